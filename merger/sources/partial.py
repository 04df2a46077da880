"""Tensors that were saved before their reduction over the ranks: what the `Partial` placement of a DTensor means.

Along such a mesh axis every rank holds a tensor of the full size, and the value is what these give together. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from merger.checks import Held, axis_text, placements_text
from merger.errors import Problem
from merger.operations import Reduce, can_reduce
from merger.sharding import Placement, mesh_coordinates
from merger.tensors import Chunk, Computation, StoredTensor, computed


def partial_axes(placements: Sequence[Placement]) -> tuple[int, ...]:
    """The mesh axes along which a tensor is yet to be reduced."""
    return tuple(axis for axis, placement in enumerate(placements) if placement.kind == "partial")


def reduced(saved: StoredTensor, held: Sequence[tuple[Held, Sequence[Chunk]]]) -> tuple[StoredTensor, list[Problem]]:
    """The tensor that the summands of `saved` give together, and why there is none.

    `held` has the chunks of every rank. Ranks that differ in their mesh coordinate along the partial axes hold
    different summands; whether each of these is whole is for the caller to check.
    """
    placements = held[0][0].placements
    axes = partial_axes(placements)
    kinds = sorted({str(placements[axis].reduce_op) for axis in axes})
    if len(kinds) > 1:
        return saved, [_mixed(saved, placements)]
    if not can_reduce(kinds[0], saved.dtype):
        return saved, [_irreducible(saved, kinds[0])]
    groups: dict[tuple[int, ...], list[Chunk]] = {}
    for one, chunks in held:
        assert one.mesh is not None, "what has placements has a mesh"
        coordinate = mesh_coordinates(one.mesh).get(one.rank)
        if coordinate is None:
            continue  # not on the mesh: it keeps an empty stand-in
        groups.setdefault(tuple(coordinate[axis] for axis in axes), []).extend(chunks)
    summands = tuple(
        StoredTensor(saved.fqn, saved.dtype, saved.shape, tuple(groups[coordinate])) for coordinate in sorted(groups)
    )
    return computed(Computation(saved.fqn, saved.dtype, saved.shape, summands, Reduce(kinds[0]))), []


def unreduced(saved: StoredTensor, held: Held) -> Problem:
    """The fault of a checkpoint with summands, where nobody asked for their sum; `held` is what one rank has."""
    axes: dict[str, list[str]] = {}
    for axis in partial_axes(held.placements):
        axes.setdefault(str(held.placements[axis]), []).append(axis_text(held.mesh, axis))
    owed = " and ".join(f"{kind} on mesh {' and on '.join(found)}" for kind, found in axes.items())
    return Problem(
        "partial",
        saved.fqn,
        f"is {owed}: each rank holds its own contribution, not the value; reduce it now with --reduce-partial, or "
        "redistribute it to Replicate() or Shard() before saving",
    )


def _mixed(saved: StoredTensor, placements: Sequence[Placement]) -> Problem:
    return Problem(
        "partial",
        saved.fqn,
        f"has placements {placements_text(placements)}: the order of different reductions is not known; redistribute "
        "it to Replicate() or Shard() before saving",
    )


def _irreducible(saved: StoredTensor, kind: str) -> Problem:
    return Problem(
        "partial",
        saved.fqn,
        f"is {saved.dtype}, for which the reduction {kind} is not defined; redistribute it to Replicate() or Shard() "
        "before saving",
    )
