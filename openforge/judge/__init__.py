"""The judge: a model behind any OpenAI-compatible endpoint that scores by rubric.

A judgement is one chat completion that answers {"score": 0..1, "reasoning": text}. It is asked for by what it is about
alone, so that the same question is asked once (`cache`), and it is recorded whole (`Judgement.record`). A judge that
does not answer has not scored 0: it has failed, in one of `FAILURES`.
"""

from openforge.judge.ask import FAILURES, Judge, Judgement
from openforge.judge.rubric import PROMPT_VERSION, Question, parse, prompt

__all__ = ["FAILURES", "PROMPT_VERSION", "Judge", "Judgement", "Question", "parse", "prompt"]
