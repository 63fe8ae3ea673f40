"""Image archives made by hand, in the two layouts that are in use."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAMS = ("bash", "cat", "ls", "stat", "touch", "rm", "mkdir", "id", "head", "sleep", "wc", "readlink", "dd")
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]

Entry = tuple[tarfile.TarInfo, bytes]


def file(name: str, data: bytes = b"", mode: int = 0o644) -> Entry:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    return info, data


def folder(name: str, mode: int = 0o755) -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, mode
    return info, b""


def link(name: str, target: str, hard: bool = False) -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.LNKTYPE if hard else tarfile.SYMTYPE, target
    return info, b""


def device(name: str, kind: bytes = tarfile.CHRTYPE) -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.devmajor, info.devminor, info.mode = kind, 1, 1, 0o666
    return info, b""


def layer(*entries: Entry) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def system() -> bytes:
    """A layer with a few programs of this host and the libraries that they load; no Python, no /workspace."""
    files = {f"/bin/{p}": shutil.which(p) or "" for p in PROGRAMS}
    for path in list(files.values()):
        for line in subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout.splitlines():
            for word in line.split():
                if word.startswith("/"):
                    files[word] = word
    entries = [file(name.lstrip("/"), Path(path).read_bytes(), 0o755) for name, path in sorted(files.items())]
    return layer(*entries, link("bin/sh", "bash"))


def busybox() -> bytes | None:
    """A layer with nothing but a static busybox; None where Debian's busybox-static is not installed."""
    path = shutil.which("busybox")
    if path is None or "not a dynamic" not in subprocess.run(["ldd", path], capture_output=True, text=True).stderr:
        return None
    applets = ("sh", "cat", "ls", "id", "touch", "rm", "echo")
    return layer(file("bin/busybox", Path(path).read_bytes(), 0o755), *(link(f"bin/{a}", "busybox") for a in applets))


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _config(layers: Sequence[bytes], config: dict[str, Any], architecture: str) -> bytes:
    diffs = [_digest(data) for data in layers]
    rootfs = {"type": "layers", "diff_ids": diffs}
    return json.dumps({"architecture": architecture, "os": "linux", "config": config, "rootfs": rootfs}).encode()


def oci(
    path: Path, layers: Sequence[bytes], architecture: str = MACHINE, compress: bool = True, **config: Any
) -> tuple[Path, str]:
    """What `skopeo copy X oci-archive:FILE` writes; its path and the digest of its configuration."""
    data = _config(layers, config, architecture)
    packed = [gzip.compress(blob, 1) if compress else blob for blob in layers]
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "config": {"digest": _digest(data), "size": len(data)},
            "layers": [{"digest": _digest(blob), "size": len(blob)} for blob in packed],
        }
    ).encode()
    index = {"schemaVersion": 2, "manifests": [{"digest": _digest(manifest), "size": len(manifest)}]}
    blobs = {f"blobs/sha256/{_digest(b)[7:]}": b for b in (data, manifest, *packed)}
    members = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": json.dumps(index).encode(), **blobs}
    path.write_bytes(layer(*(file(name, blob) for name, blob in members.items())))
    return path, _digest(data)


def docker(path: Path, layers: Sequence[bytes], **config: Any) -> tuple[Path, str]:
    """What `docker save` wrote before version 25."""
    data = _config(layers, config, MACHINE)
    name = f"{_digest(data)[7:]}.json"
    places = [f"{i}/layer.tar" for i in range(len(layers))]
    manifest = [{"Config": name, "RepoTags": ["it:latest"], "Layers": places}]
    members = {name: data, **dict(zip(places, layers, strict=True)), "manifest.json": json.dumps(manifest).encode()}
    path.write_bytes(layer(*(file(n, blob) for n, blob in members.items())))
    return path, _digest(data)
