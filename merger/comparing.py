"""Whether two stored tensors hold the same bytes, told from headers where that is enough, else by reading both.

Comparison is bitwise, so that a NaN equals itself. Memory is bounded by a few bands.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from merger.checks import ReplicaPair, compare_recorded, rank_of, ranks_text
from merger.dtypes import DType
from merger.errors import Problem
from merger.reading import SourceReader, read_bands
from merger.tensors import Chunk, StoredTensor, bands

_BAND_BYTES = 4 << 20
# How struct unpacks the types whose values a message can show; bfloat16 is the upper half of a float32.
_STRUCT = {
    "float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h", "int8": "b",
    "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "bool": "?",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element, in row-major order, that differs: its index, and the value on either side for people."""

    index: tuple[int, ...]
    first: str
    other: str


def first_difference(reader: SourceReader, first: StoredTensor, other: StoredTensor) -> Difference | None:
    """Where two tensors of the same shape and element type differ first; None where they are equal bit for bit."""
    assert (first.shape, first.dtype) == (other.shape, other.dtype)
    itemsize = first.dtype.itemsize
    # Both sides are cut into the same bands, so that the n-th of one is that of the other.
    cuts = bands(first.shape, max(1, _BAND_BYTES // itemsize))
    for (offsets, sizes), (_, left), (_, right) in zip(
        cuts, read_bands(reader, first, _BAND_BYTES), read_bands(reader, other, _BAND_BYTES), strict=True
    ):
        left_bytes, right_bytes = left.tobytes(), right.tobytes()
        if left_bytes == right_bytes:
            continue
        position = next(
            start
            for start in range(0, len(left_bytes), itemsize)
            if left_bytes[start : start + itemsize] != right_bytes[start : start + itemsize]
        )
        left_element, right_element = (data[position : position + itemsize] for data in (left_bytes, right_bytes))
        texts = element_texts(left_element, right_element, first.dtype)
        return Difference(position_in(position // itemsize, offsets, sizes), *texts)
    return None


def differing_replicas(reader: SourceReader, tensor: StoredTensor, pairs: Sequence[ReplicaPair]) -> list[Problem]:
    """Reads pairs of replicas of a tensor and says which ranks differ from the first, and where (FAULTS S5)."""
    problems: list[Problem] = []
    for pair in pairs:
        difference = first_difference(reader, _alone(tensor, pair.first), _alone(tensor, pair.other))
        if difference is None:
            continue
        index = tuple(offset + position for offset, position in zip(pair.first.offsets, difference.index, strict=True))
        problems.append(
            Problem(
                "replicas-differ",
                tensor.fqn,
                f"should be the same on all ranks that hold it, but at [{', '.join(map(str, index))}] "
                f"{ranks_text([rank_of(pair.first)])} has {difference.first} and "
                f"{ranks_text([rank_of(pair.other)])} has {difference.other}; "
                "the files are not of one run and one step, or the ranks went apart in training",
            )
        )
    return problems


def same_records(first: StoredTensor, other: StoredTensor) -> bool:
    """Whether headers alone prove two tensors equal: the same bytes, or records with the same checksum."""
    if (first.shape, first.dtype, len(first.chunks)) != (other.shape, other.dtype, len(other.chunks)):
        return False
    return all(
        (left.offsets, left.sizes) == (right.offsets, right.sizes)
        and compare_recorded(left, right, first.dtype.itemsize) == "equal"
        for left, right in zip(first.chunks, other.chunks, strict=True)
    )


def element_text(data: bytes, dtype: DType) -> str:
    """One element for people: its value, or its bytes where it is of a type that has no plain notation."""
    if dtype.name == "bfloat16":
        return f"{struct.unpack('<f', bytes(2) + data)[0]:.9g}"
    if dtype.name not in _STRUCT:
        return f"bytes {data.hex()}"
    value = struct.unpack(f"<{_STRUCT[dtype.name]}", data)[0]
    return f"{value:.17g}" if dtype.name == "float64" else f"{value:.9g}" if dtype.is_floating else str(value)


def element_texts(first: bytes, other: bytes, dtype: DType) -> tuple[str, str]:
    """Two elements that differ, for people: with their bytes where their values read the same, as two NaNs may."""
    texts = element_text(first, dtype), element_text(other, dtype)
    if texts[0] != texts[1]:
        return texts
    return f"{texts[0]} (bytes {first.hex()})", f"{texts[1]} (bytes {other.hex()})"


def _alone(tensor: StoredTensor, chunk: Chunk) -> StoredTensor:
    """A chunk as a tensor of its own."""
    return StoredTensor(tensor.fqn, tensor.dtype, chunk.sizes, (replace(chunk, offsets=(0,) * len(chunk.sizes)),))


def position_in(position: int, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """The index in a tensor of the element that is at `position` in a band of it, in row-major order."""
    index = []
    for offset, size in zip(reversed(offsets), reversed(sizes), strict=True):
        position, within = divmod(position, size)
        index.append(offset + within)
    return tuple(reversed(index))
