"""xMem's harness: models from their configurations, wikitext-2 cut at 128 tokens, a plain loop.

Source: Stone-ResearchLife/xMem, exp/trainer/trainer.py and train_loop.py (transformer_train_loop), and
paper_container/config.py: transformers 4.51.3, whose ways the code below takes where later ones differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from language_models import causal_lm
from rebuilt import LAZY_KERNELS, CannotRebuild, Rebuilt, Row, capability, dtype, ids, optimizer
from torch import Tensor, nn
from transformers import cache_utils
from transformers.integrations import sdpa_attention

from fullbatch.memory.kernels import Kernels

_GPT_NEO: dict[str, Any] = {"attention_types": [[["global", "local"], 6]], "max_position_embeddings": 2048}
_CONFIGS: dict[str, Any] = {  # by the last part of the name, in small letters
    "gpt2": lambda: transformers.GPT2Config(),
    "gpt2-medium": lambda: transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": lambda: transformers.GPT2Config(n_embd=1280, n_layer=36, n_head=20),
    "distilgpt2": lambda: transformers.GPT2Config(n_layer=6),
    "cerebras-gpt-111m": lambda: transformers.GPT2Config(
        n_embd=768, n_layer=10, n_head=12, n_inner=3072, n_positions=2048, activation_function="gelu",
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    ),
    "gpt-neo-125m": lambda: transformers.GPTNeoConfig(num_layers=12, hidden_size=768, num_heads=12, **_GPT_NEO),
    "opt-125m": lambda: transformers.OPTConfig(),
    "opt-350m": lambda: transformers.OPTConfig(
        hidden_size=1024, num_hidden_layers=24, ffn_dim=4096, num_attention_heads=16, word_embed_proj_dim=512,
        do_layer_norm_before=False,
    ),
    "t5-small": lambda: _t5(512, 2048, 6, 8),
    "t5-base": lambda: _t5(768, 3072, 12, 12),
    "pythia-14m": lambda: _pythia(128, 6, 4, 512, 50304),
    "pythia-70m": lambda: _pythia(512, 6, 8, 2048, 50304),
    "pythia-160m": lambda: _pythia(768, 12, 12, 3072, 50304),
    "pythia-410m": lambda: _pythia(1024, 24, 16, 4096, 50304),
    "pythia-1b": lambda: _pythia(2048, 16, 8, 8192, 50304),
    "bert-base-uncased": lambda: transformers.BertConfig(),
    "roberta-base": lambda: transformers.RobertaConfig(
        vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
    ),
}  # fmt: skip


def _t5(width: int, inner: int, layers: int, heads: int) -> Any:
    return transformers.T5Config(
        d_ff=inner, d_model=width, num_layers=layers, num_heads=heads, vocab_size=32128, decoder_start_token_id=0
    )


def _pythia(width: int, layers: int, heads: int, inner: int, vocabulary: int) -> Any:
    return transformers.GPTNeoXConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=inner, rotary_pct=0.25, max_position_embeddings=2048,
    )  # fmt: skip


def xmem(row: Row) -> Rebuilt:
    """The run of ``row``, by its columns."""
    name = row["model"].split("/")[-1].lower()
    if row["kind"].startswith("CNN"):
        raise CannotRebuild("a convolution net, and torchvision is not installed here")
    if dtype(row["params_dtype"]) is not torch.float32:
        raise CannotRebuild(f"parameters in {row['params_dtype']}")
    if name in _CONFIGS:
        config = _CONFIGS[name]()
        auto = transformers.AutoModelForCausalLM
        if isinstance(config, transformers.T5Config):
            auto = transformers.AutoModelForSeq2SeqLM
        elif isinstance(config, transformers.BertConfig | transformers.RobertaConfig):
            auto = transformers.AutoModelForMaskedLM
        eager = isinstance(config, transformers.T5Config | transformers.GPTNeoConfig)  # have no other way in 4.51.3
        with torch.device("meta"):
            model = auto.from_config(config, attn_implementation="eager" if eager else "sdpa")
    else:
        model = causal_lm(name, torch.float32, "sdpa")
        model.config.use_cache = True
    model.train()
    tokens = ids(row)
    return Rebuilt(
        model=model,
        loss=_loss,
        batch={"input_ids": tokens, "attention_mask": torch.zeros_like(tokens), "labels": torch.zeros_like(tokens)},
        optimizer=optimizer(row["optimizer"], lr=1e-3),
        kernels=Kernels(capability=capability(row), cublas_workspace_bytes=0),
        loop={"outputs_live": "next", "zero_grad": "before the forward"},
        outside_bytes=LAZY_KERNELS,
        around=_transformers_4_51,
    )


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


@contextmanager
def _transformers_4_51() -> Iterator[None]:
    """cache_utils.py, DynamicCache.update keeps the first keys as they are; sdpa_attention.py makes its inputs contiguous."""
    grow, attend = cache_utils.DynamicLayer.update, torch.nn.functional.scaled_dot_product_attention

    def update(layer: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if layer.is_initialized:
            return grow(layer, keys, values, *args, **kwargs)
        layer.device, layer.dtype, layer.is_initialized = keys.device, keys.dtype, True
        layer.keys, layer.values = keys, values
        return keys, values

    def contiguous(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        return attend(query.contiguous(), key.contiguous(), value.contiguous(), **kwargs)

    with (
        mock.patch.object(cache_utils.DynamicLayer, "update", update),
        mock.patch.object(sdpa_attention.torch.nn.functional, "scaled_dot_product_attention", contiguous),
    ):
        yield
