"""From a device mesh and placements to the rectangles of the global tensor that one rank holds.

Pure arithmetic on integers. Nothing here knows of files, names or element types.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import Literal, TypeAlias

# How the pieces along a mesh axis are dealt where its ranks do not ascend: by the rank's place in the process group
# (`fully_shard`, whose groups are sorted) or by its mesh coordinate (`distribute_tensor`). A file does not say which.
DealOrder: TypeAlias = Literal["group", "coordinate"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh: `ranks` in row-major order of `shape`, one entry of `shape` per mesh axis.

    `axis_names` is for people only, and None where the mesh was made without names.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    axis_names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """What one mesh axis does to a tensor.

    `dim` (tensor dim, never negative) for "shard" and "strided_shard"; `split_factor` for "strided_shard";
    `reduce_op` ("sum", "avg", ...) for "partial".
    """

    kind: Literal["shard", "strided_shard", "replicate", "partial"]
    dim: int | None = None
    split_factor: int | None = None
    reduce_op: str | None = None

    def __str__(self) -> str:
        match self.kind:
            case "shard":
                return f"Shard({self.dim})"
            case "strided_shard":
                return f"_StridedShard({self.dim}, split_factor={self.split_factor})"
            case "replicate":
                return "Replicate()"
            case "partial":
                return f"Partial({self.reduce_op})"


@dataclass(frozen=True, slots=True)
class Piece:
    """One rectangle that a rank holds, in elements.

    [offsets, offsets + sizes) in the global tensor lies at [local_offsets, local_offsets + sizes) in the rank's own.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Holding:
    """All that one rank holds of one tensor.

    `sizes` is the exact shape of the rank's local tensor; `padded_sizes` the shape it has where a trainer padded every
    rank's piece to that of the first. `pieces` are the rectangles without padding; there is none where it is empty.
    """

    sizes: tuple[int, ...]
    padded_sizes: tuple[int, ...]
    pieces: tuple[Piece, ...]


def mesh_coordinate(mesh: Mesh, rank: int) -> tuple[int, ...] | None:
    """The coordinate of `rank` in `mesh`, one index per mesh axis; None where the mesh does not have that rank."""
    try:
        return _unravel(mesh.ranks.index(rank), mesh.shape)
    except ValueError:
        return None


def unordered_axis(mesh: Mesh, placements: tuple[Placement, ...]) -> int | None:
    """The first mesh axis that shards a tensor and along which ranks do not ascend; None where there is none."""
    stride = len(mesh.ranks)
    for axis, (size, placement) in enumerate(zip(mesh.shape, placements, strict=True)):
        outer_stride, stride = stride, stride // size
        if placement.kind not in ("shard", "strided_shard") or size == 1:
            continue
        for start in range(0, len(mesh.ranks), outer_stride):
            for inner in range(stride):
                line = mesh.ranks[start + inner : start + outer_stride : stride]
                if any(left > right for left, right in pairwise(line)):
                    return axis
    return None


def shard_coordinate(mesh: Mesh, coordinate: tuple[int, ...], order: DealOrder) -> tuple[int, ...]:
    """Which piece along each mesh axis the rank at `coordinate` was dealt.

    With "coordinate" that is the coordinate itself; with "group" the place of its rank among the sorted ranks of the
    axis. The two differ only where ranks do not ascend along an axis.
    """
    if order == "coordinate":
        return coordinate
    return tuple(_place_in_group(mesh, coordinate, axis) for axis in range(len(mesh.shape)))


@lru_cache(maxsize=65536)
def holding(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] | None = None,
) -> Holding:
    """What the rank dealt the pieces at `coordinate` holds of a tensor of global `shape`.

    `shard_order` lists (tensor dim, mesh axes in the order in which they cut it) for dims cut in another order than
    that of the mesh axes; where a placement is strided, the stride says so already and the order is that of the axes.
    The rule of `torch.chunk` cuts: pieces of ceil(n / count), the last ones shorter or empty. `Partial` cuts nothing.
    Source: torch/distributed/tensor/placement_types.py (`Shard`, `_StridedShard`).
    """
    ranges = [[(0, size)] for size in shape]
    padded = list(shape)
    for axis in _cutting_order(placements, shard_order):
        placement, count = placements[axis], mesh_shape[axis]
        dim = placement.dim
        assert dim is not None, "a shard has a dim"
        parts = placement.split_factor or 1
        length = sum(stop - start for start, stop in ranges[dim])
        kept: list[tuple[int, int]] = []
        for part in range(parts):
            part_start, part_stop = _chunk(length, parts, part)
            start, stop = _chunk(part_stop - part_start, count, coordinate[axis])
            kept += _take(ranges[dim], part_start + start, part_start + stop)
        ranges[dim] = _join(kept)
        padded[dim] = parts * _ceil_div(_ceil_div(padded[dim], parts), count)
    sizes = tuple(sum(stop - start for start, stop in dim_ranges) for dim_ranges in ranges)
    return Holding(sizes, tuple(padded), _pieces(ranges))


def _cutting_order(
    placements: tuple[Placement, ...], shard_order: tuple[tuple[int, tuple[int, ...]], ...] | None
) -> list[int]:
    axes = [axis for axis, placement in enumerate(placements) if placement.kind in ("shard", "strided_shard")]
    if shard_order is None or any(placement.kind == "strided_shard" for placement in placements):
        return axes
    ordered = [axis for _, mesh_axes in shard_order for axis in mesh_axes]
    return ordered if sorted(ordered) == axes else axes


def _chunk(length: int, count: int, index: int) -> tuple[int, int]:
    size = _ceil_div(length, count)
    return min(index * size, length), min((index + 1) * size, length)


def _take(ranges: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """The sub-ranges at positions [start, stop) of the concatenation of `ranges`."""
    taken = []
    position = 0
    for range_start, range_stop in ranges:
        low = max(start, position)
        high = min(stop, position + range_stop - range_start)
        if low < high:
            taken.append((range_start + low - position, range_start + high - position))
        position += range_stop - range_start
    return taken


def _join(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _pieces(ranges: list[list[tuple[int, int]]]) -> tuple[Piece, ...]:
    """The rectangles spanned by ranges of each dim; a tensor without dims is one piece, an empty one has none."""
    placed: list[list[tuple[int, int, int]]] = []
    for dim_ranges in ranges:
        local = 0
        placed.append([])
        for start, stop in dim_ranges:
            if start < stop:
                placed[-1].append((start, stop - start, local))
            local += stop - start
    return tuple(
        Piece(
            offsets=tuple(start for start, _, _ in spans),
            sizes=tuple(size for _, size, _ in spans),
            local_offsets=tuple(local for _, _, local in spans),
        )
        for spans in product(*placed)
    )


def _place_in_group(mesh: Mesh, coordinate: tuple[int, ...], axis: int) -> int:
    stride = prod(mesh.shape[axis + 1 :])
    position = sum(index * prod(mesh.shape[dim + 1 :]) for dim, index in enumerate(coordinate))
    first = position - coordinate[axis] * stride
    group = mesh.ranks[first : first + mesh.shape[axis] * stride : stride]
    return sorted(group).index(mesh.ranks[position])


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    coordinate = []
    for size in reversed(shape):
        position, index = divmod(position, size)
        coordinate.append(index)
    return tuple(reversed(coordinate))


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
