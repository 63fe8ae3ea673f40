"""A work folder on its way out of a sandbox: what packs it is the agent's neighbour, so the tar is hostile."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from openforge.sandboxes import archive


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644, size: int = 0
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size = kind, link, mode, size
    return info


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


HOSTILE = tar_of(
    (member("./"), b""),
    (member("./up", tarfile.SYMTYPE, ".."), b""),
    (member("./here", tarfile.SYMTYPE, "."), b""),
    (member("./up/out"), b"through a link"),
    (member("../outside"), b"above"),
    (member("/absolute"), b"anywhere"),
    (member("a/../../b"), b"above by a detour"),
    (member("./passwd", tarfile.SYMTYPE, "/etc/passwd"), b""),
    (member("./pipe", tarfile.FIFOTYPE), b""),
    (member("./disk", tarfile.BLKTYPE), b""),
    (member("./closed", tarfile.DIRTYPE, mode=0), b""),
    (member("./closed/file", mode=0o4755), b"text"),
    (member("./again", tarfile.LNKTYPE, "./closed/file"), b""),
    (member("./dangling", tarfile.LNKTYPE, "./nothing"), b""),
)


def test_only_what_stays_inside_is_kept_and_links_come_last(tmp_path: Path) -> None:
    data = archive.rewritten(HOSTILE)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        kept = {m.name: m for m in tar}
        tar.extractall(tmp_path / "x" / "y", filter="fully_trusted")
    assert list(kept) == ["up/out", "closed", "closed/file", "again", "here"]
    assert (kept["closed"].mode, kept["closed/file"].mode) == (0o700, 0o755)
    # Extracted by a program that trusts it, nothing stands but below the folder.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x"] and [p.name for p in (tmp_path / "x").iterdir()] == ["y"]
    assert (tmp_path / "x/y/up/out").read_text() == "through a link" and (tmp_path / "x/y/again").read_text() == "text"


def test_a_file_can_be_edited_on_its_way() -> None:
    data = archive.rewritten(tar_of((member("a"), b"the key is sk-1")), lambda text: text.replace(b"sk-1", b"[key]"))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        file = tar.extractfile("a")
        assert file is not None and file.read() == b"the key is [key]"


def test_more_than_may_be_copied_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "COPY_BYTES", 1 << 20)
    whole = tar_of((member("a"), bytes(1 << 19)), (member("b"), bytes(1 << 19)))
    assert archive.rewritten(whole)
    with pytest.raises(ValueError, match="more than 1 MiB together"):
        archive.rewritten(tar_of((member("a"), bytes(1 << 19)), (member("b"), bytes((1 << 19) + 1))))


def test_what_is_no_tar_is_refused() -> None:
    for data in (b"", b"no tar at all" * 100, HOSTILE[:700]):
        with pytest.raises(tarfile.TarError):
            archive.rewritten(data)
