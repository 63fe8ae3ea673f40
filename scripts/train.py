"""One training epoch: samples of iteration k and checkpoint k-1 become checkpoint k."""

from datetime import UTC, datetime
from pathlib import Path

from openforge import config as typed
from openforge import manifest, retention
from openforge.job import job
from openforge.train.job import Job
from openforge.train.launch import train

with job("train", snakemake) as j:  # noqa: F821
    paths, out = snakemake.input, snakemake.output  # noqa: F821
    config = j.train_config
    k = int(j.part["k"])
    manifest.read(j.run_dir)
    began = datetime.now(UTC)
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
            config=config.model_dump(mode="json"),
            config_digest=typed.digest(config),
            report=str(Path(paths.report).resolve()),
            base=str(Path(paths.base).resolve().parent) if paths.base else None,
            blobs=[str(Path(f).resolve()) for f in paths.blobs],
        ),
        j.say,
    )
    manifest.append(j.run_dir, config, j.root, began, manifest.trained(j.run_dir, k))
    # One more than the next iteration needs: an interrupt right here must leave something to train k from again.
    retention.apply(j.run_dir, config, j.say, spare=1)
