"""Every block of README and docs is run, and its output is compared with what stands there, figures aside.

```python blocks of a page share one namespace; a ```text block after one is what it prints. In a ```console
block, lines after ``$`` are commands and the others what they print to stdout. Blocks of other kinds are not run.
A block after ``<!-- not run: why -->`` is not run either.
"""

import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- not run: [^\n]*-->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def masked(text):
    """``text`` with every number as #, and the width of columns and rules gone."""
    text = re.sub(r"[-+]?\b\d[\d,.]*(e[-+]?\d+)?", "#", text)
    text = re.sub(r"measured on .*", "measured on ...", text)
    text = re.sub(r"flat from effective batch #|still rising where the grid ends", "flat or rising", text)  # the machine's word
    text = re.sub(r"─+|-{3,}", "-", text)
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return [line for line in lines if not line.startswith("note: rounds")]  # the machine's word too


def commands_of(block):
    """Pairs of a command line and its expected output."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        while line.endswith("\\"):
            more, _, output = output.partition("\n")
            line = line[:-1] + more
        yield line, output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_and_print_what_stands_there(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    namespace = {"__name__": "__main__"}
    printed = None
    for not_run, kind, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if not_run:
            continue
        if kind == "python":
            stream = StringIO()
            with redirect_stdout(stream):
                exec(compile(block, f"{page.name}", "exec"), namespace)
            printed = stream.getvalue()
        elif kind == "text" and printed is not None:
            assert masked(printed) == masked(block)
            printed = None
        elif kind == "console":
            for line, expected in commands_of(block):
                done = subprocess.run(line, shell=True, capture_output=True, text=True, env=environment, timeout=900)
                assert done.returncode in (0, 1), done.stderr
                if expected.strip():
                    assert masked(done.stdout) == masked(expected), line


def test_no_page_names_a_path_of_a_machine():
    for page in PAGES:
        assert not re.search(r"/(home|root|work|tmp|Users)/", page.read_text(encoding="utf-8")), page.name
