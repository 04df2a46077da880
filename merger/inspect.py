"""What a checkpoint is, told from its headers alone: no tensor data is read, and torch is not needed."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from merger.adapters import LoraSummary, summarise
from merger.checkpoint import Checkpoint
from merger.checks import whole_on_text
from merger.errors import MergerError, Problem
from merger.sharding import DealOrder, Mesh
from merger.single_file import check_file, write_file
from merger.sources import read_any
from merger.tensors import SourceFile, StoredTensor, num_bytes

# The kinds of file that a picture can be.
_PICTURE_SUFFIXES = (".svg", ".html")


@dataclass(frozen=True, slots=True)
class MeshSummary:
    """A device mesh and how many tensors lie on it. `ranks` in row-major order of `shape`.

    `copies` are the ranks of other meshes like it on which the same tensors lie once more, as those do that are outside
    of tensor parallelism.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None
    ranks: tuple[int, ...]
    num_tensors: int
    copies: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor by its saved name.

    `placements` is that of its DTensor, or says that it is a ShardedTensor, or on which ranks it is whole.
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
    `num_replicated` are the plain tensors, whole on each rank that has them: buffers, and parameters not sharded.
    `tensors` holds those whose names match what was asked for. `left_out` maps saved entries that are no weights to
    what they are. `lora` is None where there are no adapters. `picture` is the file that was drawn, None where none
    was.
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
    picture: Path | None = None
    lora: LoraSummary | None = None


def inspect(
    checkpoint: str | os.PathLike[str],
    *,
    tensors: str | None = None,
    world_size: int | None = None,
    shard_order: DealOrder | None = None,
    reduce_partial: bool = False,
    workers: int | None = None,
    picture: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> InspectReport:
    """Says what lies at `checkpoint`, a sharded checkpoint or a Hugging Face model directory.

    `tensors` is a shell pattern of names to list one by one, such as "*.layers.0.*"; `workers` is how many processes
    read the headers where ranks are many. `picture` is a file to draw, .svg or .html: which rank holds which part of
    these tensors, or of all; with `overwrite` one that exists is replaced. Faults of the checkpoint are part of the
    report and of the picture; a `MergerError` is raised only where there is no checkpoint, or the picture cannot be
    written.
    """
    target = None if picture is None else Path(picture)
    if target is not None:
        _check_picture(target, overwrite=overwrite)
    source = read_any(
        Path(checkpoint),
        world_size=world_size,
        shard_order=shard_order,
        reduce_partial=reduce_partial,
        workers=workers,
        keep_fragments=target is not None,
    )
    if target is not None:
        from merger.picture import picture_text  # a part of the start of every command, and few ask for a picture

        text = picture_text(source, as_html=target.suffix.lower() == ".html", tensors=tensors)
        write_file(target, text.encode(), overwrite=overwrite)
    stored = source.tensors.values()
    placements = {fqn: _placement(source, tensor) for fqn, tensor in source.tensors.items()}
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
        placements=dict(Counter(placements.values()).most_common()),
        tensors=tuple(
            TensorSummary(fqn, tensor.dtype.name, tensor.shape, placements[fqn], len(tensor.chunks))
            for fqn, tensor in source.tensors.items()
            if tensors is not None and fnmatchcase(fqn, tensors)
        ),
        notes=(*source.located, *source.notes),
        problems=source.problems,
        left_out=dict(source.others),
        picture=target,
        lora=summarise(source),
    )


def _placement(source: Checkpoint, tensor: StoredTensor) -> str:
    if (layout := source.layouts.get(tensor.fqn)) is not None:
        return str(layout)
    files = [chunk.file for chunk in tensor.chunks]
    ranks = {file.rank for file in files if isinstance(file, SourceFile) and file.rank is not None}
    return whole_on_text(ranks, source.world_size)


def _check_picture(target: Path, *, overwrite: bool) -> None:
    if target.suffix.lower() not in _PICTURE_SUFFIXES:
        message = f"{target.name!r} ends neither in .svg nor in .html, which says what kind of picture is to be drawn"
        raise MergerError(Problem("bad-option", "picture", message))
    check_file(target, overwrite=overwrite)


def _meshes(source: Checkpoint) -> tuple[MeshSummary, ...]:
    counts: Counter[tuple[Mesh, ...]] = Counter()
    for layout in source.layouts.values():
        alike: dict[tuple[object, ...], list[Mesh]] = defaultdict(list)
        for mesh in layout.meshes:
            alike[mesh.shape, mesh.axis_names].append(mesh)
        counts.update(tuple(sorted(meshes, key=lambda mesh: mesh.ranks)) for meshes in alike.values())
    return tuple(
        MeshSummary(mesh.shape, mesh.axis_names, mesh.ranks, count, tuple(copy.ranks for copy in copies))
        for (mesh, *copies), count in counts.most_common()
    )
