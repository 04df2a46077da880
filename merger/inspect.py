"""What a checkpoint is, told from its headers alone: no tensor data is read, and torch is not needed."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from merger.checkpoint import Checkpoint, Layout
from merger.checks import placements_text
from merger.errors import Problem
from merger.sharding import DealOrder, Mesh
from merger.sources import read_any
from merger.tensors import num_bytes

REPLICATED = "on every rank"


@dataclass(frozen=True, slots=True)
class MeshSummary:
    """A device mesh and how many tensors lie on it. `ranks` in row-major order of `shape`."""

    shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None
    ranks: tuple[int, ...]
    num_tensors: int


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor by its saved name.

    `placements` is that of its DTensor, or says that it is a ShardedTensor, or plain and on every rank.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    placements: str
    num_chunks: int


@dataclass(frozen=True, slots=True)
class InspectReport:
    """What was found.

    `num_elements` and `num_bytes` are those of the merged tensors; `dtypes` and `placements` count tensors.
    `num_replicated` are the plain tensors, on every rank: buffers, and parameters that were not sharded. `tensors`
    holds those whose names match what was asked for. `left_out` maps
    saved entries that are no weights to what they are.
    """

    checkpoint: Path
    format: str
    world_size: int
    num_files: int
    file_bytes: int
    config_dir: Path | None
    meshes: tuple[MeshSummary, ...]
    num_tensors: int
    num_replicated: int
    num_elements: int
    num_bytes: int
    dtypes: dict[str, int]
    placements: dict[str, int]
    tensors: tuple[TensorSummary, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    left_out: dict[str, str] = field(default_factory=dict)


def inspect(
    checkpoint: str | os.PathLike[str],
    *,
    tensors: str | None = None,
    world_size: int | None = None,
    shard_order: DealOrder | None = None,
    reduce_partial: bool = False,
    workers: int | None = None,
) -> InspectReport:
    """Says what lies at `checkpoint`, a sharded checkpoint or a Hugging Face model directory.

    `tensors` is a shell pattern of names to list one by one, such as "*.layers.0.*"; `workers` is how many processes
    read the headers where ranks are many. Faults of the checkpoint are part
    of the report; a `MergerError` is raised only where there is no checkpoint.
    """
    source = read_any(
        Path(checkpoint),
        world_size=world_size,
        shard_order=shard_order,
        reduce_partial=reduce_partial,
        workers=workers,
    )
    stored = source.tensors.values()
    placements = {fqn: _placed(layout) for fqn, layout in source.layouts.items()}
    return InspectReport(
        checkpoint=source.path,
        format=source.format,
        world_size=source.world_size,
        num_files=len(source.files),
        file_bytes=sum(file.num_bytes for file in source.files),
        config_dir=source.config_dir,
        meshes=_meshes(source),
        num_tensors=len(source.tensors),
        num_replicated=len(source.tensors) - len(source.layouts),
        num_elements=sum(num_bytes(tensor) // tensor.dtype.itemsize for tensor in stored),
        num_bytes=sum(num_bytes(tensor) for tensor in stored),
        dtypes=dict(Counter(tensor.dtype.name for tensor in stored).most_common()),
        placements=dict(Counter(placements.get(fqn, REPLICATED) for fqn in source.tensors).most_common()),
        tensors=tuple(
            TensorSummary(fqn, tensor.dtype.name, tensor.shape, placements.get(fqn, REPLICATED), len(tensor.chunks))
            for fqn, tensor in source.tensors.items()
            if tensors is not None and fnmatchcase(fqn, tensors)
        ),
        notes=(*source.located, *source.notes),
        problems=source.problems,
        left_out=dict(source.others),
    )


def _placed(layout: Layout) -> str:
    if layout.cut is None:
        return placements_text(layout.placements)
    num_shards = len(layout.cut.rectangles)
    return f"ShardedTensor in {num_shards} shard{'' if num_shards == 1 else 's'}"


def _meshes(source: Checkpoint) -> tuple[MeshSummary, ...]:
    counts: Counter[Mesh] = Counter(mesh for layout in source.layouts.values() for mesh in layout.meshes)
    return tuple(MeshSummary(mesh.shape, mesh.axis_names, mesh.ranks, count) for mesh, count in counts.most_common())
