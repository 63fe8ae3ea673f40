"""Keys of the judge: the model that scores what no program can (docs/judge.md)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from openforge.config_reading import NonNegative, Positive, Section, Text


class Judge(Section):
    """An OpenAI-compatible endpoint that judges by rubric; rewards wait for it, episodes do not."""

    url: Text = Field(description="Its base URL, http://HOST:PORT/v1 or https://HOST/v1.")
    model: Text = Field(description="Model to ask for.")
    api_key_env: str | None = Field(
        default=None, description="NAME of the environment variable with its key; no key without one."
    )
    temperature: Annotated[float, Field(ge=0)] | None = Field(
        default=0.0, description="NULL sends none, for models that take none."
    )
    max_tokens: Positive = Field(default=1024, description="Tokens of an answer; one that is cut off is a failure.")
    retries: NonNegative = Field(default=3, description="Tries after the first of a judgement that failed.")
    timeout: Annotated[float, Field(gt=0)] = Field(default=120.0, description="Seconds of a try.")
    concurrency: Positive = Field(default=4, description="Judgements in flight.")
    calls: Positive | None = Field(default=None, description="Calls of a scoring job at most; NULL sets no limit.")
    tokens: Positive | None = Field(
        default=None, description="Tokens of a scoring job at most, prompts and answers; NULL sets no limit."
    )
    cache: Text = Field(
        default="results/.judge", description="Folder of answers by what was asked, a path from the project's root."
    )
