"""Language models by their public names, without weights: figures of each model's ``config.json``."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from rebuilt import CannotRebuild
from torch import nn

_LLAMAS = {  # vocabulary, hidden, intermediate, layers, heads, key-value heads, tied
    "SmolLM2-135M": (49152, 576, 1536, 30, 9, 3, True),
    "SmolLM2-360M": (49152, 960, 2560, 32, 15, 5, True),
    "SmolLM2-1.7B": (49152, 2048, 8192, 24, 32, 32, True),
    "TinyLlama-1.1B": (32000, 2048, 5632, 22, 32, 4, False),
    "Llama-3.2-1B": (128256, 2048, 8192, 16, 32, 8, True),
    "Llama-3.2-3B": (128256, 3072, 8192, 28, 24, 8, True),
    "Llama-3.1-8B": (128256, 4096, 14336, 32, 32, 8, False),
    "Meta-Llama-3-8B": (128256, 4096, 14336, 32, 32, 8, False),
    "Llama-2-7b": (32000, 4096, 11008, 32, 32, 32, False),
    "Llama-2-13b": (32000, 5120, 13824, 40, 40, 40, False),
}
_QWENS = {
    "Qwen2.5-0.5B": (151936, 896, 4864, 24, 14, 2, True),
    "Qwen2.5-1.5B": (151936, 1536, 8960, 28, 12, 2, True),
    "Qwen2.5-3B": (151936, 2048, 11008, 36, 16, 2, True),
    "Qwen2.5-7B": (152064, 3584, 18944, 28, 28, 4, False),
}
_QWENS3 = {
    "Qwen3-0.6B": (151936, 1024, 3072, 28, 16, 8, True),
    "Qwen3-1.7B": (151936, 2048, 6144, 28, 16, 8, True),
    "Qwen3-4B": (151936, 2560, 9728, 36, 32, 8, True),
}
_MISTRALS = {
    "Mistral-7B-v0.1": (32000, 4096, 14336, 32, 32, 8, False),
    "Mistral-7B-v0.2": (32000, 4096, 14336, 32, 32, 8, False),
    "Mistral-7B-v0.3": (32768, 4096, 14336, 32, 32, 8, False),
}
_GEMMAS = {
    "gemma-2b": (256000, 2048, 16384, 18, 8, 1, True),
    "gemma-7b": (256000, 3072, 24576, 28, 16, 16, True),
}
_GEMMAS2 = {
    "gemma-2-2b": (256000, 2304, 9216, 26, 8, 4, True),
    "gemma-2-9b": (256000, 3584, 14336, 42, 16, 8, True),
}
_PHIS = {
    "phi-1_5": (51200, 2048, 8192, 24, 32, 32, False),
    "phi-2": (51200, 2560, 10240, 32, 32, 32, False),
}
_PHIS3 = {
    "Phi-3-mini-4k": (32064, 3072, 8192, 32, 32, 32, False),
    "Phi-3-mini-128k": (32064, 3072, 8192, 32, 32, 32, False),
}
_FAMILIES: tuple[tuple[dict[str, tuple[Any, ...]], Any, dict[str, dict[str, Any]]], ...] = (
    (_LLAMAS, transformers.LlamaConfig, {}),
    (_QWENS, transformers.Qwen2Config, {}),
    (_QWENS3, transformers.Qwen3Config, {"": {"head_dim": 128}}),
    (_MISTRALS, transformers.MistralConfig, {"": {"sliding_window": None}, "Mistral-7B-v0.1": {"sliding_window": 4096}}),
    (_GEMMAS, transformers.GemmaConfig, {"": {"head_dim": 256}}),
    (_GEMMAS2, transformers.Gemma2Config, {"": {"head_dim": 256}}),
    (_PHIS, transformers.PhiConfig, {"phi-1_5": {"rotary_factor": 0.5}, "phi-2": {"rotary_factor": 0.4, "resid_pdrop": 0.1}}),
    (_PHIS3, transformers.Phi3Config, {"": {"pad_token_id": None}}),
)


def causal_lm(name: str, dtype: torch.dtype, attention: str) -> nn.Module:
    """``name`` as on the Hub, with or without its owner and ``-Instruct``, ``-Chat-v1.0``, ``-hf`` or ``-it``.

    Raises:
        CannotRebuild: It is not written down here.
    """
    short = re.sub(r"(-Instruct|-Chat-v1\.0|-[Cc]hat|-hf|-it|-Base)+(?=$|-v0)", "", name.split("/")[-1])
    short = re.sub(r"-[Ii]nstruct$", "", short)
    for table, config_class, more in _FAMILIES:
        found = {key.lower(): key for key in table}.get(short.lower())
        if found is None:
            continue
        vocabulary, hidden, intermediate, layers, heads, groups, tied = table[found]
        extra = {**more.get("", {}), **more.get(found, {})}
        factor = extra.pop("rotary_factor", None)
        if factor is not None:
            extra["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}
        config = config_class(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=groups, tie_word_embeddings=tied, use_cache=False,
            max_position_embeddings=131072, **extra,
        )  # fmt: skip
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    raise CannotRebuild(f"no configuration of {name} here")
