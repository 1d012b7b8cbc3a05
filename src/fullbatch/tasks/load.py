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

import torch

from fullbatch.errors import TaskError
from fullbatch.tasks.mlp import mlp
from fullbatch.tasks.task import Task
from fullbatch.tasks.text import text

BUILT_IN: dict[str, Callable[[], Task]] = {"mlp": mlp, "text": text}


def load(spec: str, *, seed: int = 0) -> Task:
    """The task that ``spec`` names: a built-in one, or one of the user's own, whose file is run.

    Args:
        spec: ``mlp``, ``text`` or ``path/to/file.py:function``; the function takes no
            argument and returns a :class:`Task`.
        seed: Seeds torch before the task is made, so that the same weights come each time.

    Raises:
        TaskError: There is no such task, or the function returned something else.
    """
    make = BUILT_IN.get(spec) or _from_file(spec)
    torch.manual_seed(seed)
    with _told(spec):
        task = make()
    if not isinstance(task, Task):
        raise TaskError(
            f"--task {spec} returned {type(task).__name__}: the function must return a fullbatch.Task",
            hint="return fullbatch.Task(model=..., loss=..., data=...)",
        )
    return task


def _from_file(spec: str) -> Callable[[], Task]:
    name, colon, function = spec.rpartition(":")
    path = Path(name)
    if not colon or path.suffix != ".py":
        near = difflib.get_close_matches(spec, BUILT_IN, n=1)
        hint = f"did you mean --task {near[0]}?" if near else f"--task {spec if path.suffix == '.py' else 'my_task.py'}:make"
        raise TaskError(f"--task {spec}: must be one of {', '.join(BUILT_IN)}, or file.py:function", hint=hint)
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
    make: Callable[[], Task] | None = getattr(module, function, None)
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
