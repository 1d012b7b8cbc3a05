"""The recipe reads files that may come from anywhere."""

import json

import pytest
import torch

from fullbatch import InvalidArgument
from fullbatch.experiments import named_optimizer, sweep
from fullbatch.prove import WRONG, run_broken
from fullbatch.report import recipe, write_json
from fullbatch.tasks import load


@pytest.fixture
def outputs(tmp_path):
    task = load("mlp")
    curve = sweep(task, micro_batch=4, accum_grid=[1, 2], num_steps=2, optimizer=named_optimizer("sgd", 0.1))
    write_json(tmp_path / "accum-curve.json", curve.to_json())
    return tmp_path


def test_a_fault_that_shows_in_the_second_update_is_not_called_harmless(outputs):
    task = load("mlp")
    batch = task.batch(24, torch.Generator().manual_seed(0))
    broken = run_broken("short-window-weight", task.model, task.loss, batch, items=task.items)
    write_json(outputs / "broken-short-window-weight.json", broken.to_json())
    worst = max(row.param_rel_diff for row in broken.departures if row.optimizer == "SGD")
    assert f"SGD {worst:.1%}" in recipe(outputs)
    assert worst > 0.1


@pytest.mark.parametrize(
    "change",
    [{"points": 3}, {"points": []}, {"points": [{}]}, {"settings": None}, {"evidence": []}, {"flat_rule": None, "points": [1]}],
)
def test_a_file_with_the_right_name_and_wrong_insides_is_refused(outputs, change):
    path = outputs / "accum-curve.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if change == {"points": []}:
        assert "Throughput" in recipe(outputs)  # nothing to show is no error
        return
    with pytest.raises(InvalidArgument, match="is not what its schema says"):
        recipe(outputs)


def test_deep_or_broken_json_is_refused(outputs):
    for text in ("[" * 100_000, "{", "null", "[]", '{"schema": "proof.v1"}'):
        (outputs / "proof.json").write_text(text)
        with pytest.raises(InvalidArgument):
            recipe(outputs)


def test_text_from_a_file_stays_one_line_of_text(outputs):
    path = outputs / "accum-curve.json"
    curve = json.loads(path.read_text())
    curve["settings"]["task"] = "x\n# heading\n<script>"
    curve["evidence"]["command"] = "a`b\n\n# heading"
    path.write_text(json.dumps(curve))
    page = recipe(outputs)
    assert "\n# heading" not in page
    assert "<script>" not in page


def test_every_wrong_loop_has_its_line_among_the_pitfalls(outputs):
    page = recipe(outputs)
    assert all(f"| `{kind}` |" in page for kind in WRONG)


def test_a_verdict_needs_rows(outputs):
    proof = {"schema": "proof.v1", "equal": "false", "comparisons": []}
    proof["evidence"] = json.loads((outputs / "accum-curve.json").read_text())["evidence"]
    write_json(outputs / "proof.json", proof)
    assert "NOT every split" in recipe(outputs)
