"""Root file systems from image archives, made here from programs of this host."""

from __future__ import annotations

import asyncio
import os
import stat
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import image_rig as rig
import pytest

from openforge.sandboxes import Bind, Limits, LocalBackend, Owner, SandboxError, images, roots


@pytest.fixture(scope="session")
def system() -> bytes:
    return rig.system()


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    # Characters that the options of overlayfs give a meaning to.
    cache = tmp_path / "im:ag,es"
    async with LocalBackend(tmp_path / "sand:bo,xes", "run", Owner.current(), images=cache) as backend:
        yield backend


async def test_an_image_is_the_root_with_a_writable_layer_of_ones_own(
    backend: LocalBackend, tmp_path: Path, system: bytes
) -> None:
    top = rig.layer(
        rig.file("opt/data", b"of the image\n", 0o400), rig.file("etc/passwd", b"u:x:1000:1::/:\nv:x:7:7\n")
    )
    env = ["PATH=/opt:/bin", "LANG=C", "HOME=/elsewhere", "A=b=c"]
    archive, digest = rig.oci(tmp_path / "a.tar", [system, top], Env=env)
    one, two = [await backend.create(f"e{i}", image=str(archive)) for i in range(2)]
    assert f"image {digest} (overlayfs)" in one.isolation
    result = await one.exec(
        "cat /opt/data; echo $PATH $LANG $HOME $A $SHELL; pwd; id -un; cat /etc/passwd; ls -A /home"
    )
    lines = result.stdout.decode().splitlines()
    assert lines[:4] == ["of the image", "/opt:/bin C /home/agent b=c /bin/bash", "/workspace", "agent"]
    assert lines[4:] == ["v:x:7:7", "agent:x:1000:1000:agent:/home/agent:/bin/sh", "agent"]
    assert (await one.exec("ls /usr/bin/python3 /work /root")).exit_code != 0, "nothing of the host is there"
    await one.exec("rm /opt/data; echo new > /opt/new; echo x > /workspace/f; echo y > /tmp/t")
    assert (await one.exec("ls /opt")).stdout == b"new\n"
    assert (await two.exec("cat /opt/data; ls /opt /workspace /tmp")).stdout.splitlines()[0] == b"of the image"
    assert b"new" not in (await two.exec("ls /opt")).stdout
    assert (await two.exec("ls -A /workspace /tmp")).stdout == b"/tmp:\n\n/workspace:\n"
    await one.upload_content(b"u", "a/b")
    assert await one.download_content("/workspace/a/b") == b"u"
    assert [e.name for e in await one.list_files("/opt")] == ["new"]
    await one.end_processes()
    assert sorted(os.listdir(backend.root)) == sorted(f"{s.sandbox_id}{x}" for s in (one, two) for x in ("", ".json"))


async def test_the_same_image_in_both_layouts_is_unpacked_once(
    backend: LocalBackend, tmp_path: Path, system: bytes
) -> None:
    first, digest = rig.oci(tmp_path / "a.tar", [system])
    second, same = rig.docker(tmp_path / "b.tar", [system])
    third, _ = rig.oci(tmp_path / "c.tar", [system], compress=False)
    assert digest == same
    made = await asyncio.gather(*(backend.create(f"e{i}", image=str(a)) for i, a in enumerate((first, second, third))))
    assert {s.image.digest for s in made if s.image} == {digest}
    unpacked = [p for p in (tmp_path / "im:ag,es").iterdir() if (p / "image.json").exists()]
    assert [p.name for p in unpacked] == [digest.removeprefix("sha256:")]
    assert (await made[1].exec(["cat", "/etc/hosts"])).stdout == b"127.0.0.1 localhost sandbox\n"


async def test_an_image_with_busybox_and_nothing_else(backend: LocalBackend, tmp_path: Path) -> None:
    data = rig.busybox()
    if data is None:
        pytest.skip("no static busybox on this machine")
    archive, _ = rig.oci(tmp_path / "a.tar", [data])
    sandbox = await backend.create("e", image=str(archive))
    result = await sandbox.exec('echo "$SHELL"; cat /proc/1/comm; exec id -u')
    assert result.stdout == b"/bin/sh\nld.so\n1000\n"
    await sandbox.upload_content(b"x", "d/f")
    await sandbox.exec("rm -r d; ln -s /etc d; cat /bin/busybox > big")
    await sandbox.upload_content(b"y", "d/f")
    assert await sandbox.download_content("d/f") == b"y"
    await sandbox.end_processes()
    assert (await sandbox.exec(["ls", "-A"])).stdout == b"big\nd\n"


LOWER = (
    *(rig.folder("d"), rig.file("d/old", b"1"), rig.folder("d/sub"), rig.file("d/sub/old", b"2")),
    *(rig.folder("gone"), rig.file("gone/f", b"3"), rig.file("kept", b"4"), rig.file("turned", b"5")),
    *(rig.link("var/run", "/run"), rig.link("abs", "/kept"), rig.file("twin", b"6"), rig.file("locked", b"7", 0o4000)),
)
UPPER = (
    *(rig.file("d/sub/new", b"8"), rig.file("d/.wh..wh..opq"), rig.file("d/new", b"9")),
    *(rig.file(".wh.gone"), rig.file(".wh.never"), rig.file(".wh..wh.plnk"), rig.folder("turned")),
    *(rig.file("var/run/pid", b"10"), rig.link("hard", "/twin", hard=True), rig.device("null"), rig.file("abs", b"11")),
)


def test_layers_are_laid_over_each_other_as_the_specification_says(tmp_path: Path, system: bytes) -> None:
    archive, _ = rig.docker(tmp_path / "a.tar", [rig.layer(*LOWER), rig.layer(*UPPER)])
    root = images.unpacked(archive, tmp_path / "cache").root
    found = {
        str(p.relative_to(root)): p.read_text()
        for p in root.rglob("*")
        if p.is_file() and not p.is_symlink() and p.parts[len(root.parts)] != "etc"
    }
    assert found == {
        **{"d/sub/new": "8", "d/new": "9", "kept": "4", "twin": "6", "hard": "6", "locked": "7"},
        **{"run/pid": "10", "abs": "11"},
    }
    assert (root / "turned").is_dir() and not (root / "gone").exists() and not (root / "null").exists()
    assert os.readlink(root / "var/run") == "/run" and (root / "hard").samefile(root / "twin")
    assert stat.S_IMODE((root / "locked").stat().st_mode) == 0o600


ESCAPES = {
    "through a link": (rig.link("d", "{outside}"), rig.file("d/planted", b"x")),
    "through a link of links": (rig.link("e", "/"), rig.link("d", "e/../..{outside}"), rig.file("d/planted", b"x")),
    "by a relative link": (rig.link("d", "../../../../../../../../../..{outside}"), rig.file("d/planted", b"x")),
    "by a hard link": (rig.link("d", "{outside}/secret", hard=True), rig.file("d", b"x")),
    "over a link": (rig.link("f", "{outside}/secret"), rig.file("f", b"x")),
    "a whiteout through a link": (rig.link("d", "{outside}"), rig.file("d/.wh.secret")),
    "an opaque link": (rig.link("d", "{outside}"), rig.file("d/.wh..wh..opq")),
    "mount points": (rig.link("workspace", "{outside}"), rig.link("etc", "{outside}"), rig.link("home", "{outside}")),
    "users": (rig.folder("etc"), rig.link("etc/passwd", "{outside}/secret"), rig.link("etc/hosts", "{outside}/secret")),
    "dots": (rig.file("../../../../../../../../../../../..{outside}/planted", b"x"),),
    "an absolute name": (rig.file("{outside}/planted", b"x"),),
    "a device": (rig.device("d", tarfile.BLKTYPE), rig.folder("d"), rig.file("d/f")),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_no_member_of_a_layer_gets_out(name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    entries = []
    for info, data in ESCAPES[name]:
        own = tarfile.TarInfo(info.name.format(outside=outside))
        own.type, own.linkname, own.size, own.mode = info.type, info.linkname.format(outside=outside), info.size, 0o644
        entries.append((own, data))
    archive, _ = rig.docker(tmp_path / "a.tar", [rig.layer(*entries)])
    cache = tmp_path / "cache"
    try:
        root = images.unpacked(archive, cache).root
        assert "secret" not in "".join(p.read_text() for p in (root / "etc").iterdir() if p.is_file())
    except SandboxError as e:
        assert str(archive) in str(e)
        assert [p for p in cache.iterdir() if p.suffix != ".lock"] == [], "nothing half done is left"
    assert os.listdir(outside) == ["secret"] and (outside / "secret").read_text() == "secret"
    assert (outside / "secret").stat().st_nlink == 1


def test_what_is_no_archive_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello\n" * 1000)
    with tarfile.open(tmp_path / "other.tar", "w"):
        pass
    good, _ = rig.docker(tmp_path / "good.tar", [rig.layer(rig.file("f", b"data" * 400_000))])
    data = good.read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[: len(data) // 2])
    (tmp_path / "changed.tar").write_bytes(data.replace(b"datadatadata", b"datadatadatA", 1))
    arm, _ = rig.oci(tmp_path / "arm.tar", [rig.layer()], architecture="s390x")
    odd, _ = rig.docker(tmp_path / "odd.tar", [b"no tar at all" * 100])
    for path, why in [
        (tmp_path / "missing.tar", "no such file.*skopeo copy"),
        (tmp_path / "debian:12", "no such file"),
        (tmp_path / "text", "no archive of an image"),
        (tmp_path / "other.tar", "neither index.json nor manifest.json"),
        (tmp_path / "cut.tar", r"damaged|missing"),
        (tmp_path / "changed.tar", "other content than sha256:"),
        (arm, "it is for s390x, this machine is"),
        (odd, "a layer cannot be unpacked"),
    ]:
        with pytest.raises(SandboxError, match=why) as e:
            images.unpacked(path, tmp_path / "cache")
        assert "\n" not in str(e.value) and path.name in str(e.value)
    assert images.unpacked(good, tmp_path / "cache").root.is_dir()


async def test_binds_over_an_image_and_links_in_their_way(backend: LocalBackend, tmp_path: Path, system: bytes) -> None:
    (tmp_path / "tool").write_text("of the host")
    trap = rig.layer(rig.link("opt", "/oldroot/tmp"))
    archive, _ = rig.oci(tmp_path / "a.tar", [system, trap])
    sandbox = await backend.create("e", image=str(archive), binds=[Bind(tmp_path / "tool", "/srv/deep/tool")])
    assert (await sandbox.exec("cat /srv/deep/tool; echo x > /srv/deep/tool")).stdout == b"of the host"
    assert (tmp_path / "tool").read_text() == "of the host"
    with pytest.raises(SandboxError, match="cannot bind at /opt/x: the image has a link at /opt"):
        await backend.create("e", image=str(archive), binds=[Bind(tmp_path / "tool", "/opt/x")])


async def test_without_overlayfs_an_image_is_copied_and_isolation_says_so(
    backend: LocalBackend, tmp_path: Path, system: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a kernel before 5.11, or with overlayfs as the file system below: mocked by its probe's answer."""
    monkeypatch.setattr(roots, "no_overlay", lambda root: "mount of overlay on root: Invalid argument")
    archive, digest = rig.oci(tmp_path / "a.tar", [system])
    sandbox = await backend.create("e", image=str(archive))
    assert f"image {digest} (copied, no overlayfs (mount of overlay" in sandbox.isolation
    assert (await sandbox.exec("rm /bin/wc; echo x > /new; ls /bin/wc /new")).stdout == b"/new\n"
    other = await backend.create("f", image=str(archive))
    assert (await other.exec("ls /bin/wc /new")).stdout == b"/bin/wc\n"
    with pytest.raises(SandboxError, match="disk_bytes cannot limit a copied image"):
        await backend.create("g", image=str(archive), limits=Limits(disk_bytes=8 << 20))


async def test_the_disk_of_an_image_is_limited(backend: LocalBackend, tmp_path: Path, system: bytes) -> None:
    archive, _ = rig.oci(tmp_path / "a.tar", [system])
    sandbox = await backend.create("e", image=str(archive), limits=Limits(disk_bytes=4 << 20))
    fill = "dd if=/dev/zero of={} bs=1M count=3"
    assert (await sandbox.exec(fill.format("/var/one"))).exit_code == 0
    result = await sandbox.exec(fill.format("/workspace/two"))
    assert result.exit_code != 0 and b"No space left on device" in result.stderr
