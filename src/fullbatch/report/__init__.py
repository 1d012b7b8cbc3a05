"""Figures as tables, pictures, files and pages."""

from fullbatch.files import JsonLines, write_json, write_text
from fullbatch.report.measured import measured_stretch_tables, measured_tables, plot_measured, plot_measured_stretch
from fullbatch.report.memory import anatomy_tables, cards_table, plot_anatomy, plot_stretch, stretch_tables
from fullbatch.report.plots import plot_curve, plot_run
from fullbatch.report.recipe import recipe
from fullbatch.report.tables import BROKEN_LEGEND, PROOF_LEGEND, broken_table, curve_table, proof_table
from fullbatch.report.watched import plot_watched, watched_csv, watched_lines

__all__ = [
    "BROKEN_LEGEND",
    "PROOF_LEGEND",
    "JsonLines",
    "anatomy_tables",
    "broken_table",
    "cards_table",
    "curve_table",
    "measured_stretch_tables",
    "measured_tables",
    "plot_anatomy",
    "plot_curve",
    "plot_measured",
    "plot_measured_stretch",
    "plot_run",
    "plot_stretch",
    "plot_watched",
    "proof_table",
    "recipe",
    "stretch_tables",
    "watched_csv",
    "watched_lines",
    "write_json",
    "write_text",
]
