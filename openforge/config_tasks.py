"""The sections `tasks` and `data` of a configuration: where raw tasks come from, and how they are drawn."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from openforge.config_reading import NonNegative, Positive, Section, Seed, Text, only_if


class Columns(Section):
    """Which columns of a table of one's own hold what; NULL for none, without a key the one of the same name."""

    task_id: str = Field(default="task_id", description="Identity, text or whole number; `hash` for the row's digest.")
    instruction: str = Field(default="instruction", description="What the agent is asked to do.")
    split: str | None = Field(
        default="split", description="Split; without one the file's own (`train-00000-of-00002.parquet`), else train."
    )
    files: str | None = Field(
        default="files", description="Files of the work folder: a list of (path, content), or path to text as JSON."
    )
    verifier: str | None = Field(
        default="verifier", description="Verifier as a struct or JSON: command, files, seconds; or see tasks.verifier."
    )
    tags: str | None = Field(default="tags", description="Tags, a list of texts or one text; the first is the kind.")
    payload: tuple[str, ...] | None = Field(
        default=None, description="Columns kept for the verifier and analysis; all others without it.", strict=False
    )


class Tasks(Section):
    """Where raw tasks come from."""

    source: str = Field(
        description="`demo` (the generated demo tasks), `tiny` (the tests' kind), a folder of task folders in "
        "ClawEval's format, a checkout of ClawEval or QwenClawBench (its tasks are of split `test`), a .parquet file, "
        "or a folder of them as the Hugging Face hub lays them out; $NAME for what that environment variable holds."
    )
    tags: tuple[Text, ...] | None = Field(
        default=None,
        description="Only tasks with such a tag, e.g. [data, files-*]; * and ? as in file names. All without it.",
        strict=False,
    )
    columns: Columns = Field(default_factory=Columns, description="Columns of a table of one's own.")
    verifier: str | None = Field(
        default=None,
        description="Table: a script, or a folder with verify.py, that judges every row; a path from the root.",
    )
    verifier_seconds: Annotated[float, Field(gt=0)] = Field(default=30.0, description="Seconds that it may run.")
    train: NonNegative = Field(
        default=64,
        description="Tasks generated for the train split.",
        json_schema_extra=only_if(source=["demo", "tiny"]),
    )
    heldout: NonNegative = Field(
        default=64,
        description="Tasks generated for the heldout split.",
        json_schema_extra=only_if(source=["demo", "tiny"]),
    )
    unseen: NonNegative = Field(
        default=0,
        description="Tasks generated of kinds that are never trained on.",
        json_schema_extra=only_if(source=["demo", "tiny"]),
    )
    seed: Seed = Field(
        default=0, description="Seed of the generator.", json_schema_extra=only_if(source=["demo", "tiny"])
    )


class Data(Section):
    """Drawing of tasks."""

    train_batch_size: Positive = Field(default=8, description="Groups an iteration (veRL: prompts a batch).")
    train_split: str = Field(default="train", description="Split that training draws from.")
    filter: Text | None = Field(
        default=None,
        description="SQL condition on the view `episodes` (and `calls`); an episode that fails it is not trained on.",
    )
