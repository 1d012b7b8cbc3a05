"""anatomy and stretch with --measure: real runs on the CPU, beside their prediction."""

import json

import jsonschema
import pytest


def test_anatomy_measures_beside_its_prediction(fullbatch, schema):
    done = fullbatch("anatomy", "--task", "text", "--micro-batch", "2", "--accumulate", "5", "--measure", "--json", "-")
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    jsonschema.validate(written, schema("anatomy.v1"))
    jsonschema.validate(written["measured"], schema("measured.v1"))
    assert written["measured"] == json.loads((fullbatch.folder / "outputs" / "measured.json").read_text())
    assert (fullbatch.folder / "outputs" / "measured.png").read_bytes().startswith(b"\x89PNG")
    for stage in written["measured"]["stages"]:
        assert stage["predicted_peak_allocated_bytes"] == pytest.approx(stage["measured_peak_allocated_bytes"], rel=0.01)
    assert "peak, predicted" in done.stderr
    assert "peak, measured" in done.stderr
    assert "micro-batches 4..5 of each update are in the JSON" in done.stderr
    assert "predicted on the kernels of the CPU" in done.stderr
    assert "measured on cpu" in done.stderr


def test_stretch_measures_until_memory_runs_out(fullbatch, schema):
    arguments = ("stretch", "--task", "mine.py:tokens", "--seq-lens", "128,256,512", "--micro-batch", "4", "--measure")
    done = fullbatch(*arguments, "--attention", "eager,sdpa", "--device", "20MiB")
    assert done.returncode == 1, done.stderr
    written = json.loads((fullbatch.folder / "outputs" / "measured-stretch.json").read_text())
    jsonschema.validate(written, schema("measured-stretch.v1"))
    ends = [(point["attention"], point["seq_len"], bool(point["ran_out_in"])) for point in written["points"]]
    assert ends == [
        ("eager", 128, False), ("eager", 256, False), ("eager", 512, True),
        ("sdpa", 128, False), ("sdpa", 256, False), ("sdpa", 512, False),
    ]  # fmt: skip
    for point in written["points"]:
        if not point["ran_out_in"]:
            assert point["predicted_peak_allocated_bytes"] == pytest.approx(point["measured_peak_allocated_bytes"], rel=0.01)
    assert "eager: 256 tokens are the longest that ran" in done.stdout
    assert "RAN OUT in forward" in done.stdout
    assert "cache: not emptied between lengths" in done.stdout
    assert (fullbatch.folder / "outputs" / "measured-stretch.png").exists()


def test_what_earlier_lengths_leave_in_the_cache_is_seen_unless_it_is_emptied(fullbatch):
    arguments = ("stretch", "--task", "mine.py:tokens", "--seq-lens", "512,520,528", "--attention", "eager", "--measure",
                 "--micro-batch", "4", "--device", "1GiB", "--json", "-")  # fmt: skip
    kept, emptied = (json.loads(fullbatch(*arguments, *more).stdout)["points"] for more in ((), ("--empty-cache",)))
    assert kept[0] == emptied[0]
    assert kept[2]["measured_peak_allocated_bytes"] == emptied[2]["measured_peak_allocated_bytes"]
    assert kept[2]["measured_peak_reserved_bytes"] > emptied[2]["measured_peak_reserved_bytes"]
    assert emptied[2]["measured_peak_reserved_bytes"] == emptied[2]["predicted_peak_reserved_bytes"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("anatomy", "--weights"), "--weights: only a measurement takes it"),
        (("anatomy", "--on", "cpu"), "--on: only a measurement takes it"),
        (("stretch", "--empty-cache"), "--empty-cache: only a measurement takes it"),
        (("anatomy", "--measure", "--on", "musa"), "torch_musa"),
        (("anatomy", "--measure", "--on", "abacus"), "abacus"),
        (("anatomy", "--measure", "--on", "cpu", "--record", "x.pickle"), "--record x.pickle: the CPU keeps no history"),
        (("anatomy", "--task", "text", "--measure", "--optimizer", "adamw-8bit"), "adamw-8bit"),
        (("stretch", "--task", "mine.py:tokens", "--measure", "--seq-lens", "64,32"), "ascend"),
        (("stretch", "--task", "mine.py:tokens", "--measure", "--device", "much"), "--device"),
    ],
)
def test_wrong_use_of_measure_exits_2_with_a_way_out(fullbatch, arguments, told):
    done = fullbatch(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert told in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
