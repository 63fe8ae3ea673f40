"""Build one software environment."""

import sys
import time
from pathlib import Path
from typing import NoReturn

from openforge import machine, software
from openforge.job import remember


def fail(sentence: str) -> NoReturn:
    remember(sentence)
    sys.exit(f"error: {sentence}")


start = time.monotonic()
name = snakemake.params.env  # noqa: F821
if name.endswith("-gpu") and not machine.gpus():
    fail(machine.no_gpu(f"envs/{name}.txt is the package list of a GPU environment"))
print(f"building software environment {name} from envs/{name}.txt", file=sys.stderr, flush=True)
try:
    software.build(name, Path.cwd())
except software.SoftwareError as e:
    fail(str(e))
print(f"software environment {name} is ready ({time.monotonic() - start:.0f} s)", file=sys.stderr, flush=True)
