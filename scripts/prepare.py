"""A base model, prepared for serving and training: checkpoint 0, or an evaluation's foreign policy."""

from pathlib import Path

from openforge.eval import policies
from openforge.job import job
from openforge.policy import models

with job("prepare", snakemake) as j:  # noqa: F821
    folder = Path(snakemake.output[0]).resolve().parent  # noqa: F821
    model = policies.reference(j.config).value if j.part.get("slug") else j.config.model
    j.say(f"preparing {model}")
    models.prepare(model, folder, device=j.config.server.device, dtype=j.config.server.dtype)
