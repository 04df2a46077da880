"""What properties draw, and where they put it. All of it shrinks toward one rank, one tensor, one row."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from hypothesis import event
from hypothesis import strategies as st

from fixtures.layouts import Strided, TensorSpec
from fixtures.specs import AxisPlacement
from tests.pieces import coordinates, dim_of, indices, is_gathered_again, num_pieces

ShardOrder: TypeAlias = Literal["group", "coordinate"]
_Ranks: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int_]]"

# What a safetensors file holds (the enum `Dtype` of safetensors 0.8), by torch's names; the plainest first.
DTYPES = (
    *("float32", "bfloat16", "int64", "bool", "uint8", "float16", "float64", "int32", "int16", "int8", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("uint16", "uint32", "uint64"),
)

# Sizes that leave the last of up to eight ranks a full, a short or an empty piece; the plainest first.
_SIZES = (1, 2, 3, 5, 7, 0, 9, 8, 4)
_NUM_DIMS = (1, 2, 3, 0, 4)

# The meshes that `fully_shard` is used on; tensor parallelism below it is the hard case.
_AXES = (("fsdp",), ("fsdp", "tp"), ("fsdp", "tp"), ("dp_replicate", "fsdp"), ("dp_replicate", "fsdp", "tp"))

_WRAPPERS = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "module", "base_model"}


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of one checkpoint. `shard_order` says how they were dealt where ranks do not ascend along an axis."""

    world_size: int
    specs: tuple[TensorSpec, ...]
    shard_order: ShardOrder | None


@contextmanager
def fresh_folder() -> Iterator[Path]:
    """A fresh folder for one example; pytest's own is made once for all examples of a test."""
    path = Path(tempfile.mkdtemp(prefix="properties-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def names() -> st.SearchStrategy[str]:
    """Names of tensors: such as models have, numbers that sort otherwise as text, and any text, also very long."""
    numbered = st.integers(0, 12).map("layers.{}.weight".format)
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(_is_kept)
    long = st.builds(lambda part, count: part * count, text, st.integers(1, 300))
    return st.one_of(st.sampled_from(["weight", "a", "..", "9", "10", "a.b", "a b\n"]), numbered, text, long)


def _is_kept(name: str) -> bool:
    """Whether a tensor is written under its saved name: wrappers are stripped, and one name is no tensor's."""
    return name != "__metadata__" and _WRAPPERS.isdisjoint(name.split("."))


@st.composite
def layouts(
    draw: st.DrawFn, *, world_sizes: st.SearchStrategy[int], orders: tuple[ShardOrder | None, ...], max_tensors: int
) -> Layout:
    """Tensors on any meshes of up to three axes over some or all of the ranks, with any placements, or plain."""
    world_size = draw(world_sizes)
    event(f"{world_size} ranks")
    shard_order = draw(st.sampled_from(orders))
    count = draw(st.integers(1, max_tensors))
    unique = draw(st.lists(names(), min_size=count, max_size=count, unique=True))
    specs = tuple(draw(_specs(name, world_size, shard_order)) for name in unique)
    return Layout(world_size, specs, shard_order)


@st.composite
def _specs(draw: st.DrawFn, name: str, world_size: int, shard_order: ShardOrder | None) -> TensorSpec:
    shape: tuple[int, ...] = tuple(draw(st.sampled_from(_SIZES)) for _ in range(draw(st.sampled_from(_NUM_DIMS))))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 2**16))
    spec = TensorSpec(name, shape, dtype, seed)
    kind = draw(st.sampled_from(["dtensor", "dtensor", "dtensor", "fully_shard", "plain"]))
    if kind == "plain":
        spec = replace(spec, kind="plain")
    elif kind == "fully_shard" and shape and 0 not in shape:
        # It knows no parameters without dims, and of those without elements some pieces lose their shape.
        spec = draw(_fully_sharded(spec, world_size))
    else:
        spec = draw(_distributed(spec, world_size, shard_order))
    for feature in features(spec, world_size):
        event(feature)
    return spec


@st.composite
def _distributed(draw: st.DrawFn, spec: TensorSpec, world_size: int, shard_order: ShardOrder | None) -> TensorSpec:
    """Dealt by `distribute_tensor`: any placements that torch can undo, on ranks in any order that can be told."""
    mesh_shape = draw(_mesh_shapes(world_size, draw(st.integers(1, 3))))
    placements = draw(_placements(len(spec.shape), mesh_shape))
    if not is_gathered_again(replace(spec, mesh_shape=mesh_shape, placements=placements)):
        placements = tuple(map(dim_of, placements))
    ranks = np.array(draw(st.permutations(range(world_size)))[: prod(mesh_shape)]).reshape(mesh_shape)
    if shard_order is None or not _is_dealt_out(ranks, shard_order):
        # Where ranks ascend along all sharded axes, no order need be told. Sorting one axis keeps the others sorted.
        for axis, placed in enumerate(placements):
            if placed is not None:
                ranks = np.sort(ranks, axis=axis)
    names = draw(st.none() | st.permutations(["fsdp", "dp_replicate", "tp"]).map(lambda a: tuple(a[: len(mesh_shape)])))
    mesh_ranks = tuple(ranks.ravel().tolist())
    return replace(spec, mesh_shape=mesh_shape, mesh_ranks=mesh_ranks, placements=placements, axis_names=names)


@st.composite
def _placements(draw: st.DrawFn, num_dims: int, mesh_shape: tuple[int, ...]) -> tuple[AxisPlacement, ...]:
    placement: st.SearchStrategy[AxisPlacement] = st.none()
    if num_dims:
        dims = st.integers(0, num_dims - 1)
        placement = st.one_of(dims, st.none(), st.builds(Strided, dims, st.sampled_from([2, 3, 4, 1])))
    placements = tuple(draw(placement) for _ in mesh_shape)
    if num_dims and draw(st.booleans()):
        # All axes on one dim, the later ones cutting first: as many parts as they make pieces.
        dim = draw(st.integers(0, num_dims - 1))
        placements = tuple(None if placed is None and axis == 0 else dim for axis, placed in enumerate(placements))
        made = [num_pieces(mesh_shape, placements, dim, axis + 1) for axis in range(len(mesh_shape))]
        placements = tuple(
            Strided(dim, count) if placed is not None and count > 1 else placed
            for placed, count in zip(placements, made, strict=True)
        )
    return placements


@st.composite
def _fully_sharded(draw: st.DrawFn, spec: TensorSpec, world_size: int) -> TensorSpec:
    """Cut by `fully_shard`, with replicas or not, over tensor parallelism or not."""
    axes = draw(st.sampled_from(_AXES))
    mesh_shape = draw(_mesh_shapes(world_size, len(axes)))
    sizes = dict(zip(axes, mesh_shape, strict=True))
    num_dims = len(spec.shape)
    tp = sizes.get("tp", 1)
    # Where tensor parallelism leaves a rank nothing, the piece loses its shape and `full_tensor()` fails.
    wide = [dim for dim in range(num_dims) if (tp - 1) * -(-spec.shape[dim] // tp) < spec.shape[dim]]
    tp_dim = draw(st.sampled_from([*wide[:1], *wide, None])) if "tp" in sizes else None
    num_parts = [sizes["tp"] if dim == tp_dim else 1 for dim in range(num_dims)]
    # It demands that dims other than the first divide.
    dims = [dim for dim in range(num_dims) if dim == 0 or spec.shape[dim] % (sizes["fsdp"] * num_parts[dim]) == 0]
    dim = draw(st.sampled_from([0, *dims]))
    placed: dict[str, AxisPlacement] = {
        "dp_replicate": None,
        "fsdp": Strided(dim, num_parts[dim]) if num_parts[dim] > 1 else dim,
        "tp": tp_dim,
    }
    return replace(
        spec,
        mesh_shape=mesh_shape,
        mesh_ranks=tuple(sorted(draw(st.permutations(range(world_size)))[: prod(mesh_shape)])),
        placements=tuple(placed[axis] for axis in axes),
        axis_names=axes,
        kind="fully_shard",
    )


def _mesh_shapes(world_size: int, num_axes: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Meshes of no more than all ranks; mostly one with several axes that cut, where there is one."""
    sizes = range(1, world_size + 1)
    shapes = [shape for shape in product(sizes, repeat=num_axes) if prod(shape) <= world_size]
    crossed = [shape for shape in shapes if sum(size > 1 for size in shape) > 1]
    return st.one_of(st.sampled_from(shapes), *[st.sampled_from(crossed or shapes)] * 2)


def coordinate(spec: TensorSpec, rank: int, order: ShardOrder | None) -> tuple[int, ...]:
    """Which piece along each mesh axis `rank`, one of the mesh, was dealt."""
    return _dealt(np.array(spec.mesh_ranks).reshape(spec.mesh_shape), rank, order)


def _dealt(ranks: _Ranks, rank: int, order: ShardOrder | None) -> tuple[int, ...]:
    (place,) = np.argwhere(ranks == rank)
    if order != "group":
        return tuple(place.tolist())
    through = [(*place[:axis], slice(None), *place[axis + 1 :]) for axis in range(ranks.ndim)]
    return tuple(int((ranks[line] < rank).sum()) for line in through)


def _is_dealt_out(ranks: _Ranks, order: ShardOrder) -> bool:
    """Whether every piece goes to one rank: by group, some meshes of several axes give two ranks the same one."""
    return len({_dealt(ranks, int(rank), order) for rank in ranks.flat}) == ranks.size


def features(spec: TensorSpec, world_size: int) -> set[str]:
    """What is hard in a tensor, for the statistics (`--hypothesis-show-statistics`): they say what was reached."""
    found = {spec.dtype, f"{len(spec.shape)} dims", spec.kind}
    if not spec.shape:
        found.add("scalar")
    if spec.kind == "plain":
        return found
    found.add(f"{len(spec.mesh_shape)} axes")
    if len(spec.mesh_ranks) < world_size:
        found.add("on some ranks only")
    if list(spec.mesh_ranks) != sorted(spec.mesh_ranks):
        found.add("permuted")
    if any(placed is None and size > 1 for placed, size in zip(spec.placements, spec.mesh_shape, strict=True)):
        found.add("replicated")
    for axis, placed in enumerate(spec.placements):
        if isinstance(placed, Strided) and spec.mesh_shape[axis] > 1 and placed.split_factor > 1:
            later = num_pieces(spec.mesh_shape, spec.placements, placed.dim, axis + 1)
            found.add("strided over later axes" if placed.split_factor == later else "strided freely")
    for dim, size in enumerate(spec.shape):
        if sum(dim_of(placed) == dim for placed in spec.placements) > 1:
            found.add("one dim on several axes")
        if size % num_pieces(spec.mesh_shape, spec.placements, dim, 0):
            found.add("uneven")
    if prod(spec.shape) and not all(prod(map(len, indices(spec, place))) for place in coordinates(spec)):
        found.add("empty pieces")
    return found
