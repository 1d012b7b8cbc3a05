"""anatomy, stretch and devices as a person meets them."""

import json
import pickle

import jsonschema
import pytest
import torch.cuda._memory_viz as viz


def test_anatomy_of_a_users_model_adds_up_and_writes_what_it_says(fullbatch, schema):
    arguments = ("anatomy", "--task", "mine.py:make", "--micro-batch", "4", "--accumulate", "16", "--device", "rtx4090")
    done = fullbatch(*arguments, "--save-snapshot", "x.pickle", "--json", "copy.json")
    assert done.returncode == 0, done.stderr
    assert "fits: " in done.stdout
    assert "predicted on NVIDIA GeForce RTX 4090" in done.stdout
    written = json.loads((fullbatch.folder / "outputs" / "anatomy.json").read_text())
    jsonschema.validate(written, schema("anatomy.v1"))
    assert written == json.loads((fullbatch.folder / "copy.json").read_text())
    assert sum(written["parts"].values()) == written["peak_reserved_bytes"]
    assert (fullbatch.folder / "outputs" / "anatomy.png").read_bytes().startswith(b"\x89PNG")
    snapshot = pickle.loads((fullbatch.folder / "x.pickle").read_bytes())
    assert "total_reserved" in viz.segsum(snapshot)
    assert "TOTAL MEM" in viz.trace(snapshot)
    assert len(viz.trace_plot(snapshot)) > 10_000


def test_a_run_that_does_not_fit_exits_1_and_says_where(fullbatch):
    done = fullbatch("anatomy", "--task", "mine.py:make", "--device", "4MiB", "--json", "-")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["verdict"]["fits"] is False
    assert found["verdict"]["failure"]["stage"] == "forward"  # cuBLAS asks for its workspace
    assert "DOES NOT FIT" in done.stderr
    assert "runs out in update 1, micro-batch 1 forward: cuBLAS workspace (forward) asks for 8.1 MiB" in done.stderr


def test_stretch_tells_linear_from_quadratic_on_a_users_model(fullbatch, schema):
    arguments = ("stretch", "--task", "mine.py:tokens", "--seq-lens", "256,1024,4096", "--attention", "eager,sdpa")
    done = fullbatch(*arguments, "--device", "128MiB")
    assert done.returncode == 0, done.stderr
    written = json.loads((fullbatch.folder / "outputs" / "stretch.json").read_text())
    jsonschema.validate(written, schema("stretch.v1"))
    assert [(point["attention"], point["seq_len"]) for point in written["points"]] == [
        (kind, length) for kind in ("eager", "sdpa") for length in (256, 1024, 4096)
    ]
    assert [(one["attention"], one["order"]) for one in written["growth"]] == [("eager", "quadratic"), ("sdpa", "linear")]
    assert [one["longest_that_fits"] for one in written["growth"]] == [1024, 4096]
    assert (fullbatch.folder / "outputs" / "stretch.png").read_bytes().startswith(b"\x89PNG")


def test_devices_lists_them_all(fullbatch, schema):
    done = fullbatch("devices", "--json", "-")
    assert done.returncode == 0
    assert "rtx4090" in done.stderr
    jsonschema.validate(json.loads(done.stdout), schema("devices.v1"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("anatomy", "--device", "rtx409"), "did you mean rtx4090?"),
        (("anatomy", "--device", "0GiB"), "0GiB"),
        (("anatomy", "--task", "qwen2.5-1.5"), "did you mean"),
        (("anatomy", "--dtype", "fp8"), "fp8"),
        (("anatomy", "--alloc-conf", "max_split_size:1"), "did you mean max_split_size_mb?"),
        (("anatomy", "--outputs-live", "ever"), "--outputs-live ever: must be one of"),
        (("anatomy", "--micro-batch", "0"), "--micro-batch"),
        (("anatomy", "--micro-batch", "99999999999999999999"), "--micro-batch"),
        (("anatomy", "--save-snapshot", "mine.py/x"), "cannot be written"),
        (("anatomy", "--max-grad-norm", "0"), "max_grad_norm"),
        (("stretch", "--task", "mine.py:tokens", "--seq-lens", "64,32"), "ascend"),
        (("stretch", "--task", "mine.py:tokens", "--seq-lens", "a"), "--seq-lens a: must be whole numbers"),
        (("stretch", "--task", "mine.py:tokens", "--attention", "fast"), "fast"),
    ],
)
def test_wrong_use_exits_2_with_a_way_out(fullbatch, arguments, told):
    done = fullbatch(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_task_that_depends_on_values_is_refused_with_its_own_line(fullbatch):
    done = fullbatch("anatomy", "--task", "mine.py:picky")
    assert done.returncode == 2
    assert "of mine.py: return model(x[x > 0])" in done.stderr
    assert "Traceback" not in done.stderr
