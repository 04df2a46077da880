"""Meshes and placements beyond those of the trainers: what a rank holds follows from its coordinate alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import merger
from fixtures import layouts
from fixtures.layouts import TensorSpec, full_value, save_dtensors
from fixtures.partials import save_partials
from fixtures.permuted import Way, save_permuted
from fixtures.ranks import RankPool
from fixtures.specs import PartialSpec
from merger.errors import CheckpointError
from tests.unit.archives import bits


def saved(pool: RankPool, folder: Path, specs: Sequence[TensorSpec], world_size: int = 4) -> Path:
    folder.mkdir()
    pool.run(world_size, save_dtensors, specs, str(folder))
    return folder


def merged(folder: Path, out: Path, **options: object) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    merger.merge(folder, out, weights_only=True, **options)  # type: ignore[arg-type]
    return {name: bits(tensor) for name, tensor in load_file(out / "model.safetensors").items()}


def save_ungathered(rank: int, world_size: int, specs: Sequence[TensorSpec], folder: str) -> list[tuple[int, ...]]:
    """Saves what torch itself cannot gather; returns the shapes of the local tensors."""
    state = {}
    for spec in specs:
        mesh = layouts._mesh(spec.mesh_shape, spec.mesh_ranks, spec.axis_names)
        state[spec.name] = layouts._distributed(spec, mesh)
    torch.save(state, Path(folder) / f"model_world_size_{world_size}_rank_{rank}.pt")
    return [tuple(tensor.to_local().shape) for tensor in state.values()]  # type: ignore[attr-defined]


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


def test_empty_pieces_may_have_lost_their_shape(pool: RankPool, tmp_path: Path) -> None:
    """Of what tensor parallelism left nothing, `fully_shard` makes (0, 0); `full_tensor()` fails on it."""
    mesh = {"mesh_shape": (2, 2), "mesh_ranks": (0, 1, 2, 3), "axis_names": ("fsdp", "tp"), "kind": "fully_shard"}
    specs = [
        TensorSpec("rowwise", (4, 1), "float32", 1, placements=(0, 1), **mesh),  # type: ignore[arg-type]
        TensorSpec("colwise", (1, 3), "bfloat16", 2, placements=(layouts.Strided(0, 2), 0), **mesh),  # type: ignore[arg-type]
    ]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shapes = pool.run(4, save_ungathered, specs, str(folder))
    assert shapes[1] == shapes[3] == [(0, 0), (0, 3)]
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
    """S22: refused without a choice, which the message explains."""
    spec = TensorSpec("w", (6, 3), "float32", 1, (4,), PERMUTED, (0,), ("fsdp",))
    folder = saved(pool, tmp_path / "checkpoint", [spec])
    assert refusal(folder, tmp_path / "out") == (
        "w: is sharded along mesh axis 0 (fsdp), where ranks do not ascend (mesh [2, 0, 3, 1]), and the file does not "
        "say how pieces were dealt there. fully_shard and distribute_tensor deal by the rank's place in its group: use "
        "--shard-order group. FSDP1, redistribute and distribute_tensor(src_data_rank=None) deal by mesh coordinate: "
        "use --shard-order coordinate"
    )
    assert merged(folder, tmp_path / "out", shard_order="coordinate") == {"w": bits(full_value(spec))}


@pytest.mark.parametrize(
    ("way", "rows", "order"),
    [
        *(("fully_shard", rows, "group") for rows in (8, 6, 1)),
        ("distribute_tensor", 8, "group"),
        *((way, rows, "coordinate") for way in ("fsdp1", "redistribute", "distribute_tensor alone") for rows in (8, 6)),
    ],
)
def test_each_way_to_deal_along_a_permuted_axis_is_merged_with_its_word(
    way: Way, rows: int, order: str, pool: RankPool, tmp_path: Path
) -> None:
    """S22: the same mesh and placements in the file, other rows in it."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    whole: torch.Tensor = pool.run(4, save_permuted, way, PERMUTED, rows=rows, folder=str(folder))[0]
    refusal(folder, tmp_path / "out")
    (found,) = merged(folder, tmp_path / "out", shard_order=order).values()
    assert found == bits(whole)


def test_rows_that_torch_itself_lost_on_a_permuted_axis_are_not_made_up(pool: RankPool, tmp_path: Path) -> None:
    """S22: of rows that do not divide `distribute_tensor` deals pieces by group and trims them by coordinate."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    pool.run(4, save_permuted, "distribute_tensor", PERMUTED, rows=7, folder=str(folder))
    with pytest.raises(CheckpointError) as caught:
        merger.merge(folder, tmp_path / "out", weights_only=True, shard_order="group")
    assert str(caught.value) == (
        "rank 1: weight: holds a local tensor of shape (1, 3), but of shape (7, 3) with placements (Shard(0)) this "
        "rank has [2:4, 0:3], shape (2, 3); the checkpoint would have holes or shifted rows: save it again"
    )


def test_reductions_never_done_are_refused_by_tensor_axis_and_kind(pool: RankPool, tmp_path: Path) -> None:
    """L10: on meshes of one axis and of two, with names and without."""
    line, square, rest = (4,), (2, 2), "the value; reduce it now with --reduce-partial, or redistribute it to "
    specs = [
        PartialSpec("a", (5, 3), "float32", line, ("sum",), axis_names=("dp",)),
        PartialSpec("b", (5, 3), "float32", line, ("avg",)),
        PartialSpec("c", (5, 3), "float32", square, (0, "max"), axis_names=("fsdp", "tp")),
        PartialSpec("d", (5, 3), "float32", square, ("avg", 1), axis_names=("ddp", "tp")),
        PartialSpec("e", (5, 3), "float32", square, ("sum", "sum"), axis_names=("ddp", "tp")),
        PartialSpec("f", (5, 3), "float32", square, ("max", "max")),
    ]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    pool.run(4, save_partials, specs, str(folder))
    tail = f": each rank holds its own contribution, not {rest}Replicate() or Shard() before saving"
    assert refusal(folder, tmp_path / "out").split("\n  - ") == [
        "6 problems:",
        "a: is Partial(sum) on mesh axis 0 (dp)" + tail,
        "b: is Partial(avg) on mesh axis 0" + tail,
        "c: is Partial(max) on mesh axis 1 (tp)" + tail,
        "d: is Partial(avg) on mesh axis 0 (ddp)" + tail,
        "e: is Partial(sum) on mesh axis 0 (ddp) and on axis 1 (tp)" + tail,
        "f: is Partial(max) on mesh axis 0 and on axis 1" + tail,
    ]
