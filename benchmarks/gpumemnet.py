"""GPUMemNet's language models on one device: a plain loop over wikitext-2, padded to 512 tokens.

Source: itu-rad/CARMA, workloads/BERT_base_on_wiki.py and BERT_large_on_wiki.py; the models as itu-rad/GPUMemNet,
Test_Pipeline/Trans_models prints them.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from rebuilt import LATER_CODE, SMALLEST_RUN, CannotRebuild, Rebuilt, Row, capability, number
from torch import Tensor, nn

from fullbatch.memory.kernels import Kernels

_CONFIGS: dict[str, Any] = {
    "bert_base": lambda: transformers.BertConfig(vocab_size=28996),
    "bert_large": lambda: transformers.BertConfig(
        vocab_size=28996, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
}
_WHY_NOT = {
    "gpt2": "DataParallel over two devices (workloads' shell script), and the row does not say which one it is of",
    "xlnet": "batches padded to their own longest text, unknown, and two devices under the Trainer",
}


def gpumemnet(row: Row) -> Rebuilt:
    """The run of ``row``, by its columns."""
    name = re.sub(r"_cased$", "", row["model"].split(" ")[0].lower())
    length = re.search(r"seq (\d+)", row["model"])
    if (why_not := _WHY_NOT.get(name.split("_")[0])) is not None:
        raise CannotRebuild(why_not)
    if name not in _CONFIGS:
        raise CannotRebuild("a convolution net, and what it needs is not installed here")
    with torch.device("meta"):
        model = transformers.AutoModelForMaskedLM.from_config(_CONFIGS[name](), attn_implementation="sdpa").train()
    size = number(row, "micro_batch"), int(length[1]) if length else 512
    tokens = torch.zeros(size, dtype=torch.int64, device="meta")
    return Rebuilt(
        model=model,
        loss=_loss,
        batch={"input_ids": tokens, "attention_mask": torch.zeros_like(tokens), "labels": torch.zeros_like(tokens)},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        kernels=Kernels(capability=capability(row)),
        loop={"outputs_live": "next"},
        outside_bytes=SMALLEST_RUN,
        outside_more_bytes=LATER_CODE,
    )


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss
