"""Runs inside the train environment: what the training job makes of the advantages of samples tables.

`verl_credit.py CASES.json`: [[table, adv_estimator, norm_adv_by_std_in_grpo], ...]; prints one JSON list, advantages by
sample or the sentence of the refusal.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from openforge.train import epoch  # noqa: F401  first: it registers the CPU platform before veRL looks for one

from openforge import tables  # isort: skip
from openforge.config_training import Algorithm  # isort: skip
from openforge.train.advantages import credited  # isort: skip
from openforge.train.job import TrainError  # isort: skip
from openforge.train.rows import row_of  # isort: skip


def advantages(table: str, estimator: str, by_std: bool) -> Any:
    rows = [row_of(s) for s in tables.read_rows(table, tables.SAMPLES)]
    try:
        found = credited(rows, Algorithm(adv_estimator=estimator, norm_adv_by_std_in_grpo=by_std))
    except TrainError as e:
        return str(e)
    return {r.sample_id: [a for a, m in zip(r.advantages.tolist(), r.mask, strict=True) if m] for r in found}


print(json.dumps([advantages(*case) for case in json.loads(Path(sys.argv[1]).read_text())]))
