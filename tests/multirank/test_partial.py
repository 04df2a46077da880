"""L10: what was saved as summands is reduced when that is asked for, as `DTensor.full_tensor()` reduces it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import Partial

import merger
from fixtures.partials import PartialSpec, save_partials, summand
from fixtures.ranks import RankPool
from merger.errors import CheckpointError
from tests.unit.archives import bits

FLOATS = ("float32", "bfloat16", "float16", "float64")
INTEGERS = ("int64", "int32", "uint8")
# No two of these give the same on the same tensors.
BY_KIND = {
    "sum": FLOATS + INTEGERS,
    "avg": FLOATS,
    "product": FLOATS + INTEGERS,
    "max": (*FLOATS, *INTEGERS, "bool"),
    "min": (*FLOATS, *INTEGERS, "bool"),
    "band": INTEGERS,
    "bor": INTEGERS,
    "bxor": INTEGERS,
}


def saved(
    pool: RankPool, folder: Path, specs: Sequence[PartialSpec], world_size: int
) -> tuple[Path, dict[str, torch.Tensor]]:
    folder.mkdir()
    return folder, pool.run(world_size, save_partials, specs, str(folder))[0]


def merged(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    merger.merge(folder, out, weights_only=True, reduce_partial=True)
    found: dict[str, torch.Tensor] = load_file(out / "model.safetensors")
    return found


def refusal(folder: Path, out: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        merger.merge(folder, out, weights_only=True, reduce_partial=True)
    assert not out.exists()
    return str(caught.value)


def test_two_ranks_give_bit_for_bit_what_torch_reduces(pool: RankPool, tmp_path: Path) -> None:
    specs = [
        PartialSpec(f"{kind}.{dtype}", (5, 7), dtype, (2,), (kind,), scale=3.0 if kind == "product" else 10.0)
        for kind, dtypes in BY_KIND.items()
        for dtype in dtypes
    ]
    folder, fulls = saved(pool, tmp_path / "checkpoint", specs, 2)
    found = merged(folder, tmp_path / "out")
    assert {name: bits(tensor) for name, tensor in found.items()} == {n: bits(full) for n, full in fulls.items()}


def test_what_does_not_depend_on_an_order_is_that_of_torch_on_any_mesh(pool: RankPool, tmp_path: Path) -> None:
    """Other axes may shard and replicate; two axes may both be partial; rows may be fewer than ranks."""
    specs = [
        PartialSpec("first", (5, 7), "float32", (2, 2), ("sum", 0)),
        PartialSpec("second", (5, 7), "float32", (2, 2), (1, "sum")),
        PartialSpec("few", (1, 3), "bfloat16", (2, 2), ("sum", 0)),
        PartialSpec("replicated", (5, 7), "bfloat16", (2, 2), ("avg", None)),
        PartialSpec("both", (5, 7), "float32", (2, 2), ("max", "max")),
        PartialSpec("counts", (5,), "int64", (2, 2), ("sum", "sum")),
        PartialSpec("scalar", (), "float32", (2, 2), ("min", "min")),
        PartialSpec("empty", (0, 3), "float32", (2, 2), ("sum", None)),
        PartialSpec("line", (33,), "float16", (4,), ("max",)),
    ]
    folder, fulls = saved(pool, tmp_path / "checkpoint", specs, 4)
    found = merged(folder, tmp_path / "out")
    assert {name: bits(tensor) for name, tensor in found.items()} == {n: bits(full) for n, full in fulls.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sum_of_more_ranks_is_the_exact_one_rounded_once(dtype: str, pool: RankPool, tmp_path: Path) -> None:
    """Torch rounds after each of three additions, in an order that differs from element to element."""
    spec = PartialSpec("w", (50, 20), dtype, (2, 2), ("sum", "sum"))
    folder, fulls = saved(pool, tmp_path / "checkpoint", [spec], 4)
    exact = torch.stack([summand(spec, at).double() for at in product((0, 1), repeat=2)]).sum(0)
    (found,) = merged(folder, tmp_path / "out").values()
    assert bits(found) == bits(exact.to(found.dtype))
    assert bits(found) != bits(fulls["w"])
    torch.testing.assert_close(found.double(), fulls["w"].double(), rtol=0, atol=100 * torch.finfo(found.dtype).eps)


def test_a_merge_that_reduces_is_verified_and_inspected_with_the_same_option(pool: RankPool, tmp_path: Path) -> None:
    spec = PartialSpec("w", (5, 7), "float32", (2,), ("sum",))
    folder, _ = saved(pool, tmp_path / "checkpoint", [spec], 2)
    merged(folder, tmp_path / "out")
    assert merger.verify(folder, tmp_path / "out", reduce_partial=True).is_equal
    report = json.loads((tmp_path / "out" / "merger_report.json").read_bytes())
    assert report["computed"] == {"w": [{"operation": "reduce", "settings": {"kind": "sum"}, "inputs": ["w"]}]}
    assert [source["verified_bytes"] for source in report["sources"]] == [4 * 35, 4 * 35]
    assert [problem.kind for problem in merger.inspect(folder).problems] == ["partial"]
    assert merger.inspect(folder, reduce_partial=True).problems == ()


@pytest.mark.parametrize(
    ("mesh_shape", "kinds", "message"),
    [
        ((2,), ("band",), "w: is float32, for which the reduction band is not defined"),
        (
            (2, 1),
            ("sum", "max"),
            "w: has placements (Partial(sum), Partial(max)): the order of different reductions is not known",
        ),
    ],
)
def test_reductions_that_torch_would_not_take_are_refused(
    mesh_shape: tuple[int, ...], kinds: tuple[str, ...], message: str, pool: RankPool, tmp_path: Path
) -> None:
    """Tensors as ranks save them, whose placements were rewritten afterwards."""
    folder, _ = saved(pool, tmp_path / "c", [PartialSpec("w", (4,), "float32", mesh_shape, ("sum",) * len(kinds))], 2)
    for path in folder.glob("*.pt"):
        state = torch.load(path, weights_only=False)
        state["w"]._spec.placements = tuple(map(Partial, kinds))
        torch.save(state, path)
    assert refusal(folder, tmp_path / "out") == f"{message}; redistribute it to Replicate() or Shard() before saving"
