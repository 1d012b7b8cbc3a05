"""litgpt's LoRA fine-tuning (finetune/lora.py of the end of 2023), longest sample of Alpaca first.

Source: Lightning-AI/litgpt: finetune/lora.py (rank 8, alpha 16, dropout 0.05, on query and value; the head in pieces
of 128 tokens), lit_gpt/lora.py, model.py, rmsnorm.py, utils.py (chunked_cross_entropy), config.py. The first
micro-batch holds the longest sample, so that the peak comes before there are gradients or an optimizer's state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from rebuilt import CannotRebuild, Rebuilt, Row, capability, dtype, ids, number, optimizer
from torch import Tensor, nn
from torch.nn import functional as F

from fullbatch.memory.kernels import Kernels

_RANK, _SCALING, _DROPOUT, _PIECE = 8, 2.0, 0.05, 128


@dataclass(frozen=True, kw_only=True)
class _Config:
    vocabulary: int  # as it is padded
    width: int
    layers: int
    heads: int
    groups: int = 0  # 0: as many as heads
    inner: int = 0  # 0: four times the width
    rotary: float = 1.0
    block: int = 2048
    rms: bool = False
    gated: bool = False
    bias: bool = True
    head_bias: bool = False
    parallel: bool = True
    shared_norm: bool = False


_LLAMA: dict[str, Any] = {"rms": True, "gated": True, "bias": False, "parallel": False, "block": 4096}
_CONFIGS = {
    "phi-1_5": _Config(vocabulary=51200, width=2048, layers=24, heads=32, rotary=0.5, head_bias=True, shared_norm=True),
    "phi-2": _Config(vocabulary=51200, width=2560, layers=32, heads=32, rotary=0.4, head_bias=True, shared_norm=True),
    "Llama-2-7b": _Config(vocabulary=32000, width=4096, layers=32, heads=32, inner=11008, **_LLAMA),
    "Llama-2-13b": _Config(vocabulary=32000, width=5120, layers=40, heads=40, inner=13824, **_LLAMA),
    "CodeLlama-7b": _Config(vocabulary=32016, width=4096, layers=32, heads=32, inner=11008, **{**_LLAMA, "block": 16384}),
    "TinyLlama-1.1b": _Config(
        vocabulary=32000, width=2048, layers=22, heads=32, groups=4, inner=5632, **{**_LLAMA, "block": 2048}
    ),
    "falcon-7b": _Config(
        vocabulary=65024, width=4544, layers=32, heads=71, groups=1, bias=False, shared_norm=True
    ),
    "stablelm-base-alpha-3b": _Config(vocabulary=50688, width=4096, layers=16, heads=32, rotary=0.25, block=4096),
    "stablelm-base-alpha-7b": _Config(vocabulary=50432, width=6144, layers=16, heads=48, rotary=0.25, block=4096),
    "pythia-1b": _Config(vocabulary=50304, width=2048, layers=16, heads=8, rotary=0.25),
    "pythia-1.4b": _Config(vocabulary=50304, width=2048, layers=24, heads=16, rotary=0.25),
    "pythia-2.8b": _Config(vocabulary=50304, width=2560, layers=32, heads=32, rotary=0.25),
    "pythia-6.9b": _Config(vocabulary=50432, width=4096, layers=32, heads=32, rotary=0.25),
}  # fmt: skip


def litgpt(row: Row) -> Rebuilt:
    """The run of ``row``, by its columns."""
    short = re.sub(r"(-hf|-[Cc]hat|-[Ii]nstruct|-v1\.0)+$", "", row["model"].split("/")[-1]).lower()
    config = next((value for name, value in _CONFIGS.items() if name.lower() == short), None)
    if config is None:
        raise CannotRebuild(f"no configuration of {row['model']} in litgpt here")
    if "LoRA" not in row["kind"] or row["checkpointing"] not in ("", "no"):
        raise CannotRebuild("only LoRA on one device is written out here")
    precision = dtype(row["params_dtype"])
    if dtype(row["compute_dtype"]) is not precision:
        raise CannotRebuild("mixed precision")
    with torch.device("meta"):
        model = _Fabric(_GPT(config).to(precision)).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    tokens = ids(row)
    if number(row, "seq_len") > config.block:
        raise CannotRebuild(f"{row['seq_len']} tokens, and the model has room for {config.block}")
    return Rebuilt(
        model=model,
        loss=_loss,
        batch={"input_ids": tokens, "targets": torch.zeros_like(tokens)},
        optimizer=optimizer(row["optimizer"]),
        kernels=Kernels(capability=capability(row)),
        loop={"outputs_live": "next", "updates": 1},
    )


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The last piece ends one token early: output n predicts token n + 1."""
    logits = model(batch["input_ids"])
    logits[-1] = logits[-1][..., :-1, :]
    targets = batch["targets"][..., 1:]
    pieces = [piece.reshape(-1, piece.size(-1)) for piece in logits]
    wanted = [piece.reshape(-1) for piece in targets.split(logits[0].size(1), dim=1)]
    losses = [
        F.cross_entropy(piece, goal, ignore_index=-1, reduction="none") for piece, goal in zip(pieces, wanted, strict=True)
    ]
    number = (targets != -1).sum()
    return torch.cat(losses).sum() / number.maximum(torch.ones_like(number))


class _Fabric(nn.Module):
    """lightning.fabric.wrappers: what a module returns becomes float32 (plugins/precision/half.py, convert_output)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens_BT: Tensor) -> list[Tensor]:
        return [piece.float() for piece in self.module(tokens_BT)]


class _GPT(nn.Module):
    def __init__(self, config: _Config) -> None:
        super().__init__()
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=config.head_bias)
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.h = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.ln_f = _norm(config)
        turned = int(config.rotary * (config.width // config.heads))
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(config.block, turned))

    def forward(self, tokens_BT: Tensor) -> list[Tensor]:
        cos, sin = (whole[: tokens_BT.size(1)] for whole in (self.cos, self.sin))
        x = self.wte(tokens_BT)
        for block in self.h:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        return [self.lm_head(piece) for piece in x.split(_PIECE, dim=1)]


class _Block(nn.Module):
    def __init__(self, config: _Config) -> None:
        super().__init__()
        self.parallel, self.shared = config.parallel, config.shared_norm
        self.norm_1 = _norm(config)
        self.attn = _Attention(config)
        self.norm_2 = None if config.shared_norm else _norm(config)
        self.mlp = (_GatedMLP if config.gated else _MLP)(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm_1(x)
        h = self.attn(normed, cos, sin)
        if self.parallel:
            second = normed if self.norm_2 is None else self.norm_2(x)
            return self.mlp(second) + h + x  # type: ignore[no-any-return]
        x = h + x
        return self.mlp(self.norm_2(x)) + x  # type: ignore[no-any-return, misc]


class _Attention(nn.Module):
    def __init__(self, config: _Config) -> None:
        super().__init__()
        self.heads, self.groups, self.size = config.heads, config.groups or config.heads, config.width // config.heads
        self.attn = _LoraQKV(config.width, self.heads, self.groups, config.bias)
        self.proj = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, C = x.size()
        each = self.heads // self.groups
        qkv = self.attn(x).view(B, T, self.groups, each + 2, self.size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((each, 1, 1), dim=2)
        if self.groups != self.heads:
            k, v = (part.expand(B, self.groups, each, T, self.size) for part in (k, v))
        q, k, v = (part.reshape(B, -1, T, self.size) for part in (q, k, v))
        turned = cos.size(-1)
        q_turned = _rope(q[..., :turned], cos, sin)
        k_turned = _rope(k[..., :turned], cos, sin)
        q = torch.cat((q_turned, q[..., turned:]), dim=-1)
        k = torch.cat((k_turned, k[..., turned:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.size**-0.5)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))  # type: ignore[no-any-return]


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (rotated * sin)).to(x.dtype)


class _LoraQKV(nn.Module):
    """LoRAQKVLinear: one A for query and value, their B as a convolution in two groups, padded with zeros for the key."""

    def __init__(self, width: int, heads: int, groups: int, bias: bool) -> None:
        super().__init__()
        self.width, self.kv = width, width // (heads // groups)
        out = (heads + 2 * groups) * (width // heads)
        self.out, self.equal = out, heads == groups
        self.linear = nn.Linear(width, out, bias=bias)
        self.lora_A = nn.Parameter(torch.empty(2 * _RANK, width))
        self.lora_B = nn.Parameter(torch.empty(width + self.kv, _RANK))
        self.register_buffer("chosen", torch.zeros(width + self.kv, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        pretrained = self.linear(x)
        after_A = F.linear(F.dropout(x, _DROPOUT, self.training), self.lora_A).transpose(-2, -1)
        after_B = self._conv1d(after_A, self.lora_B.unsqueeze(-1)).transpose(-2, -1)
        return pretrained + self._padded(after_B) * _SCALING  # type: ignore[no-any-return]

    def _conv1d(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.equal:
            return F.conv1d(x, weight, groups=2)
        pairs = zip(x.chunk(2, dim=1), weight.split((self.width, self.kv)), strict=True)
        return torch.cat([F.conv1d(part, kernel) for part, kernel in pairs], dim=1)

    def _padded(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        zeros = x.new_zeros((*x.shape[:-1], self.out)).view(-1, self.out)
        filled = zeros.index_copy(1, self.chosen, x.reshape(-1, self.width + self.kv))
        return filled.view((*x.shape[:-1], self.out)).transpose(0, 1)


class _MLP(nn.Module):
    def __init__(self, config: _Config) -> None:
        super().__init__()
        inner = config.inner or 4 * config.width
        self.fc, self.proj = nn.Linear(config.width, inner, config.bias), nn.Linear(inner, config.width, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x)))  # type: ignore[no-any-return]


class _GatedMLP(nn.Module):
    def __init__(self, config: _Config) -> None:
        super().__init__()
        self.fc_1, self.fc_2 = (nn.Linear(config.width, config.inner, config.bias) for _ in range(2))
        self.proj = nn.Linear(config.inner, config.width, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.fc_1(x), self.fc_2(x)
        return self.proj(F.silu(first) * second)  # type: ignore[no-any-return]


class _RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        normed = x * torch.rsqrt(mean + 1e-5)
        return (self.weight * normed).to(dtype)


def _norm(config: _Config) -> nn.Module:
    return _RMSNorm(config.width) if config.rms else nn.LayerNorm(config.width)
