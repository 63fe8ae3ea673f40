"""Root file systems from image archives: `skopeo copy docker://X oci-archive:FILE` or `docker save`, one image each.

An archive is verified against its own digests and unpacked once below a cache folder, by the digest of its
configuration (the "image id", the same in both layouts). What is unpacked is never written to again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from openforge.sandboxes.owner import remove
from openforge.sandboxes.protocol import SandboxError

_JSON_BYTES = 16 << 20
_CHUNK = 1 << 20
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}  # as the image specification names them


@dataclass(frozen=True)
class Image:
    """An unpacked image.

    Attributes:
        digest: sha256:... of its configuration.
        root: folder of its files, not to be written to.
        env: its configuration's environment.
        shell: what runs a command that is one string.
    """

    digest: str
    root: Path
    env: dict[str, str]
    shell: str


def default_cache() -> Path:
    """Where images are unpacked unless told otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "openforge" / "images"


def unpacked(archive: Path, cache: Path) -> Image:
    """The image of an archive, unpacked now if it was not before; others that want it wait.

    Raises:
        SandboxError: it is no archive of one image for this machine, or is damaged; the message says which.
    """
    try:
        with _Archive(archive) as parts:
            digest, config, layers = parts.image()
            folder = cache / digest.removeprefix("sha256:")
            if not folder.is_dir():
                cache.mkdir(parents=True, exist_ok=True)
                with open(folder.with_suffix(".lock"), "wb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    if not folder.is_dir():
                        _unpack(parts, config, layers, folder)
    except (tarfile.TarError, EOFError, zlib.error, pa.ArrowException) as e:
        raise SandboxError(f"image {archive}: no archive of an image, or a damaged one ({e}); {_RIGHT}") from None
    except OSError as e:
        raise SandboxError(f"image {archive}: {e.filename or 'it'}: {e.strerror or e}") from None
    how = json.loads((folder / "image.json").read_text())
    return Image(digest, folder / "root", how["env"], how["shell"])


_RIGHT = "make one with `skopeo copy docker://NAME oci-archive:FILE.tar` or `docker save NAME -o FILE.tar`"


class _Archive:
    """The parts of an archive."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise SandboxError(f"image {str(path)!r}: no such file; local sandboxes take an archive: {_RIGHT}")
        self._path = path

    def __enter__(self) -> _Archive:
        self._tar = tarfile.open(self._path, "r:")
        self._members = {os.path.normpath(m.name): m for m in self._tar}
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def image(self) -> tuple[str, dict[str, Any], list[str]]:
        """(digest of its configuration, the configuration, names of its layers from the lowest up)."""
        if "index.json" in self._members:
            manifest = self._manifest(self._json("index.json"))
            digest = str(manifest["config"]["digest"])
            config = self._blob(digest)
            layers = [_blob_name(entry["digest"]) for entry in manifest["layers"]]
        elif "manifest.json" in self._members:
            images = self._json("manifest.json")
            if len(images) != 1:
                raise self._bad(f"it holds {len(images)} images, one is needed")
            data = self._read(images[0]["Config"])
            digest, config, layers = f"sha256:{hashlib.sha256(data).hexdigest()}", json.loads(data), images[0]["Layers"]
        else:
            raise self._bad("it has neither index.json nor manifest.json")
        if config.get("architecture") not in (None, _MACHINES.get(platform.machine(), platform.machine())):
            raise self._bad(f"it is for {config['architecture']}, this machine is {platform.machine()}")
        if len(layers) != len(config["rootfs"]["diff_ids"]):
            raise self._bad("its manifest and its configuration name different numbers of layers")
        return digest, config, layers

    def _manifest(self, index: dict[str, Any]) -> dict[str, Any]:
        """The manifest for this machine, through indexes of indexes."""
        for _ in range(4):
            ours = [m for m in index["manifests"] if _fits(m.get("platform"))]
            if len(ours) != 1:
                raise self._bad(f"it holds {len(ours)} images for this machine, one is needed")
            index = self._blob(ours[0]["digest"])
            if "manifests" not in index:
                return index
        raise self._bad("its indexes do not end")

    def _bad(self, why: str) -> SandboxError:
        return SandboxError(f"image {self._path}: {why}; {_RIGHT}")

    def _blob(self, digest: str) -> dict[str, Any]:
        data = self._read(_blob_name(digest))
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise self._bad(f"{digest} has other content than its name says")
        found: dict[str, Any] = json.loads(data)
        return found

    def _json(self, name: str) -> Any:
        return json.loads(self._read(name))

    def _read(self, name: str) -> bytes:
        with self._open(name) as f:
            data = f.read(_JSON_BYTES + 1)
        if len(data) > _JSON_BYTES:
            raise self._bad(f"{name} is too large to be a description")
        return data

    def _open(self, name: str) -> IO[bytes]:
        member = self._members.get(os.path.normpath(name))
        file = None if member is None else self._tar.extractfile(member)
        if file is None:
            raise self._bad(f"{name} is missing in it")
        return file

    def layer(self, name: str, diff_id: str) -> Iterator[bytes]:
        """The tar of a layer, uncompressed; an error at its end if it is not the one that `diff_id` names."""
        digest = hashlib.sha256()
        with self._open(name) as f:
            for chunk in _plain(f):
                digest.update(chunk)
                yield chunk
        if f"sha256:{digest.hexdigest()}" != diff_id:
            raise self._bad(f"layer {name} has other content than {diff_id}")


def _plain(file: IO[bytes]) -> Iterator[bytes]:
    head = file.read(4)
    file.seek(0)
    if head[:2] == b"\x1f\x8b":
        yield from _gunzip(file)
    elif head == b"\x28\xb5\x2f\xfd":
        with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd") as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk
    else:
        while chunk := file.read(_CHUNK):
            yield chunk


def _gunzip(file: IO[bytes]) -> Iterator[bytes]:
    inflate = zlib.decompressobj(wbits=31)
    while data := file.read(_CHUNK):
        while data:
            yield inflate.decompress(data)
            data = inflate.unused_data
            if inflate.eof:  # a layer may be several gzip members, one after the other
                inflate = zlib.decompressobj(wbits=31)
    yield inflate.flush()


def _fits(where: dict[str, str] | None) -> bool:
    machine = platform.machine()
    return where is None or (where.get("os"), where.get("architecture")) == ("linux", _MACHINES.get(machine, machine))


def _blob_name(digest: str) -> str:
    kind, _, name = digest.partition(":")
    return f"blobs/{kind}/{name}"


def _unpack(parts: _Archive, config: dict[str, Any], layers: list[str], folder: Path) -> None:
    """Unpack into a folder beside and rename it; the lock is held."""
    partial = folder.with_suffix(".partial")
    remove(partial)  # of one that was killed
    root = partial / "root"
    root.mkdir(parents=True)
    try:
        for name, diff_id in zip(layers, config["rootfs"]["diff_ids"], strict=True):
            _step(parts, root, "layer", parts.layer(name, diff_id))
        how = json.loads(_step(parts, root, "finish", ()))
        settings = config.get("config") or {}
        env = dict(entry.partition("=")[::2] for entry in settings.get("Env") or ())
        (partial / "image.json").write_text(json.dumps({"env": env, **how}))
        partial.rename(folder)
    except BaseException:
        remove(partial)
        raise


def _step(parts: _Archive, root: Path, step: str, stream: Iterator[bytes] | tuple[()]) -> bytes:
    program = Path(__file__).with_name("unpack.py")
    command = [sys.executable, "-I", "-S", str(program), str(root), step]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it says why at its end
                for chunk in stream:
                    process.stdin.write(chunk)
            out, err = process.communicate()
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise parts._bad(f"a layer cannot be unpacked: {err.decode(errors='replace').strip()[-500:]}")
    return out


def tools(cache: Path) -> Path:
    """A folder with the program that is a sandbox's first process, which an image need not have, and its libraries.

    Raises:
        SandboxError: this host has no dynamic loader to take along.
    """
    files = _program_files()
    stamp = hashlib.sha256(repr([(n, p.stat().st_size, p.stat().st_mtime_ns) for n, p in files.items()]).encode())
    folder = cache / f"tools-{stamp.hexdigest()[:16]}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=cache, prefix="tools-", suffix=".partial"))
        for name, path in files.items():
            shutil.copy(path, partial / name)
        try:
            partial.rename(folder)
        except OSError:  # another one was first
            remove(partial)
    return folder


def _program_files() -> dict[str, Path]:
    """sh, env and sleep of this host with all that they load, by the names that they are found under."""
    files = {}
    for name in ("sh", "env", "sleep"):
        path = shutil.which(name, path="/usr/bin:/bin")
        if path is None:
            raise SandboxError(f"{name} is not installed on this host")
        files[name] = Path(path)
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        for line in listed.splitlines():
            soname, arrow, found = line.strip().partition(" => ")
            library = (found if arrow else soname).split(" (")[0].strip()
            if library.startswith("/"):
                is_loader = not arrow
                files["ld.so" if is_loader else soname] = Path(library)
    if "ld.so" not in files:
        raise SandboxError("images need a host whose `sh` is dynamically linked (ldd names no loader)")
    return files
