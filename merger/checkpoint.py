"""What a source on disk was found to be: its tensors as rectangles over bytes, how they were laid out, what is wrong.

Every module under `sources/` returns a `Checkpoint`; everything after it reads nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk, without its data.

    `tensors` by their saved names, in the order of their saving; `layouts` has those of them that were spread over
    ranks, the others are whole on every rank that has them. `others` are entries that are no weights: name and what was
    found. `config_dir` is where config.json and the tokenizer lie, None where there is none. `notes` say what a person
    should know; `problems` what makes it unfit to be merged; `located` how it was found, where another path was given.
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
