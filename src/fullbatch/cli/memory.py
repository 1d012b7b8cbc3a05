"""What the verbs about memory share: their options, and the prediction itself."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import fullbatch
from fullbatch.cli import options
from fullbatch.errors import InvalidArgument, not_one_of
from fullbatch.memory import Anatomy, anatomy, find_card
from fullbatch.memory.settings import parse_settings
from fullbatch.tasks import Setup, Task

SeqLen = Annotated[int | None, typer.Option(min=1, max=2**63 - 1, help="Tokens of a sample. Default: the task's.")]
Dtype = Annotated[str | None, typer.Option(help="fp32, bf16, amp-bf16 or amp-fp16. Default: the task's.")]
Optimizer = Annotated[str | None, typer.Option(help="adamw, adamw-8bit, adafactor, sgd, ... Default: the task's.")]
Foreach = Annotated[
    bool | None, typer.Option("--foreach/--no-foreach", help="The optimizer's foreach kernels. Default: as on CUDA, yes.")
]
Fused = Annotated[bool, typer.Option("--fused", help="The optimizer's fused kernel.")]
Checkpointing = Annotated[bool, typer.Option("--checkpointing", help="Recompute each layer's activations in the backward.")]
Attention = Annotated[str | None, typer.Option(help="eager, sdpa or flash. Default: sdpa.")]
ChunkedLoss = Annotated[bool, typer.Option("--chunked-loss", help="The loss in pieces, without all logits at once.")]
ZeroGradKeep = Annotated[bool, typer.Option("--zero-grad-keep", help="Gradients are zeroed in place, not released.")]
OutputsLive = Annotated[
    str, typer.Option(help="How long the loop holds the model's output: loss, micro-batch, update, or next (forward).")
]
CardName = Annotated[str, typer.Option("--device", help="A device that `fullbatch devices` lists, or a size: 24GiB.")]
AllocConf = Annotated[str, typer.Option(help="Settings of the allocator as in PYTORCH_ALLOC_CONF.")]
Hub = Annotated[str, typer.Option("--from", help="Where hf:NAME comes from: huggingface or modelscope.")]

_OURS = tuple(str(Path(module.__file__ or "").parent) for module in (torch, fullbatch))
_LIVE = ("loss", "micro-batch", "update", "next")


def setup(**given: Any) -> Setup:
    """The :class:`Setup` of options as typed, which it checks."""
    return Setup(**given)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run whose memory is asked about.

    Attributes:
        micro_batch: Samples of a micro-batch.
        accumulate: Micro-batches of an update.
        device: Name or size of the card.
        alloc_conf: Settings of the allocator.
        zero_grad_keep: Gradients are zeroed in place.
        outputs_live: How long the loop holds the model's output.
        max_grad_norm: Clip the gradient's norm to this.
        seed: Of the batch.
    """

    micro_batch: int
    accumulate: int
    device: str
    alloc_conf: str = ""
    zero_grad_keep: bool = False
    outputs_live: str = "micro-batch"
    max_grad_norm: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.outputs_live not in _LIVE:
            raise not_one_of("--outputs-live", self.outputs_live, _LIVE)


def first_batch(task: Task, run: Run) -> Any:
    """One micro-batch of ``task``.

    Raises:
        InvalidArgument: ``task`` makes a batch of one sample, but none of so many.
    """
    try:
        return task.batch(run.micro_batch, torch.Generator().manual_seed(run.seed))
    except (RuntimeError, MemoryError, OverflowError) as error:
        task.batch(1, torch.Generator().manual_seed(run.seed))
        raise InvalidArgument(
            f"--micro-batch {run.micro_batch}: task {task.name} cannot make a batch of so many samples: {_first_line(error)}",
            hint="--micro-batch 1 needs the least memory",
        ) from error


def predict(task: Task, setup: Setup, run: Run) -> Anatomy:
    """The anatomy of ``task``, predicted.

    Raises:
        InvalidArgument: No such device or setting, or the task needs the values of tensors.
    """
    card, allocator = find_card(run.device, "--device"), parse_settings(run.alloc_conf)
    batch = first_batch(task, run)
    given: dict[str, Any] = {"task": task.name, **vars(setup), **vars(run)}
    try:
        return anatomy(
            task.model,
            task.loss,
            batch,
            optimizer=task.optimizer,
            micro_batches=run.accumulate,
            card=card,
            allocator=allocator,
            attention="flash" if setup.attention == "flash" else "auto",
            settings=given,
            command=options.command(),
            foreach=setup.foreach,
            fused=setup.fused,
            zero_grad_keep=run.zero_grad_keep,
            outputs_live=run.outputs_live,
            max_grad_norm=run.max_grad_norm,
        )
    except (RuntimeError, NotImplementedError) as error:
        raise InvalidArgument(
            f"task {task.name} cannot be traced on tensors without data: {_first_line(error)}{_where(error)}",
            hint="model and loss must not depend on the values of tensors; --measure runs the real thing",
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _where(error: Exception) -> str:
    """The last line of the task's own code, or of a library's but torch, on the way to ``error``."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    return f" (line {own[-1].lineno} of {Path(own[-1].filename).name}: {own[-1].line})" if own else ""
