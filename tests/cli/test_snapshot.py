"""``fullbatch snapshot`` as a person meets it, and as a stranger's file does."""

import json
import os
import pickle
import sys
from pathlib import Path

import jsonschema
import pytest

from fullbatch import cli
from fullbatch.memory.allocator import CachingAllocator, OutOfMemory
from fullbatch.memory.snapshot import allocator_snapshot, write_snapshot
from fullbatch.memory.timeline import Owner
from fullbatch.units import MiB


def snapshot():
    """Of a run that a device of 160 MiB refused 80 MiB, with 60 MiB free in three pieces of one segment."""
    history = []
    allocator = CachingAllocator(160 * MiB, history=history)
    allocator.free(allocator.malloc(100 * MiB))
    pieces = [allocator.malloc(20 * MiB, tag=Owner("activations", "h", "aten.mm", f"net.py:{n}")) for n in range(5)]
    for piece in pieces[::2]:
        allocator.free(piece)
    with pytest.raises(OutOfMemory):
        allocator.malloc(80 * MiB)
    return allocator_snapshot(allocator, pieces[1::2], history)


@pytest.fixture
def main(tmp_path, monkeypatch, capsys):
    """A function that runs the command line in this process, in a folder of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fullbatch", *arguments])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        captured = capsys.readouterr()
        return exited.value.code, captured.out, captured.err

    return run


def test_a_snapshot_is_taken_apart_and_replayed(main, schema):
    write_snapshot(Path("oom.pickle"), snapshot())
    code, out, err = main("snapshot", "oom.pickle", "--json", "copy.json")
    assert code == 0, err
    written = json.loads(Path("outputs/snapshot.json").read_text())
    jsonschema.validate(written, schema("snapshot.v1"))
    assert written == json.loads(Path("copy.json").read_text())
    (device,) = written["devices"]
    assert device["reserved_bytes"] == device["allocated_bytes"] + device["unusable_bytes"]
    assert device["inactive_split_bytes"] == 60 * MiB
    assert device["largest_free_bytes"] == 20 * MiB
    assert "OUT OF MEMORY" in out
    assert "RUNS OUT at entry" in out
    (saved,) = (line for line in out.splitlines() if "would NOT have run out" in line)
    assert saved.startswith("expandable_segments:True")
    assert "net.py:1 aten.mm" in out
    assert Path("outputs/snapshot.png").read_bytes().startswith(b"\x89PNG")


def test_it_is_replayed_under_the_settings_and_on_the_device_asked_for(main, schema):
    Path("oom.pickle").write_bytes(pickle.dumps(snapshot()))
    code, out, err = main(
        "snapshot", "oom.pickle", "--alloc-conf", "expandable_segments:True", "--device", "1GiB", "--json", "-"
    )
    assert code == 0, err
    found = json.loads(out)
    jsonschema.validate(found, schema("snapshot.v1"))
    past = found["devices"][0]["past"]
    assert [(one["settings"], one["replay"]["shortage"]) for one in past["alternatives"]] == [
        ("as recorded", None),
        ("expandable_segments:True", None),
    ]
    assert main("snapshot", "oom.pickle", "--device", "90MiB")[0] == 1


def test_a_snapshot_without_a_history_shows_what_is_held(main):
    Path("x.pickle").write_bytes(pickle.dumps(snapshot()["segments"]))
    code, out, err = main("snapshot", "x.pickle")
    assert code == 0, err
    assert "net.py:1 aten.mm" in out
    assert "call torch.cuda.memory._record_memory_history() before the run" in out
    assert err.strip() == "wrote outputs/snapshot.json"


class Hostile:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_file_does_not_run(main, tmp_path, protocol):
    data = {**snapshot(), "segments": [Hostile()]}
    (tmp_path / "bad.pickle").write_bytes(pickle.dumps(data, protocol))
    code, out, err = main("snapshot", "bad.pickle")
    assert code == 2
    assert err.startswith("error: bad.pickle: ")
    assert "\nhint: " in err
    assert "Traceback" not in err
    assert out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.pickle"]


def test_a_file_that_is_cut_off_says_so(main, tmp_path):
    data = pickle.dumps(snapshot())
    for part in range(20):
        (tmp_path / "cut.pickle").write_bytes(data[: len(data) * part // 20])
        code, _, err = main("snapshot", "cut.pickle")
        assert code == 2
        assert ("is cut off after" if part else "it is empty") in err
        assert "\nhint: " in err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"step 1: loss 2.5\n", "is no memory snapshot: it begins with b'step 1: loss'"),
        (b"PK\x03\x04", "it is a zip file, as torch.save writes"),
        (pickle.dumps([1, 2]), "segments[0] is 1: must be a dict"),
        (pickle.dumps("text"), "it is 'text': must be a dict"),
        (pickle.dumps({"model": {}}), "segments is nothing: must be a list"),
        (None, "gone.pickle: cannot be read: No such file"),
    ],
)
def test_what_is_no_snapshot_exits_2_with_a_hint(main, tmp_path, content, said):
    if content is not None:
        (tmp_path / "gone.pickle").write_bytes(content)
    code, out, err = main("snapshot", "gone.pickle")
    assert (code, out) == (2, "")
    assert said in err
    assert "\nhint: torch.cuda.memory._dump_snapshot(PATH) writes one" in err


def test_a_directory_a_device_and_a_giant_are_refused(main, tmp_path):
    (tmp_path / "dir.pickle").mkdir()
    with Path("giant.pickle").open("wb") as stream:
        stream.truncate(2**40)
    for name, said in (("dir.pickle", "must be a file"), ("/dev/zero", "must be a file"), ("giant.pickle", "has 1,024.00 GiB")):
        code, _, err = main("snapshot", name)
        assert code == 2
        assert said in err
        assert "\nhint: " in err


@pytest.mark.parametrize(
    "arguments",
    [("--alloc-conf", "expandable:True"), ("--device", "rtx409"), ("--alloc-conf", "max_split_size_mb:1"), ("--top", "0")],
)
def test_wrong_options_exit_2(main, arguments):
    Path("x.pickle").write_bytes(pickle.dumps(snapshot()))
    code, _, err = main("snapshot", "x.pickle", *arguments)
    assert code == 2
    assert arguments[0] in err
