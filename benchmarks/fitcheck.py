"""fitcheck-llm, scripts/measure.py: one step of LoRA or QLoRA on a decoder-only model, after one to warm up."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from language_models import causal_lm
from loading import load_quantised
from rebuilt import CannotRebuild, MiB, Rebuilt, Row, capability, dtype, ids, number, optimizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations import sdpa_attention

from fullbatch.memory.kernels import Kernels


def fitcheck(row: Row) -> Rebuilt:
    """The run of ``row``, by its columns."""
    params, eager = row["params_dtype"], row["attention"].startswith("eager")
    quantised = params.startswith("nf4")
    if not (eager or row["attention"].startswith("sdpa")):
        raise CannotRebuild(f"attention {row['attention']!r}")
    if "double" in params:
        raise CannotRebuild("double quantisation")
    compute = dtype(row["compute_dtype"] if quantised else params)
    model = causal_lm(row["model"], compute, "eager" if eager else "sdpa")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapters(model, number(row, "lora_rank"), quantised, compute, _targets(row["kind"]))
    if "every layer" in row["checkpointing"]:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
        model.enable_input_require_grads()
    elif row["checkpointing"] not in ("", "no", "none", "off"):
        raise CannotRebuild(f"checkpointing {row['checkpointing']!r}")
    model.train()
    return Rebuilt(
        model=model,
        loss=_loss,
        batch={"input_ids": ids(row)},
        optimizer=optimizer(row["optimizer"]),
        kernels=Kernels(capability=capability(row)),
        loop={
            "outputs_live": "update",
            "zero_grad": "before the forward",
            "attention": "efficient" if "efficient" in row["attention"] else "auto",
        },
        steady=True,
        load=(lambda timeline, allocator: load_quantised(timeline, model, allocator)) if quantised else None,
        outside_bytes=int(140.875 * MiB),
        around=_grouped_heads_repeated,
    )


def _targets(kind: str) -> tuple[str, ...]:
    found = re.search(r"LoRA on ([a-z_,]+)", kind)
    if found is None:
        raise CannotRebuild("the row does not say which projections are adapted")
    return tuple(f"{name}_proj" for name in found[1].strip(",").split(",") if name)


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss
    return loss


def _grouped_heads_repeated() -> AbstractContextManager[Any]:
    """The script repeats keys and values itself, as the efficient kernel takes no grouped heads."""

    def never(*_: Any, **__: Any) -> bool:  # a mock would remember its arguments, and they would stay in memory
        return False

    return mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", never)


def adapters(model: nn.Module, rank: int, quantised: bool, compute: torch.dtype, targets: tuple[str, ...]) -> None:
    """LoRA as peft 0.21 does it, on a base in half precision or in bitsandbytes' nf4 (no double quantisation)."""
    if quantised:  # peft's prepare_model_for_kbit_training: whatever is not quantised becomes float32
        for parent in list(model.modules()):
            for child, module in list(parent.named_children()):
                if isinstance(module, nn.Linear) and child != "lm_head":
                    setattr(parent, child, Nf4Linear(module, compute))
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and not isinstance(module, Nf4Linear):
                    module._parameters[key] = nn.Parameter(parameter.detach().float(), requires_grad=False)
        if model.config.tie_word_embeddings:
            model.tie_weights()
    for parent in list(model.modules()):
        for child, module in list(parent.named_children()):
            if child in targets:
                setattr(parent, child, (Lora4bit if quantised else Lora)(module, rank))


class Lora(nn.Module):
    """peft/tuners/lora/layer.py, Linear.forward, without dropout."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        self.base = base
        self.A = nn.Linear(base.in_features, rank, bias=False, device="meta", dtype=torch.float32)
        self.B = nn.Linear(rank, base.out_features, bias=False, device="meta", dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        dtype = result.dtype
        x = x.to(self.A.weight.dtype)
        result = result + self.B(self.A(x)) * 2.0
        return result.to(dtype)


class Lora4bit(Lora):
    """peft/tuners/lora/bnb.py, Linear4bit.forward."""

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        result = result.clone()
        dtype = result.dtype
        x = x.to(self.A.weight.dtype)
        output = self.B(self.A(x)) * 2.0
        output = output.to(dtype)
        return result + output


class Nf4Linear(nn.Module):
    """bitsandbytes/nn/modules.py, Linear4bit: half a byte an element, and a float32 scale for each 64."""

    def __init__(self, of: nn.Linear, compute: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.compute = of.in_features, of.out_features, compute
        elements = of.in_features * of.out_features
        self.weight = nn.Parameter(torch.empty(elements // 2, 1, dtype=torch.uint8, device="meta"), requires_grad=False)
        self.register_buffer("absmax", torch.empty(-(-elements // 64), device="meta"))
        self.register_buffer("code", torch.empty(16, device="meta"))
        self.bias = None if of.bias is None else nn.Parameter(of.bias.detach().float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(self.compute)
        bias = None if self.bias is None else self.bias.to(self.compute)
        out: Tensor = _MatMul4Bit.apply(x, self.weight, bias, (self.out_features, self.in_features))
        return out.to(dtype)


class _MatMul4Bit(torch.autograd.Function):
    """bitsandbytes/autograd/_functions.py, MatMul4Bit: the weight is expanded for each product and not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> Tensor:
        ctx.shape = shape
        ctx.save_for_backward(packed)
        return F.linear(x, torch.empty(shape, dtype=x.dtype, device=packed.device), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        return torch.matmul(grad, torch.empty(ctx.shape, dtype=grad.dtype, device=packed.device)), None, None, None
