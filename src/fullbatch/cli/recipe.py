"""``fullbatch recipe``: a page on accumulation for a repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullbatch.cli import options
from fullbatch.report import recipe, write_text


def command(
    out: Annotated[
        Path, typer.Option("--out", help="Folder with the JSON of sweep, prove and train; the page goes there.")
    ] = Path("outputs"),
    json_path: options.Json = None,
) -> None:
    """Write skill-gradient-accumulation.md: the rules, the code, the pitfalls, and the numbers of your runs.

    It reads what ``sweep`` wrote, and what ``prove`` and ``train`` wrote if they ran.

    Example:

      fullbatch sweep && fullbatch prove && fullbatch recipe
    """
    path = out / "skill-gradient-accumulation.md"
    with options.Output(json_path) as output:
        text = recipe(out)
        write_text(path, text)
        output.show(str(path))
        output.json({"schema": "recipe.v1", "path": str(path), "text": text})
