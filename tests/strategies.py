"""What properties draw, and where they put it. All of it shrinks toward one rank, one tensor, one row."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from hypothesis import event
from hypothesis import strategies as st

from fixtures.layouts import TensorSpec

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
    shard_order = draw(st.sampled_from(orders))
    count = draw(st.integers(1, max_tensors))
    unique = draw(st.lists(names(), min_size=count, max_size=count, unique=True))
    specs = tuple(draw(_specs(name, world_size, shard_order)) for name in unique)
    return Layout(world_size, specs, shard_order)


@st.composite
def _specs(draw: st.DrawFn, name: str, world_size: int, shard_order: ShardOrder | None) -> TensorSpec:
    shape = tuple(draw(st.sampled_from(_SIZES)) for _ in range(draw(st.sampled_from(_NUM_DIMS))))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 2**16))
    if draw(st.integers(0, 4)) == 4:
        event("plain")
        return TensorSpec(name, shape, dtype, seed, kind="plain")
    mesh_shape: tuple[int, ...] = ()
    for _ in range(draw(st.integers(1, 3))):
        mesh_shape += (draw(st.integers(1, world_size // prod(mesh_shape))),)
    placement = st.none() if not shape else st.one_of(st.integers(0, len(shape) - 1), st.none())
    placements = tuple(draw(placement) for _ in mesh_shape)
    ranks = np.array(draw(st.permutations(range(world_size)))[: prod(mesh_shape)]).reshape(mesh_shape)
    if shard_order is None or not _is_dealt_out(ranks, shard_order):
        # Where ranks ascend along all sharded axes, no order need be told. Sorting one axis keeps the others sorted.
        for axis, dim in enumerate(placements):
            if dim is not None:
                ranks = np.sort(ranks, axis=axis)
    axis_names = draw(st.none() | st.permutations(["fsdp", "dp_replicate", "tp"]).map(lambda a: a[: len(mesh_shape)]))
    spec = TensorSpec(
        name,
        shape,
        dtype,
        seed,
        mesh_shape,
        tuple(ranks.ravel().tolist()),
        placements,
        None if axis_names is None else tuple(axis_names),
    )
    _tell(spec, world_size)
    return spec


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


def _tell(spec: TensorSpec, world_size: int) -> None:
    """Events for the statistics (`--hypothesis-show-statistics`), which say whether the hard cases are drawn."""
    if not spec.shape:
        event("scalar")
    if len(spec.mesh_ranks) < world_size:
        event("on some ranks only")
    if list(spec.mesh_ranks) != sorted(spec.mesh_ranks):
        event("permuted")
    if any(dim is None and size > 1 for dim, size in zip(spec.placements, spec.mesh_shape, strict=True)):
        event("replicated")
    for dim, size in enumerate(spec.shape):
        axes = [axis for axis, placed in enumerate(spec.placements) if placed == dim]
        count = prod(spec.mesh_shape[axis] for axis in axes)
        if len(axes) > 1:
            event("one dim on several axes")
        if size % count:
            event("uneven")
        if 0 < size < count:
            event("empty pieces")
