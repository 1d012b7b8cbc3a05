"""Rebuilds published runs from rows of measured.csv: model, loss, batch, optimizer, and how their scripts loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from operators import OPERATORS, NoStep
from torch import Tensor, nn
from torch.nn import functional as F

from fullbatch.memory.kernels import Kernels


@dataclass(kw_only=True)
class Rebuilt:
    """A run as :func:`fullbatch.memory.trace.trace` takes it; ``extra_bytes``: resident and outside of what is traced."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Any]
    batch: Any
    optimizer: Callable[[Any], torch.optim.Optimizer]
    kernels: Kernels
    loop: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    outside_bytes: int = 0
    steady: bool = False  # the published peak leaves the first update out


class CannotRebuild(Exception):
    """The row says too little, or what it needs is not here."""


LLAMAS = {  # vocabulary, hidden, intermediate, layers, heads, key-value heads, tied, head_dim
    "SmolLM2-135M": (49152, 576, 1536, 30, 9, 3, True),
    "SmolLM2-360M": (49152, 960, 2560, 32, 15, 5, True),
    "SmolLM2-1.7B": (49152, 2048, 8192, 24, 32, 32, True),
    "TinyLlama-1.1B-Chat-v1.0": (32000, 2048, 5632, 22, 32, 4, False),
    "Llama-3.2-1B-Instruct": (128256, 2048, 8192, 16, 32, 8, True),
    "Llama-3.2-3B-Instruct": (128256, 3072, 8192, 28, 24, 8, True),
    "Llama-2-7b": (32000, 4096, 11008, 32, 32, 32, False),
}
QWENS = {
    "Qwen2.5-0.5B": (151936, 896, 4864, 24, 14, 2, True),
    "Qwen2.5-0.5B-Instruct": (151936, 896, 4864, 24, 14, 2, True),
    "Qwen2.5-1.5B": (151936, 1536, 8960, 28, 12, 2, True),
    "Qwen2.5-1.5B-Instruct": (151936, 1536, 8960, 28, 12, 2, True),
}


def rebuild(row: dict[str, str]) -> Rebuilt:
    """The run of ``row``.

    Raises:
        CannotRebuild: With the reason.
    """
    makers = {"A": _fitcheck, "B": _xmem, "C": _optimum, "H": _trainer_bert, "N": _trainer_bert, "E": _operator}
    make = makers.get(row["id"][0])
    if make is None:
        raise CannotRebuild("set-up not published in enough detail (attention, optimizer or loop unknown)")
    return make(row)


# A: fitcheck-llm 0.3.1, scripts/measure.py: LoRA on q, k, v, o of decoder-only models on a T4


def _fitcheck(row: dict[str, str]) -> Rebuilt:
    name, rank = row["model"].split("/")[-1], int(row["lora_rank"])
    eager, quantised = row["attention"] == "eager", row["params_dtype"].startswith("nf4")
    if "every layer" not in row["checkpointing"]:
        raise CannotRebuild(f"checkpointing {row['checkpointing']!r}")
    model = causal_lm(name, torch.float16, "eager" if eager else "sdpa")
    if not eager:
        _repeat_grouped_heads()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapters(model, rank, quantised)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    ids = torch.zeros(int(row["micro_batch"]), int(row["seq_len"]), dtype=torch.int64, device="meta")
    return Rebuilt(
        model=model,
        loss=lambda model, batch: model(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss,
        batch={"input_ids": ids},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        kernels=Kernels(capability=75),
        loop={"outputs_live": "update", "zero_grad": "before the forward"},
        steady=True,
    )


def causal_lm(name: str, dtype: torch.dtype, attention: str) -> nn.Module:
    for table, config_class in ((LLAMAS, transformers.LlamaConfig), (QWENS, transformers.Qwen2Config)):
        if name in table:
            vocabulary, hidden, intermediate, layers, heads, groups, tied = table[name]
            config = config_class(
                vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=groups, tie_word_embeddings=tied, use_cache=False,
                max_position_embeddings=131072,
            )  # fmt: skip
            with torch.device("meta"):
                return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    raise CannotRebuild(f"no configuration of {name} here")


def adapters(model: nn.Module, rank: int, quantised: bool) -> None:
    """LoRA as peft 0.21 does it, on a base in half precision or in bitsandbytes' nf4 (no double quantisation)."""
    if quantised:  # peft's prepare_model_for_kbit_training: whatever is not quantised becomes float32
        for parent in list(model.modules()):
            for child, module in list(parent.named_children()):
                if isinstance(module, nn.Linear) and child != "lm_head":
                    setattr(parent, child, Nf4Linear(module))
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and not isinstance(module, Nf4Linear):
                    module._parameters[key] = nn.Parameter(parameter.detach().float(), requires_grad=False)
        if model.config.tie_word_embeddings:
            model.tie_weights()
    for parent in list(model.modules()):
        for child, module in list(parent.named_children()):
            if child in ("q_proj", "k_proj", "v_proj", "o_proj"):
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

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = of.in_features, of.out_features
        number = of.in_features * of.out_features
        self.weight = nn.Parameter(torch.empty(number // 2, 1, dtype=torch.uint8, device="meta"), requires_grad=False)
        self.register_buffer("absmax", torch.empty(-(-number // 64), device="meta"))
        self.register_buffer("code", torch.empty(16, device="meta"))
        self.bias = None if of.bias is None else nn.Parameter(of.bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float16)
        bias = None if self.bias is None else self.bias.to(torch.float16)
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


def _repeat_grouped_heads() -> None:
    """The measuring script repeats keys and values itself, as the efficient kernel takes no grouped heads."""
    from transformers.integrations import sdpa_attention

    sdpa_attention.use_gqa_in_sdpa = lambda *_, **__: False


# B: xMem's harness, models from configurations, wikitext-2 at 128 tokens


def _xmem(row: dict[str, str]) -> Rebuilt:
    name = row["model"].split("/")[-1]
    with torch.device("meta"):
        if name == "distilgpt2":
            config = transformers.GPT2Config(n_layer=6)
            model = transformers.GPT2LMHeadModel(config)
        elif name == "gpt-neo-125M":
            config = transformers.GPTNeoConfig(
                num_layers=12,
                hidden_size=768,
                num_heads=12,
                attention_types=[[["global", "local"], 6]],
                max_position_embeddings=2048,
            )
            model = transformers.GPTNeoForCausalLM(config)
        elif name == "T5-small":
            config = transformers.T5Config(
                d_ff=2048, d_model=512, num_layers=6, num_heads=8, vocab_size=32128, decoder_start_token_id=0
            )
            model = transformers.T5ForConditionalGeneration(config)
        else:
            raise CannotRebuild("convolutions: the workspace that cuDNN takes has no rule")
    model.train()
    ids = torch.zeros(int(row["micro_batch"]), int(row["seq_len"]), dtype=torch.int64, device="meta")
    return Rebuilt(
        model=model,
        loss=lambda model, batch: (
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
        ),
        batch={"input_ids": ids, "attention_mask": torch.zeros_like(ids), "labels": torch.zeros_like(ids)},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        kernels=Kernels(capability=86, cublas_workspace_bytes=0),
        loop={"outputs_live": "next", "zero_grad": "before the forward"},
    )


# C: optimum-benchmark, Trainer on ROCm


def _optimum(row: dict[str, str]) -> Rebuilt:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(), attn_implementation="eager").train()
    for block in model.transformer.h:  # until transformers 4.50 each layer kept its causal mask
        block.attn.register_buffer("bias", torch.empty(1, 1, 1024, 1024, dtype=torch.bool, device="meta"))
    return Rebuilt(
        model=model,
        loss=lambda model, batch: model(**batch).loss,
        batch=_tokens(row),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-5),
        kernels=Kernels(capability=80, cublas_workspace_bytes=0, hip=True),
        loop={"outputs_live": "loss", "max_grad_norm": 1.0},
    )


# H, N: Trainer on bert-large, figures of the driver


def _trainer_bert(row: dict[str, str]) -> Rebuilt:
    config = transformers.BertConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, num_labels=2
    )
    with torch.device("meta"):
        model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").train()
    batch = _tokens(row)
    batch["labels"] = torch.zeros(int(row["micro_batch"]), dtype=torch.int64, device="meta")
    old = row["id"].startswith("H")
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=5e-5),
        "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
    }
    idle, capability = (1343, 70) if old else (355, 89)
    return Rebuilt(
        model=model,
        loss=lambda model, batch: model(**batch).loss,
        batch=batch,
        optimizer=makers[row["optimizer"]],
        kernels=Kernels(capability=capability, cublas_workspace_bytes=0 if old else None),  # through the allocator since 1.11
        loop={"outputs_live": "loss", "max_grad_norm": 1.0, "zero_grad_keep": old, "foreach": not old},
        micro_batches=int(row["accumulate"]),
        outside_bytes=idle * 2**20,
    )


def _tokens(row: dict[str, str]) -> dict[str, Tensor]:
    ids = torch.zeros(int(row["micro_batch"]), int(row["seq_len"]), dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": torch.zeros_like(ids)}


# E: single operators, Liger-Kernel's benchmark


def _operator(row: dict[str, str]) -> Rebuilt:
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
