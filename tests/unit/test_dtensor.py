"""What the pickled classes of torch mean, with real torch (files of five versions, and this one) as the oracle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import Placement as TorchPlacement

from merger.dtypes import BY_NAME
from merger.errors import ArchiveError, Problem
from merger.sharding import Mesh, Placement
from merger.sources.dtensor import Decoder, DTensor, PlainTensor
from merger.sources.fields import MalformedError
from merger.sources.inert import Call, Global, Inert, Instance, StorageRef
from merger.sources.local_tensor import LocalTensor
from merger.sources.sharded_tensor import ShardedTensor
from merger.sources.torch_zip import Archive, read_archive
from merger.tensors import Record

ARCHIVES = Path(__file__).parents[1] / "data" / "archives"
CASES = sorted(path.parent for path in ARCHIVES.glob("*/*/truth.pt"))
SHARD_0 = Placement("shard", dim=0)
FLOAT32 = BY_NAME["float32"]


def case_id(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"


def rank_files(folder: Path) -> dict[int, Path]:
    files = {}
    for path in folder.glob("model_world_size_*_rank_*.pt"):
        match = re.fullmatch(r"model_world_size_\d+_rank_(\d+)\.pt", path.name)
        assert match
        files[int(match[1])] = path
    return files


def load_local(archive: Archive, local: LocalTensor) -> torch.Tensor:
    """The tensor that `local` describes, read from the file by torch."""
    data = archive.file.path.read_bytes()[local.record.byte_offset :][: local.record.num_bytes]
    dtype = getattr(torch, local.dtype.name)
    offset = (local.byte_offset - local.record.byte_offset) // local.dtype.itemsize
    storage = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return storage.as_strided(local.sizes, local.strides, offset)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bytes(left.contiguous().view(-1).view(torch.uint8).tolist()) == bytes(
        right.contiguous().view(-1).view(torch.uint8).tolist()
    )


def expected_piece(truth: torch.Tensor, entry: DTensor) -> torch.Tensor:
    """What `torch.chunk` gives the rank, mesh axis by mesh axis."""
    assert entry.rank is not None
    piece = truth
    coordinate = np.unravel_index(entry.mesh.ranks.index(entry.rank), entry.mesh.shape)
    for placement, size, index in zip(entry.placements, entry.mesh.shape, coordinate, strict=True):
        if placement.kind == "shard":
            assert placement.dim is not None
            chunks = piece.chunk(size, placement.dim)
            piece = chunks[index] if index < len(chunks) else piece.narrow(placement.dim, 0, 0)
    return piece


@pytest.mark.parametrize("folder", CASES, ids=case_id)
def test_the_tensors_of_every_torch_version_hold_the_bytes_that_torch_chunk_gives_their_rank(folder: Path) -> None:
    """L12, S2, S4."""
    truth = torch.load(folder / "truth.pt", weights_only=True)
    for rank, path in rank_files(folder).items():
        archive = read_archive(path, rank=rank)
        assert set(archive.entries) == set(truth)
        for fqn, entry in archive.entries.items():
            if isinstance(entry, ShardedTensor):
                for shard in entry.shards:
                    rectangle = tuple(slice(at, at + size) for at, size in zip(shard.offsets, shard.sizes, strict=True))
                    assert same_bits(load_local(archive, shard.local), truth[fqn][rectangle]), fqn
                continue
            assert isinstance(entry, PlainTensor | DTensor)
            local = load_local(archive, entry.local)
            if isinstance(entry, PlainTensor):
                assert same_bits(local, truth[fqn]), fqn
                continue
            assert (entry.rank, entry.shape, entry.dtype) == (rank, tuple(truth[fqn].shape), entry.local.dtype)
            # How strided shards are cut is for the sharding to say; here they must be read.
            if all(placement.kind != "strided_shard" for placement in entry.placements):
                assert same_bits(local, expected_piece(truth[fqn], entry)), fqn


def test_there_are_genuine_archives_of_five_torch_versions() -> None:
    assert {folder.parent.name for folder in CASES} == {"2.4.1", "2.6.0", "2.9.1", "2.10.0", "2.14.1"}
    assert len(CASES) == 61


def entry_of(version: str, case: str, rank: int, fqn: str) -> DTensor:
    (path,) = (ARCHIVES / version / case).glob(f"*_rank_{rank}.pt")
    entry = read_archive(path).entries[fqn]
    assert isinstance(entry, DTensor)
    return entry


@pytest.mark.parametrize("version", ["2.4.1", "2.6.0", "2.9.1", "2.10.0", "2.14.1"])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_two_axis_mesh_is_the_same_in_all_three_forms(version: str, rank: int) -> None:
    """L12, S10."""
    entry = entry_of(version, "fsdp1_hsdp_w4", rank, "emb.weight")
    assert entry.mesh == Mesh((2, 2), (0, 1, 2, 3), ("ddp", "fsdp"))
    assert entry.placements == (Placement("replicate"), SHARD_0)
    assert entry.rank == rank
    assert entry.shard_order == (((0, (1,)),) if version in ("2.10.0", "2.14.1") else None)


@pytest.mark.parametrize("version", ["2.6.0", "2.9.1", "2.10.0", "2.14.1"])
@pytest.mark.parametrize(("rank", "ranks"), [(0, (0, 2)), (1, (1, 3)), (2, (0, 2)), (3, (1, 3))])
def test_a_sub_mesh_is_the_copy_that_the_saving_rank_is_in(version: str, rank: int, ranks: tuple[int, ...]) -> None:
    """S10: outside of tensor parallelism, parameters lie on the mesh (0, 2) on some ranks and (1, 3) on others."""
    entry = entry_of(version, "fsdp2_tp_w4", rank, "emb.weight")
    assert entry.mesh == Mesh((2,), ranks, ("fsdp",))
    assert entry.rank == rank


@pytest.mark.parametrize("version", ["2.6.0", "2.9.1", "2.10.0", "2.14.1"])
def test_strided_shards_are_read_with_their_split_factor(version: str) -> None:
    entry = entry_of(version, "fsdp2_tp_w4", 1, "layers.0.up.weight")
    assert entry.placements == (Placement("strided_shard", dim=0, split_factor=2), SHARD_0)
    assert entry.shard_order == (((0, (1, 0)),) if version == "2.10.0" else None)


def test_a_padded_local_piece_keeps_its_own_shape() -> None:
    """S1: 5 rows on 4 ranks are 2, 2, 1 and 0, saved in storages of two rows each."""
    entry = entry_of("2.14.1", "fsdp2_uneven_w4", 2, "five")
    assert entry.local.sizes == (1, 3)
    assert entry.local.record.num_bytes == 24


def test_meshes_and_placements_that_repeat_are_the_same_objects() -> None:
    (path,) = (ARCHIVES / "2.14.1" / "fsdp2_1d_w4").glob("*_rank_1.pt")
    entries = [entry for entry in read_archive(path).entries.values() if isinstance(entry, DTensor)]
    assert len({id(entry.mesh) for entry in entries}) == 1
    assert len({id(placement) for entry in entries for placement in entry.placements}) == 1


# The torch that is installed, on a process group of one rank.


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [[0]], mesh_dim_names=("ddp", "fsdp"))
    dist.destroy_process_group()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_dtensors_are_read_in_every_pickle_protocol(mesh: DeviceMesh, tmp_path: Path, protocol: int) -> None:
    original = torch.arange(12.0).reshape(4, 3)
    placements: dict[str, list[TorchPlacement]] = {
        "a": [Replicate(), Shard(1)],
        "b": [Shard(-1), Shard(0)],
        "c": [Partial("avg"), Replicate()],
    }
    state_dict: dict[str, Any] = {
        name: TorchDTensor.from_local(original, mesh, placement, run_check=False)
        for name, placement in placements.items()
    }
    state_dict["d"] = torch.nn.Parameter(state_dict["a"])
    state_dict["e"] = torch.nn.Parameter(original.t())
    path = tmp_path / "x.pt"
    torch.save(state_dict, path, pickle_protocol=protocol)
    archive = read_archive(path)
    expected_placements = {
        "a": (Placement("replicate"), Placement("shard", dim=1)),
        "b": (Placement("shard", dim=1), SHARD_0),
        "c": (Placement("partial", reduce_op="avg"), Placement("replicate")),
        "d": (Placement("replicate"), Placement("shard", dim=1)),
    }
    for name, expected in expected_placements.items():
        entry = archive.entries[name]
        assert isinstance(entry, DTensor)
        assert entry.placements == expected
        # torch saves an axis of one rank with the shape ().
        assert (entry.mesh, entry.rank) == (Mesh((1, 1), (0,), ("ddp", "fsdp")), 0)
        assert (entry.shape, entry.dtype) == ((4, 3), FLOAT32)
        assert same_bits(load_local(archive, entry.local), original)
    plain = archive.entries["e"]
    assert isinstance(plain, PlainTensor)
    assert same_bits(load_local(archive, plain.local), original.t())


def test_a_tensor_saved_under_another_dtype_and_an_offset_is_found(tmp_path: Path) -> None:
    base = torch.arange(100, dtype=torch.int16)
    state_dict = {"part": base[10:40].reshape(5, 6)[1:, ::2], "untyped": torch.arange(9).to(torch.uint16)[4:6]}
    path = tmp_path / "x.pt"
    torch.save(state_dict, path)
    archive = read_archive(path)
    for fqn, tensor in state_dict.items():
        entry = archive.entries[fqn]
        assert isinstance(entry, PlainTensor)
        assert entry.local.dtype is BY_NAME[str(tensor.dtype).removeprefix("torch.")]
        assert same_bits(load_local(archive, entry.local), tensor)
    assert archive.entries["part"].local.sizes == (4, 3)  # type: ignore[attr-defined]  # asserted above


def test_values_that_are_no_tensors_stay_plain_python_values(tmp_path: Path) -> None:
    state_dict = {
        "n": 2**63,
        "minus": -5,
        "f": 1.5,
        "s": "text",
        "b": b"ab\xff",
        "empty": b"",
        "none": None,
        "yes": True,
        "nest": (1, [2, {"k": "v", 3: None}]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda"),
        "size": torch.Size([1, 2]),
    }
    expected = state_dict | {"dtype": "torch.bfloat16", "device": "cuda", "size": (1, 2)}
    path = tmp_path / "x.pt"
    for protocol in (2, 3, 4, 5):
        torch.save(state_dict, path, pickle_protocol=protocol)
        assert read_archive(path).entries == expected


def problem_of(state_dict: object, path: Path) -> Problem:
    torch.save(state_dict, path)
    with pytest.raises(ArchiveError) as caught:
        read_archive(path)
    (problem,) = caught.value.problems
    return problem


def test_a_lazily_conjugated_tensor_is_refused(tmp_path: Path) -> None:
    assert problem_of({"x": torch.tensor([1 + 2j]).conj()}, tmp_path / "x.pt") == Problem(
        "bad-tensor",
        "x.pt",
        "x: is a lazily conjugated or negated view; save it with .resolve_conj().resolve_neg().",
    )


def test_a_tensor_with_far_more_elements_than_its_storage_is_refused(tmp_path: Path) -> None:
    """L11: a few bytes that claim the room of any disk."""
    assert problem_of({"x": torch.ones(1).expand(1 << 28, 2)}, tmp_path / "x.pt") == Problem(
        "bad-tensor",
        "x.pt",
        "x: its shape (268435456, 2) has many more elements than its storage of 1; if it is an expanded view, save it "
        "with .contiguous().",
    )


def test_many_tensors_with_more_elements_than_their_storages_are_refused_together(tmp_path: Path) -> None:
    """L11."""
    state = {f"x{n}": torch.ones(1).expand(1 << 26) for n in range(6)}
    assert problem_of(state, tmp_path / "x.pt").message.startswith("x4: its shape (67108864,) has many more elements ")


def test_a_container_with_tensors_in_it_is_refused(tmp_path: Path) -> None:
    assert problem_of({"x": [torch.ones(1)]}, tmp_path / "x.pt") == Problem(
        "bad-tensor", "x.pt", "x: is a container with tensors in it; a state dict maps names to tensors."
    )


# Inert records by hand: what no torch writes.

RECORD = Record("data/0", 640, 48, None)
STORAGE = StorageRef(FLOAT32, "0", "cpu", 12)


def rebuild(*args: Inert) -> Call:
    return Call("torch._utils._rebuild_tensor_v2", (*args, False, {}))


def decode(value: Inert, data: bytes = b"", rank: int | None = None) -> object:
    records = {"data/0": RECORD, "data/1": Record("data/1", 704, len(data), None)}
    return Decoder(records, read_record=lambda _: data, file_rank=rank).entry(value)


def refusal(value: Inert, data: bytes = b"", rank: int | None = None) -> str:
    with pytest.raises(MalformedError) as caught:
        decode(value, data, rank)
    return str(caught.value)


def test_an_empty_tensor_may_lie_in_a_record_of_no_bytes_or_in_padding() -> None:
    """S2: where its offset leads to does not matter, and torch 2.9 lets it lead out of a storage of nothing."""
    none = StorageRef(FLOAT32, "1", "cpu", 0)
    for storage, offset in ((none, 0), (none, 2), (STORAGE, 0), (STORAGE, 12), (STORAGE, 13)):
        entry = decode(rebuild(storage, offset, (0, 3), (3, 1)))
        assert isinstance(entry, PlainTensor)
        assert entry.local.sizes == (0, 3)
        assert entry.local.byte_offset == entry.local.record.byte_offset


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            rebuild(STORAGE, 1, (4, 3), (3, 1)),
            "its shape (4, 3), stride (3, 1) and offset 1 leave its storage of 12 elements",
        ),
        (
            rebuild(STORAGE, 0, (2,), (12,)),
            "its shape (2,), stride (12,) and offset 0 leave its storage of 12 elements",
        ),
        (rebuild(STORAGE, -1, (4, 3), (3, 1)), "its storage offset is -1, not a count"),
        (rebuild(STORAGE, 0, (-4, 3), (3, 1)), "its shape holds -4, not a count"),
        (rebuild(STORAGE, 0, (4, 3), (-3, 1)), "its stride holds -3, not a count"),
        (rebuild(STORAGE, 0, (True,), (1,)), "its shape holds True, not a count"),
        (rebuild(STORAGE, 0, 4, (1,)), "its shape is 4, not a tuple of counts"),
        (rebuild(STORAGE, 0, (4, 3), (1,)), "it has 2 sizes and 1 strides"),
        (rebuild(STORAGE, 0, (1,) * 65, (1,) * 65), "it has 65 sizes and 65 strides"),
        (rebuild(StorageRef(FLOAT32, "0", "cpu", 13), 0, (1,), (1,)), "its storage claims 52 bytes, data/0 has 48"),
        (rebuild(StorageRef(FLOAT32, "7", "cpu", 1), 0, (1,), (1,)), "its storage data/7 is not in the file"),
        (rebuild(StorageRef(None, "0", "cpu", 48), 0, (1,), (1,)), "has no element type"),
        (rebuild("0", 0, (1,), (1,)), "is not made as torch makes tensors"),
        (rebuild(STORAGE, 0), "is not made as torch makes tensors"),
        (Call("torch._utils._rebuild_parameter", (3, True, {})), "is a Parameter without a tensor"),
        (Call("torch._utils._rebuild_parameter", ()), "is a Parameter without a tensor"),
        (Call("torch._tensor._rebuild_from_type_v2", (1, 2, 3, 4)), "is not made as torch makes tensors"),
        (Call("torch._tensor._rebuild_from_type_v2", ()), "is not made as torch makes tensors"),
        (
            Call("torch._tensor._rebuild_from_type_v2", (Global("f", "call"), Global("C", "type"), (), None)),
            "is a C made by f",
        ),
        (Call("_codecs.encode", ("\u20ac", "latin1")), "holds bytes that are not written as torch writes them"),
        (Call("_codecs.encode", ("abc", "rot13")), "holds a call of _codecs.encode"),
        (Instance("m.Shard", ()), "holds a Shard, which is no tensor and no plain value"),
    ],
)
def test_a_tensor_that_does_not_fit_or_is_made_in_another_way_is_refused(value: Inert, message: str) -> None:
    assert refusal(value) == message


def test_a_parameter_within_a_parameter_within_a_parameter_is_refused() -> None:
    value: Inert = rebuild(STORAGE, 0, (1,), (1,))
    for _ in range(3):
        value = Call("torch._utils._rebuild_parameter", (value, True, {}))
    assert refusal(value) == "is not made as torch makes tensors"


def test_plain_values_that_unfold_without_end_are_refused() -> None:
    bomb: tuple[object, ...] = ()
    for _ in range(60):
        bomb = (bomb, bomb)
    endless: list[object] = []
    endless.append(endless)
    wide = [[None] * 1000] * 1000
    for value in (bomb, endless, wide):
        assert refusal(value) == "is a nest of containers too large for a state dict"


SPEC = "torch.distributed.tensor._dtensor_spec"
PLACEMENT_TYPES = "torch.distributed.tensor.placement_types"
LAYOUT = "torch.distributed._mesh_layout"


def made(cls: str, state: Inert, *args: Inert) -> Instance:
    found = Instance(cls, args)
    found.state = state
    return found


def dtensor(mesh_state: dict[str, Inert], placements: Inert = None, **spec: Inert) -> Call:
    """A DTensor of shape (4, 3) whose local tensor is all of data/0."""
    wrapper = (None, Global("torch.float32", "type", FLOAT32), (4, 3), (3, 1), 0, None, None, False)
    shard = made(f"{PLACEMENT_TYPES}.Shard", {"dim": 0})
    attributes = {
        "mesh": made("torch.distributed.device_mesh.DeviceMesh", mesh_state),
        "placements": (shard,) if placements is None else placements,
        "tensor_meta": Instance(f"{SPEC}.TensorMeta", ((4, 3), (3, 1), None)),
    } | spec
    state = (
        None,
        {"_local_tensor": rebuild(STORAGE, 0, (4, 3), (3, 1)), "_spec": made(f"{SPEC}.DTensorSpec", attributes)},
    )
    rebuild_wrapper = Global("torch._utils._rebuild_wrapper_subclass", "call")
    cls = Global("torch.distributed.tensor.DTensor", "type")
    return Call("torch._tensor._rebuild_from_type_v2", (rebuild_wrapper, cls, wrapper, state))


def ranks_tensor(*sizes: int) -> Call:
    count = 1
    for size in sizes:
        count *= size
    strides = [1] * len(sizes)
    for i in range(len(sizes) - 2, -1, -1):
        strides[i] = strides[i + 1] * sizes[i + 1]
    return rebuild(StorageRef(BY_NAME["int32"], "1", "cpu", count), 0, sizes, tuple(strides))


def ranks_bytes(*ranks: int) -> bytes:
    return b"".join(rank.to_bytes(4, "little", signed=True) for rank in ranks)


def layout(*axes: tuple[Inert, Inert]) -> Instance:
    flat = tuple(made(f"{LAYOUT}._FlatLayout", {"shape": shape, "stride": stride}) for shape, stride in axes)
    return made(f"{LAYOUT}._MeshLayout", {"axes": flat})


def nested_layout(shape: Inert, stride: Inert) -> Instance:
    return made(f"{LAYOUT}._MeshLayout", {"shape": shape, "stride": stride})


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        # Mesh ("a", "b", "c") of 2 x 3 x 2; "a" and "c" flattened into one axis, seen from rank 109 = (1, 1, 1).
        (layout(((2, 2), (6, 1))), Mesh((4,), (102, 103, 108, 109))),
        (nested_layout(((2, 2),), ((6, 1),)), Mesh((4,), (102, 103, 108, 109))),
        # "b" and then "a": axes in another order than the root's.
        (layout(((3,), (2,)), ((2,), (6,))), Mesh((3, 2), (101, 107, 103, 109, 105, 111))),
        (nested_layout((3, 2), (2, 6)), Mesh((3, 2), (101, 107, 103, 109, 105, 111))),
        # An axis of one beside "b": shape () from 2.13, size 1 before.
        (layout(((), ()), ((3,), (2,))), Mesh((1, 3), (107, 109, 111))),
        (nested_layout((1, 3), (0, 2)), Mesh((1, 3), (107, 109, 111))),
        (nested_layout(3, 2), Mesh((3,), (107, 109, 111))),
    ],
)
def test_layouts_over_a_rank_map_are_what_torch_makes_of_them(form: Instance, expected: Mesh) -> None:
    """L12: the expected ranks are those of numpy.arange(100, 112).reshape(2, 3, 2), indexed and transposed by hand."""
    state = {"_layout": form, "_rank_map": ranks_tensor(12), "_rank": 109}
    placements = (made(f"{PLACEMENT_TYPES}.Replicate", None),) * len(expected.shape)
    entry = decode(dtensor(state, placements), ranks_bytes(*range(100, 112)))
    assert isinstance(entry, DTensor)
    assert (entry.mesh, entry.rank) == (expected, 109)


def test_the_files_rank_resolves_a_sub_mesh_that_does_not_say_who_saved_it() -> None:
    state = {"_layout": nested_layout((2,), (2,)), "_rank_map": ranks_tensor(4)}
    entry = decode(dtensor(state), ranks_bytes(0, 1, 2, 3), rank=3)
    assert isinstance(entry, DTensor)
    assert entry.mesh == Mesh((2,), (1, 3))
    assert refusal(dtensor(state), ranks_bytes(0, 1, 2, 3)) == (
        "its mesh is a part of a larger one, and the file does not say which rank saved it"
    )


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"mesh": 3}, "the ranks of its mesh are 3"),
        ({"mesh": rebuild(STORAGE, 0, (2,), (1,))}, "the ranks of its mesh are 48 bytes of float32"),
        ({"mesh": ranks_tensor(4), "mesh_dim_names": ("a", "b")}, "its mesh has 1 axes and 2 names"),
        ({"mesh": ranks_tensor(4), "mesh_dim_names": "ab"}, "its mesh has axis names that are no tuple"),
        (
            {"mesh": ranks_tensor(4), "_coordinate_on_dim": [4]},
            "its mesh coordinate (4,) is not in a mesh of shape (4,)",
        ),
        (
            {"mesh": ranks_tensor(2, 2), "_coordinate_on_dim": [1]},
            "its mesh coordinate (1,) is not in a mesh of shape (2, 2)",
        ),
        (
            {"_layout": layout(((4,), (1,))), "_rank_map": ranks_tensor(4), "_rank": 1, "_coordinate_on_dim": (2,)},
            "its mesh was saved by rank 1, but at its coordinate (2,) is rank 2",
        ),
        (
            {"_layout": layout(((2,), (1,))), "_rank_map": ranks_tensor(4), "_rank": 9},
            "its mesh was saved by rank 9, which its rank map does not hold",
        ),
        (
            {"_layout": layout(((4,), (2,))), "_rank_map": ranks_tensor(4), "_rank": 0},
            "its mesh of shape (4,) is larger than its rank map of 4",
        ),
        (
            {"_layout": layout(((1 << 21,), (0,))), "_rank_map": ranks_tensor(4), "_rank": 0},
            "its mesh has an axis of size 2097152",
        ),
        (
            {"_layout": layout(((2, 2), (1,))), "_rank_map": ranks_tensor(4)},
            "its mesh layout has more sizes than strides, or fewer",
        ),
        (
            {"_layout": layout(((2,) * 9, (1,) * 9)), "_rank_map": ranks_tensor(4)},
            "its mesh layout is not a tuple of at most 8 parts",
        ),
        (
            {"_layout": layout((((((2,),),),), ((((1,),),),))), "_rank_map": ranks_tensor(4)},
            "its mesh axis size is a tuple, not a count",
        ),
        ({"_layout": 1, "_rank_map": ranks_tensor(4)}, "its mesh layout is 1"),
        ({}, "the ranks of its mesh are None"),
    ],
)
def test_a_mesh_that_contradicts_itself_is_refused(state: dict[str, Inert], message: str) -> None:
    assert refusal(dtensor(state), ranks_bytes(0, 1, 2, 3)) == message


def test_a_mesh_with_a_rank_twice_or_below_zero_is_refused() -> None:
    state = {"mesh": ranks_tensor(2)}
    assert refusal(dtensor(state), ranks_bytes(1, 1)) == "its mesh holds a rank twice"
    assert refusal(dtensor(state), ranks_bytes(0, -1)) == "its mesh holds -1, not a count"
    # One rank, seen as a million by a stride of 0: L11.
    many = rebuild(StorageRef(BY_NAME["int32"], "1", "cpu", 1), 0, (1 << 20,), (0,))
    assert refusal(dtensor({"mesh": many}), ranks_bytes(0)) == "its mesh holds a rank twice"


MESH = {"mesh": ranks_tensor(2), "_coordinate_on_dim": [1]}


def test_a_dim_that_counts_from_the_end_is_made_to_count_from_the_start() -> None:
    for cls, expected in (("Shard", Placement("shard", dim=1)), ("_StridedShard", Placement("strided_shard", 1, 2))):
        placements = (made(f"{PLACEMENT_TYPES}.{cls}", {"dim": -1, "split_factor": 2}),)
        entry = decode(dtensor(MESH, placements), ranks_bytes(0, 1))
        assert isinstance(entry, DTensor)
        assert entry.placements == (expected,)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (dtensor(MESH, (made(f"{PLACEMENT_TYPES}.Shard", {"dim": 2}),)), "it is sharded on dim 2 of 2"),
        (dtensor(MESH, (made(f"{PLACEMENT_TYPES}.Shard", {}),)), "it is sharded on dim None of 2"),
        (dtensor(MESH, (made(f"{PLACEMENT_TYPES}.Shard", 7),)), "the state of its Shard is 7"),
        (
            dtensor(MESH, (made(f"{PLACEMENT_TYPES}._StridedShard", {"dim": 0, "split_factor": 0}),)),
            "its split factor is 0",
        ),
        (dtensor(MESH, (made("somewhere.Shard", {"dim": 0}),)), "one of its placements is a Shard"),
        (dtensor(MESH, (None,)), "one of its placements is None"),
        (dtensor(MESH, "Shard"), "its placements are a str"),
        (dtensor(MESH, ()), "it has 0 placements on a mesh of 1 axes"),
        (dtensor(MESH, shard_order=5), "its shard order is 5"),
        (
            dtensor(MESH, shard_order=(Instance(f"{SPEC}.ShardOrderEntry", (0,)),)),
            "its shard order has an entry that is no pair",
        ),
        (
            dtensor(MESH, tensor_meta=Instance(f"{SPEC}.TensorMeta", ((5, 3), (3, 1), None))),
            "its global shape is (4, 3), but its spec says otherwise",
        ),
        (dtensor(MESH, mesh=None), "its mesh is None"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(value: Call, message: str) -> None:
    assert refusal(value, ranks_bytes(0, 1)) == message


def test_the_wrapper_of_a_dtensor_must_say_shape_and_dtype() -> None:
    value = dtensor(MESH)
    func, cls, args, state = value.args
    bad = Call(value.func, (func, cls, (args[0], None, *args[2:]), state))
    assert refusal(bad, ranks_bytes(0, 1)) == "is not made as torch makes tensors"
    assert refusal(Call(value.func, (func, cls, args, (None, {}))), ranks_bytes(0, 1)) == "its local tensor is None"
