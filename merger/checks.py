"""Whether what the ranks saved is one whole checkpoint: census, agreement, exact cover.

Pure: every check returns all the `Problem`s it finds, as data, and reads nothing. What headers cannot decide, the bytes
of replicas whose recorded checksums do not settle it, is returned as pairs to be compared by whoever may read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Literal

from merger.dtypes import DType
from merger.errors import Problem, listed
from merger.sharding import Cut, Mesh, Placement
from merger.tensors import (
    Chunk,
    Computation,
    SourceFile,
    StoredTensor,
    distinct_chunks,
    intersection,
    is_contiguous,
)

# A tensor that is cut wrongly tends to be so in every layer: past this many, the rest are counted only.
MAX_LISTED = 8

# What says, of tensors of each kind, which ranks have them.
_NAMED_BY = {"a DTensor": "device mesh", "a ShardedTensor": "shard metadata"}


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank saved under one name: `shape` is that of the global tensor.

    A DTensor has a mesh, a ShardedTensor a cut, a plain tensor neither.
    """

    rank: int
    dtype: DType
    shape: tuple[int, ...]
    mesh: Mesh | None
    placements: tuple[Placement, ...]
    cut: Cut | None = None

    @property
    def kind(self) -> str:
        """What the tensor is, for people."""
        return "a DTensor" if self.mesh is not None else "a plain tensor" if self.cut is None else "a ShardedTensor"


@dataclass(frozen=True, slots=True)
class ReplicaPair:
    """Two chunks that must hold the same bytes, and what their headers say of it.

    `verdict` is "differ" where recorded checksums prove it, "unknown" where only reading can tell.
    """

    first: Chunk
    other: Chunk
    verdict: Literal["differ", "unknown"]


def check_census(
    fqn: str, held: Sequence[Held], world_size: int, stages: Collection[Collection[int]] = ()
) -> list[Problem]:
    """Whether every rank that should have a tensor has it: those of its meshes or cuts; of a plain one all ranks.

    Where ranks are `stages` of a pipeline, a plain tensor is on all ranks of each stage that has it.
    """
    holders = {entry.rank for entry in held}
    kind = held[0].kind
    expected: set[int] = set()
    # By identity: hundreds of ranks share one mesh, and comparing as many long meshes by value would take minutes.
    for entry in {(id(entry.mesh), id(entry.cut)): entry for entry in held}.values():
        if entry.mesh is not None:
            expected |= set(entry.mesh.ranks)
        elif entry.cut is not None:
            expected |= {rank for rank in entry.cut.ranks if rank is not None}
        else:
            everyone = stages or [range(world_size)]
            expected.update(*(stage for stage in everyone if not holders.isdisjoint(stage)))
    foreign = sorted(rank for rank in expected if rank >= world_size)
    if foreign:
        return [
            Problem(
                "mesh-mismatch",
                fqn,
                f"its {_NAMED_BY[kind]} names {ranks_text(foreign)}, but the files are those of {world_size} ranks; "
                "the files are from a run of another size",
            )
        ]
    missing = sorted(expected - holders)
    if not missing:
        return []
    savers = "all ranks of a pipeline stage" if len(stages) > 1 else "all ranks"
    reason = f"its {_NAMED_BY[kind]} names them all" if kind in _NAMED_BY else f"{savers} save a plain tensor"
    return [
        Problem(
            "missing-key",
            fqn,
            f"held by {ranks_text(holders)} but missing on {ranks_text(missing)}, though {reason}; "
            "save the checkpoint again, or restore the right files of those ranks",
        )
    ]


def check_agreement(fqn: str, held: Sequence[Held]) -> list[Problem]:
    """Whether all ranks say the same of a tensor: its kind, element type, shape and placements."""
    said = {
        (entry.kind, entry.dtype.name, entry.shape, entry.placements, entry.cut and entry.cut.rectangles)
        for entry in held
    }
    if len(said) == 1:
        return []
    problems = []
    aspects: tuple[tuple[str, Callable[[Held], str]], ...] = (
        ("kind", lambda entry: entry.kind),
        ("dtype", lambda entry: str(entry.dtype)),
        ("shape", lambda entry: f"shape {shape_text(entry.shape)}"),
        ("placements", lambda entry: placements_text(entry.placements)),
        ("shards", lambda entry: "" if entry.cut is None else f"shards {ranges_text(entry.cut.rectangles)}"),
    )
    for aspect, text_of in aspects:
        groups: dict[str, list[int]] = defaultdict(list)
        for entry in held:
            groups[text_of(entry)].append(entry.rank)
        if len(groups) > 1:
            found = ", ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in sorted(groups.items()))
            problems.append(
                Problem(
                    f"{aspect}-mismatch", fqn, f"ranks disagree: {found}; their files are not of one run and one step"
                )
            )
            if aspect == "kind":
                break
    return problems


def check_cover(tensor: StoredTensor) -> list[Problem]:
    """Whether the chunks hold every element of the tensor, and no element twice except as whole replicas."""
    chunks = distinct_chunks(tensor)
    overlap = _first_overlap(chunks)
    if overlap is not None:
        left, right = overlap
        return [
            Problem(
                "overlap",
                tensor.fqn,
                f"{_held_by(left)} and {_held_by(right)} overlap in part, so that one element would be written twice; "
                "the files are not of one run",
            )
        ]
    if sum(prod(chunk.sizes) for chunk in chunks) == prod(tensor.shape):
        return []
    hole = _first_hole(tensor.shape, chunks)
    around = listed(map(_held_by, chunks), MAX_LISTED)
    return [
        Problem(
            "hole",
            tensor.fqn,
            f"no rank holds {range_text(*hole)} of shape {shape_text(tensor.shape)}; "
            f"what is held: {around or 'nothing'}",
        )
    ]


def replica_pairs(tensor: StoredTensor, *, in_full: bool = False) -> list[ReplicaPair]:
    """The pairs of replicas of a tensor that their recorded checksums do not prove equal; with `in_full` every pair.

    The first chunk of each rectangle is the one that will be written; every other one is paired with it.
    """
    pairs: list[ReplicaPair] = []
    first_of: dict[tuple[tuple[int, ...], tuple[int, ...]], Chunk] = {}
    for chunk in tensor.chunks:
        first = first_of.setdefault((chunk.offsets, chunk.sizes), chunk)
        if first is chunk:
            continue
        verdict = compare_recorded(first, chunk, tensor.dtype.itemsize)
        if verdict != "equal":
            pairs.append(ReplicaPair(first, chunk, verdict))
        elif in_full:
            pairs.append(ReplicaPair(first, chunk, "unknown"))
    return pairs


def compare_recorded(first: Chunk, other: Chunk, itemsize: int) -> Literal["equal", "differ", "unknown"]:
    """What headers alone say of the bytes of two chunks of one size: the one place where equality is told unread.

    Equal are the same bytes of the same file, and records of one layout with one checksum. Different checksums prove a
    difference only where the chunk is all of the record: else it may lie in padding, or in what else the record holds.
    """
    laid_out_alike = (
        first.record.num_bytes == other.record.num_bytes
        and first.strides == other.strides
        and first.byte_offset - first.record.byte_offset == other.byte_offset - other.record.byte_offset
    )
    if not laid_out_alike:
        return "unknown"
    if first.file == other.file and first.record.byte_offset == other.record.byte_offset:
        return "equal"
    if first.record.crc32 is None or other.record.crc32 is None:
        return "unknown"
    if first.record.crc32 == other.record.crc32:
        return "equal"
    whole = prod(first.sizes) * itemsize == first.record.num_bytes and is_contiguous(first.sizes, first.strides)
    return "differ" if whole else "unknown"


def limit_problems(problems: Iterable[Problem]) -> list[Problem]:
    """The problems grouped by kind, at most `MAX_LISTED` of each; a last one of the kind counts those left out."""
    by_kind: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        by_kind[problem.kind].append(problem)
    limited = []
    for kind, found in by_kind.items():
        limited += found[:MAX_LISTED]
        if len(found) > MAX_LISTED:
            limited.append(Problem(kind, "", f"and {len(found) - MAX_LISTED} more of this kind ({kind})"))
    return limited


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks for people: "rank 2", "ranks 0 and 2", "ranks 0-3, 7 and 9"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts: list[str] = []
    for low, high in runs:
        parts += [f"{low}-{high}"] if high - low > 1 else [str(rank) for rank in range(low, high + 1)]
    if runs and len(parts) == 1 and runs[0][0] == runs[0][1]:
        return f"rank {parts[0]}"
    return "ranks " + (parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}")


def shape_text(shape: Sequence[int]) -> str:
    """A shape for people: "(7, 3)", "(5)", "()"."""
    return f"({', '.join(map(str, shape))})"


def range_text(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """A rectangle for people, as a slice: "[2:4, 0:3]"; "[]" is the one element of a tensor without dims."""
    return f"[{', '.join(f'{offset}:{offset + size}' for offset, size in zip(offsets, sizes, strict=True))}]"


def ranges_text(rectangles: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str:
    """Rectangles for people, each as a slice; long lists are cut short."""
    return listed((range_text(*rectangle) for rectangle in rectangles), MAX_LISTED)


def placements_text(placements: Sequence[Placement]) -> str:
    """Placements for people: "(Replicate(), Shard(0))"."""
    return f"({', '.join(map(str, placements))})"


def grid_text(shape: Sequence[int], ranks: Sequence[int]) -> str:
    """The ranks of a mesh for people, those along its last axis together: "[0, 1]", "[[0, 2], [1, 3]]"."""
    if len(shape) == 1:
        return f"[{', '.join(map(str, ranks))}]"
    step = len(ranks) // shape[0]
    rows = (grid_text(shape[1:], ranks[start : start + step]) for start in range(0, len(ranks), step))
    return f"[{', '.join(rows)}]"


def axis_text(mesh: Mesh | None, axis: int) -> str:
    """A mesh axis for people: "axis 0 (fsdp)"; "axis 0" where axes have no names."""
    assert mesh is not None, "what has placements has a mesh"
    return f"axis {axis}" if mesh.axis_names is None else f"axis {axis} ({mesh.axis_names[axis]})"


def _held_by(chunk: Chunk) -> str:
    if isinstance(chunk.file, Computation):
        owner = f"what is computed of {chunk.file.fqn}"
    else:
        owner = chunk.file.path.name if chunk.file.rank is None else f"rank {chunk.file.rank}"
    return f"{range_text(chunk.offsets, chunk.sizes)} of {owner}"


def whole_on_text(ranks: Collection[int], world_size: int) -> str:
    """Where a tensor that is not sharded lies, for people: "on every rank", "on ranks 2 and 3".

    One without elements lies nowhere, and is told like most.
    """
    return f"on {ranks_text(ranks)}" if 0 < len(set(ranks)) < world_size else "on every rank"


def rank_of(chunk: Chunk) -> int:
    """The rank that saved a chunk of a rank file."""
    assert isinstance(chunk.file, SourceFile), "what is computed was saved by no rank"
    assert chunk.file.rank is not None, "rank files have ranks"
    return chunk.file.rank


def _first_overlap(chunks: Sequence[Chunk]) -> tuple[Chunk, Chunk] | None:
    """A sweep along the dim that is cut most: only chunks that are still open there can overlap the next one."""
    if _lie_apart(chunks, 0):
        return None
    dim = max(range(len(chunks[0].offsets)), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    active: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: (chunk.offsets[dim], chunk.offsets)):
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > chunk.offsets[dim]]
        for other in active:
            if intersection(other.offsets, other.sizes, chunk.offsets, chunk.sizes) is not None:
                return other, chunk
        active.append(chunk)
    return None


def _lie_apart(chunks: Sequence[Chunk], dim: int) -> bool:
    """Whether distinct chunks are seen not to overlap by their spans along `dim`, then within each along the next.

    That is so where they come of cutting dim by dim, as placements do. Where it is not, they may overlap or not.
    """
    if len(chunks) < 2:  # noqa: PLR2004 - it takes two; and a tensor without dims has one at most
        return True
    alike: dict[tuple[int, int], list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        alike[chunk.offsets[dim], chunk.sizes[dim]].append(chunk)
    spans = sorted(alike)
    if any(low + size > next_low for (low, size), (next_low, _) in pairwise(spans)):
        return False
    return all(_lie_apart(group, dim + 1) for group in alike.values())


def _first_hole(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rectangle, as (offsets, sizes), that begins at the first element in row-major order that no chunk holds.

    Chunks do not overlap. So between two neighbouring cuts of a dim all is held where the volumes of the chunks that
    pass there add up; where they do not, the hole is looked for among these chunks along the next dim.
    """
    offsets, sizes = [], []
    passing = [chunk for chunk in chunks if 0 not in chunk.sizes]
    for dim, size in enumerate(shape):
        steps: dict[int, int] = defaultdict(int, {0: 0, size: 0})
        for chunk in passing:
            volume = prod(chunk.sizes[dim + 1 :])
            steps[chunk.offsets[dim]] += volume
            steps[chunk.offsets[dim] + chunk.sizes[dim]] -= volume
        cuts, whole = sorted(steps), prod(shape[dim + 1 :])
        # The volumes differ, so between some cuts it is not all held; nothing is behind the last one.
        held = accumulate(steps[cut] for cut in cuts[:-1])
        low, high = next(span for span, volume in zip(pairwise(cuts), held, strict=True) if volume != whole)
        offsets.append(low)
        sizes.append(high - low)
        passing = [chunk for chunk in passing if chunk.offsets[dim] <= low < chunk.offsets[dim] + chunk.sizes[dim]]
    return tuple(offsets), tuple(sizes)
