"""The command line as a person meets it: real processes, exit codes, stdout apart from stderr."""

import json
import subprocess
import sys

import jsonschema
import pytest

TASK = """
import torch
from fullbatch import Task

def make():
    torch.manual_seed(0)
    data = [(torch.randn(3), torch.randn(1)) for _ in range(40)]
    def loss(model, micro):
        return torch.nn.functional.mse_loss(model(micro[0]), micro[1])
    return Task(name="mine", model=torch.nn.Linear(3, 1), loss=loss, data=data[:30], held_out=data[30:])

def with_batch_norm():
    task = make()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    return Task(model=model, loss=task.loss, data=task.data)
"""


@pytest.fixture
def fullbatch(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)

    def run(*arguments):
        command = [sys.executable, "-m", "fullbatch", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)

    run.folder = tmp_path
    return run


def test_prove_exits_0_on_a_users_model_and_writes_its_json(fullbatch, schema):
    done = fullbatch("prove", "--task", "mine.py:make", "--batch", "12", "--dtype", "float64")
    assert done.returncode == 0, done.stderr
    assert "equal: 12x1, 3x4, 2x6, 1x12, 5+5+2" in done.stdout
    assert "measured on cpu" in done.stdout
    assert "wrote outputs/proof.json" in done.stderr
    written = json.loads((fullbatch.folder / "outputs" / "proof.json").read_text())
    jsonschema.validate(written, schema("proof.v1"))
    assert written["evidence"]["command"] == "fullbatch prove --task mine.py:make --batch 12 --dtype float64"


def test_prove_exits_1_where_batch_norm_differs_and_0_in_evaluation_mode(fullbatch):
    arguments = ("prove", "--task", "mine.py:with_batch_norm", "--dtype", "float64", "--split", "4x4")
    done = fullbatch(*arguments)
    assert done.returncode == 1
    assert "first difference: module '1' (BatchNorm1d)" in done.stdout
    assert fullbatch(*arguments, "--eval").returncode == 0


def test_a_wrong_loop_exits_1_and_shows_itself(fullbatch, schema):
    done = fullbatch("prove", "--break", "missing-division", "--json", "-")
    assert done.returncode == 1
    jsonschema.validate(json.loads(done.stdout), schema("broken-loop.v1"))  # stdout is the JSON alone
    assert "def missing_division(" in done.stderr
    assert (fullbatch.folder / "outputs" / "broken-missing-division.json").exists()


def test_sweep_then_recipe(fullbatch, schema):
    done = fullbatch(
        "sweep", "--task", "mine.py:make", "--accum-grid", "1,2", "--num-steps", "4", "--out", "o", "--json", "copy.json"
    )
    assert done.returncode == 0, done.stderr
    curve = json.loads((fullbatch.folder / "o" / "accum-curve.json").read_text())
    jsonschema.validate(curve, schema("accum-curve.v1"))
    assert curve == json.loads((fullbatch.folder / "copy.json").read_text())
    lines = [json.loads(line) for line in (fullbatch.folder / "o" / "accum-curve.jsonl").read_text().splitlines()]
    assert sorted(line["accum_steps"] for line in lines) == [1] * 4 + [2] * 4
    assert (fullbatch.folder / "o" / "accum-curve.png").read_bytes().startswith(b"\x89PNG")
    done = fullbatch("recipe", "--out", "o")
    assert done.returncode == 0
    page = (fullbatch.folder / "o" / "skill-gradient-accumulation.md").read_text()
    assert f"| 8 | 4 x 2 | {curve['points'][1]['samples_per_sec']:,.0f} |" in page
    assert "fullbatch sweep --task mine.py:make" in page


def test_train_writes_its_log_and_its_summary(fullbatch, schema):
    arguments = (
        "train",
        "--task",
        "mine.py:make",
        "--effective-batch",
        "8",
        "--micro-batch",
        "3",
        "--updates",
        "4",
        "--eval-every",
        "2",
    )
    done = fullbatch(*arguments, "--json", "-")
    assert done.returncode == 0, done.stderr
    jsonschema.validate(json.loads(done.stdout), schema("train.v1"))
    lines = [json.loads(line) for line in (fullbatch.folder / "outputs" / "train.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["held_out", "update", "update", "held_out", "update", "update", "held_out"]
    assert [line["index"] for line in lines if line["kind"] == "update"] == [1, 2, 3, 4]
    assert (fullbatch.folder / "outputs" / "train.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("prove", "--task", "mpl"), "did you mean --task mlp?"),
        (("prove", "--break", "missing-divison"), "did you mean --break missing-division?"),
        (("prove", "--batch", "0"), "--batch 0: must be at least 1"),
        (("prove", "--split", "4x5"), "holds 20 samples, but the batch has 16"),
        (("prove", "--dtype", "int8"), "--dtype int8: must be of float64"),
        (("prove", "--task", "mine.py:nothing"), "has no function 'nothing'"),
        (("sweep", "--accum-grid", "1,x"), "--accum-grid 1,x: must be whole numbers"),
        (("sweep", "--micro-batch", "0"), "micro_batch=0 must be at least 1"),
        (("sweep", "--device", "gpu9"), "device='gpu9' cannot be used"),
        (("train", "--scale-lr", "cubic"), "must be one of none, linear, sqrt"),
        (("train", "--max-grad-norm", "0"), "max_grad_norm=0.0 must be a number above 0"),
        (("recipe",), "hint: fullbatch sweep"),
        (("prove", "--nonsense"), "No such option"),
        (("nonsense",), "No such command"),
    ],
)
def test_wrong_use_exits_2_with_a_way_out_on_stderr_and_nothing_on_stdout(fullbatch, arguments, told):
    done = fullbatch(*arguments)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_recipe_refuses_a_file_that_is_not_what_it_says(fullbatch):
    (fullbatch.folder / "outputs").mkdir()
    for text in ("{", "[]", '{"schema": "other"}', "null"):
        (fullbatch.folder / "outputs" / "accum-curve.json").write_text(text)
        done = fullbatch("recipe")
        assert done.returncode == 2
        assert "is not accum-curve.v1" in done.stderr


def test_help_and_version(fullbatch):
    assert fullbatch("--version").stdout.startswith("fullbatch 0.")
    for verb in ("prove", "sweep", "train", "recipe"):
        done = fullbatch(verb, "--help")
        assert done.returncode == 0
        assert f"fullbatch {verb}" in done.stdout  # an example
