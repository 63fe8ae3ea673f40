"""A run's newest checkpoint as an endpoint, until the command ends."""

import os
import sys
from pathlib import Path

from openforge import interrupts
from openforge.verbs import VerbError, serve

interrupts.end_with_owner()
try:
    sys.exit(serve.run(snakemake.params.policy, Path(os.environ["OPENFORGE_ROOT"])))  # noqa: F821
except VerbError as e:
    sys.exit(f"error: {e}")
