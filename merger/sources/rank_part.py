"""What the file of one rank contributes: of every tensor in it, the rectangles that the rank holds and where they lie.

Everything that can be told of a file without its siblings is told here, so that files can be read in any order and in
any process. Whether the parts of all ranks make one checkpoint is for `rank_files` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from merger.checks import Held, axis_text, grid_text, placements_text, range_text, shape_text
from merger.errors import Problem
from merger.sharding import (
    DealOrder,
    Holding,
    holding,
    is_shard_order,
    mesh_coordinates,
    shard_coordinate,
    unordered_axis,
)
from merger.sources.dtensor import DTensor, PlainTensor
from merger.sources.plain import kind_text
from merger.sources.rank_set import RANK_FILE
from merger.sources.sharded_tensor import ShardedTensor
from merger.sources.shards import shard_chunks
from merger.sources.torch_zip import Archive, read_archive
from merger.tensors import Chunk, SourceFile

# A rectangle, and how its elements lie in the rank's local tensor: offsets and sizes in the global tensor, strides in
# elements, and how many bytes its first element lies behind that of the local tensor.
_Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank's file has under one name.

    `held` is None for what is no tensor, of which `other` names the type, and for tensors that cannot be read.
    `chunks` are the rectangles that the rank holds: none where its piece is empty, or where `problem` says why they
    cannot be told.
    """

    held: Held | None
    chunks: tuple[Chunk, ...]
    problem: Problem | None = None
    other: str = ""


@dataclass(frozen=True, slots=True)
class RankPart:
    """A rank's file: its parts by name in the order of their saving, and what is wrong with it as a whole.

    `checksums` is False where the file was saved without, `is_legacy` True where it is in the old format of torch.save.
    """

    file: SourceFile
    checksums: bool
    is_legacy: bool
    parts: dict[str, Part]
    problems: tuple[Problem, ...]


def read_rank_part(path: Path, rank: int, shard_order: DealOrder | None) -> RankPart:
    """Reads the headers of the file that is that of `rank` by its name.

    Raises:
        ArchiveError: it cannot be read; see `read_archive`.
    """
    archive = read_archive(path, rank=rank)
    parts = _Parts(archive.file, shard_order)
    by_name = {fqn: parts.part(fqn, entry) for fqn, entry in archive.entries.items()}
    return RankPart(archive.file, archive.checksums, archive.is_legacy, by_name, _check_rank(archive))


class _Parts:
    """The parts of one file. Its tensors are many and their layouts few: what follows from a layout is kept."""

    def __init__(self, file: SourceFile, shard_order: DealOrder | None) -> None:
        self._file = file
        self._shard_order = shard_order
        # By what they follow from; element types and meshes by identity, since the entries of a file share theirs.
        self._known: dict[object, tuple[Held, tuple[_Place, ...] | Problem]] = {}
        self._held_shards: dict[object, Held] = {}

    def part(self, fqn: str, entry: object) -> Part:
        """What the file has under the name `fqn`."""
        if isinstance(entry, ShardedTensor):
            return self._sharded(fqn, entry)
        if not isinstance(entry, PlainTensor | DTensor):
            return Part(None, (), other=kind_text(entry))
        local = entry.local
        layout: tuple[object, ...] = (local.sizes, local.strides, id(local.dtype))
        if isinstance(entry, DTensor):
            layout += (entry.shape, id(entry.dtype), id(entry.mesh), entry.placements, entry.shard_order)
        known = self._known.get(layout)
        if known is None:
            known = self._known[layout] = self._held(entry), self._places(entry)
        held, places = known
        if isinstance(places, Problem):
            return Part(held, (), replace(places, where=f"{places.where}{fqn}"))
        file, start, record = self._file, local.byte_offset, local.record
        # The same integer object where it can be: half a million of these are kept for a large checkpoint.
        return Part(
            held,
            tuple(
                [
                    Chunk(offsets, sizes, file, start + behind if behind else start, strides, record)
                    for offsets, sizes, strides, behind in places
                ]
            ),
        )

    def _sharded(self, fqn: str, entry: ShardedTensor) -> Part:
        assert self._file.rank is not None, "rank files have ranks"
        layout = (entry.shape, id(entry.dtype), id(entry.cut))
        held = self._held_shards.get(layout)
        if held is None:
            held = self._held_shards[layout] = Held(self._file.rank, entry.dtype, entry.shape, None, (), entry.cut)
        chunks = shard_chunks(fqn, entry, self._file)
        return Part(held, (), chunks) if isinstance(chunks, Problem) else Part(held, chunks)

    def _held(self, entry: PlainTensor | DTensor) -> Held:
        assert self._file.rank is not None, "rank files have ranks"
        if isinstance(entry, PlainTensor):
            return Held(self._file.rank, entry.local.dtype, entry.local.sizes, None, ())
        return Held(self._file.rank, entry.dtype, entry.shape, entry.mesh, entry.placements)

    def _places(self, entry: PlainTensor | DTensor) -> tuple[_Place, ...] | Problem:
        """The rectangles of a tensor that the rank holds, or why they cannot be told, without the tensor's name."""
        local = entry.local
        if isinstance(entry, PlainTensor):
            return () if 0 in local.sizes else (((0,) * len(local.sizes), local.sizes, local.strides, 0),)
        rank, shard_order = self._file.rank, self._shard_order
        assert rank is not None, "rank files have ranks"
        mesh, placements = entry.mesh, entry.placements
        coordinate = mesh_coordinates(mesh).get(rank)
        if coordinate is None:
            # A rank outside a tensor's mesh keeps an empty stand-in under its name.
            return ()
        axis = unordered_axis(mesh, placements)
        if axis is not None and shard_order is None:
            return _unordered(entry, axis)
        if entry.shard_order is not None and not is_shard_order(entry.shard_order, placements):
            return _bad_shard_order(entry)
        dealt = shard_coordinate(mesh, coordinate, shard_order) if axis is not None and shard_order else coordinate
        held = holding(entry.shape, mesh.shape, placements, dealt, entry.shard_order)
        if (fault := _check_local(entry, rank, held)) is not None:
            return fault
        return tuple(
            (piece.offsets, piece.sizes, local.strides, entry.dtype.itemsize * _dot(piece.local_offsets, local.strides))
            for piece in held.pieces
        )


def _dot(offsets: Sequence[int], strides: Sequence[int]) -> int:
    return sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))


def _check_rank(archive: Archive) -> tuple[Problem, ...]:
    """Whether a file is that of the rank and run in its name (FAULTS S8): sharded tensors in it say who saved it."""
    name, rank = archive.file.path.name, archive.file.rank
    for entry in archive.entries.values():
        if not isinstance(entry, DTensor | ShardedTensor):
            continue
        if entry.rank is not None and entry.rank != rank:
            return (
                Problem(
                    "wrong-rank",
                    name,
                    f"was saved by rank {entry.rank}, but its name says rank {rank}; it was renamed or copied over: "
                    f"restore the file that rank {rank} saved",
                ),
            )
        named = RANK_FILE.fullmatch(name)
        if isinstance(entry, ShardedTensor) and named and entry.world_size != int(named[1]):
            message = (
                f"was saved by a run of {entry.world_size} ranks, but its name says {int(named[1])}; it was renamed: "
                f"restore its name, and the files of all {entry.world_size} ranks"
            )
            return (Problem("wrong-world-size", name, message),)
    return ()


def _check_local(entry: DTensor, rank: int, held: Holding) -> Problem | None:
    """Whether the local tensor has the size that its placements say, exactly or padded to the first rank's.

    Of an empty piece that is all: `fully_shard` over tensor parallelism that left a rank nothing says (0, 0).
    """
    sizes = entry.local.sizes
    if entry.local.dtype != entry.dtype:
        return Problem(
            "dtype-mismatch",
            f"rank {rank}: ",
            f"the local tensor is {entry.local.dtype}, the DTensor says {entry.dtype}; the file is damaged",
        )
    fits = len(sizes) == len(held.sizes) and all(
        size in (exact, padded) for size, exact, padded in zip(sizes, held.sizes, held.padded_sizes, strict=True)
    )
    if fits or (0 in sizes and 0 in held.sizes):
        return None
    where = ", ".join(range_text(piece.offsets, piece.sizes) for piece in held.pieces) or "nothing"
    return Problem(
        "local-size",
        f"rank {rank}: ",
        f"holds a local tensor of shape {shape_text(sizes)}, but of shape {shape_text(entry.shape)} with placements "
        f"{placements_text(entry.placements)} this rank has {where}, shape {shape_text(held.sizes)}; "
        "the checkpoint would have holes or shifted rows: save it again",
    )


def _unordered(entry: DTensor, axis: int) -> Problem:
    mesh = grid_text(entry.mesh.shape, entry.mesh.ranks)
    return Problem(
        "shard-order",
        "",
        f"is sharded along mesh {axis_text(entry.mesh, axis)}, where ranks do not ascend (mesh {mesh}), and the file "
        "does not say how pieces were dealt there. fully_shard and distribute_tensor deal by the rank's place in its "
        "group: use --shard-order group. FSDP1, redistribute and distribute_tensor(src_data_rank=None) deal by mesh "
        "coordinate: use --shard-order coordinate",
    )


def _bad_shard_order(entry: DTensor) -> Problem:
    return Problem(
        "bad-shard-order",
        "",
        f"records that its dims are cut in the order {entry.shard_order}, which does not fit its placements "
        f"{placements_text(entry.placements)}; the file was not written by torch.save of a DTensor, or is damaged",
    )
