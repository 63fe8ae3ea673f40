"""Shaping: what is added to an episode's reward; it ranks outcomes and never makes a group of equal ones one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openforge.config_training import RewardKwargs


def overlong(tokens: int, kwargs: RewardKwargs) -> float:
    """The soft overlong punishment of an episode with so many trained tokens, from 0 down to -penalty_factor.

    It begins `len` tokens before `max_resp_len` and grows linearly up to it. What tools and users said between the
    turns is no part of `tokens`: the policy did not write it.

    Source: DAPO (arXiv 2503.14476), equation 13, with the factor of veRL's DAPO reward manager; there a response is
    cut at its longest, so that the punishment ends with the factor as well.
    """
    buffer = kwargs.overlong_buffer_cfg
    if not buffer.enable or buffer.len is None or kwargs.max_resp_len is None:
        return 0.0
    beyond = tokens - (kwargs.max_resp_len - buffer.len)
    return -buffer.penalty_factor * min(max(beyond / buffer.len, 0.0), 1.0)
