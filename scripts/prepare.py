"""A base model, prepared for serving and training: checkpoint 0, or an evaluation's foreign policy."""

from pathlib import Path

from openforge import config_paths
from openforge.eval import policies
from openforge.job import job
from openforge.policy import models

with job("prepare", snakemake) as j:  # noqa: F821
    folder = Path(snakemake.output[0]).resolve().parent  # noqa: F821
    model = policies.reference(j.config).value if j.part.get("slug") else j.config.model
    j.say(f"preparing {model}")
    server, template = j.config.server, config_paths.needs_template(j.config)
    models.prepare(model, folder, device=server.device, dtype=server.dtype, template=template)
