"""Figures as tables, pictures, files and pages."""

from fullbatch.report.files import JsonLines, write_json, write_text
from fullbatch.report.plots import plot_curve, plot_run
from fullbatch.report.recipe import recipe
from fullbatch.report.tables import BROKEN_LEGEND, PROOF_LEGEND, broken_table, curve_table, proof_table

__all__ = [
    "BROKEN_LEGEND",
    "PROOF_LEGEND",
    "JsonLines",
    "broken_table",
    "curve_table",
    "plot_curve",
    "plot_run",
    "proof_table",
    "recipe",
    "write_json",
    "write_text",
]
