"""Which ranks are of one stage of a pipeline: those that a mesh, a list of shards or the name of a shard connects.

A plain tensor says nothing of the ranks that have it. Without a pipeline all have it; with one, those of its stage do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from merger.checks import Held


def find_stages(tensors: Iterable[Sequence[Held]], world_size: int) -> tuple[frozenset[int], ...]:
    """The stages, by their lowest ranks; one of all ranks where what is sharded connects them, or leaves out some.

    `tensors` has what the ranks say of each tensor. Groups of ranks that shard the same names are copies of one
    another, and no stages. Ranks beyond `world_size` do not count.

    >>> find_stages([], 2)
    (frozenset({0, 1}),)
    """
    stages: list[set[int]] = []
    for held in tensors:
        # A rank that is not on a tensor's mesh may have an empty stand-in under its name.
        ranks = {entry.rank for entry in held if entry.mesh is not None or entry.cut is not None}
        for entry in {(id(entry.mesh), id(entry.cut)): entry for entry in held}.values():
            if entry.mesh is not None:
                ranks.update(entry.mesh.ranks)
            elif entry.cut is not None:
                ranks.update(rank for rank in entry.cut.ranks if rank is not None)
        ranks.intersection_update(range(world_size))
        touched = [stage for stage in stages if not ranks.isdisjoint(stage)]
        if ranks and touched != [ranks]:
            stages = [stage for stage in stages if ranks.isdisjoint(stage)] + [ranks.union(*touched)]
        if stages and len(stages[0]) == world_size:
            break  # as a rule after one tensor
    if sum(map(len, stages)) < world_size:
        return (frozenset(range(world_size)),)
    return tuple(sorted(map(frozenset, stages), key=min))
