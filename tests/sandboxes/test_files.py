from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from openforge.sandboxes import LocalBackend, LocalSandbox, SandboxError, SandboxFileError, local_sandbox


async def test_content_and_modes(sandbox: LocalSandbox) -> None:
    data = bytes(range(256)) * 5000
    await sandbox.upload_content(data, "a b/c/ü 'x'.bin", 0o750)
    assert await sandbox.download_content("a b/c/ü 'x'.bin") == data
    result = await sandbox.exec("stat -c '%a %s %U' 'a b/c/'*; sha256sum < 'a b/c/'*")
    assert result.stdout.decode().split() == ["750", "1280000", "agent", hashlib.sha256(data).hexdigest(), "-"]
    await sandbox.upload_content(b"", "/home/agent/.config/tool.toml")
    await sandbox.upload_content(b"x", "/tmp/y")
    assert (await sandbox.exec("wc -c < ~/.config/tool.toml; cat /tmp/y")).stdout == b"0\nx"
    assert (await sandbox.exec("ls -A . 'a b/c'")).stdout.count(b"upload") == 0


async def test_many_files_in_one_go(sandbox: LocalSandbox) -> None:
    await sandbox.upload_contents((f"d{i % 7}/f{i}", str(i).encode() * 1000, 0o644) for i in range(200))
    assert (await sandbox.exec("find . -type f | wc -l; cat d3/f10 | wc -c")).stdout == b"200\n2000\n"


async def test_from_and_to_the_host(sandbox: LocalSandbox, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"\0data")
    (tmp_path / "in").chmod(0o711)
    await sandbox.upload_file(tmp_path / "in", "in")
    assert (await sandbox.exec("stat -c %a in")).stdout == b"711\n"
    assert await sandbox.download_file("in", tmp_path / "new" / "out") == 5
    assert (tmp_path / "new" / "out").read_bytes() == b"\0data"


async def test_listing(sandbox: LocalSandbox) -> None:
    await sandbox.exec("mkdir d; echo hi > d/f; ln -s nowhere d/dangling; mkdir d/sub; mkfifo d/pipe; touch -d @77 d/f")
    entries = await sandbox.list_files("d")
    assert [(e.name, e.type) for e in entries] == [
        ("dangling", "symlink"),
        ("f", "file"),
        ("pipe", "other"),
        ("sub", "directory"),
    ]
    assert (entries[1].size, entries[1].modified) == (3, 77.0)
    assert {"workspace", "home", "usr", "proc"} <= {e.name for e in await sandbox.list_files()}
    with pytest.raises(SandboxFileError, match="/workspace/nowhere") as e:
        await sandbox.list_files("nowhere")
    assert e.value.errno == errno.ENOENT


async def test_uploads_elsewhere_are_refused(sandbox: LocalSandbox) -> None:
    for remote in (
        *("../x", "a/../../x", "/etc/x", "/", "/workspace", "/workspace/../etc/x", "/workspacex/y", ".", ".."),
        *("/home/other/x", "", "a\0b", "/home/agent/../../x", "/usr/bin/x", "/proc/self/mem"),
    ):
        with pytest.raises(SandboxError):
            await sandbox.upload_content(b"x", remote)


TRAPS = [
    ("ln -s {secret} f", "f"),
    ("ln -s {folder} d", "d/secret"),
    ("ln -s /proc/1/root{secret} f", "f"),
    ("ln -s ../../../../../../..{secret} f", "f"),
    ("ln -s /etc/passwd f", "f"),
    ("ln -s /etc d", "d/passwd"),
    ("ln -s f f", "f"),
    ("mkfifo f", "f"),
    ("mkdir -p f/g; touch f/g/h; chmod 0 f/g f", "f"),
    ("mkdir d; touch d/f; chmod 0 d", "d/f"),
    ("touch d", "d/f"),
    ("touch f; chmod 0 f", "f"),
    ("chmod 0 .", "f"),
]


async def test_an_upload_replaces_the_traps_of_the_agent(backend: LocalBackend, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("untouched")
    for trap, remote in TRAPS:
        async with await backend.create("episode") as sandbox:
            trap = trap.format(secret=secret, folder=tmp_path)
            assert (await sandbox.exec(trap)).exit_code == 0, trap
            await sandbox.upload_content(b"verifier", remote)
            assert await sandbox.download_content(remote) == b"verifier", trap
            result = await sandbox.exec(f"! test -L {remote} && ! test -L d && cat {remote}")
            assert result.stdout == b"verifier", trap
            assert (await sandbox.exec("head -n 1 /etc/passwd")).stdout.startswith(b"root:x:0:0:root:/root:")
        assert secret.read_text() == "untouched", trap


async def test_a_download_does_not_follow_a_link_out(sandbox: LocalSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    await sandbox.exec(f"ln -s '{secret}' f; ln -s '{tmp_path}' d; ln -s /etc/passwd p; ln -s /proc/1/root'{secret}' g")
    for remote in ("f", "d/secret", "g", str(secret)):
        with pytest.raises(SandboxFileError) as e:
            await sandbox.download_content(remote)
        assert e.value.errno in (errno.ENOENT, errno.EACCES)
    with pytest.raises(SandboxFileError):
        await sandbox.list_files("d")
    # /etc/passwd is the sandbox's own, not the host's.
    assert await sandbox.download_content("p") == (await sandbox.exec("cat /etc/passwd")).stdout
    assert await sandbox.download_content("p") != Path("/etc/passwd").read_bytes()


async def test_a_download_of_what_is_no_file(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    await sandbox.exec("mkfifo pipe; mkdir d; truncate -s 2000 sparse; touch locked; chmod 0 locked")
    monkeypatch.setattr(local_sandbox, "DOWNLOAD_BYTES", 1999)
    for remote, code in [
        ("pipe", errno.EINVAL),
        ("d", errno.EISDIR),
        ("sparse", errno.EFBIG),
        ("/dev/zero", errno.EINVAL),
        ("missing", errno.ENOENT),
        ("locked", errno.EACCES),
    ]:
        with pytest.raises(SandboxFileError, match=f"{remote} inside the sandbox: ") as e:
            await sandbox.download_content(remote)
        assert e.value.errno == code
    monkeypatch.setattr(local_sandbox, "DOWNLOAD_BYTES", 2000)
    assert await sandbox.download_content("sparse") == bytes(2000)


async def test_an_agent_can_make_a_folder_that_only_force_removes(backend: LocalBackend) -> None:
    sandbox = await backend.create("hostile")
    deep = "mkdir -p ~/$(printf 'd/%.0s' {1..1100})"
    result = await sandbox.exec(f"mkdir -p a/b; touch a/b/c; chmod 0 a/b a; chmod 0500 .; {deep}")
    assert result.exit_code == 0
    folder = backend.root / sandbox.sandbox_id
    assert folder.is_dir()
    await sandbox.delete()
    await sandbox.delete()
    assert os.listdir(backend.root) == []
