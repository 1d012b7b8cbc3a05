"""The command line in a folder of its own, with a task file of a user."""

import subprocess
import sys

import pytest

TASK = """
import torch
from fullbatch import Task

def make():
    torch.manual_seed(0)
    data = [(torch.randn(3), torch.randn(1)) for _ in range(40)]
    def loss(model, micro):
        return torch.nn.functional.mse_loss(model(micro[0]), micro[1])
    return Task(name="mine", model=torch.nn.Linear(3, 1), loss=loss, data=data[:30], held_out=data[30:])

def prints():
    print("hello from the task")
    return make()

def exits():
    raise SystemExit(0)

def raises():
    return 1 / 0

def lacks():
    return Task(loss=make().loss, data=[1])

def exits_in_the_loss():
    task = make()
    def loss(model, micro):
        raise SystemExit(0)
    return Task(model=task.model, loss=loss, data=task.data)

def tokens(seq_len=16, attention="sdpa"):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)

        def forward(self, ids):
            x = self.embed(ids)[:, None]
            if attention == "eager":
                x = (x @ x.transpose(-2, -1)).softmax(-1) @ x
            else:
                x = torch.nn.functional.scaled_dot_product_attention(x, x, x)
            return self.head(x[:, 0])
    def loss(model, micro):
        return torch.nn.functional.cross_entropy(model(micro).flatten(0, 1), micro.flatten())
    return Task(name="tokens", model=Model(), loss=loss, data=[torch.zeros(seq_len, dtype=torch.long) for _ in range(8)])

def picky():
    def loss(model, micro):
        x = micro[0]
        return model(x[x > 0]).mean()
    return Task(model=make().model, loss=loss, data=make().data)

def with_batch_norm():
    task = make()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    return Task(model=model, loss=task.loss, data=task.data)
"""


@pytest.fixture
def fullbatch(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)

    def run(*arguments):
        command = [sys.executable, "-m", "fullbatch", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)

    run.folder = tmp_path
    return run
