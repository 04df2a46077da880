"""Tensors as rectangles over bytes that lie in files, and the algebra on them.

A `StoredTensor` never holds data: it says of which rectangular pieces (`Chunk`) a tensor consists and where the bytes
of each lie. The functions return new tensors over the same bytes. A `Computation` stands where a file may stand: its
bytes are computed from other tensors when they are read, so that what is no copy goes the same ways as what is one.
Pure: no input or output, no torch, no numpy. Words are those of `torch.distributed.checkpoint.metadata`: fqn, chunk,
offsets, sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path

from merger.dtypes import BY_NAME, DType
from merger.operations import Operation


@dataclass(frozen=True, slots=True)
class Record:
    """A run of bytes in a file that was written, and can be checked, as one.

    `byte_offset` and `num_bytes` in the file; `crc32` is None where the writer recorded none.
    """

    name: str
    byte_offset: int
    num_bytes: int
    crc32: int | None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file with tensor data, as it was when its header was read. `rank` is None where files belong to no rank.

    `recorded_crc32` is a CRC-32 over all checksums that the file records, None where it records none.
    """

    path: Path
    num_bytes: int
    mtime_ns: int
    rank: int | None
    recorded_crc32: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangle [offsets, offsets + sizes) of a global tensor, in elements, and where its bytes lie.

    The element at local index i lies at `byte_offset + sum(i[d] * strides[d]) * itemsize` of `file`; `strides` are in
    elements. All of it lies within `record`.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: SourceFile | Computation
    byte_offset: int
    strides: tuple[int, ...]
    record: Record


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of `shape` made of `chunks`. Chunks of equal offsets and sizes are replicas of one another."""

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


# Two computations are the same only where they are one: comparing what they are made of would take long.
@dataclass(frozen=True, slots=True, eq=False)
class Computation:
    """A tensor of `shape` that is computed from others when it is read; its bytes are those of its row-major order.

    `operation` says how, and what the `inputs` are in turn.
    """

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    inputs: tuple[StoredTensor, ...]
    operation: Operation


def computed(computation: Computation) -> StoredTensor:
    """The result of a computation, as a tensor of one chunk; of none where it has no elements."""
    shape, size = computation.shape, prod(computation.shape) * computation.dtype.itemsize
    record = Record(computation.fqn, 0, size, None)
    chunk = Chunk((0,) * len(shape), shape, computation, 0, row_major_strides(shape), record)
    return StoredTensor(computation.fqn, computation.dtype, shape, (chunk,) if size else ())


def in_files(tensor: StoredTensor) -> Iterator[StoredTensor]:
    """The tensors whose bytes lie in files and of which a tensor is made: itself, or what it is computed from."""
    stored = tuple(chunk for chunk in tensor.chunks if isinstance(chunk.file, SourceFile))
    if stored or not tensor.chunks:
        yield tensor if len(stored) == len(tensor.chunks) else replace(tensor, chunks=stored)
    computations = {chunk.file: None for chunk in tensor.chunks if isinstance(chunk.file, Computation)}
    for computation in computations:
        for source in computation.inputs:
            yield from in_files(source)


def num_bytes(tensor: StoredTensor) -> int:
    """How many bytes the elements of the whole tensor take."""
    return prod(tensor.shape) * tensor.dtype.itemsize


def distinct_chunks(tensor: StoredTensor) -> tuple[Chunk, ...]:
    """The chunks without replicas (the first of each rectangle stands), ordered by their offsets."""
    first_of: dict[tuple[tuple[int, ...], tuple[int, ...]], Chunk] = {}
    for chunk in tensor.chunks:
        first_of.setdefault((chunk.offsets, chunk.sizes), chunk)
    return tuple(sorted(first_of.values(), key=lambda chunk: chunk.offsets))


def as_real_pairs(tensor: StoredTensor) -> StoredTensor:
    """A complex128 tensor as float64 with a last dim of two, real and imaginary part: the same bytes."""
    assert tensor.dtype.name == "complex128", tensor.dtype
    chunks = tuple(
        replace(
            chunk,
            offsets=(*chunk.offsets, 0),
            sizes=(*chunk.sizes, 2),
            strides=(*(2 * stride for stride in chunk.strides), 1),
        )
        for chunk in tensor.chunks
    )
    return StoredTensor(tensor.fqn, BY_NAME["float64"], (*tensor.shape, 2), chunks)


def is_contiguous(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of `sizes` at `strides` lie one after the other in row-major order; no elements always do."""
    if 0 in sizes:
        return True
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def is_row_run(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a rectangle of `sizes` is one unbroken run of the row-major order of `shape`.

    It is where some dim splits the others: before it the rectangle is one index thick, behind it as wide as the tensor.
    """
    dim = 0
    while dim < len(sizes) and sizes[dim] == 1:
        dim += 1
    return all(size == full for size, full in zip(sizes[dim + 1 :], shape[dim + 1 :], strict=True))


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor of `shape`."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def bands(shape: Sequence[int], max_elements: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts `shape` into runs of its row-major order of at most `max_elements`, as (offsets, sizes), in order.

    An empty tensor has none; a tensor without dims has one, of no dims.
    """
    if prod(shape) == 0:
        return
    dim, inner = len(shape), 1
    while dim > 0 and inner * shape[dim - 1] <= max_elements:
        dim -= 1
        inner *= shape[dim]
    if dim == 0:
        yield (0,) * len(shape), tuple(shape)
        return
    step = max(1, max_elements // inner)
    for outer in product(*(range(size) for size in shape[: dim - 1])):
        for start in range(0, shape[dim - 1], step):
            size = min(step, shape[dim - 1] - start)
            yield (
                (*outer, start, *(0 for _ in shape[dim:])),
                (*(1 for _ in outer), size, *shape[dim:]),
            )


def intersection(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The rectangle that two rectangles share, as (offsets, sizes); None where they share no element."""
    low = tuple(map(max, offsets, other_offsets))
    high = tuple(
        min(offset + size, other_offset + other_size)
        for offset, size, other_offset, other_size in zip(offsets, sizes, other_offsets, other_sizes, strict=True)
    )
    if any(stop <= start for start, stop in zip(low, high, strict=True)):
        return None
    return low, tuple(stop - start for start, stop in zip(low, high, strict=True))
