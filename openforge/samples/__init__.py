"""The samples stage: filter, merge, credit (see `build`)."""

from openforge.samples.build import Result, build
from openforge.samples.merge import SamplesError

__all__ = ["Result", "SamplesError", "build"]
