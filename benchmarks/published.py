"""Rebuilds published runs from rows of measured.csv: model, loss, batch, optimizer, and how their scripts loop.

A row is known by its source; everything else comes from its columns.
"""

from __future__ import annotations

import importlib.util
import json
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import transformers
from fitcheck import fitcheck
from gpumemnet import gpumemnet
from litgpt import litgpt
from operators import OPERATORS, NoStep
from rebuilt import CannotRebuild, MiB, Rebuilt, Row, capability, ids, number, optimizer
from torch import Tensor
from xmem import xmem

from fullbatch.memory.allocator import CachingAllocator
from fullbatch.memory.kernels import Kernels


def rebuild(row: Row) -> Rebuilt:
    """The run of ``row``.

    Raises:
        CannotRebuild: With the reason.
    """
    if importlib.util.find_spec("convnets") is not None:
        from convnets import convnet

        if (arguments := convnet(row)) is not None:
            return Rebuilt(**arguments)
    for part, make in _SOURCES.items():
        if part in row["source"]:
            return make(row)
    raise CannotRebuild("no script of this source is written out here")


# C: optimum-benchmark, Trainer on ROCm


def _optimum(row: Row) -> Rebuilt:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(), attn_implementation="eager").train()
    if "gpt2" not in row["model"].split(" ")[0].split("/")[-1].split("-")[0:1]:
        raise CannotRebuild(f"no configuration of {row['model']} here")
    for block in model.transformer.h:  # until transformers 4.50 each layer kept its causal mask
        block.attn.register_buffer("bias", torch.empty(1, 1, 1024, 1024, dtype=torch.bool, device="meta"))
    return Rebuilt(
        model=model,
        loss=lambda model, batch: model(**batch).loss,
        batch={"input_ids": ids(row), "labels": ids(row)},
        optimizer=optimizer(row["optimizer"], lr=5e-5),
        kernels=Kernels(capability=80, cublas_workspace_bytes=0, hip=True),
        loop={"outputs_live": "loss", "max_grad_norm": 1.0},
    )


# H, N: Trainer on bert-large, figures of the driver


def _trainer_bert(row: Row) -> Rebuilt:
    if not row["model"].startswith("bert-large"):
        raise CannotRebuild(f"no configuration of {row['model']} here")
    config = transformers.BertConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, num_labels=2
    )
    with torch.device("meta"):
        model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").train()
    if row["checkpointing"] not in ("", "no"):  # transformers' Trainer: every layer; reentrant until 2024
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": True})
    tokens = ids(row)
    batch = {"input_ids": tokens, "labels": torch.zeros(number(row, "micro_batch"), dtype=torch.int64, device="meta")}
    old = row["torch"].startswith("1.")
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(row["compute_dtype"])
    return Rebuilt(
        model=model,
        loss=lambda model, batch: _autocast(model, batch, half),
        batch=batch,
        optimizer=optimizer(row["optimizer"], lr=5e-5),
        kernels=Kernels(capability=capability(row), cublas_workspace_bytes=0 if old else None),  # in the allocator since 1.11
        loop={"outputs_live": "loss", "max_grad_norm": 1.0, "zero_grad_keep": old, "foreach": not old},
        micro_batches=number(row, "accumulate"),
        outside_bytes=_context_bytes(row, model),
        around=_softmax_of_1_10 if old else nullcontext,
    )


class _Softmax(torch.autograd.Function):
    """Until torch 1.10 the input was saved beside the result (tools/autograd/derivatives.yaml: its dtype was asked of it)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dim: int) -> Tensor:
        out = torch.softmax(scores, dim)
        ctx.dim = dim
        ctx.save_for_backward(scores, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scores, out = ctx.saved_tensors
        return torch._softmax_backward_data(grad, out, ctx.dim, scores.dtype), None


def _softmax_of_1_10() -> AbstractContextManager[Any]:
    return mock.patch.object(torch.nn.functional, "softmax", lambda scores, dim, **_: _Softmax.apply(scores, dim))


def _autocast(model: torch.nn.Module, batch: dict[str, Tensor], half: torch.dtype | None) -> Tensor:
    if half is None:
        return model(**batch).loss  # type: ignore[no-any-return]
    with torch.autocast("cpu", half):  # the trace's fakes are on the CPU in name
        return model(**batch).loss  # type: ignore[no-any-return]


def _context_bytes(row: Row, model: torch.nn.Module) -> int:
    """What the driver shows beside the allocator's segments.

    The row's note has the figure with the weights alone, or else with the context alone.
    """
    with_weights = re.search(r"with weights (\d+) MiB", row["note"])
    if with_weights is not None:
        allocator = CachingAllocator()
        for tensor in [*model.parameters(), *model.buffers()]:
            allocator.malloc(tensor.numel() * tensor.element_size())
        return int(with_weights[1]) * MiB - allocator.reserved_bytes
    context = re.search(r"context (\d+) MiB", row["note"])
    if context is None:
        raise CannotRebuild("the row does not say what the driver shows without the model")
    return int(context[1]) * MiB


# E: single operators, Liger-Kernel's benchmark


def _operator(row: Row) -> Rebuilt:
    mode, _, rest = row["kind"].partition(" ")
    setting, _, config_text = rest.partition(" ")
    key, _, value = setting.partition("=")
    made = OPERATORS.get(name := row["model"].removeprefix("operator "))
    if made is None:
        raise CannotRebuild(f"operator {name!r} is not written out in operators.py")
    try:
        with torch.device("meta"):
            operator = made({**json.loads(config_text or "{}"), key: int(float(value))}, mode)
    except (KeyError, TypeError, ValueError) as error:
        raise CannotRebuild(f"operator {name!r}: {error}") from None
    return Rebuilt(
        model=operator,
        loss=lambda model, batch: model.run(),
        batch={},
        optimizer=NoStep,
        kernels=Kernels(capability=80),
        loop={"outputs_live": "micro-batch"},
        steady=True,
    )


_SOURCES = {
    "fitcheck": fitcheck, "xMem": xmem, "optimum-benchmark": _optimum, "transformers docs": _trainer_bert,
    "personal_chatgpt": _trainer_bert, "Liger-Kernel": _operator, "litgpt": litgpt,
    "GPUMemNet": gpumemnet,
}  # fmt: skip
