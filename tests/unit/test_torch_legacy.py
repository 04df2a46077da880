"""The format of before torch 1.6 (L14): what torch writes is read as torch reads it, and what is broken is named.

Genuine rank files of five versions are merged in test_merge.py.
"""

from __future__ import annotations

import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import merger
from merger.errors import ArchiveError, Problem, UnsafePickleError
from merger.sources import torch_legacy
from merger.sources.dtensor import DTensor, PlainTensor
from merger.sources.torch_zip import Archive, read_archive
from tests.unit.archives import ARCHIVES, bits
from tests.unit.test_dtensor import load_local

SMALL = ARCHIVES / "2.14.1" / "fsdp2_1d_nonzip_w2" / "model_world_size_2_rank_0.pt"
COPY_AGAIN = "copy it again from where it was saved."
DAMAGED = f"The file is damaged, or torch.save did not write it; {COPY_AGAIN}"
MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
SYSTEM = {"protocol_version": VERSION, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def save(value: object, path: Path, protocol: int = 2) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)


def tensors(archive: Archive) -> dict[str, torch.Tensor]:
    found = {}
    for name, entry in archive.entries.items():
        assert isinstance(entry, PlainTensor | DTensor)
        found[name] = load_local(archive, entry.local)
    return found


def problem_of(path: Path, error: type[ArchiveError] = ArchiveError) -> Problem:
    with pytest.raises(error) as caught:
        read_archive(path)
    (problem,) = caught.value.problems
    assert problem.where == path.name
    return problem


# What torch writes.


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_of_every_kind_are_found(tmp_path: Path, protocol: int) -> None:
    base = torch.arange(24, dtype=torch.float32)
    shared = torch.randn(3, 4, dtype=torch.float64)
    state = {
        "whole": torch.randn(5, 3),
        "half": torch.randn(2, 2).to(torch.bfloat16),
        "scalar": torch.tensor(7),
        "view": base[4:16].reshape(3, 4)[:, 1:],
        "transposed": base.reshape(4, 6).t(),
        "empty": torch.zeros(0, 4),
        "tied": shared,
        "tied too": shared,
        "bool": torch.tensor([True, False]),
        "untyped": torch.arange(9).to(torch.uint16)[2:5],
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    path = tmp_path / "x.pt"
    save(state, path, protocol)
    archive = read_archive(path, rank=5)
    assert (archive.is_legacy, archive.checksums, archive.file.rank) == (True, False, 5)
    assert {record.crc32 for record in archive.records.values()} == {None}
    assert {name: bits(tensor) for name, tensor in tensors(archive).items()} == {
        name: bits(tensor) for name, tensor in state.items()
    }
    tied = [archive.entries[name].local.record for name in ("tied", "tied too")]  # type: ignore[attr-defined]  # by `tensors`
    assert tied[0] is tied[1]


def test_values_that_are_no_tensors_are_read(tmp_path: Path) -> None:
    state = {"step": 3, "name": "x", "none": None, "w": torch.ones(2)}
    save(state, tmp_path / "x.pt")
    entries = read_archive(tmp_path / "x.pt").entries
    assert {name: entries[name] for name in ("step", "name", "none")} == {"step": 3, "name": "x", "none": None}


def test_a_state_dict_without_tensors_is_read(tmp_path: Path) -> None:
    save({"step": 3}, tmp_path / "x.pt")
    archive = read_archive(tmp_path / "x.pt")
    assert (archive.entries, archive.records) == ({"step": 3}, {})


def test_the_pickles_are_found_whatever_part_of_the_file_is_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing says where they end: every cut of them must be told from damage."""
    path = tmp_path / "x.pt"
    save({"name \u00e9\U0001f600": torch.ones(3), "b": b"\xff", "n": 2**40, "f": 0.5}, path, protocol=4)
    expected = read_archive(path)
    for window in range(28, path.stat().st_size):
        monkeypatch.setattr(torch_legacy, "_FIRST_BYTES", window)
        assert read_archive(path) == expected, window


def test_a_merge_says_that_damage_cannot_be_noticed(tmp_path: Path) -> None:
    report = merger.merge(SMALL.parent, tmp_path / "out", weights_only=True)
    assert report.notes == (
        (
            "ranks 0 and 1: saved in the old format of torch.save, without checksums, so damage to the files cannot be "
            "noticed"
        ),
        "names and shapes are as saved: those of the hub need a config",
    )


def test_replicas_without_checksums_are_compared_byte_by_byte(tmp_path: Path) -> None:
    """S5."""
    for rank in range(2):
        save({"w": torch.tensor([1.0, 2.0, 3.0 + rank])}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(merger.CheckpointError) as caught:
        merger.merge(tmp_path, tmp_path / "out", weights_only=True)
    assert str(caught.value) == (
        "w: should be the same on all ranks that hold it, but at [2] rank 0 has 3 and rank 1 has 4; the files are not "
        "of one run and one step, or the ranks went apart in training"
    )


# What torch wrote long ago, written here by hand; torch.load is the oracle.


class Storage:
    """Pickled as the persistent id `pid`."""

    def __init__(self, *pid: object) -> None:
        self.pid = pid


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> object:
        return value.pid if isinstance(value, Storage) else None


def rebuild(storage: Storage, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> object:
    """Pickled as the tensor that it describes."""

    class Made:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return torch._utils._rebuild_tensor_v2, (storage, offset, sizes, strides, False, {})

    return Made()


def write(
    path: Path,
    value: object,
    storages: dict[str, bytes],
    *,
    itemsize: int = 4,
    version: object = VERSION,
    system: object = SYSTEM,
    keys: object = None,
    counts: dict[str, int] | None = None,
    tail: bytes = b"",
) -> Path:
    with path.open("wb") as file:
        for part in (MAGIC, version, system):
            pickle.dump(part, file, protocol=2)
        Pickler(file, protocol=2).dump(value)
        pickle.dump(list(storages) if keys is None else keys, file, protocol=2)
        for key, data in storages.items():
            file.write(struct.pack("<q", (counts or {}).get(key, len(data) // itemsize)) + data)
        file.write(tail)
    return path


TEN = struct.pack("<10f", *range(10))
FLOATS = Storage("storage", torch.FloatStorage, "5", "cpu", 10, None)


def test_a_view_of_a_storage_is_the_part_that_torch_takes(tmp_path: Path) -> None:
    view = Storage("storage", torch.FloatStorage, "5", "cpu", 10, ("6", 3, 4))
    value = {"root": rebuild(FLOATS, 1, (2, 4), (4, 1)), "view": rebuild(view, 1, (3,), (1,))}
    path = write(tmp_path / "x.pt", value, {"5": TEN})
    found = tensors(read_archive(path))
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in torch.load(path, weights_only=False).items()
    }
    assert found["view"].tolist() == [4.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (
            ("6", 3, 4),
            "w: its shape (5,), stride (1,) and offset 0 leave its storage of 4 elements.",
        ),
        (("6", 3, 8), None),
        (("6", -1, 4), None),
        (("6", 11, 0), None),
        ((6, 3, 4), None),
        ("6", None),
    ],
)
def test_a_view_that_leaves_its_storage_is_refused(tmp_path: Path, view: object, message: str | None) -> None:
    """L11."""
    storage = Storage("storage", torch.FloatStorage, "5", "cpu", 10, view)
    path = write(tmp_path / "x.pt", {"w": rebuild(storage, 0, (5,), (1,))}, {"5": TEN})
    bad = (
        "its pickle has a persistent id with a view that is not in its storage. The file is damaged, or torch.save did "
        "not write it."
    )
    kind = "bad-tensor" if message else "bad-pickle"
    assert problem_of(path) == Problem(kind, "x.pt", message or bad)


# What is broken.


def test_a_file_cut_at_any_length_is_refused(tmp_path: Path) -> None:
    """L2."""
    path = tmp_path / SMALL.name
    shutil.copyfile(SMALL, path)
    kinds: set[str] = set()
    for length in reversed(range(0, path.stat().st_size, 5)):
        os.truncate(path, length)
        kinds.add(problem_of(path).kind)
    assert kinds == {"truncated", "bad-pickle", "not-an-archive", "empty-file"}


def test_a_file_that_is_cut_short_says_where(tmp_path: Path) -> None:
    """L2."""
    path = tmp_path / "x.pt"
    save({"a": torch.ones(4), "b": torch.ones(8)}, path)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    assert problem_of(path) == Problem(
        "truncated",
        "x.pt",
        f"The file is cut short: storage 2 of 2 should end at byte {size:,}, the file has {size - 1:,}. The copy or "
        f"the save was not finished; {COPY_AGAIN}",
    )


def test_a_flip_of_any_bit_is_refused_or_read_and_never_crashes(tmp_path: Path) -> None:
    """S21: there is no checksum to notice it by, but nothing outside of the file is ever read."""
    original = SMALL.read_bytes()
    path = tmp_path / SMALL.name
    kinds: set[str] = set()
    for at in range(0, len(original), 7):
        path.write_bytes(original[:at] + bytes([original[at] ^ 1 << at % 8]) + original[at + 1 :])
        try:
            archive = read_archive(path, rank=0)
        except ArchiveError as error:
            kinds.update(problem.kind for problem in error.problems)
        else:
            for record in archive.records.values():
                assert 0 <= record.byte_offset <= record.byte_offset + record.num_bytes <= len(original)
    assert kinds >= {"bad-pickle", "unsafe-pickle", "bad-tensor", "damaged-archive"}


def test_what_follows_the_last_storage_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pt", {"w": rebuild(FLOATS, 0, (10,), (1,))}, {"5": TEN}, tail=b"more")
    size = path.stat().st_size
    assert problem_of(path) == Problem(
        "damaged-archive", "x.pt", f"Its last storage ends at byte {size - 4}, but the file has {size}. {DAMAGED}"
    )


@pytest.mark.parametrize("count", [-1, 0, 9, 11, 2**62])
def test_a_storage_of_another_size_than_the_pickle_says_is_refused(tmp_path: Path, count: int) -> None:
    path = write(tmp_path / "x.pt", {"w": rebuild(FLOATS, 0, (10,), (1,))}, {"5": TEN}, counts={"5": count})
    assert problem_of(path) == Problem(
        "damaged-archive", "x.pt", f"Storage 1 of 1 has {count:,} elements, not the 10 that its tensors name. {DAMAGED}"
    )


def test_a_storage_larger_than_any_file_is_refused(tmp_path: Path) -> None:
    """L11."""
    huge = Storage("storage", torch.FloatStorage, "5", "cpu", 2**61, None)
    path = write(tmp_path / "x.pt", {"w": rebuild(huge, 0, (10,), (1,))}, {"5": TEN}, counts={"5": 2**61})
    size = path.stat().st_size
    assert problem_of(path) == Problem(
        "truncated",
        "x.pt",
        f"The file is cut short: storage 1 of 1 should end at byte {size - 40 + 2**63:,}, the file has {size}. The "
        f"copy or the save was not finished; {COPY_AGAIN}",
    )


@pytest.mark.parametrize(
    ("keys", "clause"),
    [
        (["6"], "It lists 1 storages, and its tensors name 1: not the same ones"),
        (["5", "5"], "It lists 2 storages, and its tensors name 1: not the same ones"),
        ([], "It lists 0 storages, and its tensors name 1: not the same ones"),
        ([5], "Its storage keys are no list of texts"),
        (("5",), "Its storage keys are no list of texts"),
        ([["5"]], "Its storage keys are no list of texts"),
    ],
)
def test_keys_that_are_not_those_of_the_tensors_are_refused(tmp_path: Path, keys: object, clause: str) -> None:
    path = write(tmp_path / "x.pt", {"w": rebuild(FLOATS, 0, (10,), (1,))}, {"5": TEN}, keys=keys)
    assert problem_of(path) == Problem("damaged-archive", "x.pt", f"{clause}. {DAMAGED}")


@pytest.mark.parametrize("system", [SYSTEM | {"little_endian": False}, {}, 5])
def test_a_file_of_a_big_endian_machine_is_refused(tmp_path: Path, system: object) -> None:
    path = write(tmp_path / "x.pt", {"w": rebuild(FLOATS, 0, (10,), (1,))}, {"5": TEN}, system=system)
    assert problem_of(path) == Problem(
        "byte-order",
        "x.pt",
        "It was saved on a machine that is not little-endian; only little-endian files can be read. "
        "Load and save it again on a little-endian machine.",
    )


@pytest.mark.parametrize("version", [1000, True, "1001", [1001]])
def test_another_version_of_the_format_is_refused(tmp_path: Path, version: object) -> None:
    path = write(tmp_path / "x.pt", {}, {}, version=version)
    found = "a list" if version == [1001] else str(version) if version != "1001" else "a str"
    assert problem_of(path) == Problem(
        "damaged-archive", "x.pt", f"Its protocol version is {found}, not 1001. {DAMAGED}"
    )


class RunsCommand:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.parametrize("part", ["version", "system", "value", "keys"])
def test_a_hostile_pickle_is_refused_and_runs_nothing(tmp_path: Path, part: str) -> None:
    """L11: in any of its pickles."""
    marker = tmp_path / "ran"
    hostile = RunsCommand(f"touch {marker}")
    value = {"w": hostile} if part == "value" else {}
    more: dict[str, Any] = {} if part == "value" else {part: hostile}
    path = write(tmp_path / "x.pt", value, {}, **more)
    assert problem_of(path, UnsafePickleError) == Problem(
        "unsafe-pickle",
        "x.pt",
        f"its pickle asks for {os.name}.system, which is not among the classes that sharded checkpoints are made of. "
        "Nothing of it was run. If you trust the origin of this file, save it again with tensors only.",
    )
    assert not marker.exists()


def test_a_module_saved_whole_is_refused_and_named(tmp_path: Path) -> None:
    """L11."""
    save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    assert problem_of(tmp_path / "x.pt", UnsafePickleError).message.startswith(
        "its pickle asks for torch.nn.modules.linear.Linear, "
    )


def test_a_state_dict_within_a_dict_is_named(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2)}}, tmp_path / "x.pt")
    assert problem_of(tmp_path / "x.pt") == Problem(
        "not-a-state-dict",
        "x.pt",
        "The file holds a dict with a nested state dict under 'model', not a state dict. Save that part by itself: "
        "torch.save(checkpoint['model'], path).",
    )
