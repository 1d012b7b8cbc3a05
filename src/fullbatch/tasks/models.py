"""Tasks of transformers' models: of known shape, without a network, or of any configuration."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch.accumulate import Counter, samples, tokens
from fullbatch.errors import TaskError
from fullbatch.tasks.chunked import IGNORED, chunked_loss, move_head_into_loss
from fullbatch.tasks.setup import WEIGHTS, Setup
from fullbatch.tasks.task import Task

Batch = dict[str, Tensor]

SEQ_LEN = 512
"""Tokens of a sample, where the setup says nothing and the model has so many positions."""
MASKED = 0.15
"""Share of the tokens that a masked model is to predict. Source: BERT (arXiv:1810.04805), section 3.1."""
CHUNKED = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
"""Model types whose logits are the output layer's output as it is; others scale or cap them."""


@dataclass(frozen=True)
class Head:
    """What a model predicts.

    Attributes:
        auto: The class of transformers that makes such a model from a configuration.
        architectures: How the names of such classes end in ``config.json``.
        items: What the model's own loss is a mean over.
        batch: ``batch(config, seq_len, samples, generator)``, random.
    """

    auto: str
    architectures: tuple[str, ...]
    items: Counter
    batch: Callable[[Any, int, int, torch.Generator], Batch]

    @property
    def has_tokens(self) -> bool:
        """Whether a sample is a row of tokens."""
        return self.batch is not _images


def _ids(config: Any, seq_len: int, samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(config.vocab_size, (samples, seq_len), generator=generator)


def _next_tokens(config: Any, seq_len: int, samples: int, generator: torch.Generator) -> Batch:
    ids = _ids(config, seq_len, samples, generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _masked(config: Any, seq_len: int, samples: int, generator: torch.Generator) -> Batch:
    ids = _ids(config, seq_len, samples, generator)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape, generator=generator) >= MASKED, IGNORED)}


def _pairs(config: Any, seq_len: int, samples: int, generator: torch.Generator) -> Batch:
    return {"input_ids": _ids(config, seq_len, samples, generator), "labels": _ids(config, seq_len, samples, generator)}


def _classes(config: Any, samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(config.num_labels, (samples,), generator=generator)


def _sequences(config: Any, seq_len: int, samples: int, generator: torch.Generator) -> Batch:
    return {"input_ids": _ids(config, seq_len, samples, generator), "labels": _classes(config, samples, generator)}


def _images(config: Any, seq_len: int, samples: int, generator: torch.Generator) -> Batch:
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    pixels = torch.randn(samples, getattr(config, "num_channels", 3), height, width, generator=generator)
    return {"pixel_values": pixels, "labels": _classes(config, samples, generator)}


# The models' losses: transformers' ForCausalLMLoss leaves the first label of a row out, the others none.
HEADS = {
    "pairs": Head("AutoModelForSeq2SeqLM", ("ForConditionalGeneration", "WithLMHeadModel"), tokens("labels"), _pairs),
    "causal": Head("AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel"), tokens("labels", shift=True), _next_tokens),
    "masked": Head("AutoModelForMaskedLM", ("ForMaskedLM", "ForPreTraining"), tokens("labels"), _masked),
    "classes": Head("AutoModelForSequenceClassification", ("ForSequenceClassification",), samples, _sequences),
    "images": Head("AutoModelForImageClassification", ("ForImageClassification",), samples, _images),
}


@dataclass(frozen=True)
class Known:
    """A published model: its head, where its weights are, and its configuration (``config.json`` there)."""

    head: str
    hub_name: str
    config: Mapping[str, Any]


def _gpt2(hub_name: str, width: int, layers: int, heads: int) -> Known:
    return Known("causal", hub_name, {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads})


def _bert(hub_name: str, width: int, layers: int, heads: int) -> Known:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width}
    return Known("classes", hub_name, {"model_type": "bert", "vocab_size": 30522, **sizes})


def _decoder(
    model_type: str, hub_name: str, vocab: int, width: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> Known:
    sizes = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return Known("causal", hub_name, {"model_type": model_type, **sizes, **attention, **more})


_QWEN = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_LLAMA_2 = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_LLAMA_3 = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_VIT_L = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}

MODELS: dict[str, Known] = {
    "bert-base": _bert("google-bert/bert-base-uncased", 768, 12, 12),
    "bert-large": _bert("google-bert/bert-large-uncased", 1024, 24, 16),
    "gpt2": _gpt2("openai-community/gpt2", 768, 12, 12),
    "gpt2-medium": _gpt2("openai-community/gpt2-medium", 1024, 24, 16),
    "gpt2-large": _gpt2("openai-community/gpt2-large", 1280, 36, 20),
    "gpt2-xl": _gpt2("openai-community/gpt2-xl", 1600, 48, 25),
    "qwen2.5-0.5b": _decoder("qwen2", "Qwen/Qwen2.5-0.5B", 151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True, **_QWEN),
    "qwen2.5-1.5b": _decoder("qwen2", "Qwen/Qwen2.5-1.5B", 151936, 1536, 8960, 28, 12, 2, tie_word_embeddings=True, **_QWEN),
    "qwen2.5-7b": _decoder("qwen2", "Qwen/Qwen2.5-7B", 152064, 3584, 18944, 28, 28, 4, **_QWEN),
    "llama-2-7b": _decoder("llama", "meta-llama/Llama-2-7b-hf", 32000, 4096, 11008, 32, 32, 32, **_LLAMA_2),
    "llama-2-70b": _decoder("llama", "meta-llama/Llama-2-70b-hf", 32000, 8192, 28672, 80, 64, 8, **_LLAMA_2),
    "llama-3.1-8b": _decoder("llama", "meta-llama/Llama-3.1-8B", 128256, 4096, 14336, 32, 32, 8, **_LLAMA_3),
    "t5-small": Known("pairs", "google-t5/t5-small", {"model_type": "t5", "decoder_start_token_id": 0}),
    "vit-l-16": Known("images", "google/vit-large-patch16-224", {"model_type": "vit", "num_labels": 1000, **_VIT_L}),
}


def known_model(name: str, setup: Setup, *, meta: bool) -> Task:
    """The task of a published model: random batches, and its own loss.

    Args:
        name: One of :data:`MODELS`.
        setup: Its dtype of weights and its options for the model are taken up here.
        meta: Make the model on the meta device: its shapes, and no data.

    Raises:
        TaskError: transformers is missing, or the model cannot take an option.
    """
    known = MODELS[name]
    if setup.weights:
        config = _config(name, _fetched(known.hub_name, setup))
    else:
        config = _transformers().AutoConfig.for_model(**known.config)
    return _task(name, HEADS[known.head], config, known.hub_name, setup, meta)


def any_model(spec: str, setup: Setup, *, meta: bool) -> Task:
    """The task of any model of transformers; its head is that of ``architectures`` in its ``config.json``.

    Args:
        spec: ``hf:NAME_OR_DIR``: a directory with ``config.json``, or a name on the hub. Code from there is never run.
        setup: Its dtype of weights and its options for the model are taken up here.
        meta: Make the model on the meta device: its shapes, and no data.

    Raises:
        TaskError: transformers is missing, the configuration cannot be had, its head is none of :data:`HEADS`,
            or the model cannot take an option.
    """
    name = spec.partition(":")[2]
    config = _config(spec, _fetched(name, setup))
    architecture = (getattr(config, "architectures", None) or ["no architecture"])[0]
    head = next((head for head in HEADS.values() if architecture.endswith(head.architectures)), None)
    if head is None:
        raise TaskError(
            f"--task {spec}: its config.json names {architecture}, which is no class with a loss that is known here",
            hint=f"set architectures to one that ends in {', '.join(head.architectures[0] for head in HEADS.values())}",
        )
    return _task(spec, head, config, name, setup, meta)


def _transformers() -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise TaskError(f"transformers cannot be imported: {error}", hint="pip install 'fullbatch[hf]'") from error


def _fetched(name: str, setup: Setup) -> str:
    """Where transformers can read the model: a name of its hub's, or a directory."""
    if Path(name).expanduser().is_dir():
        return str(Path(name).expanduser())
    if setup.hub == "huggingface":
        return name
    try:
        modelscope = importlib.import_module("modelscope")
    except ImportError as error:
        raise TaskError(f"hub='modelscope': modelscope cannot be imported: {error}", hint="pip install modelscope") from error
    try:
        return str(modelscope.snapshot_download(name, allow_file_pattern=None if setup.weights else ["*.json"]))
    except Exception as error:  # its own, requests' and the file system's
        raise _unfetched(name, error) from error


def _config(spec: str, place: str) -> Any:
    try:
        return _transformers().AutoConfig.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise _unfetched(spec, error) from error


def _unfetched(spec: str, error: Exception) -> TaskError:
    return TaskError(
        f"--task {spec}: its configuration cannot be read: {str(error).strip().splitlines()[0]}",
        hint="give a directory with config.json (--task hf:DIR), set HF_HOME to a cache that has it, or use --from modelscope",
    )


def _task(name: str, head: Head, config: Any, source: str, setup: Setup, meta: bool) -> Task:
    seq_len = _seq_len(name, head, config, setup)
    if head is HEADS["classes"] or head is HEADS["images"]:
        config.problem_type = "single_label_classification"
        if head.has_tokens and getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0  # a decoder classifies at the last token that is none
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model = _model(head, config, source, setup, meta)
    if setup.checkpointing:
        _checkpoint_blocks(name, model)
    if setup.chunked_loss:
        if head is not HEADS["causal"] or config.model_type not in CHUNKED:
            raise TaskError(
                f"chunked_loss=True: task {name} ({config.model_type}) does not take it",
                hint=f"causal language models take it: {', '.join(CHUNKED)}",
            )
        move_head_into_loss(model)

    def make_batch(samples: int, generator: torch.Generator) -> Batch:
        return head.batch(config, seq_len, samples, generator)

    return Task(
        name=name,
        model=model.train(),
        loss=chunked_loss if setup.chunked_loss else own_loss,
        make_batch=make_batch,
        items=head.items,
    )


def own_loss(model: nn.Module, micro: Mapping[str, Tensor]) -> Tensor:
    """The loss that a model of transformers computes of ``labels``; pixels are given in the dtype of the weights.

    Args:
        model: A model of transformers, or one that wraps it.
        micro: Its arguments by name.
    """
    dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
    loss: Tensor = model(**{key: value.to(dtype) if value.is_floating_point() else value for key, value in micro.items()}).loss
    return loss


def _model(head: Head, config: Any, source: str, setup: Setup, meta: bool) -> nn.Module:
    transformers = _transformers()
    auto = getattr(transformers, head.auto)
    dtype = "dtype" if int(transformers.__version__.partition(".")[0]) >= 5 else "torch_dtype"
    options: dict[str, Any] = {dtype: WEIGHTS.get(setup.dtype or "fp32", torch.float32), "trust_remote_code": False}
    if setup.attention is not None:
        options["attn_implementation"] = "eager" if setup.attention == "eager" else "sdpa"
    if setup.weights:
        loaded: nn.Module = auto.from_pretrained(_fetched(source, setup), config=config, **options)
        return loaded
    with torch.device("meta") if meta else nullcontext():
        made: nn.Module = auto.from_config(config, **options)
    return made


def _seq_len(name: str, head: Head, config: Any, setup: Setup) -> int:
    if not head.has_tokens:
        if setup.seq_len is not None:
            raise TaskError(f"seq_len={setup.seq_len}: task {name} does not take it: its samples are images")
        return 0
    rotary = hasattr(config, "rope_parameters") or hasattr(config, "rope_theta")  # these have no table of positions
    limit = None if rotary else getattr(config, "max_position_embeddings", None)
    if setup.seq_len is None:
        return SEQ_LEN if limit is None else min(SEQ_LEN, limit)
    least = 2 if head is HEADS["causal"] else 1
    if setup.seq_len < least:
        raise TaskError(f"seq_len={setup.seq_len}: task {name} predicts the next token: it must be at least {least}")
    if limit is not None and setup.seq_len > limit:
        raise TaskError(f"seq_len={setup.seq_len}: task {name} has {limit} positions", hint=f"seq_len={limit} or less")
    return setup.seq_len


def _checkpoint_blocks(name: str, model: Any) -> None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise TaskError(f"checkpointing=True: task {name} does not take it: {type(model).__name__} has no checkpointed blocks")
    # newer versions of transformers have the first name, and warn of the second
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
