"""Containers of an engine. Podman is run where there is one; of Docker and Apptainer only their command lines."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from pathlib import Path

import image_rig as rig
import pytest

from openforge.sandboxes import Bind, Limits, Owner, SandboxError
from openforge.sandboxes.engine_backend import EngineBackend
from openforge.sandboxes.engines import ENGINES, Started, started

LINE = (
    "run --detach --rm --name=openforge-e-1 --hostname=sandbox --user=0:0 --entrypoint=/.openforge/ld.so "
    "--cap-drop=all --security-opt=no-new-privileges --ulimit=nofile=4096:4096 --ulimit=nproc=1024:1024 "
    "--tmpfs=/tmp:rw,nosuid,nodev,mode=1777,size=4096 --shm-size=4096 --network=none "
    "--volume=/s/e-1/disk/work:/workspace:rw --volume=/s/e-1/disk/home:/home/agent:rw "
    "--volume=/cache/tools:/.openforge:ro --volume=/opt/node:/opt/node:ro debian:12 "
    "--library-path /.openforge /.openforge/env --ignore-signal=CHLD /.openforge/ld.so --library-path /.openforge "
    "/.openforge/sleep infinity"
)
EXPECTED = {
    "podman": f"podman {LINE}",
    "docker": f"docker {LINE}",  # not run: no daemon here
    # Not run: there is no Apptainer here.
    "apptainer": "apptainer instance start --containall --no-home --writable-tmpfs --userns --hostname=sandbox --net "
    "--network=none --bind=/s/e-1/disk/work:/workspace:rw --bind=/s/e-1/disk/home:/home/agent:rw "
    "--bind=/opt/node:/opt/node:ro debian:12 openforge-e-1",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_command_lines(name: str) -> None:
    binds = [Bind(Path("/opt/node"))]
    place = (Path("/s/e-1"), Path("/cache/tools"), binds, 4096)
    assert ENGINES[name].start_line("openforge-e-1", "debian:12", "none", *place) == EXPECTED[name].split(" ")
    assert "--network=none" in ENGINES[name].start_line("n", "i", "proxy", *place)
    assert "--network=none" not in ENGINES[name].start_line("n", "i", "open", *place)


def test_what_an_engine_says_of_a_container() -> None:
    podman = '10080 52851f81529f ["PATH=/usr/bin","A=b=c"]\n'
    assert started(ENGINES["podman"], "n", podman) == Started(10080, "52851f81529f", {"PATH": "/usr/bin", "A": "b=c"})
    assert started(ENGINES["docker"], "n", "7 sha256:ab null").env == {}
    with pytest.raises(SandboxError, match="ended as soon as"):
        started(ENGINES["docker"], "n", "0 sha256:ab []")
    listed = '{"instances": [{"instance": "n", "pid": 812, "img": "/i.sif", "ip": "", "logErrPath": ""}]}'
    assert started(ENGINES["apptainer"], "n", listed) == Started(812, "/i.sif", {})
    with pytest.raises(SandboxError, match="no instance m"):
        started(ENGINES["apptainer"], "m", listed)


async def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match="'lxc' must be one of podman, docker, apptainer"):
        EngineBackend("lxc", tmp_path, "run", Owner.current())
    (tmp_path / "docker").write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2; exit 1\n")  # a mock
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    async with EngineBackend("docker", tmp_path / "s", "run", Owner.current(), images=tmp_path / "i") as backend:
        with pytest.raises(SandboxError, match="needs an image"):
            await backend.create("e")
        with pytest.raises(SandboxError, match="disk_bytes is not offered by docker"):
            await backend.create("e", image="debian:12", limits=Limits(disk_bytes=1 << 20))
        archive, _ = rig.docker(tmp_path / "a.tar", [rig.layer()])
        with pytest.raises(SandboxError, match=r"docker runs no image archive: load .*a.tar into it"):
            await backend.create("e", image=str(archive))
        with pytest.raises(SandboxError, match="docker run failed: Cannot connect to the Docker daemon"):
            await backend.create("e", image="debian:12")
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
        with pytest.raises(SandboxError, match="docker is not installed"):
            await backend.create("e", image="debian:12")
    assert os.listdir(tmp_path / "s") == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("podman") is None or os.getuid() != 0, reason="needs Podman, and root to join")
async def test_podman(tmp_path: Path) -> None:
    """The same things that a local sandbox does, in a container from an archive without Python."""
    archive, digest = rig.oci(tmp_path / "a.tar", [rig.system()], Env=["PATH=/bin", "OF_IMAGE=yes"])
    (tmp_path / "tool").write_text("of the host")
    async with EngineBackend("podman", tmp_path / "s", "run", Owner.current(), images=tmp_path / "i") as backend:
        try:
            binds = [Bind(tmp_path / "tool", "/opt/tool")]
            one = await backend.create("e", network="none", image=str(archive), binds=binds)
            assert one.isolation.startswith("podman ") and digest.removeprefix("sha256:") in one.isolation
            assert "mnt,pid,net,ipc,uts" in one.isolation and "caps none; no_new_privs" in one.isolation
            result = await one.exec("id -u; echo $OF_IMAGE $HOME; pwd; cat /opt/tool; cat /proc/1/comm; touch here")
            assert result.stdout.split() == [
                b"1000",
                b"yes",
                b"/home/agent",
                b"/workspace",
                b"of",
                b"the",
                b"hostld.so",
            ]
            assert (await one.exec("cat /proc/1/root/opt/tool; ls /proc/1/fd; touch /planted /opt/tool")).stdout == b""
            await one.upload_content(b"up", "a/b")
            assert await one.download_content("a/b") == b"up"
            assert (await one.exec("sleep 60", timeout=0.2)).timed_out
            with pytest.raises(ConnectionRefusedError):
                await one.connect(9100)
            two = await one.companion(image=str(archive))
            assert (await two.exec("ls /workspace")).stdout == b""
            listener = await backend.spawner.listen(one.holder_pid, 8080)
            with listener, socket.fromfd(listener.fileno(), socket.AF_INET, socket.SOCK_STREAM):
                dial = asyncio.create_task(one.exec("exec 3<>/dev/tcp/127.0.0.1/8080; cat <&3", timeout=30))
                listener.setblocking(False)
                accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
                with accepted:
                    await asyncio.get_running_loop().sock_sendall(accepted, b"proxy")
                assert (await dial).stdout == b"proxy"
            await one.end_processes()
            assert await one.download_content("here") == b""
            names = [f"openforge-{s.sandbox_id}" for s in (one, two)]
            await one.delete()
            assert os.listdir(tmp_path / "s") == [] and not backend.sandboxes
            listed = subprocess.run(["podman", "ps", "-a", "--format={{.Names}}"], capture_output=True, text=True)
            assert not set(names) & set(listed.stdout.split())
        finally:
            subprocess.run(["podman", "rmi", "--force", digest.removeprefix("sha256:")], capture_output=True)
