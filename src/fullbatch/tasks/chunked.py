"""The cross-entropy of a large vocabulary, some tokens at a time: the logits of all are never stored."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, pad
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # torch's default ignore_index of cross_entropy
CHUNK = 1024
"""Tokens of a chunk: 0.6 GB of float32 logits at a vocabulary of 150,000."""

# torch.nn.functional.linear_cross_entropy (2.13) does the same in one operator, but returns the loss in the dtype
# of the weights: in bf16 a loss of 10.7 is then 10.6875 or 10.75, where transformers, and this, have it in float32.


class HeadInLoss(nn.Linear):
    """An output layer that returns its input [..., D]: the loss multiplies by its weight [V, D]."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def move_head_into_loss(model: nn.Module) -> None:
    """Make ``model.get_output_embeddings()`` a :class:`HeadInLoss` with the same parameters, tied ones too.

    Args:
        model: A causal language model of transformers, whose logits are its output layer's output as it is.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    with torch.device("meta"):
        moved = HeadInLoss(head.in_features, head.out_features, bias=False)
    moved.weight, moved.bias = head.weight, head.bias
    model.set_output_embeddings(moved)  # type: ignore[operator]


def chunked_loss(model: nn.Module, micro: Mapping[str, Tensor]) -> Tensor:
    """The mean, in float32 or wider, over the next tokens that have a label: as transformers' ``ForCausalLMLoss``.

    Args:
        model: Holds a :class:`HeadInLoss`.
        micro: ``input_ids`` [B, T] and ``labels`` [B, T], which are shifted here.
    """
    head = next(module for module in model.modules() if isinstance(module, HeadInLoss))
    hidden_ND = model(**{key: value for key, value in micro.items() if key != "labels"}).logits.flatten(0, 1)
    labels_N = pad(micro["labels"], (0, 1), value=IGNORED)[..., 1:].flatten()

    at_least_float32 = torch.promote_types(head.weight.dtype, torch.float32)

    def summed(hidden_CD: Tensor, labels_C: Tensor) -> Tensor:
        logits_CV = linear(hidden_CD, head.weight, head.bias).to(at_least_float32)
        return cross_entropy(logits_CV, labels_C, reduction="sum", ignore_index=IGNORED)

    sums = [
        checkpoint(summed, hidden, labels, use_reentrant=False, preserve_rng_state=False)
        for hidden, labels in zip(hidden_ND.split(CHUNK), labels_N.split(CHUNK), strict=True)
    ]
    loss: Tensor = torch.stack(sums).sum() / (labels_N != IGNORED).sum()
    return loss
