"""What a source on disk was found to be: its tensors as rectangles over bytes, how they were laid out, what is wrong.

Every module under `sources/` returns a `Checkpoint`; everything after it reads nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from merger.errors import Problem
from merger.sharding import Cut, Mesh, Placement
from merger.tensors import SourceFile, StoredTensor


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor was spread over ranks.

    A DTensor by placements over the axes of a mesh (`meshes` are several where ranks saved sub-meshes of their own), a
    ShardedTensor by a `cut`.
    """

    meshes: tuple[Mesh, ...]
    placements: tuple[Placement, ...]
    cut: Cut | None = None

    def __str__(self) -> str:
        """For people: "(Replicate(), Shard(0))"."""
        if self.cut is None:
            return f"({', '.join(map(str, self.placements))})"
        num_shards = len(self.cut.rectangles)
        return f"ShardedTensor in {num_shards} shard{'' if num_shards == 1 else 's'}"


# Why a rank does not hold what it should. "missing": it has no usable file, or lacks the tensor; "odd": it says another
# dtype, shape or placements than most ranks do; "misfit": its local tensor is not the size that its placements say.
Reason: TypeAlias = Literal["missing", "odd", "misfit"]


@dataclass(frozen=True, slots=True)
class Owed:
    """A rectangle [offsets, offsets + sizes) that `rank` should hold by the placements of its tensor, and does not."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Fragments:
    """What was found of a tensor of a checkpoint with problems: for people to look at, never to be merged.

    `tensor` and `layout` are as most of its ranks describe them (of as many, as the lowest rank does), with the chunks
    of those ranks. `is_told` is False where the files do not say which rank holds what.
    """

    tensor: StoredTensor
    layout: Layout | None
    owed: tuple[Owed, ...]
    is_told: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk, without its data.

    `tensors` by their saved names, in the order of their saving; `layouts` has those of them that were spread over
    ranks, the others are whole on every rank that has them. `others` are entries that are no weights: name and what was
    found. `config_dir` is where config.json and the tokenizer lie, None where there is none. `notes` say what a person
    should know; `problems` what makes it unfit to be merged; `located` how it was found, where another path was given.
    `fragments` has every tensor of which something was found, by name, where there are problems and the reader was
    asked to keep them.
    """

    path: Path
    format: str
    world_size: int
    files: tuple[SourceFile, ...]
    tensors: Mapping[str, StoredTensor]
    layouts: Mapping[str, Layout]
    others: Mapping[str, str]
    config_dir: Path | None
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    located: tuple[str, ...] = ()
    fragments: Mapping[str, Fragments] = field(default_factory=dict)
