"""Train at the batch you want on the memory you have, and prove that nothing changed."""

from fullbatch.accumulate import Accumulator, MicroBatch, Update, samples, tokens
from fullbatch.errors import (
    BatchError,
    DtypeNotSupported,
    FullbatchError,
    HookedStep,
    InvalidArgument,
    LossError,
    OptimizerError,
    OutputError,
    TaskError,
)
from fullbatch.prove import Proof, prove
from fullbatch.tasks import Task
from fullbatch.version import __version__

__all__ = [
    "Accumulator",
    "BatchError",
    "DtypeNotSupported",
    "FullbatchError",
    "HookedStep",
    "InvalidArgument",
    "LossError",
    "MicroBatch",
    "OptimizerError",
    "OutputError",
    "Proof",
    "Task",
    "TaskError",
    "Update",
    "__version__",
    "prove",
    "samples",
    "tokens",
]
