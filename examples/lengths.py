"""A task whose length and kind of attention the command line chooses: fullbatch stretch --task examples/lengths.py:make."""

import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from fullbatch import Task


class Model(torch.nn.Module):
    def __init__(self, width=64, attention="sdpa"):
        super().__init__()
        self.attention = attention
        self.embed, self.head = torch.nn.Embedding(256, width), torch.nn.Linear(width, 256)

    def forward(self, ids):
        x = self.embed(ids).unflatten(-1, (4, -1)).transpose(1, 2)  # [samples, heads, tokens, width]
        if self.attention == "eager":
            x = (x @ x.transpose(-2, -1)).softmax(-1) @ x
        else:
            x = scaled_dot_product_attention(x, x, x)
        return self.head(x.transpose(1, 2).flatten(2))


def make(seq_len=128, attention="sdpa"):
    def batch(samples, generator):
        return torch.randint(256, (samples, seq_len), generator=generator)

    def loss(model, ids):
        return cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    return Task(model=Model(attention=attention), loss=loss, make_batch=batch, name="lengths")
