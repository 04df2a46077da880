"""What can still be told of the tensors of a checkpoint with problems, so that a person can see where it is broken.

Nothing that is merged comes from here. Where ranks contradict one another, most of them are believed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from merger.checkpoint import Fragments, Layout, Owed, Reason
from merger.checks import Held
from merger.sharding import DealOrder, Mesh, Piece, holding, mesh_coordinates, shard_coordinate, unordered_axis
from merger.sources.partial import partial_axes
from merger.sources.rank_part import Part, RankPart
from merger.sources.stages import find_stages
from merger.tensors import Chunk, StoredTensor

# Faults of the local tensor of one rank; any other fault says that nobody can tell what the ranks hold.
_KINDS_OF_ONE_RANK = frozenset({"local-size", "dtype-mismatch", "wrong-shards"})


def gather_fragments(
    files: Sequence[RankPart], world_size: int, shard_order: DealOrder | None, *, reduce_partial: bool
) -> dict[str, Fragments]:
    """What the ranks hold under each name, in the order of their saving, whatever else is wrong with it."""
    by_name: dict[str, list[tuple[Held, Part]]] = defaultdict(list)
    for file in files:
        for fqn, part in file.parts.items():
            if part.held is not None:
                by_name[fqn].append((part.held, part))
    meshes: dict[Mesh, Mesh] = {}
    stages = find_stages(([held for held, _ in parts] for parts in by_name.values()), world_size)
    return {
        fqn: _fragments(fqn, parts, stages, shard_order, meshes, reduce_partial=reduce_partial)
        for fqn, parts in by_name.items()
    }


def _fragments(
    fqn: str,
    parts: Sequence[tuple[Held, Part]],
    stages: Sequence[frozenset[int]],
    shard_order: DealOrder | None,
    meshes: dict[Mesh, Mesh],
    *,
    reduce_partial: bool,
) -> Fragments:
    # `most_common` keeps the order of insertion among equals, and ranks come in their order.
    said = Counter(_said(held) for held, _ in parts).most_common(1)[0][0]
    agreeing = [(held, part) for held, part in parts if _said(held) == said]
    first = agreeing[0][0]
    faults = {held.rank: part.problem.kind for held, part in agreeing if part.problem is not None}
    is_told = all(kind in _KINDS_OF_ONE_RANK for kind in faults.values())
    is_told &= reduce_partial or not partial_axes(first.placements)
    chunks_of = {held.rank: part.chunks for held, part in agreeing if part.problem is None}
    # Every file brings meshes of its own; equal ones become one.
    on = {id(mesh): mesh for held, _ in agreeing if held.mesh for mesh in [meshes.setdefault(held.mesh, held.mesh)]}
    is_plain = first.mesh is None and first.cut is None
    layout = None if is_plain else Layout(tuple(on.values()), first.placements, first.cut)
    owed: list[Owed] = []
    if is_told:
        odd = {held.rank for held, _ in parts if _said(held) != said}
        for rank, offsets, sizes in _due([held for held, _ in agreeing], layout, stages, shard_order, chunks_of):
            reason: Reason = "misfit" if rank in faults else "odd" if rank in odd else "missing"
            owed.append(Owed(rank, offsets, sizes, reason))
    chunks = tuple(chunk for found in chunks_of.values() for chunk in found) if is_told else ()
    return Fragments(StoredTensor(fqn, first.dtype, first.shape, chunks), layout, tuple(owed), is_told)


def _said(held: Held) -> tuple[object, ...]:
    """What ranks must say alike; of a ShardedTensor the shards, since hybrid groups of ranks name themselves alone."""
    return held.kind, held.dtype.name, held.shape, held.placements, held.cut and held.cut.rectangles


def _due(
    agreeing: Sequence[Held],
    layout: Layout | None,
    stages: Sequence[frozenset[int]],
    shard_order: DealOrder | None,
    chunks_of: Mapping[int, Sequence[Chunk]],
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """What ranks without chunks should hold by what the others say, as (rank, offsets, sizes); nothing empty."""
    first = agreeing[0]
    if layout is None:
        if 0 not in first.shape:
            owing = [stage for stage in stages if not stage.isdisjoint(held.rank for held in agreeing)]
            without = (rank for rank in sorted(frozenset().union(*owing)) if rank not in chunks_of)
            yield from ((rank, (0,) * len(first.shape), first.shape) for rank in without)
        return
    for cut in dict.fromkeys(held.cut for held in agreeing if held.cut is not None):
        for (offsets, sizes), rank in zip(cut.rectangles, cut.ranks, strict=True):
            if rank is not None and rank not in chunks_of and 0 not in sizes:
                yield rank, offsets, sizes
    for mesh in layout.meshes:
        due = {
            rank: [(piece.offsets, piece.sizes) for piece in _pieces(first, mesh, rank, shard_order)]
            for rank in mesh.ranks
        }
        # The order in which axes cut may be another, which a missing rank cannot tell: then the others do not fit.
        if all(
            due[rank] == [(chunk.offsets, chunk.sizes) for chunk in chunks]
            for rank, chunks in chunks_of.items()
            if rank in due
        ):
            yield from ((rank, *piece) for rank, pieces in due.items() if rank not in chunks_of for piece in pieces)


def _pieces(first: Held, mesh: Mesh, rank: int, shard_order: DealOrder | None) -> tuple[Piece, ...]:
    coordinate = mesh_coordinates(mesh)[rank]
    if shard_order is not None and unordered_axis(mesh, first.placements) is not None:
        coordinate = shard_coordinate(mesh, coordinate, shard_order)
    return holding(first.shape, mesh.shape, first.placements, coordinate).pieces
