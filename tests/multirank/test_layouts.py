"""Meshes and placements beyond those of the trainers: what a rank holds follows from its coordinate alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import merger
from fixtures.layouts import TensorSpec, full_value, save_dtensors
from fixtures.permuted import save_fully_sharded
from fixtures.ranks import RankPool
from merger.errors import CheckpointError
from tests.unit.archives import bits


def saved(pool: RankPool, folder: Path, specs: Sequence[TensorSpec], world_size: int = 4) -> Path:
    folder.mkdir()
    pool.run(world_size, save_dtensors, specs, str(folder))
    return folder


def merged(folder: Path, out: Path, **options: object) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    merger.merge(folder, out, weights_only=True, **options)  # type: ignore[arg-type]
    return {name: bits(tensor) for name, tensor in load_file(out / "model.safetensors").items()}


def refusal(folder: Path, out: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        merger.merge(folder, out, weights_only=True)
    return str(caught.value)


@pytest.mark.parametrize("axis_names", [("dp_replicate", "dp_shard"), ("ddp", "fsdp"), ("x", "y"), None])
def test_axis_names_mean_nothing(axis_names: tuple[str, ...] | None, pool: RankPool, tmp_path: Path) -> None:
    """S10."""
    spec = TensorSpec("w", (7, 3), "float32", 1, (2, 2), (0, 1, 2, 3), (None, 0), axis_names)
    folder = saved(pool, tmp_path / "checkpoint", [spec])
    assert merged(folder, tmp_path / "out") == {"w": bits(full_value(spec))}


@pytest.mark.parametrize(
    ("mesh_ranks", "placements"), [((0, 2, 1, 3), (None, 0)), ((0, 2, 1, 3), (0, None)), ((2, 3, 0, 1), (None, 1))]
)
def test_a_mesh_in_any_order_is_merged_by_coordinate(
    mesh_ranks: tuple[int, ...], placements: tuple[int | None, ...], pool: RankPool, tmp_path: Path
) -> None:
    """S10: meshes such as [[0, 2], [1, 3]], where ranks ascend along the axis that shards."""
    spec = TensorSpec("w", (5, 6), "float32", 1, (2, 2), mesh_ranks, placements)
    folder = saved(pool, tmp_path / "checkpoint", [spec])
    assert merged(folder, tmp_path / "out") == {"w": bits(full_value(spec))}


def test_each_tensor_has_a_mesh_of_its_own(pool: RankPool, tmp_path: Path) -> None:
    """S3, S9, S10: nothing is inferred from one key; a key on some ranks is right where its mesh has only those."""
    specs = [
        TensorSpec("a_buffer", (), "int64", 1, kind="plain"),
        TensorSpec("cube", (4, 6, 5), "bfloat16", 2, (2, 2), (0, 1, 2, 3), (0, 2)),
        TensorSpec("pair", (5, 2), "float32", 3, (2,), (1, 3), (0,)),
        TensorSpec("line", (1, 9), "float64", 4, (4,), (0, 1, 2, 3), (0,)),
        TensorSpec("twice", (9, 3), "float32", 5, (2, 2), (0, 1, 2, 3), (0, 0)),
        TensorSpec("whole", (3,), "bool", 6, (2, 2), (0, 1, 2, 3), (None, None)),
    ]
    folder = saved(pool, tmp_path / "checkpoint", specs)
    assert merged(folder, tmp_path / "out") == {spec.name: bits(full_value(spec)) for spec in specs}


def test_ranks_may_save_sub_meshes_of_their_own(pool: RankPool, tmp_path: Path) -> None:
    """S10: as parameters outside tensor parallelism do; both copies must agree, here they do."""
    specs = [TensorSpec("w", (5, 2), "float32", 3, (2,), ranks, (0,)) for ranks in ((0, 2), (1, 3))]
    folder = saved(pool, tmp_path / "checkpoint", specs)
    assert merged(folder, tmp_path / "out") == {"w": bits(full_value(specs[0]))}


def test_an_overlap_that_disagrees_is_refused(pool: RankPool, tmp_path: Path) -> None:
    """S11: the first element that differs, and on which ranks."""
    specs = [TensorSpec("w", (3, 2), "int32", seed, (2,), ranks, (0,)) for seed, ranks in ((3, (0, 1)), (4, (2, 3)))]
    folder = saved(pool, tmp_path / "checkpoint", specs)
    left, right = full_value(specs[0]), full_value(specs[1])
    assert refusal(folder, tmp_path / "out") == (
        "2 problems:\n"
        "  - w: should be the same on all ranks that hold it, but at [0, 0] "
        f"rank 0 has {left[0, 0]} and rank 2 has {right[0, 0]}; "
        "the files are not of one run and one step, or the ranks went apart in training\n"
        "  - w: should be the same on all ranks that hold it, but at [2, 0] "
        f"rank 1 has {left[2, 0]} and rank 3 has {right[2, 0]}; "
        "the files are not of one run and one step, or the ranks went apart in training"
    )


def test_an_overlap_in_part_is_refused(pool: RankPool, tmp_path: Path) -> None:
    """S11."""
    specs = [TensorSpec("w", (4, 2), "float32", 3, (len(ranks),), ranks, (0,)) for ranks in ((0,), (1, 2, 3))]
    folder = saved(pool, tmp_path / "checkpoint", specs)
    assert refusal(folder, tmp_path / "out") == (
        "w: [0:4, 0:2] of rank 0 and [0:2, 0:2] of rank 1 overlap in part, so that one element would be written twice; "
        "the files are not of one run"
    )


PERMUTED = (2, 0, 3, 1)


def test_rows_dealt_along_a_permuted_axis_need_a_word(pool: RankPool, tmp_path: Path) -> None:
    """S22: `distribute_tensor` deals by coordinate; refused without a choice, exact with the right one."""
    spec = TensorSpec("w", (6, 3), "float32", 1, (4,), PERMUTED, (0,), ("fsdp",))
    folder = saved(pool, tmp_path / "checkpoint", [spec])
    assert refusal(folder, tmp_path / "out") == (
        "w: is sharded along mesh axis 0 (fsdp), where ranks do not ascend (mesh [2, 0, 3, 1]); fully_shard deals "
        "pieces by the rank's place in its group, distribute_tensor by mesh coordinate, and the file does not say "
        "which: use --shard-order group for a model sharded by fully_shard, coordinate for the other"
    )
    assert merged(folder, tmp_path / "out", shard_order="coordinate") == {"w": bits(full_value(spec))}


@pytest.mark.parametrize("rows", [8, 6, 1])
def test_fully_shard_deals_by_the_place_in_the_group(rows: int, pool: RankPool, tmp_path: Path) -> None:
    """S22: the same mesh and placements in the file, other rows in it."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    whole: torch.Tensor = pool.run(4, save_fully_sharded, PERMUTED, rows, str(folder))[0]
    refusal(folder, tmp_path / "out")
    assert merged(folder, tmp_path / "out", shard_order="group") == {"weight": bits(whole)}
