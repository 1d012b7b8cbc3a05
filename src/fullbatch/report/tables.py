"""Figures as tables for a terminal; without colour they read the same."""

from __future__ import annotations

from rich import box
from rich.table import Table

from fullbatch.experiments import Curve
from fullbatch.prove import BrokenLoop, Proof, split_name


def proof_table(proof: Proof) -> Table:
    """One row a dtype and split."""
    table = _table(
        "dtype",
        "split",
        "grad max diff",
        "grad rel diff",
        "grad error",
        "full batch's",
        "bound",
        "param max diff",
        "loss diff",
        "steps",
        "",
    )
    for row in proof.comparisons:
        figures = (
            row.grad_max_abs_diff,
            row.grad_rel_diff,
            row.grad_error,
            row.full_batch_error,
            row.bound,
            row.param_max_abs_diff,
            row.loss_diff,
        )
        verdict = "equal" if row.equal else "NOT EQUAL"
        table.add_row(row.dtype, split_name(row.split), *(f"{figure:.1e}" for figure in figures), str(row.steps), verdict)
    return table


def broken_table(loops: list[BrokenLoop]) -> Table:
    """One row a loop, optimizer and update."""
    table = _table(
        "kind",
        "optimizer",
        "update",
        "steps",
        "grad ratio",
        "grad rel diff",
        "param max diff",
        "param rel diff",
        "lr ratio",
        "",
    )
    for loop in loops:
        for row in loop.departures:
            table.add_row(
                loop.kind,
                row.optimizer,
                str(row.update),
                str(row.steps),
                f"{row.grad_ratio:.4f}",
                f"{row.grad_rel_error:.1e}",
                f"{row.param_max_abs_diff:.1e}",
                f"{row.param_rel_diff:.1e}",
                f"{row.lr_ratio:.3f}",
                "equal" if row.equal else "NOT EQUAL",
            )
    return table


def curve_table(curve: Curve) -> Table:
    """One row a point."""
    table = _table(
        "effective batch",
        "micro-batch",
        "accum steps",
        "samples/s",
        "slowest..fastest round",
        "median ms",
        "avg loss",
        "sync calls/update",
    )
    for point in curve.points:
        table.add_row(
            str(point.effective_batch),
            str(point.micro_batch),
            str(point.accum_steps),
            f"{point.samples_per_sec:,.0f}",
            f"{point.samples_per_sec_low:,.0f}..{point.samples_per_sec_high:,.0f}",
            f"{point.median_step_ms:.2f}",
            f"{point.avg_loss:.4f}",
            f"{point.sync_calls / point.steps:g}",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        left = column in ("dtype", "split", "kind", "optimizer", "")
        table.add_column(column, justify="left" if left else "right")
    return table
