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
from typing import Any, NamedTuple

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

    def of_leaf(leaf: Any, path: str) -> Sequence[Any]:
        if isinstance(leaf, Tensor):
            return leaf.split(list(sizes)) if leaf.ndim else [leaf] * len(sizes)
        if _hides_tensors(leaf):
            raise BatchError(
                f"{path} is {_describe(leaf)}, which holds tensors but cannot be split",
                hint="use dicts, tuples, lists or dataclasses; or cut it: step(iter([MicroBatch(data, samples=n), ...]))",
            )
        one_a_sample = leaf.ndim > 0 if _is_array(leaf) else _one_a_sample(leaf, samples)
        return [leaf[a:b] if one_a_sample else leaf for a, b in zip(starts, stops, strict=True)]

    def of(node: Any, path: str) -> Sequence[Any]:
        opened = _opened(node, path)
        if opened is None:
            return of_leaf(node, path)
        columns = [of(child, child_path) for child_path, child in opened.children]
        return [opened.rebuild([column[i] for column in columns]) for i in range(len(sizes))]

    return list(of(batch, "batch")) if sizes else []


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """``batch`` with ``function`` applied to every tensor, same structure."""
    opened = _opened(batch, "batch")
    if opened is None:
        return function(batch) if isinstance(batch, Tensor) else batch
    return opened.rebuild([map_tensors(function, child) for _, child in opened.children])


class _Opened(NamedTuple):
    """The parts of a structure, each with its path, and how to make the like of it from other parts."""

    children: list[tuple[str, Any]]
    rebuild: Callable[[list[Any]], Any]


def _opened(node: Any, path: str) -> _Opened | None:
    """``node`` taken apart; ``None`` if it is a leaf, as is a list or tuple that holds no tensor at any depth."""
    if isinstance(node, Mapping):
        children = [(f"{path}[{key!r}]", value) for key, value in node.items()]
        return _Opened(children, lambda parts: _same_mapping(node, dict(zip(node, parts, strict=True))))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node) if field.init]  # the others follow, in __post_init__
        children = [(f"{path}.{name}", getattr(node, name)) for name in names]
        return _Opened(children, lambda parts: dataclasses.replace(node, **dict(zip(names, parts, strict=True))))
    if isinstance(node, (list, tuple)) and _holds_arrays(node):
        if hasattr(node, "_fields"):
            children = [(f"{path}.{name}", part) for name, part in zip(node._fields, node, strict=True)]
            return _Opened(children, lambda parts: type(node)(*parts))
        return _Opened([(f"{path}[{i}]", part) for i, part in enumerate(node)], type(node))
    return None


def _leaves(node: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    opened = _opened(node, path)
    if opened is None:
        yield path, node
    else:
        for child_path, child in opened.children:
            yield from _leaves(child, child_path)


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
