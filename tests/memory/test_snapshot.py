"""A snapshot that is read back says what the allocator went through, and its replay goes through it again."""

import copy
import pickle
from contextlib import suppress

import pytest
import torch
import torch.cuda._memory_viz as viz
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbatch.errors import SnapshotError
from fullbatch.memory import anatomy, find_card
from fullbatch.memory import snapshot_file as module
from fullbatch.memory.allocator import CachingAllocator, OutOfMemory
from fullbatch.memory.dissection import dissect
from fullbatch.memory.history import History
from fullbatch.memory.holders import BEFORE, source_line
from fullbatch.memory.recorded import Frame
from fullbatch.memory.replay import recorded_limit, replay
from fullbatch.memory.settings import AllocatorSettings, parse_settings
from fullbatch.memory.snapshot import allocator_snapshot, predicted_snapshot, write_snapshot
from fullbatch.memory.snapshot_file import check_snapshot, read_snapshot
from fullbatch.memory.timeline import Owner
from fullbatch.units import GiB, MiB

CONFS = ("", "expandable_segments:True", "max_split_size_mb:20", "roundup_power2_divisions:8")


def ran(program, conf=""):
    """``program`` through the allocator: itself, its live blocks, its history, and the state after each entry of that.

    A step: (size, which, stream); size ``None`` empties the cache, 0 frees.
    """
    history, live, moments = [], [], [({}, 0, 0)]
    allocator = CachingAllocator(None, parse_settings(conf), history)
    for number, (size, which, stream) in enumerate(program):
        if size is None:
            allocator.empty_cache()
        elif size or not live:
            block = allocator.malloc(size + 1, stream, Owner("workspace", "", "aten.mm", f"a.py:{number}"))
            live.append(block)
        else:
            allocator.free(live.pop(which % len(live)))
        state = {block.address: (block.size, block.requested, block.pool.stream) for block in live}
        moments += [(state, allocator.allocated_bytes, allocator.reserved_bytes)] * (len(history) + 1 - len(moments))
    return allocator, live, history, moments


sizes = st.one_of(st.none(), st.just(0), st.integers(0, 4000), st.integers(0, 60 * MiB))
programs = st.lists(st.tuples(sizes, st.integers(0, 99), st.sampled_from([0, 0, 7])), max_size=60)


@given(programs, st.sampled_from(CONFS))
@settings(deadline=None)
def test_a_history_replayed_under_its_own_settings_takes_every_step_again(program, conf):
    allocator, live, history, _ = ran(program, conf)
    snapshot = check_snapshot(allocator_snapshot(allocator, live, history))
    calls = []
    played = replay(History(snapshot, 0), snapshot.settings, calls=calls)
    assert [call[:4] for call in calls] == [call[:4] for call in history]  # addresses too
    assert (played.peak_allocated_bytes, played.peak_reserved_bytes) == (
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
    )


@given(programs, st.sampled_from(CONFS), st.integers(0, 200))
@settings(deadline=None)
def test_the_start_of_a_history_that_was_cut_is_rebuilt_to_the_byte(program, conf, cut):
    allocator, live, history, moments = ran(program, conf)
    cut %= len(history) + 1
    data = allocator_snapshot(allocator, live, history)
    entries = data["device_traces"][0]
    while sum(entry["action"] != "free_requested" for entry in entries) > len(history) - cut:
        del entries[0]
    found = History(check_snapshot(data), 0)
    assert found.contradictions == 0
    if cut == 0 or history[cut - 1].action in ("alloc", "free_completed"):  # not inside of a call
        state, allocated, reserved = moments[cut]
        assert {address: block[:3] for address, block in found.before.items()} == state
        assert (sum(block.size for block in found.before.values()), found.before_reserved_bytes) == (allocated, reserved)
    *_, end = found.walk()
    assert {address: block[:2] for address, block in end.live.items()} == {b.address: (b.size, b.requested) for b in live}
    assert (end.allocated_bytes, end.reserved_bytes) == (allocator.allocated_bytes, allocator.reserved_bytes)


@pytest.fixture(scope="module")
def prediction():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.GELU(), torch.nn.Linear(900, 700))
    return anatomy(
        model,
        lambda model, x: model(x).square().mean(),
        torch.randn(64, 700),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        micro_batches=2,
    )


@pytest.fixture
def file(prediction, tmp_path):
    write_snapshot(tmp_path / "x.pickle", predicted_snapshot(prediction.timeline))
    return tmp_path / "x.pickle"


def test_a_predicted_snapshot_that_is_read_back_has_the_peaks_of_the_prediction(prediction, file):
    found = dissect(read_snapshot(file), file="x.pickle")
    (device,) = found.devices
    assert device.past.peak_allocated_bytes == prediction.peak_allocated_bytes
    assert device.past.peak_reserved_bytes == prediction.peak_reserved_bytes
    assert device.past.alternatives[0].replay.peak_reserved_bytes == prediction.peak_reserved_bytes
    assert device.past.alternatives[0].replay.peak_allocated_bytes == prediction.peak_allocated_bytes
    assert sum(one.bytes for one in device.past.holders) == prediction.peak_allocated_bytes
    lines = {line for line in prediction.by("line") if line.startswith(__file__.rpartition("/")[2])}
    assert lines <= {one.line.rpartition(" ")[0] for one in device.past.holders}
    assert device.reserved_bytes == device.allocated_bytes + device.unusable_bytes
    assert device.allocated_bytes == device.requested_bytes + device.rounding_bytes
    assert device.notes == []


def test_what_we_read_is_what_pytorchs_viewer_reads(file):
    data = pickle.loads(file.read_bytes())
    found = read_snapshot(file)
    assert f"segments: {len(found.segments)}\n" in viz.segsum(data)
    assert f"{len(found.traces[0])} entries\n" in viz.trace(data)
    assert len(viz.trace_plot(data)) > 10_000
    assert len(viz.segment_plot(data)) > 10_000


def test_settings_of_the_record_are_read():
    given = AllocatorSettings(
        expandable_segments=True,
        max_split_size_bytes=64 * MiB,
        garbage_collection_threshold=0.5,
        roundup_power2_divisions=(1, 2, 4, 8) * 4,
    )
    assert check_snapshot(allocator_snapshot(CachingAllocator(settings=given), [], [])).settings == given


def failed(limit):
    """A record of a run that fails: three of six 10 MiB segments went back to the driver, and 35 MiB were asked for."""
    history = []
    allocator = CachingAllocator(limit, None, history)
    blocks = [allocator.malloc(10 * MiB, tag=Owner("activations", "", "aten.mm", f"a.py:{n}")) for n in range(6)]
    for block in blocks[::2]:
        allocator.free(block)
    with suppress(OutOfMemory):
        blocks.append(allocator.malloc(35 * MiB))
    return allocator, blocks[1:6:2], history


def test_an_out_of_memory_error_is_shown_with_who_held_memory():
    allocator, live, history = failed(62 * MiB)
    (device,) = dissect(check_snapshot(allocator_snapshot(allocator, live, history)), file="x").devices
    (event,) = device.past.ran_out
    assert event.requested_bytes == 35 * MiB
    assert event.reserved_bytes == 30 * MiB
    assert event.device_free_bytes == 32 * MiB
    assert [(one.line, one.bytes) for one in event.holders] == [(f"a.py:{n} aten.mm", 10 * MiB) for n in (1, 3, 5)]
    assert device.past.limit_bytes == 62 * MiB
    assert device.past.emptied == 1
    assert device.past.alternatives[0].replay.shortage.requested_bytes == 35 * MiB


def test_a_replay_says_which_settings_would_have_saved_the_run():
    """Pieces of one segment cannot go back to the driver, pages of an expandable one can."""
    history = []
    allocator = CachingAllocator(160 * MiB, None, history)
    filled = [allocator.malloc(100 * MiB)]
    allocator.free(filled.pop())
    pieces = [allocator.malloc(20 * MiB) for _ in range(5)]
    for piece in pieces[::2]:
        allocator.free(piece)
    with pytest.raises(OutOfMemory):
        allocator.malloc(80 * MiB)
    snapshot = check_snapshot(allocator_snapshot(allocator, pieces[1::2], history))
    (device,) = dissect(snapshot, file="x", alloc_confs=["expandable_segments:True"]).devices
    recorded, expandable = (one.replay for one in device.past.alternatives)
    assert recorded.shortage.entry == device.past.entries
    assert expandable.shortage is None
    assert expandable.rescued == 1
    (device,) = dissect(snapshot, file="x", card=find_card("2GiB")).devices
    assert [one.replay.shortage for one in device.past.alternatives] == [None] * 4


def test_the_limit_of_a_record_is_where_it_failed():
    allocator, live, history = failed(62 * MiB)
    data = allocator_snapshot(allocator, live, history)
    assert recorded_limit(History(check_snapshot(data), 0)) == 62 * MiB
    data["device_traces"][0][-1]["device_free"] = 10 * GiB  # free on the device, but the process may not have it
    assert recorded_limit(History(check_snapshot(data), 0)) == 30 * MiB + 36 * MiB - 1
    del data["device_traces"][0][-1]
    assert recorded_limit(History(check_snapshot(data), 0)) is None


def test_the_cache_that_a_record_emptied_for_want_of_memory_stays_where_there_is_enough():
    allocator, live, history = failed(62 * MiB)
    found = History(check_snapshot(allocator_snapshot(allocator, live, history)), 0)
    assert replay(found, found.settings, 2 * GiB).reserved_bytes == 6 * 10 * MiB + 36 * MiB


def test_a_cached_segment_that_is_whole_is_unusable_but_not_split():
    allocator, live, history, _ = ran([(12 * MiB, 0, 0), (0, 0, 0), (5 * MiB, 0, 0), (13 * MiB, 0, 0), (0, 1, 0)])
    (device,) = dissect(check_snapshot(allocator_snapshot(allocator, live, history)), file="x").devices
    free = sum(block.size for block in allocator.free_blocks())
    whole = sum(block.size for block in allocator.free_blocks() if block.previous is None and block.next is None)
    assert 0 < whole < free == device.unusable_bytes
    assert device.inactive_split_bytes == free - whole


def test_blocks_from_before_the_record_are_told_as_such():
    allocator, live, history, _ = ran([(5 * MiB, 0, 0), (3 * MiB, 0, 0), (0, 0, 0)])
    data = allocator_snapshot(allocator, live, history)
    del data["device_traces"][0][:-2]  # free_requested and free_completed are left
    (device,) = dissect(check_snapshot(data), file="x").devices
    assert {one.line: one.blocks for one in device.past.holders} == {BEFORE: 1, "a.py:1 aten.mm": 1}
    assert "2 blocks (" in device.notes[0]


def test_a_record_that_ended_before_the_snapshot_is_told_as_such():
    allocator, live, history, _ = ran([(5 * MiB, 0, 0), (3 * MiB, 0, 0)])
    allocator.free(live.pop())
    (device,) = dissect(check_snapshot(allocator_snapshot(allocator, live, history[:-1])), file="x").devices
    assert device.notes == ["1 entry contradicts the segments: recording ended before the snapshot was taken"]


def test_the_line_shown_is_the_innermost_of_the_user():
    torch_frame = Frame("forward", "/x/lib/site-packages/torch/nn/modules/linear.py", 5)
    cpp, user = Frame("at::empty", "TensorFactories.cpp", 9), Frame("train", "/x/train.py", 12)
    assert source_line((cpp, torch_frame, user, Frame("main", "/x/main.py", 1))) == "/x/train.py:12 train"
    assert source_line((cpp, torch_frame)) == "/x/lib/site-packages/torch/nn/modules/linear.py:5 forward"
    assert source_line((cpp,)) == "TensorFactories.cpp:9 at::empty"
    assert source_line(()) == "(no stack was recorded)"


OLD = [{"address": 4096, "total_size": 1024, "stream": 0, "device": 1, "blocks": [
    {"size": 512, "state": "active_pending_free",
     "history": [{"addr": 4096, "real_size": 500, "frames": [{"name": "f", "filename": "a.py", "line": 3}]}]},
    {"size": 512, "state": "inactive"}]}]  # fmt: skip


def test_formats_of_older_versions_are_read():
    for data in (OLD, {"segments": OLD}):
        (device,) = dissect(check_snapshot(copy.deepcopy(data)), file="x").devices
        assert (device.device, device.allocated_bytes, device.rounding_bytes, device.past) == (1, 512, 12, None)
        assert device.holders[0].line == "a.py:3 f"
        assert "no history" in device.notes[0]


def test_names_cannot_steer_a_terminal():
    data = copy.deepcopy(OLD)
    data[0]["blocks"][0]["history"][0]["frames"][0]["name"] = "\x1b[2Jf\n\ud800"
    assert check_snapshot(data).segments[0].blocks[0].frames[0].name == "?[2Jf??"


GOOD = {"segments": [{"address": 0, "total_size": 512, "stream": 0, "blocks": [
            {"address": 0, "size": 512, "requested_size": 4, "state": "active_allocated",
             "frames": [{"name": "f", "filename": "a.py", "line": 1}]}]}],
        "device_traces": [[{"action": "alloc", "addr": 0, "size": 4, "stream": 0}]]}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ([], 3, "it is 3: must be a dict"),
        (["segments"], None, "segments is nothing: must be a list"),
        (["segments", 0], 5, "segments[0] is 5: must be a dict"),
        (["segments", 0, "total_size"], 513, "segments[0].total_size is 513: must be the sum of its blocks, 512"),
        (["segments", 0, "address"], 2**63, f"segments[0].address is {2**63}: must be a whole number from 0 to 2**63 - 1"),
        (["segments", 0, "blocks", 0, "size"], -5, "segments[0].blocks[0].size is -5: must be a whole number from 1"),
        (["segments", 0, "blocks", 0, "size"], True, "segments[0].blocks[0].size is True: must be a whole number"),
        (["segments", 0, "blocks", 0, "size"], 512.0, "segments[0].blocks[0].size is 512.0: must be a whole number"),
        (["segments", 0, "blocks", 0, "address"], 8, "segments[0].blocks[0].address is 8: must be where the block before it"),
        (["segments", 0, "blocks", 0, "requested_size"], 513, "requested_size is 513: must not be more than size, 512"),
        (["segments", 0, "blocks", 0, "state"], "gone", "segments[0].blocks[0].state is 'gone': must be one of active_"),
        (["segments", 0, "blocks", 0, "state"], [], "segments[0].blocks[0].state is a list: must be one of active_allocated"),
        (["segments", 0, "blocks", 0, "frames"], "x" * 999, "segments[0].blocks[0].frames is 'xxx"),
        (["segments", 0, "blocks", 0, "frames", 0, "line"], "1", "segments[0].blocks[0].frames[0].line is '1': must be"),
        (["device_traces"], {}, "device_traces is a dict: must be a list"),
        (["device_traces", 0], None, "device_traces[0] is nothing: must be a list"),
        (["device_traces", 0, 0], [], "device_traces[0][0] is a list: must be a dict"),
        (["device_traces", 0, 0, "action"], 1, "device_traces[0][0].action is 1: must be text"),
        (["device_traces", 0, 0, "action"], "oom", "device_traces[0][0].device_free is nothing: must be a whole number"),
        (["device_traces", 0, 0, "size"], 10**100, "device_traces[0][0].size is 1000"),
    ],
)  # fmt: skip
def test_an_error_names_the_place_in_the_snapshot(path, value, said):
    data = copy.deepcopy(GOOD)
    check_snapshot(data)
    place = data
    for key in path[:-1]:
        place = place[key]
    if path:
        place[path[-1]] = value
    with pytest.raises(SnapshotError, match=r"^x\.pickle: ") as caught:
        check_snapshot(data if path else value, "x.pickle")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


def test_segments_that_overlap_are_refused():
    with pytest.raises(SnapshotError, match="must not overlap"):
        check_snapshot({"segments": GOOD["segments"] * 2})


def test_lists_that_are_named_many_times_over_are_not_walked_for_ever(monkeypatch):
    monkeypatch.setattr(module, "MAX_ROWS", 5000)
    trace = [{"action": "alloc", "addr": 0, "size": 4}] * 100
    for data in ({"segments": [], "device_traces": [trace] * 100}, [{**OLD[0], "blocks": OLD[0]["blocks"] * 3000}]):
        with pytest.raises(SnapshotError, match="has more than 5,000 blocks, entries and frames"):
            check_snapshot(data)


@given(st.integers(0, 10**9), st.integers(0, 255), st.sampled_from(CONFS))
@settings(deadline=None, max_examples=300)
def test_a_snapshot_with_a_wrong_byte_is_read_or_refused(at, byte, conf):
    allocator, live, history, _ = ran([(5 * MiB, 0, 0), (300, 0, 0), (0, 0, 0), (None, 0, 0), (9 * MiB, 0, 7)], conf)
    data = bytearray(pickle.dumps(allocator_snapshot(allocator, live, history), 4))
    data[at % len(data)] = byte
    with suppress(SnapshotError):
        dissect(check_snapshot(module.unpickle(bytes(data), "x"), "x"), file="x").to_json()
