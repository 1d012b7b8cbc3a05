"""Sees every storage appear and die while a run goes on, and names its owner."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch.memory.timeline import Event, Owner, Part, Stage, Timeline
from fullbatch.torch_private import TorchDispatchMode, current_autograd_node, storage_key, tree_iter

_HERE = str(Path(__file__).parent)
_LOOP = str(Path(__file__).with_name("loop.py"))
_TORCH = str(Path(torch.__file__).parent)

_DEVICE = torch.ops.prim.device.default

Temporaries = Callable[[Any, tuple[Any, ...], Any], Iterable[tuple[str, int]]]
"""Bytes that the kernel of an operator takes and gives back: from operator, arguments and result."""


class Recorder(TorchDispatchMode):
    """A dispatch mode that writes a :class:`Timeline`.

    Args:
        temporaries: Buffers inside kernels, which no dispatch shows.
        lasting: Buffers that a library takes once and keeps, with the name under which it is remembered.
    """

    def __init__(self, temporaries: Temporaries, lasting: Temporaries) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timeline = Timeline()
        self._temporaries, self._lasting = temporaries, lasting
        self._storages: dict[int, tuple[int, Any]] = {}  # storage -> block, weak reference with its callback
        self._taken: set[str] = set()
        self._stage: tuple[str, int, int, int] | None = None
        self._part: Part = "activations"
        self._modules: list[str] = [""]
        self._origin: dict[int, tuple[str, str]] = {}  # node of the graph -> module, line that made it
        self._host: set[int] = set()
        self._owners: dict[Owner, Owner] = {}

    # What happens

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper around each call: nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # most of all calls: the graph asks each tensor
            return args[0].device
        if func is torch.ops.aten._local_scalar_dense.default:
            return _stand_in(args[0])
        out = func(*args, **(kwargs or {}))
        new = [tensor for tensor in tree_iter(out) if isinstance(tensor, Tensor) and self._unseen(tensor)]
        extra = [(True, *lasting) for lasting in self._lasting(func, args, out) if lasting[0] not in self._taken]
        extra += [(False, *temporary) for temporary in self._temporaries(func, args, out)]
        if not new and not extra:
            if func is torch.ops.aten.add_.Tensor:
                self._accumulated(args)
            elif current_autograd_node() is None:
                self._remember()
            return out
        module, line = self._where()
        operator = _name(func)
        for tensor in new:
            self._appear(tensor, self._owner(self._part, module, operator, line))
        blocks = []
        for keeps, name, size in extra:
            if keeps:
                self._taken.add(name)
                self._block(size, self._owner("workspace", "", name, ""))
            else:
                blocks.append(self._block(size, self._owner("workspace", module, name, line)))
        self.timeline.events += [Event(block, -1) for block in blocks]
        return out

    def _unseen(self, tensor: Tensor) -> bool:
        return storage_key(tensor.untyped_storage()) not in self._storages

    def _appear(self, tensor: Tensor, owner: Owner) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._storages:  # one storage may hold several tensors
            return
        block = self._block(storage.nbytes(), owner)
        storages, events = self._storages, self.timeline.events

        def gone(_: Any) -> None:
            del storages[key]
            events.append(Event(block, -1))

        storages[key] = (block, weakref.ref(storage, gone))

    def _block(self, size: int, owner: Owner) -> int:
        block = len(self.timeline.owners)
        self.timeline.owners.append(owner)
        self.timeline.events.append(Event(block, size))
        return block

    def _owner(self, part: Part, module: str, operator: str, line: str) -> Owner:
        owner = Owner(part, module, operator, line)
        return self._owners.setdefault(owner, owner)

    # Where it happens

    def _where(self) -> tuple[str, str]:
        node = current_autograd_node()
        if node is not None:
            if len(self._modules) > 1:  # a forward inside the backward: recomputation
                return self._remember()
            return self._origin.get(node._sequence_nr(), ("", ""))
        return self._remember()

    def _remember(self) -> tuple[str, str]:
        """Where this operator of the forward is called; its node of the graph, made just before, gets it too."""
        where = self._modules[-1], _calling_line()
        self._origin.setdefault(torch.autograd._get_sequence_nr() - 1, where)  # type: ignore[attr-defined]
        return where

    def _accumulated(self, args: tuple[Any, ...]) -> None:
        """A gradient is added to the one that is there: the one that arrives is a gradient too."""
        node = current_autograd_node()
        if node is not None and node.name().endswith("AccumulateGrad"):
            self.mark((("", args[1]),), "gradients")

    @contextmanager
    def naming(self, model: nn.Module) -> Iterator[None]:
        """Know the modules of ``model`` by name while it runs."""
        handles = []
        for name, module in model.named_modules():

            def enter(_: nn.Module, __: Any, name: str = name) -> None:
                self._modules.append(name)

            def leave(_: nn.Module, __: Any, ___: Any) -> None:
                self._modules.pop()

            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # What the run says about itself

    def stage(self, name: str, update: int = 0, micro_batch: int = 0) -> None:
        """From here on it is stage ``name``."""
        events = self.timeline.events
        if self._stage is not None:
            before, at, number, start = self._stage
            self.timeline.stages.append(Stage(before, at, number, start, len(events)))
        self._stage = (name, update, micro_batch, len(events))
        self._part = "workspace" if name == "update" else "activations"

    def hold(self, tensors: Iterable[tuple[str, Tensor]], part: Part, operator: str) -> None:
        """Enter tensors that exist already, each with the name of its module."""
        for module, tensor in tensors:
            self._appear(tensor, self._owner(part, module, operator, ""))

    def mark(self, tensors: Iterable[tuple[str, Any]], part: Part) -> None:
        """Say to which part known tensors belong, and to which module where it is named."""
        for module, tensor in tensors:
            if (block := self._known(tensor)) is not None:
                owner = self.timeline.owners[block]
                self.timeline.owners[block] = self._owner(part, module or owner.module, owner.operator, owner.line)

    def on_host(self, tensors: Iterable[Any]) -> None:
        """Leave tensors out that live in host memory, whatever the device."""
        self._host.update(block for tensor in tensors if (block := self._known(tensor)) is not None)

    def _known(self, tensor: Any) -> int | None:
        """Block of ``tensor``, if it is one and has been seen."""
        if not isinstance(tensor, Tensor):
            return None
        known = self._storages.get(storage_key(tensor.untyped_storage()))
        return None if known is None else known[0]

    def finish(self) -> Timeline:
        """The record, without what lives on the host."""
        self.stage("end")
        record, host = self.timeline, self._host
        events: list[Event] = []
        moved = []  # place of each event after those of the host are gone
        for event in record.events:
            moved.append(len(events))
            if event.block not in host:
                events.append(event)
        moved.append(len(events))
        stages = [
            Stage(stage.name, stage.update, stage.micro_batch, moved[stage.start], moved[stage.end]) for stage in record.stages
        ]
        return Timeline(events, list(record.owners), stages, list(record.notes))


def _name(func: Any) -> str:
    namespace, _, name = func._schema.name.partition("::")
    return f"{namespace}.{name}"


def _stand_in(tensor: Tensor) -> bool | int | float:
    """What ``.item()`` gives where there is no data: yes, and 1."""
    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


def _calling_line() -> str:
    """Nearest line of the user's model or loss: between torch and the loop."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (file := frame.f_code.co_filename) != _LOOP:
        if not (file.startswith((_TORCH, _HERE)) or file.startswith("<")):
            return f"{_short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_shortened: dict[str, str] = {}


def _short(file: str) -> str:
    known = _shortened.get(file)
    if known is None:
        path = Path(file)
        parts = path.parts
        if "site-packages" in parts:
            known = "/".join(parts[parts.index("site-packages") + 1 :])
        else:
            known = path.name
        _shortened[file] = known
    return known
