"""Figures as tables for a terminal; without colour they read the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fullbatch.experiments import Curve
from fullbatch.prove import BrokenLoop, Proof, split_name

PROOF_LEGEND = (
    "error: relative 2-norm error of the gradient against the float64 truth; full batch: the same of the full batch itself; "
    "bound: the largest error that counts as equal; max diff: split minus full batch, of the gradient before the step, "
    "of a parameter after it."
)
BROKEN_LEGEND = (
    "grad ratio: length of the gradient at the window's last step over the full batch's; rel diff: 2-norm of the difference "
    "over the full batch's gradient, over the way that the right weights went; "
    "lr ratio: learning rate after the window over the right one."
)


@dataclass(frozen=True)
class _Column:
    """A column; in a narrow terminal those with the largest ``drop`` go first, and those with 0 stay."""

    name: str
    cells: Sequence[str]
    drop: int = 0
    left: bool = False


def proof_table(proof: Proof, width: int) -> Table:
    """One row a dtype and split, at most ``width`` characters wide."""
    rows = proof.comparisons
    return _table(
        [
            _Column("dtype", [row.dtype for row in rows], left=True),
            _Column("split", [split_name(row.split) for row in rows], left=True),
            _Column("error", [_short(row.grad_error) for row in rows]),
            _Column("full batch", [_short(row.full_batch_error) for row in rows], drop=1),
            _Column("bound", [_short(row.bound) for row in rows]),
            _Column("grad max diff", [_short(row.grad_max_abs_diff) for row in rows], drop=4),
            _Column("grad rel diff", [_short(row.grad_rel_diff) for row in rows], drop=5),
            _Column("param max diff", [_short(row.param_max_abs_diff) for row in rows], drop=3),
            _Column("loss diff", [_short(row.loss_diff) for row in rows], drop=2),
            _Column("steps", [str(row.steps) for row in rows], drop=6),
            _Column("", ["equal" if row.equal else "NOT EQUAL" for row in rows], left=True),
        ],
        width,
    )


def broken_table(loops: list[BrokenLoop], width: int) -> Table:
    """One row a loop, optimizer and update, at most ``width`` characters wide."""
    rows = [(loop.kind, row) for loop in loops for row in loop.departures]
    return _table(
        [
            _Column("kind", [kind for kind, _ in rows], left=True),
            _Column("optimizer", [row.optimizer for _, row in rows], left=True),
            _Column("update", [str(row.update) for _, row in rows]),
            _Column("steps", [str(row.steps) for _, row in rows], drop=3),
            _Column("grad ratio", [f"{row.grad_ratio:.4f}" for _, row in rows], drop=1),
            _Column("grad rel diff", [_short(row.grad_rel_error) for _, row in rows], drop=2),
            _Column("param max diff", [_short(row.param_max_abs_diff) for _, row in rows], drop=5),
            _Column("param rel diff", [_short(row.param_rel_diff) for _, row in rows]),
            _Column("lr ratio", [f"{row.lr_ratio:.3f}" for _, row in rows], drop=4),
            _Column("", ["equal" if row.equal else "NOT EQUAL" for _, row in rows], left=True),
        ],
        width,
    )


def curve_table(curve: Curve, width: int) -> Table:
    """One row a point, at most ``width`` characters wide."""
    points = curve.points
    return _table(
        [
            _Column("effective batch", [str(point.effective_batch) for point in points]),
            _Column("micro-batch", [str(point.micro_batch) for point in points], drop=2),
            _Column("accum steps", [str(point.accum_steps) for point in points]),
            _Column("samples/s", [f"{point.samples_per_sec:,.0f}" for point in points]),
            _Column(
                "slowest..fastest round",
                [f"{point.samples_per_sec_low:,.0f}..{point.samples_per_sec_high:,.0f}" for point in points],
                drop=1,
            ),
            _Column("median ms", [f"{point.median_step_ms:.2f}" for point in points]),
            _Column("avg loss", [f"{point.avg_loss:.4f}" for point in points]),
            _Column("sync calls/update", [f"{point.sync_calls / point.steps:g}" for point in points], drop=3),
        ],
        width,
    )


def _short(figure: float) -> str:
    return f"{figure:.1e}"


def _table(columns: list[_Column], width: int) -> Table:
    measuring = Console(width=10_000)
    while True:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        for column in columns:
            table.add_column(column.name, justify="left" if column.left else "right", no_wrap=True)
        for row in zip(*(column.cells for column in columns), strict=True):
            table.add_row(*row)
        least = max(columns, key=lambda column: column.drop)
        if not least.drop or Measurement.get(measuring, measuring.options, table).maximum <= width:
            return table
        columns = [column for column in columns if column is not least]
