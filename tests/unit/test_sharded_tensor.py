"""ShardedTensors (L13): what a file says of its shards, and which sets of files are not one whole tensor.

The files are torch's own, of each rank in turn, with torch's fake process group; genuine ones of five versions are
merged in test_merge.py, those of real ranks in the multi-rank tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.remote_device import _remote_device
from torch.testing._internal.distributed.fake_pg import FakeStore

import merger
from fixtures.sharded_tensors import Edit, save_sharded_tensors
from fixtures.specs import ShardedSpec
from merger.dtypes import BY_NAME
from merger.errors import CheckpointError
from merger.sharding import Cut
from merger.sources.fields import MalformedError
from merger.sources.inert import Call, Inert, Instance, StorageRef
from merger.sources.sharded_tensor import ShardedTensor, ShardedTensorDecoder
from merger.sources.torch_zip import read_archive

# Five rows on three ranks are 2, 2 and 1; one row is on rank 0 alone.
ROWS = ShardedSpec("rows", (5, 2), "float32", 1, (((0, 0), (2, 2), 0), ((2, 0), (2, 2), 1), ((4, 0), (1, 2), 2)))
ROW = ShardedSpec("row", (1, 3), "float32", 2, (((0, 0), (1, 3), 0),))


def save(
    folder: Path, *, specs: tuple[ShardedSpec, ...] = (ROWS, ROW), world_size: int = 3, edit: Edit | None = None
) -> None:
    """The files of all ranks; `edit(rank, state)` breaks what is saved."""
    for rank in range(world_size):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            save_sharded_tensors(rank, world_size, specs, str(folder), edit)
        finally:
            dist.destroy_process_group()


def on_rank(number: int, change: Callable[[dict[str, Any]], object]) -> Edit:
    """An edit of what one rank saves."""

    def edit(rank: int, state: dict[str, Any]) -> None:
        if rank == number:
            change(state)

    return edit


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        merger.merge(folder, folder / "out", weights_only=True)
    assert not (folder / "out").exists()
    return str(caught.value)


# One file.


def test_a_file_holds_its_own_shards_and_says_who_holds_the_others(tmp_path: Path) -> None:
    save(tmp_path)
    entries = read_archive(tmp_path / "model_world_size_3_rank_2.pt").entries
    rows, row = entries["rows"], entries["row"]
    assert isinstance(rows, ShardedTensor)
    assert isinstance(row, ShardedTensor)
    assert (rows.shape, rows.dtype, rows.rank, rows.world_size) == ((5, 2), BY_NAME["float32"], 2, 3)
    assert rows.cut == Cut((((0, 0), (2, 2)), ((2, 0), (2, 2)), ((4, 0), (1, 2))), (0, 1, 2))
    assert [(shard.offsets, shard.sizes, shard.local.sizes) for shard in rows.shards] == [((4, 0), (1, 2), (1, 2))]
    assert (row.cut, row.shards) == (Cut((((0, 0), (1, 3)),), (0,)), ())


@pytest.mark.parametrize("protocol", [2, 4])
def test_it_is_read_in_other_pickle_protocols(tmp_path: Path, protocol: int) -> None:
    save(tmp_path, edit=lambda _, state: torch.save(state, tmp_path / "x.pt", pickle_protocol=protocol))
    archive = read_archive(tmp_path / "x.pt")
    rows = archive.entries["rows"]
    assert isinstance(rows, ShardedTensor)
    assert (rows.rank, rows.cut.ranks) == (2, (0, 1, 2))


# Sets of files.


def test_a_rank_without_shards_is_no_fault(tmp_path: Path) -> None:
    save(tmp_path)
    report = merger.merge(tmp_path, tmp_path / "out", weights_only=True)
    assert (report.num_tensors, report.notes) == (2, ("names and shapes are as saved: those of the hub need a config",))


def test_a_rank_that_holds_no_shard_need_not_have_the_key(tmp_path: Path) -> None:
    save(tmp_path, edit=on_rank(1, lambda state: state.pop("row")))
    assert merger.merge(tmp_path, tmp_path / "out", weights_only=True).num_tensors == 2


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    """L1."""
    save(tmp_path)
    (tmp_path / "model_world_size_3_rank_1.pt").unlink()
    assert refusal(tmp_path).startswith(f"{tmp_path}: rank 1 of 3 is missing (found ranks 0 and 2); ")


def test_a_missing_key_is_named_with_the_rank_that_should_have_it(tmp_path: Path) -> None:
    """S9."""
    save(tmp_path, edit=on_rank(1, lambda state: state.pop("rows")))
    assert refusal(tmp_path) == (
        "rows: held by ranks 0 and 2 but missing on rank 1, though its shard metadata names them all; save the "
        "checkpoint again, or restore the right files of those ranks"
    )


def test_a_missing_shard_is_named_with_its_rank_and_rows(tmp_path: Path) -> None:
    """S11."""
    save(tmp_path, edit=on_rank(1, lambda state: state["rows"].local_shards().clear()))
    assert refusal(tmp_path) == (
        "rank 1: rows: its file holds no shard, but by the metadata of the ShardedTensor this rank has [2:4, 0:2]; "
        "the files are not of one run, or are damaged: save the checkpoint again"
    )


def test_a_shard_that_is_another_ranks_is_named(tmp_path: Path) -> None:
    """S11."""

    def move(state: dict[str, Any]) -> None:
        state["rows"].local_shards()[0].metadata = ShardMetadata([0, 0], [2, 2], "rank:1/cpu")

    save(tmp_path, edit=on_rank(1, move))
    assert refusal(tmp_path) == (
        "rank 1: rows: its file holds [0:2, 0:2], but by the metadata of the ShardedTensor this rank has [2:4, 0:2]; "
        "the files are not of one run, or are damaged: save the checkpoint again"
    )


def test_a_hole_that_the_metadata_leave_is_named(tmp_path: Path) -> None:
    """S11: torch refuses to make it, but not to save it."""

    def drop_last(_: int, state: dict[str, Any]) -> None:
        tensor = state["rows"]
        tensor.metadata().shards_metadata.pop()
        del tensor.local_shards()[: 1 if dist.get_rank() == 2 else 0]

    save(tmp_path, edit=drop_last)
    assert refusal(tmp_path) == (
        "rows: no rank holds [4:5, 0:2] of shape (5, 2); what is held: [0:2, 0:2] of rank 0, [2:4, 0:2] of rank 1"
    )


def test_ranks_whose_metadata_disagree_are_named(tmp_path: Path) -> None:
    """S11."""
    other = ShardedSpec("rows", (5, 2), "float32", 1, (((0, 0), (1, 2), 0), ((1, 0), (2, 2), 1), ((3, 0), (2, 2), 2)))
    save(tmp_path)
    kept = (tmp_path / "model_world_size_3_rank_0.pt").read_bytes()
    save(tmp_path, specs=(other, ROW))
    (tmp_path / "model_world_size_3_rank_0.pt").write_bytes(kept)
    assert refusal(tmp_path) == (
        "rows: ranks disagree: shards [0:1, 0:2], [1:3, 0:2], [3:5, 0:2] on ranks 1 and 2, shards [0:2, 0:2], "
        "[2:4, 0:2], [4:5, 0:2] on rank 0; their files are not of one run and one step"
    )


def test_a_plain_tensor_on_one_rank_is_named(tmp_path: Path) -> None:
    """S9."""
    save(tmp_path, edit=on_rank(2, lambda state: state.update(row=torch.zeros(1, 3))))
    assert refusal(tmp_path) == (
        "row: ranks disagree: a ShardedTensor on ranks 0 and 1, a plain tensor on rank 2; their files are not of one "
        "run and one step"
    )


def test_a_file_copied_over_another_is_told_by_the_rank_that_it_records(tmp_path: Path) -> None:
    """S8."""
    save(tmp_path)
    (tmp_path / "model_world_size_3_rank_2.pt").write_bytes((tmp_path / "model_world_size_3_rank_1.pt").read_bytes())
    assert refusal(tmp_path) == (
        "model_world_size_3_rank_2.pt: was saved by rank 1, but its name says rank 2; it was renamed or copied over: "
        "restore the file that rank 2 saved"
    )


def test_files_of_a_larger_run_are_told_by_the_world_size_that_they_record(tmp_path: Path) -> None:
    """S8, L3: the names say two, and all the names are there."""
    save(tmp_path, specs=(ROW,))
    for rank in range(2):
        (tmp_path / f"model_world_size_3_rank_{rank}.pt").rename(tmp_path / f"model_world_size_2_rank_{rank}.pt")
    (tmp_path / "model_world_size_3_rank_2.pt").unlink()
    assert refusal(tmp_path) == (
        "2 problems:\n"
        "  - model_world_size_2_rank_0.pt: was saved by a run of 3 ranks, but its name says 2; it was renamed: restore "
        "its name, and the files of all 3 ranks\n"
        "  - model_world_size_2_rank_1.pt: was saved by a run of 3 ranks, but its name says 2; it was renamed: restore "
        "its name, and the files of all 3 ranks"
    )


def test_a_shard_of_another_type_or_size_than_it_says_is_named(tmp_path: Path) -> None:
    """S11."""

    def retype(state: dict[str, Any]) -> None:
        state["rows"].local_shards()[0].tensor = torch.zeros(2, 2, dtype=torch.bfloat16)

    def widen(state: dict[str, Any]) -> None:
        state["rows"].local_shards()[0].tensor = torch.zeros(2, 4)

    save(tmp_path, edit=on_rank(0, retype))
    assert refusal(tmp_path) == (
        "rank 0: rows: its shard [0:2, 0:2] is bfloat16, the ShardedTensor float32; the file is damaged"
    )
    save(tmp_path, edit=on_rank(0, widen))
    assert refusal(tmp_path) == ("rank 0: rows: its shard [0:2, 0:2] is a tensor of shape (2, 4); the file is damaged")


def without_ranks(_: int, state: dict[str, Any]) -> None:
    """The placements of an RPC group name workers."""
    for index, metadata in enumerate(state["rows"].metadata().shards_metadata):
        metadata.placement = _remote_device(f"worker{index}/cpu")


def test_placements_that_name_no_rank_leave_it_to_the_files(tmp_path: Path) -> None:
    save(tmp_path, edit=without_ranks)
    assert merger.merge(tmp_path, tmp_path / "out", weights_only=True).num_tensors == 2


def test_where_placements_name_no_rank_a_missing_shard_is_a_hole(tmp_path: Path) -> None:
    def edit(rank: int, state: dict[str, Any]) -> None:
        without_ranks(rank, state)
        if rank == 1:
            state["rows"].local_shards().clear()

    save(tmp_path, edit=edit)
    assert refusal(tmp_path) == (
        "rows: no rank holds [2:4, 0:2] of shape (5, 2); what is held: [0:2, 0:2] of rank 0, [4:5, 0:2] of rank 2"
    )


# Inert records by hand: what no torch writes.

SHARDED = "torch.distributed._shard"
WHOLE = ([0, 0], [2, 3])


def made(name: str, **attributes: Inert) -> Instance:
    found = Instance(f"{SHARDED}.{name}", ())
    found.state = attributes
    return found


def shard_metadata(offsets: Inert, sizes: Inert, rank: Inert = 0) -> Instance:
    device = Instance("torch.distributed.remote_device._remote_device", ())
    device.state = {"_rank": rank}
    return made("metadata.ShardMetadata", shard_offsets=offsets, shard_sizes=sizes, placement=device)


def state(
    shards: Inert = None, metadata: Inert = None, size: Inert = (2, 3), group: Inert = None, held: Inert = None
) -> tuple[Inert, ...]:
    """The state of a ShardedTensor of shape (2, 3), held by this rank as a whole unless an argument says otherwise."""
    tensor = Call("torch._utils._rebuild_tensor_v2", (StorageRef(BY_NAME["float32"], "0", "cpu", 6), 0, (2, 3), (3, 1)))
    local = made("sharded_tensor.shard.Shard", tensor=held or tensor, metadata=shard_metadata(*WHOLE))
    meta = made(
        "sharded_tensor.metadata.ShardedTensorMetadata",
        size=size,
        shards_metadata=[shard_metadata(*WHOLE)] if metadata is None else metadata,
    )
    saved_by = made("sharded_tensor.api.ShardedTensor.ProcessGroupState", global_rank=0, global_world_size=1)
    return ([local] if shards is None else shards, meta, group or saved_by, None, False)


def decode(value: Inert) -> ShardedTensor:
    return ShardedTensorDecoder(lambda *_: None).decode((2, 3), BY_NAME["float32"], value)  # type: ignore[arg-type]  # the tensor itself is not looked at


def test_the_state_made_by_hand_is_sound() -> None:
    assert decode(state()).cut == Cut((((0, 0), (2, 3)),), (0,))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "its state is not that of a ShardedTensor"),
        (state()[:4], "its state is not that of a ShardedTensor"),
        (state(size=(3, 2)), "its global shape is (2, 3), but its metadata say otherwise"),
        (state(shards=()), "its shards are a tuple"),
        (state(metadata=5), "its shards are 5"),
        (state(metadata=[5]), "its shard is 5"),
        (state(shards=[shard_metadata(*WHOLE)]), "its local shard is a ShardMetadata"),
        (state(held=5), "the tensor of its local shard is 5"),
        (
            state(metadata=[shard_metadata([1, 0], [2, 3])]),
            "its shard at (1, 0) of shape (2, 3) leaves the tensor of shape (2, 3)",
        ),
        (
            state(metadata=[shard_metadata([0], [2])]),
            "its shard at (0,) of shape (2,) leaves the tensor of shape (2, 3)",
        ),
        (state(metadata=[shard_metadata([0, -1], [2, 3])]), "its shard offsets holds -1, not a count"),
        (state(metadata=[shard_metadata(*WHOLE, rank=-2)]), "its shard's rank is -2, not a count"),
        (
            state(metadata=[made("metadata.ShardMetadata", shard_offsets=[0, 0], shard_sizes=[2, 3], placement=5)]),
            "its shard's placement is 5",
        ),
        (
            state(group=made("sharded_tensor.api.ShardedTensor.ProcessGroupState", global_rank=None)),
            "its rank is None, not a count",
        ),
    ],
)
def test_a_state_that_makes_no_sense_is_refused(value: Inert, message: str) -> None:
    with pytest.raises(MalformedError) as caught:
        decode(value)
    assert str(caught.value) == message


def test_a_long_list_of_shards_that_is_named_again_and_again_is_refused() -> None:
    """L11: a few bytes of pickle for each tensor."""
    decoder = ShardedTensorDecoder(lambda *_: None)  # type: ignore[arg-type]  # not looked at
    decoder._shards_left = 9
    value = state(metadata=[shard_metadata(*WHOLE)] * 10)
    with pytest.raises(MalformedError) as caught:
        decoder.decode((2, 3), BY_NAME["float32"], value)
    assert str(caught.value) == "has more shards than any run has ranks: the file lists over 4,194,304"
