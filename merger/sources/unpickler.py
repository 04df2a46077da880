"""Reads a pickle into inert records, and runs nothing of it.

An opcode loop of our own, since an allow-list on the C unpickler is not enough: ten bytes of LONG_BINPUT make that one
take 4 GiB. Here the memo is a dict, every length is bounded by the bytes that are there, integers are of 64 bits, and
dict keys are scalars (the hash of a tuple that is nested a million deep overflows the C stack). It reads what protocols
2 to 5 write; the rest of the opcodes (text forms, INST, OBJ, extensions, out-of-band buffers, sets) is refused.

Source: the opcode documentation in CPython's Lib/pickletools.py.
"""

# ruff: noqa: PLR2004  each opcode has its name beside it
from __future__ import annotations

import gc
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from merger.errors import ArchiveError, Problem, UnsafePickleError
from merger.sources.inert import (
    KNOWN,
    MEM_FORMAT,
    MEM_FORMATS,
    ORDERED_DICT,
    PROCESS_GROUP_STATE,
    SHARDED_TENSOR,
    Call,
    Global,
    Inert,
    Instance,
    StorageRef,
)

_U16 = struct.Struct("<H").unpack_from
_U32 = struct.Struct("<I").unpack_from
_I32 = struct.Struct("<i").unpack_from
_F64 = struct.Struct(">d").unpack_from

_SCALARS = frozenset({str, int, bool, float, bytes, type(None)})

# A name longer than this is shown cut; the longest known one has 86 characters.
_SHOWN_NAME = 200
# An unsigned number of 64 bits takes nine bytes as a signed one.
_MAX_LONG_BYTES = 9
# Names with anything else in them are shown quoted and escaped.
_ORDINARY_NAME = re.compile(r"[A-Za-z0-9_.]+")
_TOO_EARLY = "ends too early"
# Opcode: (bytes of the length that follows it, text or bytes).
_SIZED = {
    0x8C: (1, True),  # SHORT_BINUNICODE
    0x8D: (8, True),  # BINUNICODE8
    0x43: (1, False),  # SHORT_BINBYTES
    0x42: (4, False),  # BINBYTES
    0x8E: (8, False),  # BINBYTES8
}


class _BadPickleError(Exception):
    """What is wrong with the opcodes, as half a sentence; `load` says of which file."""


class _TooEarlyError(Exception):
    """The data end before the pickle does."""


class _UnsafeError(Exception):
    """The name of the global that was refused."""


class CutShortError(ArchiveError):
    """A pickle goes on behind the end of the data, as far as can be told from what is there."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Switches the cyclic garbage collector off for a while.

    It would walk the growing heap of records again and again: half of the time of a load.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load(data: bytes, *, where: str) -> Inert:
    """The inert value of the pickle `data`: scalars, tuples, lists, dicts and the records of `inert`.

    Containers may be nested to any depth, shared or cyclic: who walks them must bound the walk.

    Raises:
        UnsafePickleError: it names a global that is not on the list; `where` is the place in the Problem.
        ArchiveError: it is cut short, malformed, or uses opcodes that torch never writes.
    """
    value, _, _ = load_next(data, 0, where=where, name="data.pkl")
    return value


def load_next(
    data: bytes, start: int, *, where: str, name: str = "its pickle"
) -> tuple[Inert, int, tuple[StorageRef, ...]]:
    """The inert value of the pickle that begins at `start` of `data`, where it ends, and the storages that it names.

    `name` is what it is called in messages. Raises what `load` does; `CutShortError` where more bytes could mend it.
    """
    storages: list[StorageRef] = []
    try:
        value, end = _run(data, start, storages)
    except _UnsafeError as error:
        raise UnsafePickleError(
            Problem(
                "unsafe-pickle",
                where,
                f"{name} asks for {error}, which is not among the classes that sharded checkpoints are made of. "
                "Nothing of it was run. If you trust the origin of this file, save it again with tensors only.",
            )
        ) from None
    except _BadPickleError as error:
        kind, found = ArchiveError, str(error)
    except _TooEarlyError:
        kind, found = CutShortError, _TOO_EARLY
    except (IndexError, struct.error):
        kind, found = CutShortError, _TOO_EARLY
    except KeyError:
        kind, found = ArchiveError, "refers to a value that it never stored"
    except UnicodeDecodeError:
        # Or it is cut in the middle of a character.
        kind, found = CutShortError, "has text that is not UTF-8"
    else:
        return value, end, tuple(storages)
    message = f"{name} {found}. The file is damaged, or torch.save did not write it."
    raise kind(Problem("bad-pickle", where, message))


def _run(  # noqa: C901, PLR0912, PLR0915  one loop: a call per opcode would double its time
    data: bytes, start: int, storages: list[StorageRef]
) -> tuple[Inert, int]:
    if data[start] != 0x80 or not 2 <= data[start + 1] <= 5:
        raise _BadPickleError("is not a pickle of protocol 2 to 5")
    pos = start + 2
    stack: list[Inert] = []
    marks: list[int] = []
    memo: dict[int, Inert] = {}
    push = stack.append
    pop = stack.pop
    # Ordered by how often the opcodes occur in the pickles of DTensors. A read past the end raises IndexError or
    # struct.error; a slice past the end is short, but then the opcode that must follow it is missing.
    while True:
        op = data[pos]
        pos += 1
        if op == 0x68:  # BINGET
            push(memo[data[pos]])
            pos += 1
        elif op == 0x72:  # LONG_BINPUT
            memo[_U32(data, pos)[0]] = stack[-1]
            pos += 4
        elif op == 0x4B:  # BININT1
            push(data[pos])
            pos += 1
        elif op == 0x71:  # BINPUT
            memo[data[pos]] = stack[-1]
            pos += 1
        elif op == 0x6A:  # LONG_BINGET
            push(memo[_U32(data, pos)[0]])
            pos += 4
        elif op == 0x28:  # MARK
            marks.append(len(stack))
        elif op == 0x58:  # BINUNICODE
            end = pos + 4 + _U32(data, pos)[0]
            push(str(data[pos + 4 : end], "utf-8"))
            pos = end
        elif op == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif op == 0x52:  # REDUCE
            args = pop()
            func = stack[-1]
            if func.__class__ is not Global or args.__class__ is not tuple:
                raise _BadPickleError("calls something that is no function")
            if func.kind == "call":
                stack[-1] = Call(func.name, args)
            elif func is ORDERED_DICT and not args:
                stack[-1] = {}
            else:
                stack[-1] = _special_call(func, args)
        elif op == 0x74:  # TUPLE
            mark = marks.pop()
            last = tuple(stack[mark:])
            del stack[mark:]
            push(last)
        elif op == 0x29:  # EMPTY_TUPLE
            push(())
        elif op == 0x7D:  # EMPTY_DICT
            push({})
        elif op == 0x86:  # TUPLE2
            last = pop()
            stack[-1] = (stack[-1], last)
        elif op == 0x81:  # NEWOBJ
            args = pop()
            cls = stack[-1]
            if cls.__class__ is not Global or cls.kind != "class" or args.__class__ is not tuple:
                raise _BadPickleError("makes an object of something that is no class")
            stack[-1] = Instance(cls.name, args)
        elif op == 0x75:  # SETITEMS
            mark = marks.pop()
            items = stack[mark:]
            del stack[mark:]
            _set_items(stack[-1], items[::2], items[1::2])
        elif op == 0x62:  # BUILD
            state = pop()
            _build(stack[-1], state)
        elif op == 0x89:  # NEWFALSE
            push(False)  # noqa: FBT003  a value, not a flag
        elif op == 0x4E:  # NONE
            push(None)
        elif op == 0x51:  # BINPERSID
            storage = stack[-1] = _storage(stack[-1])
            storages.append(storage)
        elif op == 0x73:  # SETITEM
            last = pop()
            key = pop()
            _set_items(stack[-1], (key,), (last,))
        elif op == 0x2E:  # STOP
            value = pop()
            if stack or marks:
                raise _BadPickleError("stops in the middle of a value")
            return value, pos
        else:
            pos = _rare(op, data, pos, stack, marks, memo)


def _rare(  # noqa: C901, PLR0912, PLR0917  a table of opcodes, one line or two each
    op: int, data: bytes, pos: int, stack: list[Inert], marks: list[int], memo: dict[int, Inert]
) -> int:
    """Does one of the less frequent opcodes; returns where the next one begins."""
    if op == 0x4D:  # BININT2
        stack.append(_U16(data, pos)[0])
        pos += 2
    elif op == 0x4A:  # BININT
        stack.append(_I32(data, pos)[0])
        pos += 4
    elif op == 0x87:  # TUPLE3
        third, second = stack.pop(), stack.pop()
        stack[-1] = (stack[-1], second, third)
    elif op == 0x5D:  # EMPTY_LIST
        stack.append([])
    elif op == 0x61:  # APPEND
        item = stack.pop()
        _extend(stack[-1], (item,))
    elif op == 0x65:  # APPENDS
        mark = marks.pop()
        items = stack[mark:]
        del stack[mark:]
        _extend(stack[-1], items)
    elif op == 0x63:  # GLOBAL
        end = _line_end(data, _line_end(data, pos) + 1)
        stack.append(_known(data[pos:end]))
        pos = end + 1
    elif op == 0x93:  # STACK_GLOBAL
        name, module = stack.pop(), stack.pop()
        if module.__class__ is not str or name.__class__ is not str:
            raise _BadPickleError("asks for a global whose name is no text")
        stack.append(_known(f"{module}\n{name}".encode()))
    elif op == 0x8A:  # LONG1
        pos = _long(data, pos + 1, data[pos], stack)
    elif op == 0x8B:  # LONG4
        pos = _long(data, pos + 4, _I32(data, pos)[0], stack)
    elif op == 0x88:  # NEWTRUE
        stack.append(True)
    elif op == 0x47:  # BINFLOAT
        stack.append(_F64(data, pos)[0])
        pos += 8
    elif op == 0x94:  # MEMOIZE
        memo[len(memo)] = stack[-1]
    elif op in _SIZED:
        length_bytes, is_text = _SIZED[op]
        start = pos + length_bytes
        pos = start + int.from_bytes(data[pos:start], "little")
        stack.append(str(data[start:pos], "utf-8") if is_text else data[start:pos])
    elif op == 0x95:  # FRAME: a hint for buffered readers; every opcode is bounded by itself
        pos += 8
    elif op == 0x30:  # POP
        stack.pop()
    elif op == 0x31:  # POP_MARK
        del stack[marks.pop() :]
    else:
        raise _BadPickleError(f"uses the opcode 0x{op:02x}, which torch.save never writes")
    return pos


def _known(lines: bytes) -> Global:
    """The global of a module and a name on a line each, if it is on the list."""
    known = KNOWN.get(lines)
    if known is None:
        name = lines[:_SHOWN_NAME].replace(b"\n", b".").decode("utf-8", "backslashreplace")
        raise _UnsafeError(name if _ORDINARY_NAME.fullmatch(name) else ascii(name))
    return known


def _line_end(data: bytes, pos: int) -> int:
    end = data.find(b"\n", pos)
    if end < 0:
        raise _TooEarlyError
    return end


def _long(data: bytes, start: int, length: int, stack: list[Inert]) -> int:
    if not 0 <= length <= _MAX_LONG_BYTES:
        raise _BadPickleError(f"has an integer of {length} bytes")
    end = start + length
    value = int.from_bytes(data[start:end], "little", signed=True)
    if not -(1 << 63) <= value < 1 << 64:
        raise _BadPickleError("has an integer of more than 64 bits")
    stack.append(value)
    return end


def _set_items(target: Inert, keys: Sequence[Inert], values: Sequence[Inert]) -> None:
    if target.__class__ is not dict or len(keys) != len(values):
        raise _BadPickleError("sets items of something that is no dict")
    if not _SCALARS.issuperset(map(type, keys)):
        raise _BadPickleError("has a dict key that is neither text nor number")
    expected = len(target) + len(keys)
    target.update(zip(keys, values, strict=True))
    if len(target) != expected:
        raise _BadPickleError("sets a dict key twice")


def _extend(target: Inert, items: Sequence[Inert]) -> None:
    if target.__class__ is not list:
        raise _BadPickleError("appends to something that is no list")
    target.extend(items)


def _build(target: Inert, state: Inert) -> None:
    if target.__class__ is Instance and target.state is None:
        target.state = state
    elif target.__class__ is not dict or state.__class__ is not dict:
        raise _BadPickleError("sets the state of something that has none")
    # The state of an OrderedDict is its attributes: `_metadata`, the version numbers of modules. Not needed.


def _storage(pid: Inert) -> StorageRef:
    """What a persistent id of torch.save says: ("storage", class, key, location, number of elements).

    In the format of before torch 1.6 a sixth part is None, or (key, offset, number of elements) of a view of that
    storage; of its key nothing is needed.
    """
    if pid.__class__ is tuple and 5 <= len(pid) <= 6:
        tag, cls, key, location, count, *rest = pid
        types = (tag.__class__, cls.__class__, key.__class__, location.__class__, count.__class__)
        if types == (str, Global, str, str, int) and tag == "storage" and cls.kind == "storage" and count >= 0:
            view = _view(rest[0], count) if rest and rest[0] is not None else None
            return StorageRef(cls.dtype, key, location, count, view)
    raise _BadPickleError("has a persistent id that is no storage")


def _view(value: Inert, count: int) -> tuple[int, int]:
    """Offset and number of elements of a view of a storage of `count` elements."""
    if value.__class__ is tuple and [part.__class__ for part in value] == [str, int, int]:
        _, offset, size = value
        if 0 <= offset <= count and 0 <= size <= count - offset:
            return offset, size
    raise _BadPickleError("has a persistent id with a view that is not in its storage")


def _special_call(func: Global, args: tuple[Inert, ...]) -> Inert:
    if func.name == "torch.Size" and len(args) == 1 and args[0].__class__ is tuple:
        return args[0]
    if func.name.endswith(".getattr"):
        # By identity and type only: `==` between nested containers may recurse without bound.
        if len(args) == 2 and args[1].__class__ is str:
            owner, name = args
            if owner is SHARDED_TENSOR and name == "ProcessGroupState":
                return PROCESS_GROUP_STATE
            if owner is MEM_FORMAT and name in MEM_FORMATS:
                return Call(MEM_FORMAT.name, (name,))
        raise _UnsafeError(func.name)
    raise _BadPickleError(f"calls {func.name} as torch.save never does")
