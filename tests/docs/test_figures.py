"""The tables of README and docs are those of the benchmark's own record."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def benchmark():
    spec = importlib.util.spec_from_file_location("overhead", ROOT / "benchmarks" / "overhead.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_tables_are_those_of_the_record():
    record = json.loads((ROOT / "docs" / "overhead.json").read_text())
    table = benchmark().as_markdown(record["rows"])
    assert table in (ROOT / "docs" / "benchmarks.md").read_text()
    text = [line for line in table.splitlines() if not line.startswith("| mlp") and "by hand" not in line]
    assert "\n".join(text) in (ROOT / "README.md").read_text()


def test_the_record_holds_what_the_goal_asks():
    """On text: time within 2 % of the loop by hand, no more memory. A record, not a clock: a test measures no time."""
    rows = json.loads((ROOT / "docs" / "overhead.json").read_text())["rows"]
    mine = [row for row in rows if row["loop"] == "fullbatch"]
    assert {(row["task"], row["K"]) for row in mine} == {(task, K) for task in ("mlp", "text") for K in (1, 8, 64)}
    assert all(row["peak_ratio"] <= 1.0 for row in mine)
    assert all(row["time_ratio"] <= 1.02 for row in mine if row["task"] == "text")
    assert all(row["gradient_error"] <= 1e-12 for row in mine)


def test_the_example_of_the_docs_is_the_file_that_is_run():
    example = (ROOT / "examples" / "my_task.py").read_text()
    assert f"```python\n{example}```" in (ROOT / "docs" / "tasks.md").read_text()
    assert len(example.splitlines()) <= 20
