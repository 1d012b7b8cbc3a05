import torch
from torch.nn.functional import cross_entropy

from fullbatch import Task, tokens


def make():
    words = torch.randint(50, (200, 12))
    lengths = torch.randint(2, 13, (200, 1))
    labels = words.masked_fill(torch.arange(12) >= lengths, -100)  # past the end there is nothing to learn
    samples = [{"words": w, "labels": y} for w, y in zip(words, labels, strict=True)]
    model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50))

    def loss(model, micro):  # the mean over labelled tokens
        return cross_entropy(model(micro["words"]).flatten(0, 1), micro["labels"].flatten())

    def optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2)

    return Task(model=model, loss=loss, items=tokens("labels"), data=samples[:160], held_out=samples[160:], optimizer=optimizer)
