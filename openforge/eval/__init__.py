"""Stage eval: pass@k of a policy on held-out tasks. It never plans training."""

from openforge.eval.evaluate import EvalError, eval_path, evaluate, evaluate_run, headline

__all__ = ["EvalError", "eval_path", "evaluate", "evaluate_run", "headline"]
