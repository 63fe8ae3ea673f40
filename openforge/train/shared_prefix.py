"""veRL's FSDP engine for a language model on CPU, with prefixes that rows share computed once.

The rows of a micro-batch (veRL cuts them by raw tokens) run as one token trie (openforge/train/trie.py), and
only the nodes that predict a trained token go through the language-model head. Log-probs and entropies come
back in veRL's layout, a value a token, 0 where nothing is trained. A micro-batch without `shared_prefix` is
veRL's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from openforge.train.trie import Trie, pack


class SharedPrefixEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """FSDPEngineWithLMHead that overrides how inputs and outputs of the model are prepared.

    Attributes:
        computed_tokens: tokens that went through the model since the engine was built, shared ones once.
    """

    computed_tokens: int = 0

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """Model inputs over the N nodes of the trie, and what `prepare_model_outputs` needs.

        Raises:
            ValueError: rows with images or with temperatures of their own, which a trie cannot share.
        """
        if not tu.get_non_tensor_data(micro_batch, "shared_prefix", default=False):
            self.computed_tokens += int(micro_batch["input_ids"].offsets()[-1])
            inputs: tuple[dict[str, Any], dict[str, Any]] = super().prepare_model_inputs(micro_batch)
            return inputs
        if "multi_modal_inputs" in micro_batch or micro_batch["position_ids"].dim() == 3:
            raise ValueError("rows with images cannot share prefixes; set actor.use_shared_prefix: false")
        if isinstance(micro_batch["temperature"], torch.Tensor):
            raise ValueError("rows that share prefixes need one temperature, not one a row")
        rows = [r.numpy() for r in micro_batch["input_ids"].unbind()]
        # A row's last token predicts nothing, so it needs no node.
        trie = pack([r[:-1] for r in rows])
        targets = _targets(rows, [m.numpy() for m in micro_batch["loss_mask"].unbind()], trie)
        # A micro-batch of padding only still needs one node, for a graph to run backward through.
        nodes, of_target = np.unique(targets["node"], return_inverse=True) if len(targets["node"]) else ([0], [])
        self.computed_tokens += len(trie.token)
        model_inputs = {
            "input_ids": torch.from_numpy(trie.token)[None],
            "position_ids": torch.from_numpy(trie.depth)[None],
            "attention_mask": ancestor_mask(torch.from_numpy(trie.end)),
            "logits_to_keep": torch.as_tensor(nodes, dtype=torch.long),
        }
        output_args = {
            "of_target": torch.as_tensor(of_target, dtype=torch.long),
            "label": torch.from_numpy(targets["label"]),
            "slot": torch.from_numpy(targets["slot"]),
        }
        return model_inputs, output_args

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        """`log_probs` and, where asked for, `entropy`: nested (rows, L); the value for token t stands at t -
        1."""
        if "of_target" not in output_args:
            whole: dict[str, Any] = super().prepare_model_outputs(
                output, output_args, micro_batch, logits_processor_func
            )
            return whole
        logits = output.logits[0].float()  # (U, vocabulary)
        if micro_batch["temperature"] != 1.0:
            logits = logits / micro_batch["temperature"]
        of_target, label, slot = output_args["of_target"], output_args["label"], output_args["slot"]
        offsets = micro_batch["input_ids"].offsets()

        def spread(values: torch.Tensor) -> torch.Tensor:
            flat = torch.zeros(int(offsets[-1])) + 0.0 * logits[0, 0]
            return torch.nested.nested_tensor_from_jagged(flat.index_put((slot,), values), offsets)

        log_z = torch.logsumexp(logits, dim=-1)
        result = {"log_probs": spread(logits[of_target, label] - log_z[of_target])}
        if tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False):
            # Without an entropy bonus it is a figure to watch: no graph through the vocabulary for it.
            with torch.set_grad_enabled(
                torch.is_grad_enabled() and tu.get_non_tensor_data(micro_batch, "entropy_grad", default=True)
            ):
                result["entropy"] = spread(entropy_from_logits(logits)[of_target])
        return result


def ancestor_mask(end: torch.Tensor) -> torch.Tensor:
    """Additive attention mask (1, 1, N, N) in float32: node i sees j where j is i or an ancestor of i.

    Nodes are in depth-first order, so that is j <= i < end[j]. Built once as floats: a boolean mask would be
    converted again in every layer.
    """
    index = torch.arange(len(end))
    hidden = (index[None, :] > index[:, None]) | (index[:, None] >= end[None, :])
    mask = torch.zeros(len(end), len(end))
    return mask.masked_fill_(hidden, torch.finfo(torch.float32).min)[None, None]


def _targets(rows: list[Any], masks: list[Any], trie: Trie) -> dict[str, Any]:
    """For every trained token: the node that predicts it, its id, and its place in the flat output.

    `masks` cover the responses, the tail of each row (veRL's loss_mask).
    """
    node: list[Any] = []
    label: list[Any] = []
    slot: list[Any] = []
    offset = 0
    for row, mask, path in zip(rows, masks, trie.paths, strict=True):
        at: Any = np.flatnonzero(mask) + len(row) - len(mask)
        node.append(path[at - 1])
        label.append(row[at])
        slot.append(offset + at - 1)
        offset += len(row)
    return {"node": np.concatenate(node), "label": np.concatenate(label), "slot": np.concatenate(slot)}
