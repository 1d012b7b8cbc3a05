"""Tasks of torchvision's image classifiers, by their names there."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fullbatch.errors import TaskError
from fullbatch.tasks.setup import WEIGHTS, Setup
from fullbatch.tasks.task import Task

CLASSIFIERS = (
    *("alexnet", "convnext_tiny", "convnext_small", "convnext_base", "convnext_large", "densenet121", "densenet201"),
    *("efficientnet_b0", "efficientnet_b4", "efficientnet_v2_s", "efficientnet_v2_m", "efficientnet_v2_l"),
    *("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "resnet18", "resnet34", "resnet50", "resnet101"),
    *("resnet152", "resnext50_32x4d", "swin_t", "swin_s", "swin_b", "vgg11", "vgg16", "vgg19", "vit_b_16", "vit_l_16"),
    *("wide_resnet50_2", "wide_resnet101_2"),
)
"""The best known; torchvision's other classifiers are found by name too, where it is installed."""

CLASSES = 1000
SIDE = 224  # pixels, as most of the models are trained
SIDES = {"inception_v3": 299}
_NO_OPERATOR = "operator torchvision::nms does not exist"
_DETECTION = ("torchvision::nms", "torchvision::qnms")  # whose forms on fakes torchvision enters when it is imported
WITH_AUXILIARY = ("googlenet", "inception_v3")  # classifiers in the middle, which are left out


def is_classifier(name: str) -> bool:
    """Whether torchvision has, or would have if it were installed, a classifier of this name.

    Args:
        name: As in ``torchvision.models``.
    """
    if name in CLASSIFIERS:
        return True
    if not name.isidentifier() or importlib.util.find_spec("torchvision") is None:
        return False
    try:
        models = _models(name)
    except TaskError:
        return False
    return name in models.list_models(module=models)


def classifier(name: str, setup: Setup, *, meta: bool) -> Task:
    """The task of an image classifier: random images [n, 3, 224, 224] of 1,000 classes.

    Args:
        name: As in ``torchvision.models``.
        setup: Its dtype of weights and ``weights`` are taken up here.
        meta: Make the model on the meta device: its shapes, and no data.

    Raises:
        TaskError: torchvision is missing or does not fit torch, or an option of ``setup`` is not for these models.
    """
    for option, value in setup.without("weights").model_options.items():
        raise TaskError(f"{option}={value!r}: task {name} is an image classifier of torchvision and does not take it")
    model = network(name, meta=True) if meta and not setup.weights else network(name, trained=setup.weights)
    model = model.to(WEIGHTS.get(setup.dtype or "fp32", torch.float32))
    side = SIDES.get(name, SIDE)

    def make_batch(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        images = torch.randn(samples, 3, side, side, generator=generator)
        return {"images": images, "labels": torch.randint(CLASSES, (samples,), generator=generator)}

    return Task(name=name, model=model.train(), loss=classification_loss, make_batch=make_batch)


def network(name: str, *, meta: bool = False, trained: bool = False, num_classes: int = CLASSES) -> nn.Module:
    """The classifier ``name`` without classifiers in its middle, unless it is ``trained``.

    Args:
        name: As in ``torchvision.models``.
        meta: On the meta device.
        trained: With its published weights, and all that belongs to them.
        num_classes: Scores of an image.

    Raises:
        TaskError: torchvision is missing or does not fit torch.
    """
    models = _models(name)
    options: dict[str, Any] = {"weights": "DEFAULT"} if trained else {"num_classes": num_classes}
    if name in WITH_AUXILIARY and not trained:
        options |= {"aux_logits": False, "init_weights": False}

    def make() -> nn.Module:
        made: nn.Module = models.get_model(name, **options)
        return made

    if not meta:
        return make()
    try:
        with torch.device("meta"):
            return make()
    except NotImplementedError:  # RegNet computes its widths with tensors
        return make().to("meta")


def classification_loss(model: nn.Module, micro: Mapping[str, Tensor]) -> Tensor:
    """The mean cross-entropy over the images; the outputs of auxiliary classifiers are left out.

    Args:
        model: Makes scores [B, 1000] from images in the dtype of its weights.
        micro: ``images`` [B, 3, H, W] and ``labels`` [B].
    """
    outputs = model(micro["images"].to(next(model.parameters()).dtype))
    return cross_entropy(outputs if isinstance(outputs, Tensor) else outputs.logits, micro["labels"])


def _models(name: str) -> ModuleType:
    try:
        try:
            return importlib.import_module("torchvision.models")
        except RuntimeError as error:  # its operators are compiled for another torch
            if _NO_OPERATOR not in str(error):
                raise
            for operator in _DETECTION:  # of which no classifier needs any: their names are enough to import
                torch.library.define(operator, "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
            return importlib.import_module("torchvision.models")
    except ImportError as error:
        raise TaskError(
            f"--task {name}: torchvision cannot be imported: {error}", hint="pip install 'fullbatch[vision]'"
        ) from error
    except RuntimeError as error:
        raise TaskError(
            f"--task {name}: torchvision does not fit torch {torch.__version__}: {error}",
            hint="install the two from the same index, as https://pytorch.org/get-started says",
        ) from error
