"""Batches of any nesting: how many samples they hold, and slices of them.

A batch is a tensor, or mappings, tuples, lists and dataclasses of tensors at any depth
(dict, NamedTuple, transformers' BatchEncoding). Dimension 0 of every tensor is the sample.
A list of plain values, one a sample (ids, texts), is split like a tensor, and so is a tuple of texts.
Everything else (a flag, a size such as (224, 224), a 0-dimensional tensor, None) goes whole to each micro-batch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from fullbatch.errors import BatchError

_READY_HINT = (
    "if these are ready micro-batches, pass an iterator: step(iter(batches)); "
    "if one has no common dimension 0, say its size: step(iter([MicroBatch(data, samples=n), ...]))"
)


def batch_size(batch: Any) -> int:
    """Number of samples in ``batch``: the length of dimension 0, the same in every tensor.

    Raises:
        BatchError: Two tensors differ in length, or no tensor has a dimension 0.
    """
    lengths = [(path, len(leaf)) for path, leaf in _leaves(batch) if _is_array(leaf) and leaf.ndim]
    if not lengths and isinstance(batch, Iterable) and not isinstance(batch, (str, bytes, list, tuple, Mapping)):
        raise BatchError(
            f"batch is {_describe(batch)}: a call makes one update from one batch",
            hint="for batch in loader: step(batch)",
        )
    if not lengths:
        raise BatchError(
            f"batch is {_describe(batch)}, which holds no tensor with a dimension 0 to split",
            hint="pass tensors in dicts, tuples, lists or dataclasses, one sample a row; " + _READY_HINT,
        )
    first_path, first = lengths[0]
    for path, length in lengths[1:]:
        if length != first:
            raise BatchError(
                f"{first_path} has {first} samples and {path} has {length}: "
                "all tensors of a batch must have the same length in dimension 0",
                hint="give shared tensors to the loss by another way (a closure, or the model); " + _READY_HINT,
            )
    if isinstance(batch, list) and batch and all(_holds_arrays(part) and not _is_array(part) for part in batch):
        raise BatchError(
            f"batch is a list of {len(batch)} structures ({_describe(batch[0])} first), "
            "which can be one nested batch or a list of micro-batches",
            hint=_READY_HINT + "; if it is one batch, pass a tuple",
        )
    return first


def slices(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Consecutive parts of ``batch``, ``sizes[i]`` samples in part i; tensors are views.

    Args:
        batch: Any nesting of tensors, ``sum(sizes)`` samples.
        sizes: Samples of each part, at least 0 each.
    """
    samples = sum(sizes)
    stops = list(accumulate(sizes))
    starts = [stop - size for stop, size in zip(stops, sizes, strict=True)]

    def parts(leaf: Any) -> Sequence[Any]:
        if isinstance(leaf, Tensor):
            return leaf.split(list(sizes)) if leaf.ndim else [leaf] * len(sizes)
        one_a_sample = leaf.ndim > 0 if _is_array(leaf) else _one_a_sample(leaf, samples)
        return [leaf[a:b] if one_a_sample else leaf for a, b in zip(starts, stops, strict=True)]

    leaves = _leaves(batch)
    for path, leaf in leaves:
        if _hides_tensors(leaf):
            raise BatchError(
                f"{path} is {_describe(leaf)}, which holds tensors but cannot be split",
                hint="use dicts, tuples, lists or dataclasses; or cut it: step(iter([MicroBatch(data, samples=n), ...]))",
            )
    columns = [parts(leaf) for _, leaf in leaves]
    return [_refill(batch, iter(row)) for row in zip(*columns, strict=True)] if sizes else []


def _refill(batch: Any, leaves: Iterator[Any]) -> Any:
    return map_leaves(lambda *_: next(leaves), batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """``batch`` with ``function`` applied to every tensor, same structure."""
    return map_leaves(lambda leaf, _: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def map_leaves(function: Callable[[Any, str], Any], node: Any, path: str = "batch") -> Any:
    """``node`` rebuilt with ``function(leaf, path)`` in place of every leaf.

    A list or tuple that holds no tensor at any depth is one leaf.
    """
    if isinstance(node, Mapping):
        return _same_mapping(node, {key: map_leaves(function, value, f"{path}[{key!r}]") for key, value in node.items()})
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        values = {
            field.name: map_leaves(function, getattr(node, field.name), f"{path}.{field.name}")
            for field in dataclasses.fields(node)
            if field.init  # the others follow from these, in __post_init__
        }
        return dataclasses.replace(node, **values)
    if isinstance(node, (list, tuple)) and _holds_arrays(node):
        if hasattr(node, "_fields"):
            names = node._fields
            return type(node)(*(map_leaves(function, part, f"{path}.{name}") for name, part in zip(names, node, strict=True)))
        parts = [map_leaves(function, part, f"{path}[{i}]") for i, part in enumerate(node)]
        return type(node)(parts)
    return function(node, path)


def _leaves(batch: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []

    def keep(leaf: Any, path: str) -> Any:
        found.append((path, leaf))
        return leaf

    map_leaves(keep, batch)
    return found


def _same_mapping(node: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(node) is dict:
        return values
    try:
        rebuilt = copy.copy(node)
        rebuilt.update(values)  # type: ignore[attr-defined]  # mutable mappings keep their type
        kept = all(rebuilt[key] is value for key, value in values.items())
    except (AttributeError, TypeError):
        kept = False
    return rebuilt if kept else values


def _is_array(leaf: Any) -> bool:
    """Whether ``leaf`` is a tensor or a NumPy array (told by its face: NumPy need not be there)."""
    return isinstance(leaf, Tensor) or (hasattr(leaf, "ndim") and hasattr(leaf, "dtype") and hasattr(leaf, "shape"))


def _holds_arrays(node: Any) -> bool:
    if isinstance(node, (list, tuple)):
        return any(_holds_arrays(part) for part in node)
    return any(_is_array(leaf) for _, leaf in _leaves(node))


def _one_a_sample(leaf: Any, samples: int) -> bool:
    if isinstance(leaf, tuple) and all(isinstance(part, (int, float)) for part in leaf):
        return False  # a size
    return isinstance(leaf, (list, tuple)) and len(leaf) == samples


def _hides_tensors(leaf: Any) -> bool:
    """Whether ``leaf`` is an object of another kind that holds tensors (a deque, a namespace, a class of one's own)."""
    if leaf is None or _is_array(leaf) or isinstance(leaf, (list, tuple, str, bytes, int, float)):
        return False
    held = [*getattr(leaf, "__dict__", {}).values(), *(leaf if isinstance(leaf, Collection) else ())]
    return any(isinstance(part, Tensor) for part in held)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
