"""The opcode loop: what pickle writes is read, and whatever else stands in a pickle is refused and never run."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import textwrap
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING

from merger.errors import ArchiveError, Problem, UnsafePickleError
from merger.sources.inert import KNOWN, Call, Instance
from merger.sources.unpickler import gc_paused, load

ROOT = Path(__file__).parents[2]
PROTOCOLS = [2, 3, 4, 5]

MEM_FORMAT = "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING"


def refusal(data: bytes) -> str:
    """What is wrong with a pickle, without the rest of the sentence."""
    with pytest.raises(ArchiveError) as caught:
        load(data, where="r.pt")
    (problem,) = caught.value.problems
    prefix, suffix = "data.pkl ", ". The file is damaged, or torch.save did not write it."
    assert (problem.kind, problem.where) == ("bad-pickle", "r.pt")
    assert problem.message.startswith(prefix)
    assert problem.message.endswith(suffix)
    return problem.message.removeprefix(prefix).removesuffix(suffix)


def call(value: object) -> tuple[str, tuple[object, ...]]:
    assert isinstance(value, Call)
    return value.func, value.args


def unsafe_name(data: bytes) -> str:
    """The global for which a pickle is refused; asserts the whole message."""
    with pytest.raises(UnsafePickleError) as caught:
        load(data, where="r.pt")
    (problem,) = caught.value.problems
    name = problem.message.removeprefix("data.pkl asks for ").partition(", which is not among")[0]
    assert problem == Problem(
        "unsafe-pickle",
        "r.pt",
        f"data.pkl asks for {name}, which is not among the classes that sharded checkpoints are made of. "
        "Nothing of it was run. If you trust the origin of this file, save it again with tensors only.",
    )
    return name


# What is read.

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
keys = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=30,
)


@given(values, st.sampled_from(PROTOCOLS))
def test_plain_values_come_back_as_the_pickle_module_reads_them(value: object, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol), where="x") == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_long_containers_strings_and_shared_values_come_back(protocol: int) -> None:
    shared = list(range(3000))
    value = [shared, shared, "x" * 70_000, {str(i): i for i in range(3000)}, {"one": 1}, [1], (1, 2, 3, 4)]
    found = load(pickle.dumps(value, protocol), where="x")
    assert found == value
    assert found[0] is found[1]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_bytes_of_any_length_come_back(protocol: int) -> None:
    value = [b"", b"abc", bytes(70_000)]
    assert load(pickle.dumps(value, protocol), where="x") == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_ordered_dict_is_a_dict_and_its_attributes_are_dropped(protocol: int) -> None:
    value = OrderedDict(b=1, a=2)
    value._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as torch.nn.Module.state_dict does
    found = load(pickle.dumps(value, protocol), where="x")
    assert type(found) is dict
    assert list(found.items()) == [("b", 1), ("a", 2)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_recursive_tuple_comes_back(protocol: int) -> None:
    inner: list[object] = []
    value = (inner,)
    inner.append(value)
    found = load(pickle.dumps(value, protocol), where="x")
    assert found[0][0][0] is found[0]


def test_known_classes_and_calls_become_records_and_are_not_made() -> None:
    found = load(b"\x80\x02ctorch\ndevice\nX\x03\x00\x00\x00cpu\x85R.", where="x")
    assert (type(found), found.func, found.args) == (Call, "torch.device", ("cpu",))
    found = load(
        b"\x80\x02ctorch.distributed.tensor.placement_types\nShard\n)\x81}X\x03\x00\x00\x00dimK\x01sb.", where="x"
    )
    assert (type(found), found.args, found.state) == (Instance, (), {"dim": 1})
    assert found.cls == "torch.distributed.tensor.placement_types.Shard"


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("member", list(MEM_FORMAT_ENCODING))
def test_a_member_of_an_enum_by_its_name_is_a_record_too(
    member: MEM_FORMAT_ENCODING, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S10: so Python 3.11.2 pickles it, which ShardedTensors hold, where others pickle its value."""
    assert call(load(pickle.dumps(member, protocol), where="r.pt")) == (MEM_FORMAT, (member.value,))
    by_name = lambda self, _protocol: (getattr, (type(self), self.name))  # noqa: E731 - a method of an enum
    monkeypatch.setattr(MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    assert call(load(pickle.dumps(member, protocol), where="r.pt")) == (MEM_FORMAT, (member.name,))


def test_the_memo_of_a_huge_index_takes_no_memory() -> None:
    """L11: the C unpickler allocates 4 GiB for these ten bytes."""
    probe = textwrap.dedent(
        """
        import resource
        from merger.sources.unpickler import load
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        print(load(b"\\x80\\x02Nr\\xff\\xff\\xff\\xff.", where="x"))
        """
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.stdout, done.stderr, done.returncode) == ("None\n", "", 0)


def test_shared_and_deep_nesting_is_read_without_walking_it() -> None:
    """L11: 2**200 leaves in 800 bytes, and a tuple nested 200,000 deep."""
    found = load(b"\x80\x02)" + b"q\x00h\x00\x86" * 200 + b".", where="x")
    assert found[0] is found[1]
    assert type(load(b"\x80\x02)" + b"\x85" * 200_000 + b".", where="x")) is tuple


def test_the_collector_is_paused_and_put_back_as_it_was() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ArchiveError), gc_paused():
        load(b"", where="x")
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


# What is refused: globals.


class Hostile:
    """Calls `func(*args)` when it is unpickled."""

    def __init__(self, func: object, *args: object) -> None:
        self.reduced = (func, args)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.reduced


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickle_that_runs_a_command_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    """L11."""
    marker = tmp_path / "ran"
    data = pickle.dumps({"w": Hostile(os.system, f"touch {marker}")}, protocol)
    assert unsafe_name(data) == f"{os.name}.system"
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists()  # so the pickle was a live one


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickle_that_evaluates_an_expression_is_refused(protocol: int) -> None:
    """L11."""
    builtins = "__builtin__" if protocol == 2 else "builtins"
    assert unsafe_name(pickle.dumps(Hostile(eval, "1 + 1"), protocol)) == f"{builtins}.eval"
    assert unsafe_name(pickle.dumps(Hostile(getattr, "x", "upper"), protocol)) == f"{builtins}.getattr"


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\x80\x02cos\nsystem\n.", "os.system"),
        (b"\x80\x02c__main__\nMyConfig\n.", "__main__.MyConfig"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "os.system"),
        (b"\x80\x04X\x02\x00\x00\x00os\x8d\x06\x00\x00\x00\x00\x00\x00\x00system\x93.", "os.system"),
        (b"\x80\x04\x8c\x02os\x94\x8c\x0bpath.exists\x94\x93.", "os.path.exists"),
        (b"\x80\x04\x8c\x05torch\x8c\x0c_C.Generator\x93.", "torch._C.Generator"),
        # Names that only look like those on the list.
        (b"\x80\x02ctorch.\nSize\n.", "torch..Size"),
        (b"\x80\x02c\ntorch.Size\n.", ".torch.Size"),
        (b"\x80\x02ctorch\nSize \n.", "'torch.Size '"),
        (b"\x80\x02ctorch.serialization\nload\n.", "torch.serialization.load"),
        (b"\x80\x02cto\xffrch\n\x1b[31m\n.", r"'to\\xffrch.\x1b[31m'"),
        (b"\x80\x02c" + b"a" * 300 + b"\nb\n.", "a" * 200),
        # getattr of anything but the one nested class and the members of one enum.
        (b"\x80\x02c__builtin__\ngetattr\nNN\x86R.", "__builtin__.getattr"),
        (b"\x80\x02c__builtin__\ngetattr\n)R.", "__builtin__.getattr"),
        (
            (
                b"\x80\x02c__builtin__\ngetattr\nctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n"
                b"X\x08\x00\x00\x00__init__\x86R."
            ),
            "__builtin__.getattr",
        ),
        (
            b"\x80\x02c__builtin__\ngetattr\nctorch\ndevice\nX\x11\x00\x00\x00ProcessGroupState\x86R.",
            "__builtin__.getattr",
        ),
        (
            (
                b"\x80\x02c__builtin__\ngetattr\nctorch.distributed._shard.sharded_tensor.metadata\n"
                b"MEM_FORMAT_ENCODING\nX\x08\x00\x00\x00__init__\x86R."
            ),
            "__builtin__.getattr",
        ),
    ],
)
def test_an_unknown_global_is_refused_and_named(data: bytes, name: str) -> None:
    """L11."""
    assert unsafe_name(data) == name


def test_the_list_of_known_globals_names_nothing_that_could_run_code() -> None:
    modules = {key.split(b"\n")[0].decode() for key in KNOWN}
    assert {module.partition(".")[0] for module in modules} == {
        "torch", "collections", "builtins", "__builtin__", "_codecs", "_io"
    }  # fmt: skip
    outside = {key.decode().replace("\n", ".") for key in KNOWN if not key.startswith(b"torch")}
    assert outside == {
        "collections.OrderedDict",
        "builtins.getattr",
        "__builtin__.getattr",
        "builtins.bytes",
        "__builtin__.bytes",
        "_codecs.encode",
        "_io.BytesIO",
    }


# What is refused: opcodes.

STORAGE_TAG = b"X\x07\x00\x00\x00storage"
KEY_AND_PLACE = b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu"


def test_a_persistent_id_of_a_storage_is_read() -> None:
    data = b"\x80\x02(" + STORAGE_TAG + b"ctorch\nFloatStorage\n" + KEY_AND_PLACE + b"K\x01tQ."
    found = load(data, where="x")
    assert (found.dtype.name, found.key, found.location, found.num_elements) == ("float32", "0", "cpu", 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends too early"),
        (b"\x80", "ends too early"),
        (b"(lp0\n.", "is not a pickle of protocol 2 to 5"),
        (b"\x80\x01N.", "is not a pickle of protocol 2 to 5"),
        (b"\x80\x06N.", "is not a pickle of protocol 2 to 5"),
        (b"\x80\x02", "ends too early"),
        (b"\x80\x02N", "ends too early"),
        (b"\x80\x02.", "ends too early"),
        (b"\x80\x02X\x05\x00\x00\x00abc", "ends too early"),
        (b"\x80\x02X\xff\xff\xff\xffabc.", "ends too early"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc.", "ends too early"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.", "ends too early"),
        (b"\x80\x04\x8c\x05abc.", "ends too early"),
        (b"\x80\x02ctorch\nSize", "ends too early"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f\x01.", "has an integer of 2147483647 bytes"),
        (b"\x80\x02\x8b\xff\xff\xff\xff\x01.", "has an integer of -1 bytes"),
        (b"\x80\x02\x8a\x0a0123456789.", "has an integer of 10 bytes"),
        (b"\x80\x02\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01.", "has an integer of more than 64 bits"),
        (b"\x80\x02\x8a\x081234567", "ends too early"),
        (b"\x80\x02X\x01\x00\x00\x00\xff.", "has text that is not UTF-8"),
        (b"\x80\x02X\x03\x00\x00\x00\xed\xa0\x80.", "has text that is not UTF-8"),
        (b"\x80\x02h\x00.", "refers to a value that it never stored"),
        (b"\x80\x02q\x00.", "ends too early"),
        (b"\x80\x02t.", "ends too early"),
        (b"\x80\x02(.", "ends too early"),
        (b"\x80\x02NN.", "stops in the middle of a value"),
        (b"\x80\x02(N.", "stops in the middle of a value"),
        (b"\x80\x02N)R.", "calls something that is no function"),
        (b"\x80\x02ctorch\ndevice\nNR.", "calls something that is no function"),
        (b"\x80\x02ctorch\nfloat32\n)R.", "calls torch.float32 as torch.save never does"),
        (b"\x80\x02ctorch\nSize\n)R.", "calls torch.Size as torch.save never does"),
        (b"\x80\x02ccollections\nOrderedDict\nN\x85R.", "calls collections.OrderedDict as torch.save never does"),
        (b"\x80\x02ctorch\ndevice\n)\x81.", "makes an object of something that is no class"),
        (b"\x80\x02ctorch\ndevice\n)RNb.", "sets the state of something that has none"),
        (b"\x80\x02K\x01Nb.", "sets the state of something that has none"),
        (b"\x80\x02}Nb.", "sets the state of something that has none"),
        (
            b"\x80\x02ctorch.distributed.device_mesh\nDeviceMesh\n)\x81}b}b.",
            "sets the state of something that has none",
        ),
        (b"\x80\x02]K\x01K\x02s.", "sets items of something that is no dict"),
        (b"\x80\x02}(K\x01u.", "sets items of something that is no dict"),
        (b"\x80\x02})K\x02s.", "has a dict key that is neither text nor number"),
        (b"\x80\x02}(K\x01NK\x01Nu.", "sets a dict key twice"),
        (b"\x80\x02}K\x01a.", "appends to something that is no list"),
        (b"\x80\x02NQ.", "has a persistent id that is no storage"),
        (b"\x80\x02X\x01\x00\x00\x000Q.", "has a persistent id that is no storage"),
        (
            b"\x80\x02(" + STORAGE_TAG + b"ctorch\nfloat32\n" + KEY_AND_PLACE + b"K\x01tQ.",
            "has a persistent id that is no storage",
        ),
        (
            b"\x80\x02(" + STORAGE_TAG + b"ctorch\nFloatStorage\n" + KEY_AND_PLACE + b"J\xff\xff\xff\xfftQ.",
            "has a persistent id that is no storage",
        ),
        (
            b"\x80\x02(" + STORAGE_TAG + b"ctorch\nFloatStorage\n" + KEY_AND_PLACE + b"tQ.",
            "has a persistent id that is no storage",
        ),
        (b"\x80\x04NN\x93.", "asks for a global whose name is no text"),
        # The text, old, extension and out-of-band opcodes.
        *(
            (b"\x80\x02" + opcode + b"rest\n.", f"uses the opcode 0x{opcode[0]:02x}, which torch.save never writes")
            for opcode in (pickle.PERSID, pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.GET)
        ),
        *(
            (b"\x80\x02" + opcode + b"rest\n.", f"uses the opcode 0x{opcode[0]:02x}, which torch.save never writes")
            for opcode in (pickle.INT, pickle.LONG, pickle.STRING, pickle.UNICODE, pickle.FLOAT, pickle.PUT, pickle.DUP)
        ),
        *(
            (b"\x80\x05" + opcode + b"rest\n.", f"uses the opcode 0x{opcode[0]:02x}, which torch.save never writes")
            for opcode in (pickle.NEWOBJ_EX, pickle.EMPTY_SET, pickle.BYTEARRAY8, pickle.NEXT_BUFFER, b"\x00", b"\xff")
        ),
    ],
)
def test_a_malformed_pickle_is_refused(data: bytes, message: str) -> None:
    assert refusal(data) == message


def test_a_key_that_would_overflow_the_stack_when_hashed_is_refused() -> None:
    """L11: the C unpickler dies of the hash of this key."""
    assert refusal(b"\x80\x02})" + b"\x85" * 200_000 + b"Ns.") == "has a dict key that is neither text nor number"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickle_cut_at_any_byte_is_refused(protocol: int) -> None:
    data = pickle.dumps({"a": (1, 2.5, -7, 2**40, 300, 70_000, [None, True]), "b": {"c": "d" * 300}}, protocol)
    for length in range(len(data)):
        refusal(data[:length])


@given(st.binary(max_size=60), st.sampled_from([b"\x80\x02", b"\x80\x04", b"\x80\x05"]))
def test_any_bytes_are_read_or_refused(data: bytes, start: bytes) -> None:
    with suppress(ArchiveError):
        load(start + data, where="x")
