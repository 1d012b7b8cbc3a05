"""The rules of Accumulator's arguments."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fullbatch.errors import InvalidArgument, OptimizerError


def check_loss(loss: Any, model: Any) -> None:
    """A function of the model and a micro-batch."""
    if type(loss).__module__ == "torch.nn.modules.loss":
        raise InvalidArgument(
            f"loss is {type(loss).__name__}, which takes outputs and targets: it must be loss(model, micro)",
            hint='loss=lambda model, micro: criterion(model(micro["x"]), micro["y"])',
        )
    if not callable(loss):
        raise InvalidArgument(
            f"loss is {type(loss).__name__}: it must be a function loss(model, micro)",
            hint='def loss(model, micro): return cross_entropy(model(micro["x"]), micro["y"])',
        )
    try:
        inspect.signature(loss).bind(model, None)
    except TypeError as error:
        raise InvalidArgument(f"loss cannot be called as loss(model, micro): {error}") from None
    except ValueError:
        pass  # it does not show its signature


def check_scaler(scaler: Any) -> None:
    """A gradient scaler, or ``None``."""
    missing = [
        name for name in ("scale", "unscale_", "step", "update", "is_enabled") if not callable(getattr(scaler, name, None))
    ]
    if scaler is not None and missing:
        raise InvalidArgument(
            f"scaler is {type(scaler).__name__}, which has no {missing[0]}()", hint='scaler=torch.amp.GradScaler("cuda")'
        )


def check_micro_batch(micro_batch: Any) -> None:
    """A whole number of samples, at least 1, or ``None``."""
    if micro_batch is None or (isinstance(micro_batch, int) and not isinstance(micro_batch, bool) and micro_batch >= 1):
        return
    raise InvalidArgument(
        f"micro_batch={micro_batch!r} must be a whole number of samples, at least 1",
        hint="micro_batch=1 needs the least memory; leave it out to run the batch in one piece",
    )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A torch optimizer that steps once and holds every trainable parameter of ``model``."""
    if not isinstance(model, nn.Module):
        raise InvalidArgument(
            f"model is {type(model).__name__}: it must be a torch.nn.Module", hint="Accumulator(model, optimizer, loss, ...)"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"optimizer is {type(optimizer).__name__}: it must be a torch.optim.Optimizer",
            hint="optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3)",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "optimizer is LBFGS, which asks for the loss several times a step: a window gives one gradient",
            hint="use an optimizer that steps once on given gradients: SGD, AdamW, Adafactor, Muon, ...",
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    missing = [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in held]
    if not names:
        raise OptimizerError(
            "model has no trainable parameter (requires_grad=True)", hint="call model.requires_grad_(True) or unfreeze a part"
        )
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        whose = "none" if len(missing) == len(names) else f"{len(names) - len(missing)}"
        raise OptimizerError(
            f"optimizer holds {whose} of the model's {len(names)} trainable parameters; it lacks {shown}",
            hint="make it from this model, after the model is wrapped or moved: AdamW(model.parameters(), ...); "
            "freeze what is not to be trained: parameter.requires_grad_(False)",
        )


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Something with ``step()`` that belongs to ``optimizer`` and needs no metric, or ``None``."""
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InvalidArgument(
            "scheduler is ReduceLROnPlateau, whose step needs a metric that a window does not have",
            hint="leave it out here and call scheduler.step(metric) after each evaluation",
        )
    if not callable(getattr(scheduler, "step", None)):
        raise InvalidArgument(
            f"scheduler is {type(scheduler).__name__}: it must have a step() method",
            hint="scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, function)",
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise InvalidArgument(
            "scheduler belongs to another optimizer", hint="make it from the optimizer given here: LambdaLR(optimizer, ...)"
        )


def check_ranks(model: nn.Module) -> None:
    """No reduction over several ranks: this version counts the items of one process."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() > 1 and hasattr(model, "no_sync"):
        raise InvalidArgument(
            f"model is {type(model).__name__} over {torch.distributed.get_world_size()} ranks: "
            "this version accumulates in one process",
            hint="items are not yet summed over ranks, and their mean of means would break the law of equal item weights",
        )
