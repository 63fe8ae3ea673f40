"""Says in one sentence what this machine lacks, before anything is downloaded: `python3 openforge/machine.py`.

Standard library only and old syntax: it must run on the very Python that is too old.
"""

import glob
import os
import platform
import shutil
import sys

MEMORY_GB = 12
DISK_GB = 25


def lacks(root: str = ".") -> str:
    """The first thing that is missing, as a sentence; empty when the machine will do."""
    for sentence in (python(), system(), memory(), disk(root), bubblewrap()):
        if sentence:
            return sentence
    return ""


def python() -> str:
    if sys.version_info[:2] != (3, 11):
        return (
            "OpenForge needs Python 3.11 (its pinned wheels are for it), this is Python %d.%d; "
            "name one with: make PYTHON=python3.11" % sys.version_info[:2]
        )
    return ""


def system() -> str:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "OpenForge's CPU wheels are for Linux on x86_64, this is %s on %s." % (
            platform.system(),
            platform.machine(),
        )
    return ""


def memory() -> str:
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if size < MEMORY_GB:
        return "The demo needs %d GB of memory, this machine has %.1f." % (MEMORY_GB, size)
    return ""


def disk(root: str = ".") -> str:
    # What is built already needs no room a second time.
    if not os.path.exists(os.path.join(root, ".software/train-cpu/ready.json")):
        free = shutil.disk_usage(root).free / 2**30
        if free < DISK_GB:
            return "Set-up and demo need %d GB of disk, %.1f are free here." % (DISK_GB, free)
    return ""


def bubblewrap() -> str:
    if shutil.which("bwrap") is None:
        return "OpenForge's local sandbox needs bubblewrap: apt-get install bubblewrap (as root)."
    return ""


def gpus():
    # type: () -> list[str]
    """Device files of the GPUs here: NVIDIA's, those of Windows' Linux, AMD's."""
    return sorted(glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg") + glob.glob("/dev/kfd"))


def no_gpu(why):
    # type: (str) -> str
    """The sentence for a job that needs a GPU; `why` says what asks for one."""
    return "%s, but %s has no GPU (/dev/nvidia0, /dev/dxg or /dev/kfd): run this job where one is, or use cpu" % (
        why,
        platform.node(),
    )


if __name__ == "__main__":
    sentence = lacks()
    if sentence:
        sys.exit("error: " + sentence)
