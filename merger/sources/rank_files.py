"""Per-rank files of a training run: `model_world_size_{W}_rank_{R}.pt`, one `torch.save(model.state_dict())` each.

FSDP2, and FSDP1 with a device mesh, leave DTensors for what is sharded and plain tensors for the rest. Reads headers
and pickles only. Whatever is wrong with the set is gathered in the checkpoint's problems, not raised.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from merger.checkpoint import Checkpoint, Layout
from merger.checks import (
    Held,
    check_agreement,
    check_census,
    check_cover,
    placements_text,
    range_text,
    ranks_text,
    replica_pairs,
    shape_text,
)
from merger.errors import ArchiveError, Problem
from merger.sharding import (
    DealOrder,
    Holding,
    Mesh,
    holding,
    is_shard_order,
    mesh_coordinates,
    shard_coordinate,
    unordered_axis,
)
from merger.sources.dtensor import DTensor, PlainTensor, ShardedTensorEntry
from merger.sources.rank_set import beside_siblings, find_rank_set
from merger.sources.torch_zip import Archive, read_archive
from merger.tensors import Chunk, SourceFile, StoredTensor

FORMAT = "per-rank FSDP files"


def read_rank_files(folder: Path, *, world_size: int | None, shard_order: DealOrder | None) -> Checkpoint:
    """Reads the headers of the set of rank files in `folder`.

    `world_size` picks a set where there are several; `shard_order` says how pieces were dealt where ranks do not ascend
    along a mesh axis (FAULTS S22).
    """
    rank_set = find_rank_set(folder, world_size)
    problems = list(rank_set.problems)
    archives: list[Archive] = []
    for rank, path in sorted(rank_set.paths.items()):
        try:
            archives.append(read_archive(path, rank=rank))
        except ArchiveError as error:
            problems += beside_siblings(error.problems, rank_set.paths)
    tensors: dict[str, StoredTensor] = {}
    layouts: dict[str, Layout] = {}
    others: dict[str, str] = {}
    if not problems:
        problems += [problem for archive in archives for problem in _check_rank(archive)]
    if not problems:
        tensors, layouts, others, problems = _assemble(archives, rank_set.world_size, shard_order)
    if not problems and not tensors:
        problems.append(Problem("no-tensors", str(folder), "the rank files hold no tensor; the model was not saved"))
    config_dir = folder / "huggingface"
    return Checkpoint(
        path=folder,
        format=FORMAT,
        world_size=rank_set.world_size,
        files=tuple(archive.file for archive in archives),
        tensors=tensors,
        layouts=layouts,
        others=others,
        config_dir=config_dir if config_dir.is_dir() else None,
        notes=_notes(archives, others),
        problems=tuple(problems),
    )


def _check_rank(archive: Archive) -> list[Problem]:
    """Whether a file is that of the rank in its name (FAULTS S8): every mesh in it says who saved it."""
    for entry in archive.entries.values():
        if not isinstance(entry, DTensor):
            continue
        if entry.rank is not None and entry.rank != archive.file.rank:
            return [
                Problem(
                    "wrong-rank",
                    archive.file.path.name,
                    f"was saved by rank {entry.rank}, but its name says rank {archive.file.rank}; it was renamed or "
                    f"copied over: restore the file that rank {archive.file.rank} saved",
                )
            ]
    return []


def _assemble(
    archives: Sequence[Archive], world_size: int, shard_order: DealOrder | None
) -> tuple[dict[str, StoredTensor], dict[str, Layout], dict[str, str], list[Problem]]:
    """Joins what the ranks hold under each name into one tensor, or says why that cannot be."""
    by_name: dict[str, list[tuple[Archive, object]]] = defaultdict(list)
    for archive in archives:
        for fqn, entry in archive.entries.items():
            by_name[fqn].append((archive, entry))
    tensors: dict[str, StoredTensor] = {}
    layouts: dict[str, Layout] = {}
    others: dict[str, str] = {}
    problems: list[Problem] = []
    meshes = _OneOfEach()
    for fqn, entries in by_name.items():
        sharded_tensor = any(isinstance(entry, ShardedTensorEntry) for _, entry in entries)
        held = [
            _held(entry, archive.file, meshes) for archive, entry in entries if isinstance(entry, PlainTensor | DTensor)
        ]
        if sharded_tensor:
            problems.append(_unsupported(fqn))
        elif not held:
            others[fqn] = type(entries[0][1]).__name__
        elif faults := check_agreement(fqn, held) or check_census(fqn, held, world_size):
            problems += faults
        else:
            found = [_chunks(fqn, entry, archive.file, shard_order, meshes) for archive, entry in entries]
            # Ranks that find the same fault say the same.
            faults = list(dict.fromkeys(fault for fault in found if isinstance(fault, Problem)))
            chunks = tuple(chunk for part in found if not isinstance(part, Problem) for chunk in part)
            tensors[fqn] = StoredTensor(fqn, held[0].dtype, held[0].shape, chunks)
            if held[0].mesh is not None:
                on = {id(one.mesh): one.mesh for one in held if one.mesh is not None}
                layouts[fqn] = Layout(tuple(on.values()), held[0].placements)
            problems += faults or check_cover(tensors[fqn]) or _proven_differences(tensors[fqn])
    return tensors, layouts, others, problems


class _OneOfEach:
    """Equal meshes as one object: every file brings its own, and what asks by identity is quick."""

    def __init__(self) -> None:
        self._by_value: dict[Mesh, Mesh] = {}
        self._by_id: dict[int, Mesh] = {}

    def __call__(self, mesh: Mesh) -> Mesh:
        found = self._by_id.get(id(mesh))
        if found is None:
            found = self._by_id[id(mesh)] = self._by_value.setdefault(mesh, mesh)
        return found


def _held(entry: PlainTensor | DTensor, file: SourceFile, meshes: _OneOfEach) -> Held:
    assert file.rank is not None, "rank files have ranks"
    if isinstance(entry, PlainTensor):
        return Held(file.rank, entry.local.dtype, entry.local.sizes, None, ())
    return Held(file.rank, entry.dtype, entry.shape, meshes(entry.mesh), entry.placements)


def _chunks(
    fqn: str, entry: object, file: SourceFile, shard_order: DealOrder | None, meshes: _OneOfEach
) -> tuple[Chunk, ...] | Problem:
    """The rectangles of a tensor that a rank holds, or why they cannot be told."""
    if not isinstance(entry, PlainTensor | DTensor):
        return ()  # on a rank that is not of the tensor's mesh, else the census would have missed it
    local = entry.local
    if isinstance(entry, PlainTensor):
        chunk = Chunk((0,) * len(local.sizes), local.sizes, file, local.byte_offset, local.strides, local.record)
        return () if 0 in local.sizes else (chunk,)
    assert file.rank is not None, "rank files have ranks"
    mesh, placements = meshes(entry.mesh), entry.placements
    coordinate = mesh_coordinates(mesh).get(file.rank)
    if coordinate is None:
        # A rank outside a tensor's mesh keeps an empty stand-in under its name.
        return ()
    partial = next((axis for axis, placement in enumerate(placements) if placement.kind == "partial"), None)
    if partial is not None:
        return _partial(fqn, entry, partial)
    axis = unordered_axis(mesh, placements)
    if axis is not None and shard_order is None:
        return _unordered(fqn, entry, axis)
    if entry.shard_order is not None and not is_shard_order(entry.shard_order, placements):
        return _bad_shard_order(fqn, entry)
    dealt = shard_coordinate(mesh, coordinate, shard_order) if axis is not None and shard_order else coordinate
    held = holding(entry.shape, mesh.shape, placements, dealt, entry.shard_order)
    if (fault := _check_local(fqn, entry, file.rank, held)) is not None:
        return fault
    return tuple(
        Chunk(
            piece.offsets,
            piece.sizes,
            file,
            local.byte_offset
            + entry.dtype.itemsize
            * sum(offset * stride for offset, stride in zip(piece.local_offsets, local.strides, strict=True)),
            local.strides,
            local.record,
        )
        for piece in held.pieces
    )


def _check_local(fqn: str, entry: DTensor, rank: int, held: Holding) -> Problem | None:
    """Whether the local tensor has the size that its placements say, exactly or padded to the first rank's."""
    sizes = entry.local.sizes
    if entry.local.dtype != entry.dtype:
        return Problem(
            "dtype-mismatch",
            f"rank {rank}: {fqn}",
            f"the local tensor is {entry.local.dtype}, the DTensor says {entry.dtype}; the file is damaged",
        )
    fits = len(sizes) == len(held.sizes) and all(
        size in (exact, padded) for size, exact, padded in zip(sizes, held.sizes, held.padded_sizes, strict=True)
    )
    if fits:
        return None
    where = ", ".join(range_text(piece.offsets, piece.sizes) for piece in held.pieces) or "nothing"
    return Problem(
        "local-size",
        f"rank {rank}: {fqn}",
        f"holds a local tensor of shape {shape_text(sizes)}, but of shape {shape_text(entry.shape)} with placements "
        f"{placements_text(entry.placements)} this rank has {where}, shape {shape_text(held.sizes)}; "
        "the checkpoint would have holes or shifted rows: save it again",
    )


def _proven_differences(tensor: StoredTensor) -> list[Problem]:
    """Replicas whose recorded checksums differ, found without reading data; the merge itself says where they do."""
    differ = [pair for pair in replica_pairs(tensor) if pair.verdict == "differ"]
    if not differ:
        return []
    first = differ[0].first.file.rank
    assert first is not None, "rank files have ranks"
    ranks = [pair.other.file.rank for pair in differ if pair.other.file.rank is not None]
    return [
        Problem(
            "replicas-differ",
            tensor.fqn,
            f"should be the same on all ranks that hold it, but {ranks_text(ranks)} "
            f"{'has' if len(ranks) == 1 else 'have'} other bytes than rank {first} (by the checksums in the files)",
        )
    ]


def _partial(fqn: str, entry: DTensor, axis: int) -> Problem:
    return Problem(
        "partial",
        fqn,
        f"is {entry.placements[axis]} on mesh {_axis_text(entry, axis)}: each rank holds a summand, not the value; "
        "redistribute it to Replicate() or Shard() before saving",
    )


def _unordered(fqn: str, entry: DTensor, axis: int) -> Problem:
    mesh = _mesh_text(entry.mesh.shape, entry.mesh.ranks)
    return Problem(
        "shard-order",
        fqn,
        f"is sharded along mesh {_axis_text(entry, axis)}, where ranks do not ascend (mesh {mesh}); fully_shard deals "
        "pieces by the rank's place in its group, distribute_tensor by mesh coordinate, and the file does not say "
        "which: use --shard-order group for a model sharded by fully_shard, coordinate for the other",
    )


def _axis_text(entry: DTensor, axis: int) -> str:
    names = entry.mesh.axis_names
    return f"axis {axis}" if names is None else f"axis {axis} ({names[axis]})"


def _bad_shard_order(fqn: str, entry: DTensor) -> Problem:
    return Problem(
        "bad-shard-order",
        fqn,
        f"records that its dims are cut in the order {entry.shard_order}, which does not fit its placements "
        f"{placements_text(entry.placements)}; the file was not written by torch.save of a DTensor, or is damaged",
    )


def _unsupported(fqn: str) -> Problem:
    return Problem(
        "sharded-tensor",
        fqn,
        "is a ShardedTensor (FSDP1 without a device mesh), which this version does not read; pass a device_mesh to "
        "FullyShardedDataParallel and save again, or save a full state dict",
    )


def _mesh_text(shape: Sequence[int], ranks: Sequence[int]) -> str:
    if len(shape) == 1:
        return f"[{', '.join(map(str, ranks))}]"
    step = len(ranks) // shape[0]
    rows = (_mesh_text(shape[1:], ranks[start : start + step]) for start in range(0, len(ranks), step))
    return f"[{', '.join(rows)}]"


def _notes(archives: Sequence[Archive], others: dict[str, str]) -> tuple[str, ...]:
    notes = []
    unchecked = [archive.file.rank for archive in archives if not archive.checksums and archive.file.rank is not None]
    if unchecked:
        notes.append(f"{ranks_text(unchecked)}: saved with checksums off, so damage to the files cannot be noticed")
    if others:
        listed = ", ".join(f"{fqn} ({kind})" for fqn, kind in list(others.items())[:5])
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""  # noqa: PLR2004 - as many as are listed
        notes.append(f"entries that are no tensors, left out: {listed}{more}")
    return tuple(notes)
