"""Which part of a tensor a rank holds, written out with numpy, and which layouts torch itself can gather again."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod
from typing import TypeAlias

import numpy as np

from fixtures.layouts import TensorSpec
from fixtures.specs import AxisPlacement, Strided

Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int_]]"


def dim_of(placement: AxisPlacement) -> int | None:
    """The tensor dim that a mesh axis cuts, None where it replicates."""
    return placement.dim if isinstance(placement, Strided) else placement


def coordinates(spec: TensorSpec) -> Iterable[tuple[int, ...]]:
    return product(*map(range, spec.mesh_shape))


def indices(spec: TensorSpec, coordinate: tuple[int, ...]) -> list[Indices]:
    """Which indices of each dim the piece at `coordinate` has.

    `distribute_tensor` goes through the mesh axes from left to right: pieces of ceil(n / count), what is left for the
    last; a strided one takes such a piece of each of `split_factor` such parts. `fully_shard` cuts last, what tensor
    parallelism has cut on the axis to its right.
    """
    axes = range(len(spec.mesh_shape))
    if spec.kind == "fully_shard":
        return _cut(spec, coordinate, [(axis, 1) for axis in reversed(axes)])
    factors = [p.split_factor if isinstance(p, Strided) else 1 for p in spec.placements]
    return _cut(spec, coordinate, list(zip(axes, factors, strict=True)))


def _cut(spec: TensorSpec, coordinate: tuple[int, ...], cuts: Iterable[tuple[int, int]]) -> list[Indices]:
    """The indices after cuts by mesh axes in this order, each with the number of parts that it cuts first."""
    found = [np.arange(size) for size in spec.shape]
    for axis, num_parts in cuts:
        dim = dim_of(spec.placements[axis])
        if dim is not None:
            parts = [_nth(found[dim], num_parts, part) for part in range(num_parts)]
            found[dim] = np.concatenate([_nth(part, spec.mesh_shape[axis], coordinate[axis]) for part in parts])
    return found


def _nth(whole: Indices, count: int, index: int) -> Indices:
    step = -(-len(whole) // count)
    return whole[index * step :][:step]


def is_gathered_again(spec: TensorSpec) -> bool:
    """Whether `full_tensor()` gives back what `distribute_tensor` dealt out, in torch 2.13.

    If every split factor is the number of pieces that some of the axes to the right make, torch takes the placements
    for an order of cutting and undoes that: right unless the sizes are so uneven that dealing from left to right gave
    other pieces (seven rows on 3 x 2). Else it undoes the axes one by one from right to left, but forgets that a
    strided axis made the rows fewer for those to its right that cut the same dim: that fails, or kills the process.
    (`DTensorSpec._maybe_convert_StridedShard_to_shard_order` and
    `DTensorRedistributePlanner.generate_greedy_transform_infos`.)
    """
    order = _order(spec)
    if order is not None:
        cuts = [(axis, 1) for axis in order]
        return all(
            all(map(np.array_equal, indices(spec, place), _cut(spec, place, cuts))) for place in coordinates(spec)
        )
    return not any(
        isinstance(p, Strided) and _pieces_to_the_right(spec, axis) > 1 for axis, p in enumerate(spec.placements)
    )


def _pieces_to_the_right(spec: TensorSpec, axis: int) -> int:
    """Into how many pieces the axes to the right of `axis` cut its dim; 1 if it has only one rank itself."""
    if spec.mesh_shape[axis] == 1:
        return 1
    return num_pieces(spec.mesh_shape, spec.placements, dim_of(spec.placements[axis]), axis + 1)


def num_pieces(mesh_shape: tuple[int, ...], placements: tuple[AxisPlacement, ...], dim: int | None, first: int) -> int:
    """Into how many pieces the mesh axes from `first` on cut a dim."""
    axes = range(first, len(mesh_shape))
    return prod(mesh_shape[axis] for axis in axes if dim is not None and dim_of(placements[axis]) == dim)


def _order(spec: TensorSpec) -> list[int] | None:
    """The axes in the order in which torch believes that they cut; None where the split factors tell of no order."""
    orders: dict[int, list[int]] = {}
    for axis in reversed(range(len(spec.mesh_shape))):
        placement = spec.placements[axis]
        dim = dim_of(placement)
        if dim is None:
            continue
        before = orders.setdefault(dim, [])
        factor = placement.split_factor if isinstance(placement, Strided) else 1
        made = [prod(spec.mesh_shape[other] for other in before[:count]) for count in range(len(before) + 1)]
        if factor not in made:
            return None
        before.insert(made.index(factor), axis)
    return [axis for order in orders.values() for axis in order]
