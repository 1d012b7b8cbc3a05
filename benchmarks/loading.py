"""How a quantised model comes onto the device, which shapes the cache that training finds.

A block cut from a hole that is at most 1 MiB too large is not split and counts whole, so that even *allocated*
depends on what was taken and given back before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

from fullbatch.memory.allocator import CachingAllocator
from fullbatch.memory.timeline import Stage, Timeline


def load_quantised(timeline: Timeline, model: nn.Module, allocator: CachingAllocator) -> Timeline:
    """Load ``model`` through ``allocator`` as transformers 5, bitsandbytes and peft do it, one step after the other.

    Sources: transformers/modeling_utils.py, caching_allocator_warmup (a block of the size of all weights as they will
    be, taken and given back); core_model_loading.py, convert_and_load_state_dict_in_model (weights in the order of
    their names, one at a time where they are quantised on the way: float16 on the device, quantised, released);
    bitsandbytes/backends/cuda/ops.py, quantize_4bit (scales, then the packed weight) and functional.py,
    get_4bit_type (the code); peft/utils/other.py, prepare_model_for_kbit_training (what is left goes to float32, one
    after the other, and the cache is emptied); peft/tuners/lora/layer.py, update_layer (A and B as modules come).

    Returns:
        ``timeline`` without its weights: the allocator holds them.
    """
    stage = next(stage for stage in timeline.stages if stage.name == "model")
    made = timeline.events[stage.start : stage.end]
    sizes = dict(zip(_names(model), (event.size for event in made), strict=True))
    quantised = [name.removesuffix(".absmax") for name in sizes if name.endswith(".absmax")]
    of_quantised = {f"{name}.{part}" for name in quantised for part in ("weight", "absmax", "code")}
    adapters = [name for name in sizes if re.search(r"\.[AB]\.weight$", name)]
    parameters = {name for name, _ in model.named_parameters()}
    rest = [name for name in sizes if name not in of_quantised and name not in adapters]

    half = {name: sizes[name] // 2 for name in rest if name in parameters}
    allocator.free(allocator.malloc(sum(sizes[f"{name}.weight"] for name in quantised) + sum(half.values())))
    held = {}
    for name in sorted([*(f"{name}.weight" for name in quantised), *half], key=_natural):
        if name in half:
            held[name] = allocator.malloc(half[name])
            continue
        full = allocator.malloc(4 * sizes[name])  # two bytes an element, not half a one
        owner = name.removesuffix(".weight")
        for part in ("absmax", "weight", "code"):
            allocator.malloc(sizes[f"{owner}.{part}"])
        allocator.free(full)
    for name in rest:
        allocator.malloc(sizes[name])
        if name in held:
            allocator.free(held[name])
    allocator.empty_cache()
    for name in adapters:
        allocator.malloc(sizes[name])
    return _without(timeline, stage)


def _without(timeline: Timeline, gone: Stage) -> Timeline:
    """``timeline`` without the events of one stage, which stays, empty."""
    number = gone.end - gone.start

    def moved(event: int) -> int:
        return event - number if event >= gone.end else min(event, gone.start)

    stages = [
        Stage(stage.name, stage.update, stage.micro_batch, moved(stage.start), moved(stage.end)) for stage in timeline.stages
    ]
    events = [*timeline.events[: gone.start], *timeline.events[gone.end :]]
    return Timeline(events, timeline.owners, stages, timeline.notes)


def _names(model: nn.Module) -> Iterator[str]:
    """Full names of parameters and buffers, in the order in which a trace enters them."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if isinstance(tensor, Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """core_model_loading.py, dot_natural_key: by parts, numbers as numbers; ``base`` is our wrapper's."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.replace(".base.", ".").split(".")]
