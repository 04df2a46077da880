"""All of a tensor that shows in a picture but its name, so that tensors which look the same can share a panel.

Pure: from a `Checkpoint` to frozen, hashable data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from merger.checkpoint import Checkpoint, Fragments, Owed
from merger.checks import replica_pairs
from merger.errors import Problem
from merger.picture.regions import Rectangle
from merger.sharding import Mesh
from merger.tensors import Computation, SourceFile, in_files


@dataclass(frozen=True, slots=True)
class Look:
    """How a tensor is described and held.

    `pieces` are (owner, rectangle), those of its inputs where it `is_computed`; `differing` are the rectangles whose
    replicas are proven to differ. `empty_owners` are the ranks of its meshes whose piece has no elements. `meshes` are
    indices into those of the picture.
    """

    dtype: str
    shape: tuple[int, ...]
    placements: str
    meshes: tuple[int, ...]
    pieces: tuple[tuple[int, Rectangle], ...]
    owed: tuple[Owed, ...]
    differing: frozenset[Rectangle]
    is_told: bool
    is_computed: bool
    empty_owners: tuple[int, ...]
    problems: tuple[str, ...]


def everything_in(source: Checkpoint) -> Mapping[str, Fragments]:
    """Every tensor of which something is known, whole or not."""
    if source.fragments:
        return source.fragments
    return {fqn: Fragments(tensor, source.layouts.get(fqn), (), is_told=True) for fqn, tensor in source.tensors.items()}


def looks_of(
    source: Checkpoint,
    tensors: Mapping[str, Fragments],
    meshes: Mapping[Mesh, int],
    about: Mapping[str, Sequence[str]],
) -> dict[str, Look]:
    """The look of each of `tensors`; `about` has their problems as text."""
    # What belongs to no rank is numbered by its file, from 1 as Hugging Face numbers them.
    numbers = {file.path: number for number, file in enumerate(source.files, start=1) if file.rank is None}
    lost = lost_ranks(source)
    return {
        fqn: _look(one, numbers, lost, meshes, about.get(fqn, ()), has_problems=bool(source.problems))
        for fqn, one in tensors.items()
    }


def lost_ranks(source: Checkpoint) -> frozenset[int]:
    """Ranks that have no file, one that cannot be read, or that of another rank."""
    wrong = {problem.where for problem in source.problems if problem.kind == "wrong-rank"}
    usable = {file.rank for file in source.files if file.path.name not in wrong}
    return frozenset(rank for rank in range(source.world_size) if rank not in usable)


def by_tensor(problems: Iterable[Problem], names: Collection[str]) -> tuple[dict[str, list[str]], list[Problem]]:
    """The problems of each tensor as text, and those of no one tensor.

    A problem is about a tensor where it says so: its `where` is "NAME", or "rank 2: NAME".
    """
    about: dict[str, list[str]] = defaultdict(list)
    general: list[Problem] = []
    for problem in problems:
        head, _, tail = problem.where.partition(": ")
        if problem.where in names:
            about[problem.where].append(problem.message)
        elif head.startswith("rank ") and tail in names:
            about[tail].append(f"{head} {problem.message}")
        else:
            general.append(problem)
    return about, general


def _look(
    one: Fragments,
    numbers: Mapping[Path, int],
    lost: Collection[int],
    meshes: Mapping[Mesh, int],
    problems: Sequence[str],
    *,
    has_problems: bool,
) -> Look:
    is_computed = any(isinstance(chunk.file, Computation) for chunk in one.tensor.chunks)
    pieces = tuple(
        (numbers[chunk.file.path] if chunk.file.rank is None else chunk.file.rank, (chunk.offsets, chunk.sizes))
        for stored in in_files(one.tensor)
        for chunk in stored.chunks
        if isinstance(chunk.file, SourceFile)
    )
    # Replicas that differ are a problem: where there is none, there is nothing to find.
    pairs = replica_pairs(one.tensor) if has_problems and not is_computed else []
    empty: set[int] = set()
    if one.layout is not None and one.is_told:
        empty = {rank for mesh in one.layout.meshes for rank in mesh.ranks}
        empty |= {rank for rank in (one.layout.cut.ranks if one.layout.cut else ()) if rank is not None}
        empty -= {owner for owner, _ in pieces} | {owed.rank for owed in one.owed} | set(lost)
    return Look(
        dtype=one.tensor.dtype.name,
        shape=one.tensor.shape,
        placements=str(one.layout) if one.layout else "",
        meshes=tuple(meshes[mesh] for mesh in one.layout.meshes) if one.layout else (),
        pieces=pieces,
        owed=one.owed,
        differing=frozenset((pair.first.offsets, pair.first.sizes) for pair in pairs if pair.verdict == "differ"),
        is_told=one.is_told,
        is_computed=is_computed,
        empty_owners=tuple(sorted(empty)),
        problems=tuple(problems),
    )
