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
# (`fully_shard` and `distribute_tensor`, which scatters in a group, and groups are sorted) or by its mesh coordinate
# (FSDP1, `redistribute`, and `distribute_tensor` with `src_data_rank=None`). A file does not say which.
DealOrder: TypeAlias = Literal["group", "coordinate"]

# The kinds of placement that cut a tensor.
_CUTTING = frozenset({"shard", "strided_shard"})


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
class Cut:
    """How a tensor without a mesh is cut: rectangles (offsets, sizes), and the rank that holds each.

    A rank is None where it is not known.
    """

    rectangles: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    ranks: tuple[int | None, ...]


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


@lru_cache(maxsize=64)
def mesh_coordinates(mesh: Mesh) -> dict[int, tuple[int, ...]]:
    """The coordinate of every rank of `mesh`, one index per mesh axis."""
    return {rank: _unravel(position, mesh.shape) for position, rank in enumerate(mesh.ranks)}


@lru_cache(maxsize=1024)
def unordered_axis(mesh: Mesh, placements: tuple[Placement, ...]) -> int | None:
    """The first mesh axis that shards a tensor and along which ranks do not ascend; None where there is none."""
    stride = len(mesh.ranks)
    for axis, (size, placement) in enumerate(zip(mesh.shape, placements, strict=True)):
        outer_stride, stride = stride, stride // size
        if placement.kind not in _CUTTING or size == 1:
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
    that of the mesh axes. The rule of `torch.chunk` cuts: pieces of ceil(n / count), the last ones shorter or empty.
    `Partial` cuts nothing.

    A strided shard whose split factor is the product of the later axes on its dim says that those cut before it (that
    is how `fully_shard` treats a tensor that is tensor-parallel already). Any other cuts each of `split_factor` parts,
    and takes its piece of each; then nothing is known of how padding would lie, and none is allowed for.
    Source: torch/distributed/tensor/placement_types.py (`Shard`, `_StridedShard`).
    """
    ranges = [[(0, size)] for size in shape]
    padded: list[int | None] = list(shape)
    for axis, parts in _cuts(mesh_shape, placements, shard_order):
        dim, count = placements[axis].dim, mesh_shape[axis]
        assert dim is not None, "a shard has a dim"
        length = sum(stop - start for start, stop in ranges[dim])
        kept: list[tuple[int, int]] = []
        for part in range(parts):
            part_start, part_stop = _chunk(length, parts, part)
            start, stop = _chunk(part_stop - part_start, count, coordinate[axis])
            kept += _take(ranges[dim], part_start + start, part_start + stop)
        ranges[dim] = _join(kept)
        before = padded[dim]
        padded[dim] = None if before is None or parts > 1 else _ceil_div(before, count)
    sizes = tuple(sum(stop - start for start, stop in dim_ranges) for dim_ranges in ranges)
    padded_sizes = tuple(size if pad is None else pad for size, pad in zip(sizes, padded, strict=True))
    return Holding(sizes, padded_sizes, _pieces(ranges))


def is_shard_order(shard_order: tuple[tuple[int, tuple[int, ...]], ...], placements: tuple[Placement, ...]) -> bool:
    """Whether `shard_order` names, dim by dim, just the axes that shard that dim."""
    named = [(axis, dim) for dim, axes in shard_order for axis in axes]
    return sorted(named) == [
        (axis, placement.dim) for axis, placement in enumerate(placements) if placement.kind in _CUTTING
    ]


def _cuts(
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] | None,
) -> list[tuple[int, int]]:
    """The mesh axes that cut, in order, each with the number of parts that it cuts its dim in first."""
    axes = [axis for axis, placement in enumerate(placements) if placement.kind in _CUTTING]
    if all(placements[axis].kind == "shard" for axis in axes):
        return [(axis, 1) for axis in (axes if shard_order is None else (a for _, named in shard_order for a in named))]
    cuts: list[tuple[int, int]] = []
    for axis in reversed(axes):
        placement = placements[axis]
        later = [(other, parts) for other, parts in cuts if placements[other].dim == placement.dim]
        explained = all(parts == 1 for _, parts in later) and placement.split_factor == prod(
            mesh_shape[other] for other, _ in later
        )
        if placement.kind == "strided_shard" and explained:
            cuts.append((axis, 1))
        else:
            cuts.insert(0, (axis, placement.split_factor or 1))
    return cuts


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
