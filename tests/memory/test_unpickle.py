"""Nothing in a stranger's pickle runs, and none takes the machine with it."""

import os
import pickle
import pickletools
import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullbatch.errors import SnapshotError
from fullbatch.memory import unpickle as module
from fullbatch.memory.unpickle import unpickle

DATA = {
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
    "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "MARK", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MEMOIZE", "FRAME", "PROTO", "STOP",
}  # fmt: skip

scalars = st.none() | st.booleans() | st.integers(-(2**900), 2**900) | st.floats(allow_nan=False) | st.text(max_size=300)
plain_data = st.recursive(
    scalars,
    lambda part: st.lists(part) | st.dictionaries(st.text(), part) | st.lists(part).map(tuple),
    max_leaves=40,
)


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@given(plain_data, st.integers(2, 5))
def test_plain_data_comes_out_as_pickle_gives_it(value, protocol):
    assert unpickle(pickle.dumps(value, protocol), "x") == value


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("wrap", [lambda bad: bad, lambda bad: {"segments": [bad], "device_traces": []}])
def test_a_command_in_a_pickle_does_not_run(tmp_path, protocol, wrap):
    data = pickle.dumps(wrap(Hostile(tmp_path / "ran")), protocol)
    with pytest.raises(SnapshotError) as caught:
        unpickle(data, "x.pickle")
    assert not (tmp_path / "ran").exists()
    if protocol >= 2:
        assert f"asks Python for '{os.system.__module__}.system'" in str(caught.value)
        assert "nothing in it was run" in caught.value.hint
    pickle.loads(data)
    assert (tmp_path / "ran").exists()  # it was a live one


@pytest.mark.parametrize("operation", [one for one in pickletools.opcodes if one.name not in DATA], ids=lambda one: one.name)
def test_every_operation_that_makes_no_plain_data_is_refused(operation):
    for before in (b"", b"}", b"]}", b"(}", b"(\x8c\x02os\x8c\x06system"):
        data = b"\x80\x04" + before + operation.code.encode("latin-1") + b"\x00\x00\x00\x00os\nsystem\n" + bytes(300) + b"."
        with pytest.raises(SnapshotError, match=r"x: byte \d+: (asks Python|operation 0x\w\w does not belong)"):
            unpickle(data, "x")


@given(st.binary(max_size=80))
def test_any_bytes_give_plain_data_or_an_error(noise):
    with suppress(SnapshotError):
        unpickle(b"\x80\x04" + noise + b".", "x")


def test_a_pickle_that_is_cut_off_anywhere_says_so():
    data = pickle.dumps({"a": [1, 300, 70_000, 2**40, 1.5, None, "text", ("x" * 300,)] * 3, "b": {}})
    for end in range(1, len(data)):
        with pytest.raises(SnapshotError, match="is cut off after"):
            unpickle(data[:end], "x")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is empty"),
        (b"hello", "it begins with b'hello'"),
        (b"PK\x03\x04....", "torch.save"),
        (b"\x1f\x8b....", "compressed"),
        (pickle.dumps([1], 0), "it begins with"),
        (b"\x80\x09N.", "protocol 9"),
        (b"\x80\x04a.", "damaged"),
        (b"\x80\x04h\x07.", "damaged"),
        (b"\x80\x04\x8c\x01\xff.", "damaged"),
        (b"\x80\x04NNa.", "no list"),
        (b"\x80\x04NNNs.", "no dict"),
        (b"\x80\x04}(K\x01K\x02u.", "keys of text"),
        (b"\x80\x04}(\x8c\x01ku.", "no dict with keys"),
    ],
)
def test_what_is_no_pickle_of_plain_data_is_named(data, said):
    with pytest.raises(SnapshotError, match=r"^x: ") as caught:
        unpickle(data, "x")
    assert said in str(caught.value)
    assert caught.value.hint


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "data",
    [
        b"X" + struct.pack("<I", 2**32 - 1) + b"a.",  # a text of 4 GB
        b"\x8a\xff" + b"\x01" * 9 + b".",  # a number of more bytes than there are
        b"N" + b"r" + struct.pack("<I", 2**32 - 1) + b"(",  # a table of 2**32 entries
        b")" + b"2\x86" * 200 + b"}\x8c\x01k.",  # DUP
        b")\x940" + b"".join(b"h" + bytes([n]) * 1 + b"h" + bytes([n]) + b"\x86\x940" for n in range(200)) + b".",  # POP
        b"}(" + b")\x94" + b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x94" for n in range(250)) + b"Nu.",
        b"}" + b")\x94" + b"".join(b"h" + bytes([n]) + b"\x86\x94" for n in range(250)) + b"Ns.",  # a key with 2**250 leaves
    ],
)  # fmt: skip
def test_a_small_file_that_asks_for_endless_memory_or_time_is_refused_at_once(data):
    with pytest.raises(SnapshotError):
        unpickle(b"\x80\x04" + data, "x")


def test_a_million_lists_in_one_another_are_read_without_recursion():
    depth, found = 0, unpickle(b"\x80\x04" + b"]" * 10**6 + b"a" * (10**6 - 1) + b".", "x")
    while found:
        depth, found = depth + 1, found[0]
    assert depth == 10**6 - 1


def test_the_number_of_objects_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_OBJECTS", 100)
    for one in (b"]", b"}", b")", b"(", b"\x8c\x02ab", b"N\x85"):
        with pytest.raises(SnapshotError, match="more than 100 objects"):
            unpickle(b"\x80\x04" + one * 200 + b".", "x")
