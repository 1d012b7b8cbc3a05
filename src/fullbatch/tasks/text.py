"""Task ``text``: a byte-level GPT on the Python language reference that ships inside Python."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, pad, scaled_dot_product_attention

from fullbatch.accumulate import tokens
from fullbatch.tasks.task import Task

# Shapes: B samples, T positions, D width, V byte values.
BYTES = 256
CONTEXT = 128
PADDING = -100  # torch's default ignore_index of cross_entropy
HELD_OUT = 0.1  # of the text


class Block(nn.Module):
    """Attention, then a two-layer network, each added to the stream [B, T, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(self.attention_norm(x_BTD)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        x_BTD = x_BTD + self.attention_out(mixed)
        out: Tensor = x_BTD + self.mlp_out(gelu(self.mlp_in(self.mlp_norm(x_BTD))))
        return out


class ByteGPT(nn.Module):
    """Next-byte logits [B, T, V] from bytes [B, T]; the output layer shares the embedding's weights."""

    def __init__(self, width: int = 144, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.embed, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        positions_T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        x_BTD = self.embed(bytes_BT) + self.position(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return linear(self.norm(x_BTD), self.embed.weight)


def text() -> Task:
    """Samples are pieces of documents: ``bytes`` [128], and as ``labels`` [128] the byte after each, -100 past the end."""
    train: list[dict[str, Tensor]] = []
    held_out: list[dict[str, Tensor]] = []
    families = _families()
    total = sum(len(document) for family in families for document in family)
    held_out_bytes = 0
    for position, family in enumerate(families):
        size = sum(map(len, family))
        # Every third of the small ones, up to the share.
        out = position % 3 == 0 and size < HELD_OUT / 2 * total and held_out_bytes < HELD_OUT * total
        held_out_bytes += size if out else 0
        for document in family:
            (held_out if out else train).extend(_pieces(document))

    def loss(model: nn.Module, micro: Mapping[str, Tensor]) -> Tensor:
        logits_BTV = model(micro["bytes"])
        return cross_entropy(logits_BTV.flatten(0, 1), micro["labels"].flatten(), ignore_index=PADDING)

    def optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    return Task(
        name="text",
        model=ByteGPT(),
        loss=loss,
        data=train,
        held_out=held_out,
        items=tokens("labels"),
        optimizer=optimizer,
        unit=("bits per byte", 1 / math.log(2)),
    )


def _families() -> list[list[bytes]]:
    """The documents; those that share a long line, and there are many, stand in one family: no text on both sides."""
    from pydoc_data.topics import topics  # about 450 KB of text: loaded only when asked for

    family_of: dict[str, list[str]] = {}  # by line
    families: list[list[str]] = []
    for name in sorted(topics):
        lines = {line.strip() for line in topics[name].splitlines() if len(line.strip()) >= 60}
        joined = [name]
        for other in {id(family_of[line]): family_of[line] for line in lines if line in family_of}.values():
            joined += other
            families = [family for family in families if family is not other]
        families.append(joined)
        family_of |= dict.fromkeys(lines, joined)
        family_of = {line: joined if family[0] in joined else family for line, family in family_of.items()}
    return [[topics[name].encode() for name in family] for family in families]


def _pieces(document: bytes) -> list[dict[str, Tensor]]:
    values = torch.frombuffer(bytearray(document), dtype=torch.uint8).long()
    pieces = []
    for start in range(0, len(values) - 1, CONTEXT):
        labels = values[start + 1 : start + 1 + CONTEXT]
        inputs = values[start : start + len(labels)]
        missing = (0, CONTEXT - len(labels))
        pieces.append({"bytes": pad(inputs, missing), "labels": pad(labels, missing, value=PADDING)})
    return pieces
