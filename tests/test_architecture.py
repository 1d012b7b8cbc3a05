"""What an import loads and sets, and what is public."""

import json
import subprocess
import sys

import fullbatch

LOOK = """
import json, os, random, sys, warnings
before = dict(os.environ)
state = random.getstate()
import fullbatch
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "environment": dict(os.environ) == before,
    "random": random.getstate() == state,
    "threads": __import__("torch").get_num_threads(),
}))
"""


def test_importing_fullbatch_loads_no_plotting_no_command_line_and_sets_nothing():
    code = "import torch; print(torch.get_num_threads())"
    threads = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    seen = json.loads(subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True).stdout)
    unwanted = {"matplotlib", "rich", "typer", "click", "transformers", "accelerate", "lightning", "pandas", "pydoc_data"}
    assert not unwanted & set(seen["modules"])
    assert seen["environment"]
    assert seen["random"]
    assert seen["threads"] == threads


def test_the_public_names_are_sorted_and_there():
    assert fullbatch.__all__ == sorted(fullbatch.__all__, key=lambda name: (name.startswith("_") or name[0].islower(), name))
    assert all(hasattr(fullbatch, name) for name in fullbatch.__all__)
