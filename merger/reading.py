"""Reads rectangles of stored tensors in bounded memory: the one room that opens source files for their data.

What lies in no file but is computed from others is computed band by band, as it is asked for. Files are read by offset,
never mapped, so that memory does not grow with what is read. numpy is imported on first use: commands that read no data
start without it.
"""

from __future__ import annotations

import os
import resource
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from merger.computing import band_grid, compute_band
from merger.errors import ArchiveError, Problem
from merger.tensors import (
    Chunk,
    Computation,
    SourceFile,
    StoredTensor,
    bands,
    distinct_chunks,
    intersection,
    row_major_strides,
)

if TYPE_CHECKING:
    import numpy as np

    from merger.computing import Kept

    Elements: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# Source files kept open at once: half of what the process may open, the rest is left to others. On a network disk each
# opening is a round trip, so all ranks that a tensor comes from should fit.
MAX_OPEN_FILES = max(16, min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
# How much of what was computed is kept, for all threads together: enough for each to go on where it was, and to gather
# the transpose of a matrix of some 10 million elements without computing it once per row.
_MAX_KEPT_BYTES = 96 << 20
# How much of a source may be read to gather a strided rectangle, as a multiple of the bytes wanted, before it is
# read in smaller pieces instead.
_MAX_READ_AMPLIFICATION = 4


class SourceReader:
    """Open source files, at most `MAX_OPEN_FILES` of them, for reads by offset from any thread.

    A file that is not what it was when its header was read (other size or time of change) is an error, whether it is
    seen when the file is opened or when it is closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[SourceFile, _OpenFile] = OrderedDict()
        # Bands that were computed, and what is needed for the next ones.
        self._kept: OrderedDict[tuple[Computation, object], Kept] = OrderedDict()
        self._kept_bytes = 0

    def __enter__(self) -> SourceReader:  # noqa: PYI034 - typing.Self is not in Python 3.10
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        changed = [file for file, entry in self._files.items() if not _is_same(file, entry.descriptor)]
        for entry in self._files.values():
            os.close(entry.descriptor)
        self._files.clear()
        if changed and kind is None:
            raise _changed(changed[0])

    @contextmanager
    def descriptor(self, file: SourceFile) -> Iterator[int]:
        """The descriptor of an open file, which stays open as long as the block runs."""
        with self._lock:
            entry = self._files.get(file)
            if entry is None:
                entry = self._files[file] = _OpenFile(_open(file))
            self._files.move_to_end(file)
            entry.users += 1
            self._close_idle()
        try:
            yield entry.descriptor
        finally:
            with self._lock:
                entry.users -= 1

    def read_into(self, file: SourceFile | Computation, byte_offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `byte_offset` of `file`; a file that ends before is an error."""
        if isinstance(file, Computation):
            self._compute_into(file, byte_offset, buffer)
            return
        with self.descriptor(file) as descriptor:
            while buffer:
                try:
                    count = os.preadv(descriptor, [buffer], byte_offset)
                except OSError as error:
                    raise _unreadable(file, error) from error
                if count == 0:
                    raise _changed(file)
                buffer = buffer[count:]
                byte_offset += count

    def _compute_into(self, computation: Computation, byte_offset: int, buffer: memoryview) -> None:
        starts, _ = _grid(computation)
        index = bisect_right(starts, byte_offset) - 1
        while buffer:
            data = self._band(computation, index)
            start = byte_offset - starts[index]
            count = min(len(data) - start, len(buffer))
            buffer[:count] = data[start : start + count]
            buffer = buffer[count:]
            byte_offset += count
            index += 1

    def _band(self, computation: Computation, index: int) -> memoryview:
        """A band of a computation's grid."""
        offsets, sizes = _grid(computation)[1][index]
        read = partial(read_rectangle, self)
        found: memoryview = self._keep(
            (computation, ("band", index)), lambda: compute_band(computation, offsets, sizes, read, self._keep)
        )
        return found

    def _keep(self, key: tuple[Computation, object], make: Callable[[], Kept]) -> Any:  # noqa: ANN401 - as made
        """What was made under this key, kept from before or made now."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
        # Two threads may come to make the same: then both find the same, and one is kept.
        made = make()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self._kept_bytes += made.nbytes
            while self._kept_bytes > _MAX_KEPT_BYTES and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._kept_bytes -= dropped.nbytes
        return made

    def _close_idle(self) -> None:
        excess = len(self._files) - MAX_OPEN_FILES
        if excess <= 0:
            return
        idle = [file for file, entry in self._files.items() if entry.users == 0]
        for file in idle[:excess]:
            descriptor = self._files.pop(file).descriptor
            is_same = _is_same(file, descriptor)
            os.close(descriptor)
            if not is_same:
                raise _changed(file)


class _OpenFile:
    __slots__ = ("descriptor", "users")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.users = 0


@lru_cache(maxsize=64)
def _grid(computation: Computation) -> tuple[list[int], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """The bands in which a computation is done, by the byte where each begins.

    They are the same for every read, for the same element must not come out otherwise where another band surrounds it.
    """
    starts, found, position = [], [], 0
    for offsets, sizes in band_grid(computation):
        starts.append(position)
        found.append((offsets, sizes))
        position += prod(sizes) * computation.dtype.itemsize
    return starts, found


def read_rectangle(
    reader: SourceReader, tensor: StoredTensor, offsets: Sequence[int], sizes: Sequence[int]
) -> Elements:
    """The elements [offsets, offsets + sizes) of a tensor, bit for bit, as an array of `sizes` of opaque elements.

    The chunks must cover the rectangle. Takes the memory of the rectangle and a few times that of one chunk's part.
    """
    import numpy as np

    result = np.empty(tuple(sizes), dtype=element_type(tensor.dtype.itemsize))
    for chunk in distinct_chunks(tensor):
        shared = intersection(offsets, sizes, chunk.offsets, chunk.sizes)
        if shared is None:
            continue
        low, extent = shared
        place = tuple(
            slice(start - base, start - base + size) for start, base, size in zip(low, offsets, extent, strict=True)
        )
        within = tuple(start - base for start, base in zip(low, chunk.offsets, strict=True))
        result[place] = read_chunk(reader, chunk, tensor.dtype.itemsize, within, extent)
    return result


def read_chunk(
    reader: SourceReader, chunk: Chunk, itemsize: int, offsets: Sequence[int], sizes: Sequence[int]
) -> Elements:
    """The elements [offsets, offsets + sizes) of a chunk (counted in the chunk) as an array of opaque elements."""
    import numpy as np

    start = chunk.byte_offset + itemsize * sum(
        offset * stride for offset, stride in zip(offsets, chunk.strides, strict=True)
    )
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, chunk.strides, strict=True))
    if span <= _MAX_READ_AMPLIFICATION * prod(sizes):
        buffer = bytearray(span * itemsize)
        reader.read_into(chunk.file, start, memoryview(buffer))
        flat = np.frombuffer(buffer, dtype=element_type(itemsize))
        byte_strides = [stride * itemsize for stride in chunk.strides]
        return np.lib.stride_tricks.as_strided(flat, tuple(sizes), byte_strides, writeable=False)
    # Far apart in the file: take the dim with the longest steps one index at a time.
    result = np.empty(tuple(sizes), dtype=element_type(itemsize))
    dim = max((d for d in range(len(sizes)) if sizes[d] > 1), key=lambda d: chunk.strides[d])
    for index in range(sizes[dim]):
        part_offsets = (*offsets[:dim], offsets[dim] + index, *offsets[dim + 1 :])
        part_sizes = (*sizes[:dim], 1, *sizes[dim + 1 :])
        place = (*(slice(None) for _ in range(dim)), slice(index, index + 1))
        result[place] = read_chunk(reader, chunk, itemsize, part_offsets, part_sizes)
    return result


def read_bands(reader: SourceReader, tensor: StoredTensor, max_bytes: int) -> Iterator[tuple[int, Elements]]:
    """A tensor in row-major order, in arrays of at most `max_bytes`, each with the index of its first element."""
    strides = row_major_strides(tensor.shape)
    for offsets, sizes in bands(tensor.shape, max(1, max_bytes // tensor.dtype.itemsize)):
        first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        yield first, read_rectangle(reader, tensor, offsets, sizes)


def element_type(itemsize: int) -> np.dtype[Any]:
    """The numpy type for elements of so many bytes that are moved and compared, but not computed with."""
    import numpy as np

    # A 16-byte element (complex128) has no unsigned type; raw bytes move the same, only slower.
    return np.dtype({1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(itemsize, f"V{itemsize}"))


def _open(file: SourceFile) -> int:
    try:
        descriptor = os.open(file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        raise _changed(file) from None
    except OSError as error:
        raise _unreadable(file, error) from error
    if not _is_same(file, descriptor):
        os.close(descriptor)
        raise _changed(file)
    return descriptor


def _is_same(file: SourceFile, descriptor: int) -> bool:
    status = os.fstat(descriptor)
    return (status.st_size, status.st_mtime_ns) == (file.num_bytes, file.mtime_ns)


def _unreadable(file: SourceFile, error: OSError) -> ArchiveError:
    reason = error.strerror or str(error)
    return ArchiveError(
        Problem("unreadable-file", file.path.name, f"cannot be read ({reason}); check the disk and the permissions")
    )


def _changed(file: SourceFile) -> ArchiveError:
    return ArchiveError(
        Problem(
            "changed-file",
            file.path.name,
            "changed while it was being merged; wait until the run has finished saving, then start again",
        )
    )
