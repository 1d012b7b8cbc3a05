"""The command line as a person meets it: real processes, exit codes, stdout apart from stderr."""

import json
import subprocess
import sys
import time

import jsonschema
import pytest


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
        (("prove", "--break", "missing-divison"), "did you mean missing-division?"),
        (("prove", "--break", "early-step", "--split", "4x4"), "--break runs 24 samples"),
        (("prove", "--lr", "1"), "--lr 1.0: the task's own optimizer has its own"),
        (("prove", "--split", "1x3000000000"), "holds 3000000000 samples"),
        (("prove", "--json", ""), "must be a path, or - for stdout"),
        (("prove", "--seed", "-1"), "--seed"),
        (("prove", "--out", "mine.py"), "cannot be written"),
        (("prove", "--device", "meta"), "device='meta' cannot be used"),
        (("prove", "--task", "mine.py:exits"), "mine.py:exits fails: SystemExit: 0"),
        (("prove", "--task", "mine.py:exits_in_the_loss"), "the task's code called sys.exit(0)"),
        (("prove", "--task", "mine.py:lacks"), "missing 1 required keyword-only argument: 'model'"),
        (("sweep", "--optimizer", "adma"), "must be one of sgd, adamw, "),
        (("train", "--lr", "0"), "lr=0.0 must be a finite number above 0"),
        (("train", "--lr", "nan"), "must be a finite number above 0"),
        (("prove", "--batch", "0"), "--batch 0: must be at least 1"),
        (("prove", "--split", "4x5"), "holds 20 samples, but the batch has 16"),
        (("prove", "--dtype", "int8"), "--dtype int8: must be one of float64"),
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
    assert "mine.py" in " ".join(arguments) or "Traceback" not in done.stderr
    assert done.stdout == "" or "--out" in arguments  # the proof is shown before it is written


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


def test_code_of_the_user_that_fails_exits_2_with_its_own_line(fullbatch):
    done = fullbatch("prove", "--task", "mine.py:raises")
    assert done.returncode == 2
    assert "return 1 / 0" in done.stderr
    assert "mine.py:raises fails: ZeroDivisionError: division by zero (line" in done.stderr


def test_what_a_task_prints_does_not_mix_with_the_data(fullbatch):
    done = fullbatch("prove", "--task", "mine.py:prints", "--dtype", "float64", "--json", "-")
    assert json.loads(done.stdout)["equal"] is True
    assert "hello from the task" in done.stderr


def test_a_wrong_argument_leaves_the_last_runs_files_alone(fullbatch):
    good = ("sweep", "--task", "mine.py:make", "--accum-grid", "1", "--num-steps", "2")
    assert fullbatch(*good).returncode == 0
    before = {path.name: path.read_bytes() for path in (fullbatch.folder / "outputs").iterdir()}
    assert fullbatch("sweep", "--task", "mpl").returncode == 2
    assert fullbatch("sweep", "--accum-grid", "1,0").returncode == 2
    assert before == {path.name: path.read_bytes() for path in (fullbatch.folder / "outputs").iterdir()}


def test_a_diverged_run_exits_1_is_told_and_does_not_break_the_recipe(fullbatch):
    done = fullbatch("train", "--task", "mine.py:make", "--effective-batch", "8", "--lr", "1e30", "--max-grad-norm", "inf")
    assert done.returncode == 1
    assert "is not a number" in done.stdout
    assert fullbatch("sweep", "--task", "mine.py:make", "--lr", "1e30", "--accum-grid", "1,2").returncode == 0
    assert fullbatch("recipe").returncode == 0
    assert "not a number" in (fullbatch.folder / "outputs" / "skill-gradient-accumulation.md").read_text()


def test_a_killed_run_leaves_whole_lines_and_no_file_of_an_older_run(fullbatch):
    outputs = fullbatch.folder / "outputs"
    assert fullbatch("train", "--task", "mine.py:make", "--effective-batch", "8", "--updates", "2").returncode == 0
    assert (outputs / "train.json").exists()
    command = [sys.executable, "-m", "fullbatch", "train", "--task", "mine.py:make", "--effective-batch", "8"]
    process = subprocess.Popen([*command, "--updates", "1000000"], cwd=fullbatch.folder, stderr=subprocess.DEVNULL)
    log = outputs / "train.jsonl"
    deadline = time.monotonic() + 200
    while len(log.read_text().splitlines()) < 50 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    lines = log.read_text().splitlines(keepends=True)
    assert len(lines) >= 50
    assert all(json.loads(line) for line in lines if line.endswith("\n"))
    assert all(line.endswith("\n") for line in lines[:-1])
    assert [path.name for path in outputs.iterdir()] == ["train.jsonl"]
