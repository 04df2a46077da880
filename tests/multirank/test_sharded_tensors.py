"""ShardedTensors that real ranks saved (L13): read without a process group, whatever their cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import merger
from fixtures.case import Exact
from fixtures.cases import CASES
from fixtures.conformance.weights import read_truth
from fixtures.ranks import RankPool
from fixtures.sharded_tensors import (
    full,
    save_chunked_columns,
    save_flat_parameters,
    save_hybrid,
    save_sharded_tensors,
)
from fixtures.specs import ShardedSpec
from merger.errors import CheckpointError
from tests.unit.archives import bits

# On four ranks: rows that do not divide, one row, a grid, several shards on a rank, and one rank that holds all.
SPECS = (
    ShardedSpec(
        "rows",
        (7, 3),
        "float32",
        1,
        (((0, 0), (2, 3), 0), ((2, 0), (2, 3), 1), ((4, 0), (2, 3), 2), ((6, 0), (1, 3), 3)),
    ),
    ShardedSpec("row", (1, 5), "bfloat16", 2, (((0, 0), (1, 5), 0),)),
    ShardedSpec(
        "grid", (4, 5), "int64", 3, (((0, 0), (2, 3), 3), ((0, 3), (2, 2), 2), ((2, 0), (2, 3), 1), ((2, 3), (2, 2), 0))
    ),
    ShardedSpec("several", (6,), "float16", 4, (((0,), (2,), 1), ((2,), (1,), 0), ((3,), (3,), 1))),
    ShardedSpec("whole", (2, 2, 2), "float64", 5, (((0, 0, 0), (2, 2, 2), 2),)),
)


def merged(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    merger.merge(folder, out, weights_only=True)
    tensors: dict[str, torch.Tensor] = load_file(out / "model.safetensors")
    return tensors


def test_shards_of_any_cut_come_together(pool: RankPool, tmp_path: Path) -> None:
    """L13: the oracle is the tensor that the ranks cut."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    pool.run(4, save_sharded_tensors, SPECS, str(folder))
    found = merged(folder, tmp_path / "out")
    assert {name: bits(tensor) for name, tensor in found.items()} == {spec.name: bits(full(spec)) for spec in SPECS}
    assert merger.inspect(folder).placements == {
        "ShardedTensor in 4 shards": 2,
        "ShardedTensor in 1 shard": 2,
        "ShardedTensor in 3 shards": 1,
    }


def test_columns_that_torch_chunks_may_leave_a_rank_with_an_empty_shard(pool: RankPool, tmp_path: Path) -> None:
    """L13, S2."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (value, *_) = pool.run(4, save_chunked_columns, str(folder))
    assert {name: bits(tensor) for name, tensor in merged(folder, tmp_path / "out").items()} == {"w": bits(value)}


def test_replicas_over_process_groups_are_one(pool: RankPool, tmp_path: Path) -> None:
    """L13: HYBRID_SHARD without a mesh; ranks of either half name their own half only."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (whole, *_) = pool.run(4, save_hybrid, str(folder))
    found = merged(folder, tmp_path / "out")
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(value) for name, value in whole.items()
    }
    assert merger.inspect(folder).placements == {"ShardedTensor in 2 shards": 2, "ShardedTensor in 1 shard": 2}


def test_a_model_under_fsdp1_without_a_mesh_is_merged_exactly(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """L13: refusing would be right of any merger; this one reads it."""
    name = "llama-fp32-w3-fsdp1_without_mesh"
    assert any(isinstance(outcome, Exact) for outcome in CASES[name].expected)
    made = checkpoint(name)
    found = merged(made / "checkpoint", tmp_path / "out")
    truth = read_truth(made / "truth", "truth")
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(value) for name, value in truth.items()
    }


def flat_parameters_refused(folder: Path, names: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        merger.merge(folder, folder / "out", weights_only=True)
    assert str(caught.value) == (
        f"{folder}: holds flat parameters of FSDP1 ({names}): under LOCAL_STATE_DICT every rank saves its slice of "
        "many parameters joined into one, and the files do not say where each of them lies; save again under "
        "FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT), or FULL_STATE_DICT"
    )
    assert not (folder / "out").exists()


@pytest.mark.parametrize("original", [False, True])
def test_flat_parameters_are_refused_with_what_to_save_instead(
    pool: RankPool, tmp_path: Path, *, original: bool
) -> None:
    """L13: their ShardedTensors are sound, and would be merged to a tensor that no model has."""
    pool.run(2, save_flat_parameters, str(tmp_path), original=original)
    names = "0._flat_param, _flat_param" if original else "_flat_param, 0._flat_param"
    flat_parameters_refused(tmp_path, names)


def test_a_model_under_fsdp1_that_was_saved_locally_is_refused(checkpoint: Callable[[str], Path]) -> None:
    """L13."""
    flat_parameters_refused(checkpoint("qwen2-fp32-w2-fsdp1_local") / "checkpoint", "_flat_param")
