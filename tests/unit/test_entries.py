"""What else a state dict holds, on real files: entries that are no weights, and tensors that lay on a GPU."""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import merger
from merger.errors import ArchiveError, Problem
from merger.sources.dtensor import PlainTensor
from merger.sources.torch_zip import read_archive
from tests.unit.archives import ARCHIVES, bits, truth

NAME = "model_world_size_1_rank_0.pt"


def as_bits(tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    return {name: bits(tensor) for name, tensor in tensors.items()}


def merged(folder: Path, out: Path) -> tuple[merger.MergeReport, dict[str, torch.Tensor]]:
    report = merger.merge(folder, out, weights_only=True)
    return report, load_file(out / "model.safetensors")


# Entries that are no weights.


class WithState(torch.nn.Linear):
    """A module that saves more than its parameters, as those that compute in float8 do."""

    def __init__(self, state: object) -> None:
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


EXTRA: dict[str, tuple[object, str]] = {
    "buffer": (io.BytesIO(b"scales"), "BytesIO"),
    "bytes": (b"scales", "bytes"),
    "no_bytes": (b"", "bytes"),
    "none": (None, "None"),
    "number": (3, "int"),
    "text": ("fp8", "str"),
    "listed": ([1, 2.5, "a"], "list"),
    "settings": ({"amax": [1.0], "margin": 0}, "dict"),
    "tensor": (torch.arange(5, dtype=torch.uint8), "tensor"),
    "tensors": ({"scale": torch.ones(2), "buffer": io.BytesIO(b"x")}, "dict"),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("legacy", [False, True])
def test_extra_states_of_modules_are_named_and_left_out(tmp_path: Path, protocol: int, *, legacy: bool) -> None:
    model = torch.nn.ModuleDict({name: WithState(state) for name, (state, _) in EXTRA.items()})
    torch.save(model.state_dict(), tmp_path / NAME, pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
    report, found = merged(tmp_path, tmp_path / "out")
    assert as_bits(found) == as_bits(dict(model.named_parameters()))
    expected = {f"{name}._extra_state": kind for name, (_, kind) in EXTRA.items()}
    assert report.left_out == expected
    assert merger.inspect(tmp_path).left_out == expected
    assert report.notes[-2] == (
        "entries that are no weights, left out: buffer._extra_state (BytesIO), bytes._extra_state (bytes), "
        "no_bytes._extra_state (bytes), none._extra_state (None), number._extra_state (int) and 5 more"
    )


def test_extra_states_may_differ_between_ranks(tmp_path: Path) -> None:
    """A rank's own scales: no replicas, and not held against one another."""
    for rank in range(2):
        state = {"w": torch.ones(3), "_extra_state": torch.arange(rank, dtype=torch.uint8)}
        torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    report, found = merged(tmp_path, tmp_path / "out")
    assert (set(found), report.left_out) == ({"w"}, {"_extra_state": "tensor"})


def test_values_that_are_no_tensors_are_named_and_left_out(tmp_path: Path) -> None:
    state = {
        "step": 3,
        "rate": 0.5,
        "name": "x",
        "nothing": None,
        "flag": True,
        "list": [1, (2, "a")],
        "dict": {"a": {"b": None}},
        "buffer": io.BytesIO(b"x"),
        "dtype": torch.bfloat16,
        "w": torch.ones(3),
    }
    torch.save(state, tmp_path / NAME)
    report, found = merged(tmp_path, tmp_path / "out")
    assert set(found) == {"w"}
    assert report.left_out == {
        "step": "int",
        "rate": "float",
        "name": "str",
        "nothing": "None",
        "flag": "bool",
        "list": "list",
        "dict": "dict",
        "buffer": "BytesIO",
        "dtype": "str",
    }


def test_a_tensor_in_a_container_is_no_extra_state_and_is_not_lost_in_silence(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "more": [io.BytesIO(b"x"), torch.ones(2)]}, tmp_path / NAME)
    with pytest.raises(ArchiveError) as caught:
        read_archive(tmp_path / NAME)
    assert caught.value.problems == (
        Problem(
            "bad-tensor",
            NAME,
            "more: is a container with tensors in it; a state dict maps names to tensors.",
        ),
    )


# Tensors that lay on a GPU.


@pytest.fixture
def on_cuda() -> Iterator[None]:
    """While it lasts, torch.save tags storages as it does those of the second GPU."""
    registry = torch.serialization._package_registry
    before = list(registry)
    torch.serialization.register_package(0, lambda _: "cuda:1", lambda _storage, _location: None)
    yield
    registry[:] = before


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("legacy", [False, True])
def test_storages_that_lay_on_a_gpu_are_read_without_one(tmp_path: Path, *, legacy: bool) -> None:
    state = {"a": torch.randn(3, 5), "b": torch.arange(4)}
    torch.save(state, tmp_path / NAME, _use_new_zipfile_serialization=not legacy)
    assert b"cuda:1" in (tmp_path / NAME).read_bytes()
    entries = read_archive(tmp_path / NAME).entries.values()
    assert [entry.local.device for entry in entries if isinstance(entry, PlainTensor)] == ["cuda:1", "cuda:1"]
    assert as_bits(merged(tmp_path, tmp_path / "out")[1]) == as_bits(state)


def to_cuda(data: bytes, location: str) -> bytes:
    """A pickle in which every device, location of a storage and type of a mesh that was the CPU is the GPU instead."""
    parts, last = [], 0
    for opcode, argument, position in pickletools.genops(data):
        if opcode.name == "BINUNICODE" and argument in ("cpu", "cpu:0"):
            assert position is not None
            parts.append(data[last:position] + b"X" + struct.pack("<I", len(location)) + location.encode())
            last = position + 5 + len(str(argument))
    assert parts
    return b"".join([*parts, data[last:]])


@pytest.mark.parametrize("location", ["cuda", "cuda:7"])
@pytest.mark.parametrize(
    "case",
    [
        "2.4.1/fsdp1_hsdp_w4",
        "2.6.0/fsdp2_tp_w4",
        "2.9.1/fsdp1_nomesh_w4",
        "2.10.0/fsdp2_hsdp_w4",
        "2.14.1/fsdp1_noshard_w2",
        "2.14.1/fsdp1_nomesh_w4",
        "2.14.1/fsdp2_dtypes_buf_w2",
        "2.14.1/fsdp2_tp_uneven_w4",
    ],
)
def test_sharded_tensors_that_lay_on_gpus_merge_the_same(case: str, location: str, tmp_path: Path) -> None:
    """L12: meshes of type "cuda" with storages, shards and devices there; else genuine files."""
    for path in (ARCHIVES / case).glob("model_*.pt"):
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / path.name, "w") as moved:
            for name in archive.namelist():
                data = archive.read(name)
                moved.writestr(name, to_cuda(data, location) if name.endswith("/data.pkl") else data)
    report, found = merged(tmp_path, tmp_path / "out")
    expected = merged(ARCHIVES / case, tmp_path / "cpu")[1]
    assert as_bits(found) == as_bits(expected)
    assert report.num_tensors == len(truth(ARCHIVES / case))
