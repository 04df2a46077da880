"""A `RankPart` as bytes, for the way from the process that read it to the one that merges.

What the tensors of a file have in common is few and goes as JSON, each thing once; what they have of their own, where
their bytes lie and with which checksum, goes as columns of integers. It is no pickle: what a child that reads
untrusted files hands over can make nothing but these records.
"""

from __future__ import annotations

import json
from array import array
from functools import lru_cache
from pathlib import Path
from sys import intern
from typing import Any, TypeAlias

from merger.checks import Held
from merger.dtypes import BY_NAME
from merger.errors import Problem
from merger.sharding import Cut, Mesh, Placement
from merger.sources.rank_part import Part, RankPart
from merger.sources.sharded_tensor import shared_cut
from merger.tensors import Chunk, Record, SourceFile

# What is read back of JSON; every field of it is known to `encode`.
_Json: TypeAlias = Any
# Stands for a checksum that was not recorded.
_NO_CRC32 = -1
_LENGTH_BYTES = 8


def encode(part: RankPart) -> bytes:
    """`part` as bytes; `decode` makes an equal one of them."""
    meshes, cuts, held, problems, kinds = _Table(), _Table(), _Table(), _Table(), _Table()
    kind_of: list[int] = []
    record_names: list[str] = []
    # Per record: its place in the file, and its checksum.
    columns = array("q")
    for found in part.parts.values():
        records: list[Record] = []
        places = []
        for chunk in found.chunks:
            # Chunks of one local tensor share its record, and follow one another.
            if not records or records[-1] is not chunk.record:
                records.append(chunk.record)
            behind = chunk.byte_offset - chunk.record.byte_offset
            places.append((chunk.offsets, chunk.sizes, chunk.strides, behind, len(records) - 1))
        one = found.held
        kind_of.append(
            kinds.index(
                (
                    None if one is None else held.index(one, by=id(one)),
                    None if found.problem is None else problems.index(found.problem),
                    found.other,
                    tuple(places),
                    tuple([record.num_bytes for record in records]),
                )
            )
        )
        for record in records:
            record_names.append(record.name)
            columns.append(record.byte_offset)
            columns.append(_NO_CRC32 if record.crc32 is None else record.crc32)
    said = [
        (
            one.dtype.name,
            one.shape,
            None if one.mesh is None else meshes.index(one.mesh, by=id(one.mesh)),
            [(axis.kind, axis.dim, axis.split_factor, axis.reduce_op) for axis in one.placements],
            None if one.cut is None else cuts.index(one.cut, by=id(one.cut)),
        )
        for one in held.items
    ]
    file = part.file
    head = {
        "file": (file.num_bytes, file.mtime_ns, file.rank, file.recorded_crc32),
        "checksums": part.checksums,
        "is_legacy": part.is_legacy,
        "wrong": [_fields(problem) for problem in part.problems],
        # Long, and the same in most files: as texts they are known again.
        "meshes": json.dumps([(mesh.shape, mesh.ranks, mesh.axis_names) for mesh in meshes.items]),
        "cuts": json.dumps([(cut.rectangles, cut.ranks) for cut in cuts.items]),
        "held": said,
        "problems": [_fields(problem) for problem in problems.items],
        "kinds": kinds.items,
        "names": list(part.parts),
        "kind_of": kind_of,
        "records": record_names,
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + columns.tobytes()


def decode(data: bytes, path: Path) -> RankPart:
    """What `encode` made `data` of, for the file at `path`."""
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    head: dict[str, _Json] = json.loads(data[_LENGTH_BYTES:start])
    columns = array("q")
    columns.frombytes(data[start:])
    file = SourceFile(path, *head["file"])
    assert file.rank is not None, "rank files have ranks"
    meshes, cuts = _meshes(head["meshes"]), _cuts(head["cuts"])
    held = [
        Held(
            file.rank,
            BY_NAME[dtype],
            tuple(shape),
            None if mesh is None else meshes[mesh],
            tuple(Placement(*fields) for fields in placements),
            None if cut is None else cuts[cut],
        )
        for dtype, shape, mesh, placements, cut in head["held"]
    ]
    problems = [Problem(*fields) for fields in head["problems"]]
    kinds = [
        (
            None if one is None else held[one],
            None if problem is None else problems[problem],
            other,
            [(tuple(offsets), tuple(sizes), tuple(strides), *rest) for offsets, sizes, strides, *rest in places],
            sizes,
        )
        for one, problem, other, places, sizes in head["kinds"]
    ]
    places_and_sums = zip(columns[::2], columns[1::2], map(intern, head["records"]), strict=True)
    parts: dict[str, Part] = {}
    for fqn, kind in zip(head["names"], head["kind_of"], strict=True):
        one, problem, other, places, sizes = kinds[kind]
        records = []
        for size in sizes:
            byte_offset, crc32, name = next(places_and_sums)
            records.append(Record(name, byte_offset, size, None if crc32 == _NO_CRC32 else crc32))
        chunks = []
        for offsets, extent, strides, behind, number in places:
            record = records[number]
            # The same integer object where it can be, to save memory.
            byte_offset = record.byte_offset + behind if behind else record.byte_offset
            chunks.append(Chunk(offsets, extent, file, byte_offset, strides, record))
        parts[intern(fqn)] = Part(one, tuple(chunks), problem, other)
    return RankPart(
        file=file,
        checksums=head["checksums"],
        is_legacy=head["is_legacy"],
        parts=parts,
        problems=tuple(Problem(*fields) for fields in head["wrong"]),
    )


@lru_cache(maxsize=64)
def _meshes(text: str) -> list[Mesh]:
    return [
        Mesh(tuple(shape), tuple(ranks), None if names is None else tuple(names))
        for shape, ranks, names in json.loads(text)
    ]


@lru_cache(maxsize=64)
def _cuts(text: str) -> list[Cut]:
    return [
        shared_cut(tuple((tuple(offsets), tuple(sizes)) for offsets, sizes in rectangles), tuple(ranks))
        for rectangles, ranks in json.loads(text)
    ]


def _fields(problem: Problem) -> tuple[str, str, str]:
    return problem.kind, problem.where, problem.message


class _Table:
    """Things that are listed once and named by their place from then on."""

    def __init__(self) -> None:
        self.items: list[_Json] = []
        self._places: dict[object, int] = {}

    def index(self, item: object, *, by: object = None) -> int:
        """The place of `item`, which is known by `by` where to compare it would take long."""
        key = item if by is None else by
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self.items)
            self.items.append(item)
        return place
