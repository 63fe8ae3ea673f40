"""Runs inside the train environment under torchrun: a job whose processes are one replica: `one_replica.py JOB`.

A mock of an engine that cuts the model over its processes, as Megatron and Ulysses do: all processes get the same rows,
and only the last one holds outputs and metrics, which is not the one that writes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from openforge.train import epoch  # first: it registers the CPU platform before veRL looks for one

import torch.distributed as dist  # isort: skip
from openforge.config_training import Trainer
from openforge.train.shared_prefix import SharedPrefixEngine

start = epoch.start_processes
groups: list[Any] = []


def started(trainer: Trainer) -> None:
    start(trainer)
    # Each call is one of all processes.
    groups.extend(dist.new_group([rank]) for rank in range(dist.get_world_size()))


epoch.start_processes = started
SharedPrefixEngine.get_data_parallel_rank = lambda self: 0
SharedPrefixEngine.get_data_parallel_size = lambda self: 1
SharedPrefixEngine.get_data_parallel_group = lambda self: groups[dist.get_rank()]
SharedPrefixEngine.is_mp_src_rank_with_outputs = lambda self: dist.get_rank() == dist.get_world_size() - 1
epoch.main(Path(sys.argv[1]))
