"""Reads the plain data in a pickle that comes from a stranger.

Not Python's unpickler with parts forbidden, but a machine that knows 30 operations and no other: those that make
numbers, text, lists, tuples and dicts. Nothing in it looks a name up or calls what it finds, so nothing in the
file can run. What a file can still do is to ask for more memory or time than it has bytes. Against that: keys are
text (a key of nested tuples takes for ever to hash, chosen numbers collide), a length is never believed before the
bytes are there, the memo is a dict (no table as large as an index says), and the number of objects is bounded.

Source of the operations: Lib/pickletools.py (CPython 3.14). ``pickle`` writes plain data with them in protocols 2 to
5, and so does torch/csrc/jit/serialization/pickler.cpp, which PyTorch uses from C++.
"""

from __future__ import annotations

import struct
from typing import Any, NoReturn

from fullbatch.errors import SnapshotError

MAX_OBJECTS = 2**24  # lists, tuples, dicts and texts: together with the bound on the file, some GB of memory
HINT = "torch.cuda.memory._dump_snapshot(PATH) writes one"
FEWER = "record fewer entries: torch.cuda.memory._record_memory_history(max_entries=100_000)"
_CODE = {
    0x63: "GLOBAL", 0x69: "INST", 0x6F: "OBJ", 0x52: "REDUCE", 0x62: "BUILD", 0x50: "PERSID", 0x51: "BINPERSID",
    0x81: "NEWOBJ", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", 0x92: "NEWOBJ_EX", 0x93: "STACK_GLOBAL",
}  # fmt: skip
"""Operations that look names up or call something, for the message."""


def unpickle(data: bytes, name: str) -> Any:
    """The numbers, texts, lists, tuples and dicts in ``data``.

    Args:
        data: A pickle of protocol 2 or later.
        name: Of the file, for errors.

    Raises:
        SnapshotError: ``data`` is no pickle, is cut off or damaged, holds more than plain data, or too much of it.
    """
    if data[:1] != b"\x80":
        raise SnapshotError(f"{name}: is no memory snapshot: {_looks_like(data)}", hint=HINT)
    machine = _Machine(data)
    try:
        return machine.run()
    except _Refused as refused:
        raise SnapshotError(f"{name}: byte {machine.at}: {refused}", hint=refused.hint) from None
    except (IndexError, KeyError, ValueError, struct.error) as error:  # empty stack, unknown memo entry, no UTF-8; short number
        if isinstance(error, struct.error) or machine.next >= len(data):
            raise SnapshotError(f"{name}: is cut off after {len(data):,} bytes", hint="copy the file again, whole") from None
        raise SnapshotError(f"{name}: byte {machine.at}: is damaged", hint="copy the file again") from None


class _Refused(Exception):
    def __init__(self, message: str, hint: str = HINT) -> None:
        super().__init__(message)
        self.hint = hint


class _Machine:
    """A stack, a memo, and where it is in ``data``."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = self.next = 0
        self.objects = 0

    def run(self) -> Any:
        data, memo, stack, marked = self.data, {}, [], []  # type: ignore[var-annotated]
        at = 0
        try:
            while True:
                self.at, code = at, data[at]
                at += 1
                if code == 0x68:  # BINGET
                    stack.append(memo[data[at]])
                    at += 1
                elif code == 0x6A:  # LONG_BINGET
                    stack.append(memo[_unsigned(data, at)])
                    at += 4
                elif code == 0x94:  # MEMOIZE
                    memo[len(memo)] = stack[-1]
                elif code == 0x71:  # BINPUT
                    memo[data[at]] = stack[-1]
                    at += 1
                elif code == 0x72:  # LONG_BINPUT
                    memo[_unsigned(data, at)] = stack[-1]
                    at += 4
                elif code == 0x4B:  # BININT1
                    stack.append(data[at])
                    at += 1
                elif code == 0x4D:  # BININT2
                    stack.append(struct.unpack_from("<H", data, at)[0])
                    at += 2
                elif code == 0x4A:  # BININT
                    stack.append(struct.unpack_from("<i", data, at)[0])
                    at += 4
                elif code == 0x8A:  # LONG1
                    end = at + 1 + data[at]
                    stack.append(int.from_bytes(self._bytes(at + 1, end), "little", signed=True))
                    at = end
                elif code in (0x8C, 0x58):  # SHORT_BINUNICODE, BINUNICODE
                    start = at + (1 if code == 0x8C else 4)
                    end = start + (data[at] if code == 0x8C else _unsigned(data, at))
                    stack.append(self._bytes(start, end).decode("utf-8", "surrogatepass"))
                    at = end
                    self._count()
                elif code == 0x7D:  # EMPTY_DICT
                    stack.append({})
                    self._count()
                elif code == 0x5D:  # EMPTY_LIST
                    stack.append([])
                    self._count()
                elif code == 0x28:  # MARK
                    marked.append(stack)
                    stack = []
                    self._count()
                elif code == 0x75:  # SETITEMS
                    items, stack = stack, marked.pop()
                    _put(stack[-1], items)
                elif code == 0x73:  # SETITEM
                    item, key = stack.pop(), stack.pop()
                    _put(stack[-1], [key, item])
                elif code == 0x65:  # APPENDS
                    items, stack = stack, marked.pop()
                    _extend(stack[-1], items)
                elif code == 0x61:  # APPEND
                    item = stack.pop()
                    _extend(stack[-1], [item])
                elif code == 0x47:  # BINFLOAT
                    stack.append(struct.unpack_from(">d", data, at)[0])
                    at += 8
                elif code in (0x4E, 0x88, 0x89):  # NONE, NEWTRUE, NEWFALSE
                    stack.append({0x4E: None, 0x88: True, 0x89: False}[code])
                elif code in (0x29, 0x85, 0x86, 0x87):  # EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3
                    stack.append(tuple([stack.pop() for _ in range(code - 0x84 if code != 0x29 else 0)][::-1]))
                    self._count()
                elif code == 0x74:  # TUPLE
                    items, stack = stack, marked.pop()
                    stack.append(tuple(items))
                    self._count()
                elif code == 0x95:  # FRAME: so many bytes follow, which lie here already
                    at += 8
                elif code == 0x80:  # PROTO
                    if not 2 <= data[at] <= 5:
                        raise _Refused(f"protocol {data[at]} of pickle is not known")
                    at += 1
                elif code == 0x2E:  # STOP
                    return stack.pop()
                else:
                    self._refuse(code, at, stack)
        finally:
            self.next = at

    def _bytes(self, start: int, end: int) -> bytes:
        if end > len(self.data):
            raise struct.error("more bytes than there are")
        return self.data[start:end]

    def _count(self) -> None:
        self.objects += 1
        if self.objects > MAX_OBJECTS:
            raise _Refused(f"more than {MAX_OBJECTS:,} objects", hint=FEWER)

    def _refuse(self, code: int, at: int, stack: list[Any]) -> NoReturn:
        if code not in _CODE:
            raise _Refused(f"operation {code:#04x} does not belong in a memory snapshot")
        names: list[Any] = []
        if code in (0x63, 0x69):  # GLOBAL, INST: two lines of text
            names = [part.decode("utf-8", "replace") for part in self.data[at : at + 200].split(b"\n", 2)[:2]]
        elif code == 0x93:  # STACK_GLOBAL
            names = stack[-2:]
        wanted = ".".join(name for name in names if isinstance(name, str))
        raise _Refused(
            f"asks Python for {wanted[:100]!a}" if wanted else f"asks Python to run something ({_CODE[code]})",
            hint="a memory snapshot holds no code: do not open this file with pickle or torch.load; nothing in it was run",
        )


def _unsigned(data: bytes, at: int) -> int:
    found: int = struct.unpack_from("<I", data, at)[0]
    return found


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is not list:
        raise _Refused("adds to something that is no list")
    target.extend(items)


def _put(target: Any, items: list[Any]) -> None:
    keys = items[::2]
    if type(target) is not dict or len(items) % 2 or not all(type(key) is str for key in keys):
        raise _Refused("fills something that is no dict with keys of text")
    target.update(zip(keys, items[1::2], strict=True))


def _looks_like(data: bytes) -> str:
    if data[:4] == b"PK\x03\x04":
        return "it is a zip file, as torch.save writes"
    if data[:2] == b"\x1f\x8b":
        return "it is compressed (gzip)"
    if not data:
        return "it is empty"
    return f"it begins with {data[:12]!r}"
