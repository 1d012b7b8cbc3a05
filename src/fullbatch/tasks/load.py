"""From what a person types after ``--task`` to a task."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fullbatch.errors import TaskError
from fullbatch.tasks.mlp import mlp
from fullbatch.tasks.models import MODELS, any_model, known_model
from fullbatch.tasks.setup import MODEL_OPTIONS, WEIGHTS, Setup, apply
from fullbatch.tasks.task import Task
from fullbatch.tasks.text import text
from fullbatch.tasks.vision import CLASSIFIERS, classifier, is_classifier

BUILT_IN: dict[str, Callable[[], Task]] = {"mlp": mlp, "text": text}

NAMES = (*BUILT_IN, *MODELS, *CLASSIFIERS)
"""Names that :func:`load` knows; beside them torchvision's other classifiers, ``hf:NAME_OR_DIR`` and ``file.py:function``."""


def load(spec: str, *, seed: int = 0, setup: Setup | None = None, meta: bool = True) -> Task:
    """The task that ``spec`` names: a built-in one, a model's, or one of the user's own, whose file is run.

    Args:
        spec: One of :data:`NAMES`, ``hf:NAME_OR_DIR`` or ``path/to/file.py:function``; the function returns
            a :class:`Task` and takes no argument, or those of :data:`MODEL_OPTIONS` that it knows of.
        seed: Seeds torch before the task is made, so that the same weights come each time.
        setup: How the task is to be trained. ``None``: as it is.
        meta: A model's task has its model on the meta device: its shapes, for a prediction. ``False``, or
            ``weights`` in ``setup``: with data, to be trained. Other tasks always have data.

    Raises:
        TaskError: There is no such task, or the function returned something else.
        InvalidArgument: The task cannot take an option of ``setup``.
    """
    setup = setup or Setup()
    torch.manual_seed(seed)
    if spec in BUILT_IN:
        return apply(BUILT_IN[spec](), setup)
    if spec in MODELS or spec.startswith("hf:") or is_classifier(spec):
        make_model = known_model if spec in MODELS else any_model if spec.startswith("hf:") else classifier
        with _told(spec):
            made = make_model(spec, setup, meta=meta)
        rest = setup.without(*MODEL_OPTIONS, *(["dtype"] if setup.dtype in WEIGHTS else []))
        return apply(made, rest)
    make = _from_file(spec)
    arguments = _taken(make, setup.model_options)
    torch.manual_seed(seed)
    with _told(spec):
        task = make(**arguments)
    if not isinstance(task, Task):
        raise TaskError(
            f"--task {spec} returned {type(task).__name__}: the function must return a fullbatch.Task",
            hint="return fullbatch.Task(model=..., loss=..., data=...)",
        )
    return apply(task, setup.without(*arguments))


def _taken(make: Callable[..., Task], options: dict[str, Any]) -> dict[str, Any]:
    """The ``options`` that ``make`` has arguments for."""
    parameters = inspect.signature(make).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def _from_file(spec: str) -> Callable[..., Task]:
    name, colon, function = spec.rpartition(":")
    path = Path(name)
    if not colon or path.suffix != ".py":
        near = difflib.get_close_matches(spec, NAMES, n=1)
        hint = f"did you mean --task {near[0]}?" if near else f"--task {spec if path.suffix == '.py' else 'my_task.py'}:make"
        raise TaskError(
            f"--task {spec}: must be one of {', '.join((*BUILT_IN, *MODELS))}, "
            "an image classifier of torchvision, hf:NAME_OR_DIR, or file.py:function",
            hint=hint,
        )
    if not path.is_file():
        raise TaskError(f"--task {spec}: there is no file {path}", hint="give the path from where you are now")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that the file can import its neighbours, as when it is run
    module_name = f"fullbatch_task_{path.stem}"  # never hides a module that the file itself imports
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    with _told(spec):
        module_spec.loader.exec_module(module)
    make: Callable[..., Task] | None = getattr(module, function, None)
    if not callable(make):
        own = [name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module_name]
        raise TaskError(
            f"--task {spec}: {path} has no function {function!r}",
            hint=f"it has {', '.join(own)}" if own else "define one that returns a fullbatch.Task",
        )
    return make


@contextmanager
def _told(spec: str) -> Iterator[None]:
    """What the user's code raises becomes a TaskError that says where; the traceback stays behind it."""
    try:
        yield
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        file = spec.rpartition(":")[0]
        lines = [
            frame for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename.endswith(Path(file).name)
        ]
        where = f" (line {lines[-1].lineno} of {file})" if lines else ""
        raise TaskError(f"--task {spec} fails: {type(error).__name__}: {error}{where}") from error
