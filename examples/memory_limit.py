"""Batch 4 runs out of memory, and 1 x 4 makes the same update: real tensors on the CPU, on a device of a predicted size."""

import copy

import torch

from fullbatch import Accumulator
from fullbatch.memory import limit, predict_cpu
from fullbatch.tasks import load
from fullbatch.units import show_bytes

task = load("text")
batch = task.batch(4, torch.Generator().manual_seed(0))


def predicted(micro_batch):
    micro = {name: tensor[:micro_batch] for name, tensor in batch.items()}
    return predict_cpu(task.model, task.loss, micro, optimizer=task.optimizer, micro_batches=4 // micro_batch)


def update(micro_batch, size):
    model = copy.deepcopy(task.model)
    step = Accumulator(model, task.optimizer(model.parameters()), task.loss, items=task.items, micro_batch=micro_batch)
    with limit(size, device="cpu", holding=(model, batch)) as device:
        try:
            for _ in range(2):  # in the second the optimizer's state is there from the start
                step(batch)
        except torch.OutOfMemoryError as error:
            return f"{type(error).__name__}: {str(error).partition(' The device')[0]}"
    return f"ran, peak {show_bytes(device.peak_reserved_bytes)} reserved"


peaks = {micro_batch: predicted(micro_batch).peak_reserved_bytes for micro_batch in (4, 1)}
size = sum(peaks.values()) // 2
print(f"the device: {show_bytes(size)}, between the two predicted peaks")
for micro_batch, peak in peaks.items():
    print(f"batch {micro_batch} x {4 // micro_batch}: predicted peak {show_bytes(peak)}; {update(micro_batch, size)}")
