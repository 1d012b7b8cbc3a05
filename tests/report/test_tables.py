"""Tables fit the terminal."""

import io

import pytest
import torch
from rich.console import Console

from fullbatch.prove import prove, run_broken
from fullbatch.report import broken_table, proof_table
from fullbatch.tasks import load


@pytest.mark.parametrize("columns", [60, 80, 132, 200])
def test_a_narrow_table_drops_columns_and_shows_every_figure_whole(columns):
    task = load("mlp")
    draw = torch.Generator().manual_seed(0)
    proof = prove(task.model, task.loss, task.batch(16, draw), items=task.items, dtypes=torch.float64)
    broken = run_broken("early-step", task.model, task.loss, task.batch(24, draw), items=task.items)
    for table, verdicts in ((proof_table(proof, columns), 5), (broken_table([broken], columns), 4)):
        stream = io.StringIO()
        Console(width=columns, file=stream).print(table)
        text = stream.getvalue()
        assert "…" not in text
        assert text.lower().count("equal") == verdicts
        assert all(len(line.rstrip()) <= columns for line in text.splitlines())
