"""One training epoch: samples of iteration k and checkpoint k-1 become checkpoint k."""

import hashlib
import json
from pathlib import Path

from openforge.job import job
from openforge.train.job import Job
from openforge.train.launch import train

with job("train", snakemake) as j:  # noqa: F821
    paths, out = snakemake.input, snakemake.output  # noqa: F821
    config = j.train_config.model_dump(mode="json")
    k = int(j.part["k"])
    train(
        Job(
            run=j.run,
            iteration=k,
            checkpoint_in=str(Path(paths.policy).resolve().parent),
            state_in=str(Path(paths.state).resolve().parent) if k > 1 else None,
            samples=str(Path(paths.samples).resolve()),
            checkpoint_out=str(Path(out.policy).resolve().parent),
            state_out=str(Path(out.state).resolve().parent),
            metrics_out=str(Path(out.metrics).resolve()),
            config=config,
            config_digest=hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        ),
        j.say,
    )
