"""Tensors without data: torch's fakes, with a leaner key to their cache."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fullbatch.memory.loop import named_tensors
from fullbatch.memory.redirect import here
from fullbatch.torch_private import storage_key, tree_map

_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)  # fmt: skip


class FakeMode(FakeTensorMode):
    """torch's mode, which spends most of its time on a key of 17 fields a tensor to look up what an operator returns.

    Seven of them tell plain strided tensors apart; anything else takes torch's own way. What is made on an
    accelerator is made where all tensors of a trace are.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": here(kwargs["device"])}
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _cache_key(self, state: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), tuple(kwargs)]
        if self._describe(key, args) and self._describe(key, kwargs.values()):
            return fake_tensor._DispatchCacheKey(tuple(key))
        return super()._cache_key(state, func, args, kwargs)

    def _describe(self, key: list[Any], values: Iterable[Any]) -> bool:
        """Add to ``key`` what tells ``values`` apart, if that can be said in short."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if (
                    value.fake_mode is not self
                    or value.constant is not None
                    or value.layout is not torch.strided
                    or value.is_quantized
                    or value.is_conj()
                    or value.is_neg()
                ):
                    return False
                storage = value.untyped_storage()
                key += (value.dtype, value.shape, value.stride(), value.storage_offset(), storage.nbytes())
                key += (value.requires_grad, value.fake_device)
            elif kind in (list, tuple, torch.Size):
                key += (kind, len(value))
                if not self._describe(key, value):
                    return False
            elif kind in _PLAIN:
                key += (kind, value)
            else:
                return False
        return True


def fake_copy(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """``model`` with every tensor replaced by one without data, on the CPU in name; shared tensors stay shared."""
    memo: dict[int, Any] = {}
    bases: dict[int, Tensor] = {}
    with fake:
        for _, tensor in named_tensors(model):
            if id(tensor) in memo:
                continue
            made = _fake(tensor, bases)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = made
        return copy.deepcopy(model, memo)


def fake_batch(batch: Any, fake: FakeTensorMode) -> Any:
    """``batch`` with every tensor replaced by one without data."""
    bases: dict[int, Tensor] = {}
    with fake:
        return tree_map(lambda part: _fake(part, bases) if isinstance(part, Tensor) else part, batch)


def _fake(tensor: Tensor, bases: dict[int, Tensor]) -> Tensor:
    """A fake of ``tensor``; views of one storage become views of one fake."""
    if tensor.is_meta:  # the storage of a meta tensor tells nothing of sharing
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    storage = tensor.untyped_storage()
    base = bases.get(storage_key(storage))
    if base is None or base.dtype is not tensor.dtype:
        base = torch.empty(storage.nbytes() // tensor.element_size(), dtype=tensor.dtype, device="cpu")
        bases[storage_key(storage)] = base
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
