"""Rebuilds published runs of convolution nets from rows of measured.csv, as arguments of ``published.Rebuilt``.

The scripts behind the rows: Stone-ResearchLife/xMem, perf_estimator/models.py and trainer/train_loop.py;
itu-rad/GPUMemNet, Test_Pipeline/cnn_models/*.py (Adam, torchvision's models, timm's Xception; torchsummary first);
timm, train.py and data/loader.py. timm is taken where it is installed; without it those rows are not rebuilt.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from rebuilt import LATER_CODE, SMALLEST_RUN
from torch import Tensor, nn

from fullbatch.errors import TaskError
from fullbatch.memory.kernels import Kernels
from fullbatch.tasks.vision import _models, classification_loss, network

MiB = 2**20

_DRIVER = {"outside_bytes": SMALLEST_RUN, "outside_more_bytes": LATER_CODE}
_NAMES = {  # as the rows say -> torchvision's
    "efficientnet": "efficientnet_b0", "inception": "inception_v3",
    "mobenetv3small": "mobilenet_v3_small", "mobenetv3large": "mobilenet_v3_large",
    "mobilenetv3small": "mobilenet_v3_small", "mobilenetv3large": "mobilenet_v3_large",
    "mnasnet": "mnasnet1_0",
}  # fmt: skip
_TEN_CLASSES = ("mobilenet_v3_small", "mobilenet_v3_large", "mnasnet1_0")  # in xMem's list of models
_OPTIMIZERS = {
    **{name.lower(): getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adafactor")},
    "sgd momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
}  # fmt: skip


def convnet(row: dict[str, str]) -> dict[str, Any] | None:
    """Arguments of ``Rebuilt`` for ``row``; ``None``: it is not of these sources, or no convolution net of torchvision or timm.

    Of the loop, xMem's rows leave one thing open: whether gradients go before the forward or just before the
    backward (``-z 0`` or ``-z 1``); the first is taken.
    """
    source, model = row["source"], row["model"]
    if row["params_dtype"] != "fp32":
        return None
    if "xMem" in source:
        name = _torchvision_name(model)
        classes = 10 if name in _TEN_CLASSES else 1000
        return name and _run(
            network(name, meta=True, num_classes=classes), row, row["optimizer"],
            side=int(re.search(r"(\d+)x\1", row["kind"])[1]),
            kernels={"capability": 86, "cublas_workspace_bytes": 0},
        )  # fmt: skip
    if "GPUMemNet" not in source:
        return None
    if model.startswith("timm "):
        net = _timm(model.removeprefix("timm "))
        made = net and _run(net, row, row["optimizer"], kernels={"cudnn_benchmark": True}, **_DRIVER)
        return made and _prefetched(made)
    short = model.split(" (")[0]
    name = _torchvision_name(short)
    net = _timm("legacy_xception") if short.lower() == "xception" else name and network(name, meta=True)
    side = 299 if name == "inception_v3" else 224
    made = net and _run(net, row, row["optimizer"] or "Adam", side=side, **_DRIVER)
    return made and {**made, "loss": _Summarised()}


def _torchvision_name(model: str) -> str | None:
    """``ResNet101``, ``vgg16`` or ``RegNetX400MF`` as torchvision spells it."""
    if (short := model.lower()) in _NAMES:
        return _NAMES[short]
    try:
        models = _models(model)
    except TaskError:  # torchvision is not installed
        return None
    names = sorted(models.list_models(module=models), key=len, reverse=True)  # 32gf is not 3_2gf: the shortest counts
    spelled = {re.sub(r"[^a-z0-9]", "", name): name for name in names}
    return spelled.get(re.sub(r"[^a-z0-9]", "", short))


def _timm(name: str) -> nn.Module | None:
    try:
        _models(name)  # timm imports torchvision
        import timm
    except (TaskError, ImportError):
        return None
    with torch.device("meta"):
        net: nn.Module = timm.create_model(name, num_classes=1000)
    return net


def _prefetched(made: dict[str, Any]) -> dict[str, Any]:
    """timm's PrefetchLoader: the next batch is there, made on a stream whose cache nothing else can use.

    While it is made three batches live in float32, and one as it came, a byte a number.
    """
    images = made["batch"]["images"]
    made["batch"]["next images"] = torch.empty_like(images)
    made["outside_bytes"] += sum(-(-size // (2 * MiB)) * 2 * MiB for size in (images.numel() * 4, images.numel()))
    return made


class _Summarised:
    """The loss of a script that shows its model with torchsummary first: a forward of two samples leaves a cache."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []  # summarised already

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not any(model is known for known in self.models):
            self.models.append(model)
            model(torch.rand(2, *batch["images"].shape[1:]))
        return classification_loss(model, batch)


def _run(
    net: nn.Module,
    row: dict[str, str],
    optimizer: str,
    *,
    side: int = 224,
    kernels: dict[str, Any] | None = None,
    outside_bytes: int = 0,
    outside_more_bytes: int = 0,
) -> dict[str, Any]:
    samples = int(row["micro_batch"])
    make: Callable[..., torch.optim.Optimizer] = _OPTIMIZERS[optimizer.lower()]
    batch: dict[str, Tensor] = {
        "images": torch.empty(samples, 3, side, side, device="meta"),
        "labels": torch.empty(samples, dtype=torch.int64, device="meta"),
    }
    return {
        "model": net.train(),
        "loss": classification_loss,
        "batch": batch,
        "optimizer": lambda parameters: make(parameters, lr=0.001),
        "kernels": Kernels(**(kernels or {})),
        "loop": {"outputs_live": "next", "zero_grad": "before the forward"},
        "outside_bytes": outside_bytes,
        "outside_more_bytes": outside_more_bytes,
    }
