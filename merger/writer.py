"""Runs a plan: moves every byte once from the source files to its place in the output files.

Memory is bounded by a block or a band per worker, whatever the size of the model, of a rank or of a tensor. Bytes that
need no change go from file to file by `os.copy_file_range`; those of a record are read along the way for its checksum.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from merger.casting import cast_block
from merger.checksums import checksum_error, fastest_crc32
from merger.errors import Problem, TargetError
from merger.plan import Copy, OutputFile, Plan, PlannedTensor
from merger.reading import SourceReader, read_bands
from merger.tensors import Chunk, Computation, Record, SourceFile, distinct_chunks, in_files

# Large enough that system calls do not count, small enough that a block is still in the processor's cache when it is
# copied after its checksum (1 MiB and 8 MiB measured alike on ext4; the smaller one bounds memory).
BLOCK_BYTES = 1 << 20
# A band is assembled where rows come from several chunks; several MiB keep reads long even from many ranks.
BAND_BYTES = 4 << 20

INDEX_NAME = "model.safetensors.index.json"
_NOT_AS_WRITTEN = "was written, but does not read back as it should; the disk or file system is not to be trusted"

# What a kernel or file system says that cannot copy from file to file.
_NO_COPY_FILE_RANGE = {errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EBADF}


@dataclass(slots=True)
class WriteResult:
    """What was noticed while writing: per tensor name, how many elements overflowed the type they were cast to."""

    overflows: dict[str, int] = field(default_factory=dict)


class Cancelled(Exception):  # noqa: N818 - it is not an error, it ends the other workers after one
    """Another worker failed, or the user interrupted: what is left is not written."""


def write_plan(
    plan: Plan, directory: Path, *, check_sums: bool, workers: int, progress: Callable[[int], None]
) -> WriteResult:
    """Writes the files of `plan` into `directory`, each complete and on disk when this returns.

    `progress` is called from any worker with the number of output bytes just written. Raises `ChecksumError` for a
    source record that is not what was saved, `ArchiveError` for a source that changes meanwhile, `OSError` where the
    target cannot be written.
    """
    result = WriteResult()
    unchecked = _Unchecked(check_sums=check_sums)
    with SourceReader() as reader, ThreadPoolExecutor(workers) as pool:
        for file in plan.files:
            path = directory / file.name
            path.parent.mkdir(exist_ok=True)
            _write_file(file, path, reader, pool, unchecked=unchecked, progress=progress, result=result)
    if plan.index is not None:
        write_bytes(directory / INDEX_NAME, plan.index)
    return result


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a new small file and brings it to disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_file(
    file: OutputFile,
    path: Path,
    reader: SourceReader,
    pool: ThreadPoolExecutor,
    *,
    unchecked: _Unchecked,
    progress: Callable[[int], None],
    result: WriteResult,
) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.truncate(descriptor, file.num_bytes)
        _write_all(descriptor, memoryview(file.header), 0)
        job = _Job(reader, descriptor, unchecked=unchecked, progress=progress, result=result)
        futures: list[Future[None]] = []
        try:
            for planned in file.tensors:
                futures.append(pool.submit(job.write_tensor, planned))  # noqa: PERF401 - Ctrl-C must find what began
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            # After an error or Ctrl-C, workers stop at their next block and nothing new begins.
            job.cancelled.set()
            for future in futures:
                future.cancel()
            wait(futures)
        for future in futures:
            error = None if future.cancelled() else future.exception()
            if error is not None and not isinstance(error, Cancelled):
                raise error
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Unchecked:
    """Which records are still to be checked: each once, however many tensors and output files share it."""

    def __init__(self, *, check_sums: bool) -> None:
        self._check_sums = check_sums
        self._lock = threading.Lock()
        self._taken: set[tuple[SourceFile | Computation, int]] = set()

    def take(self, chunk: Chunk) -> bool:
        """Whether the caller is to check the record of `chunk`; nobody else is asked to then."""
        if not self._check_sums or chunk.record.crc32 is None:
            return False
        key = (chunk.file, chunk.record.byte_offset)
        with self._lock:
            is_new = key not in self._taken
            self._taken.add(key)
        return is_new


class _Job:
    """The writing of one output file, shared by the workers that write its tensors."""

    def __init__(
        self,
        reader: SourceReader,
        descriptor: int,
        *,
        unchecked: _Unchecked,
        progress: Callable[[int], None],
        result: WriteResult,
    ) -> None:
        self.reader = reader
        self.descriptor = descriptor
        self.unchecked = unchecked
        self.progress = progress
        self.result = result
        self.cancelled = threading.Event()
        self.crc32 = fastest_crc32()

    def write_tensor(self, planned: PlannedTensor) -> None:
        self._check_inputs(planned)
        if planned.copies is None:
            self._write_bands(planned)
            return
        for copy in planned.copies:
            self._write_copy(planned, copy)

    def _check_inputs(self, planned: PlannedTensor) -> None:
        """What is computed shows no damage of what it is computed from, so the records of that are checked before."""
        source = planned.tensor.source
        for stored in in_files(source):
            if stored is not source:
                for chunk in distinct_chunks(stored):
                    if self.unchecked.take(chunk):
                        self._check_record(chunk, stored.fqn)

    def _write_bands(self, planned: PlannedTensor) -> None:
        source, dtype = planned.tensor.source, planned.tensor.dtype
        for chunk in distinct_chunks(source):
            if self.unchecked.take(chunk):
                self._check_record(chunk, source.fqn)
        for first, elements in read_bands(self.reader, source, BAND_BYTES):
            self._stop_if_cancelled()
            data = elements.reshape(-1).view("u1").data
            self._write_elements(planned, data, planned.byte_offset + first * dtype.itemsize)

    def _write_copy(self, planned: PlannedTensor, copy: Copy) -> None:
        """Copies a chunk; where its record is to be checked, reads the whole record and copies what is the chunk's."""
        chunk, source_dtype = copy.chunk, planned.tensor.source.dtype
        start = chunk.byte_offset
        stop = start + prod(chunk.sizes) * source_dtype.itemsize
        check = self.unchecked.take(chunk)
        cast = planned.tensor.dtype != source_dtype
        is_computed = isinstance(chunk.file, Computation)
        low, high = (chunk.record.byte_offset, _end(chunk.record)) if check else (start, stop)
        found = 0
        buffer = memoryview(bytearray(min(BLOCK_BYTES, high - low)))
        for position in range(low, high, BLOCK_BYTES):
            self._stop_if_cancelled()
            block = buffer[: min(BLOCK_BYTES, high - position)]
            if check or cast or is_computed:
                self.reader.read_into(chunk.file, position, block)
            if check:
                found = self.crc32(block, found)
            first, last = max(position, start), min(position + len(block), stop)
            if first >= last:
                continue
            if cast or is_computed:
                target = copy.target_offset + (first - start) // source_dtype.itemsize * planned.tensor.dtype.itemsize
                self._write_elements(planned, block[first - position : last - position], target)
            else:
                assert isinstance(chunk.file, SourceFile)
                self._copy_range(chunk.file, first, copy.target_offset + first - start, last - first)
        if check:
            self._conclude_check(chunk, found, planned.tensor.source.fqn)

    def _check_record(self, chunk: Chunk, fqn: str) -> None:
        record = chunk.record
        found = 0
        buffer = memoryview(bytearray(min(BLOCK_BYTES, record.num_bytes)))
        for position in range(record.byte_offset, _end(record), BLOCK_BYTES):
            self._stop_if_cancelled()
            block = buffer[: min(BLOCK_BYTES, _end(record) - position)]
            self.reader.read_into(chunk.file, position, block)
            found = self.crc32(block, found)
        self._conclude_check(chunk, found, fqn)

    def _conclude_check(self, chunk: Chunk, found: int, fqn: str) -> None:
        if found != chunk.record.crc32:
            assert isinstance(chunk.file, SourceFile), "only files have checksums"
            raise checksum_error(chunk.file, chunk.record, found, fqn)

    def _write_elements(self, planned: PlannedTensor, data: memoryview, target_offset: int) -> None:
        source, target = planned.tensor.source.dtype, planned.tensor.dtype
        if source != target:
            data, overflowed = cast_block(data, source, target)
            if overflowed:
                overflows = self.result.overflows
                overflows[planned.tensor.name] = overflows.get(planned.tensor.name, 0) + overflowed
        _write_all(self.descriptor, data, target_offset)
        self.progress(len(data))

    def _copy_range(self, file: SourceFile, source_offset: int, target_offset: int, count: int) -> None:
        with self.reader.descriptor(file) as source:
            while count:
                step = min(count, BLOCK_BYTES)
                copied = _copy_file_range(source, self.descriptor, step, source_offset, target_offset)
                if copied == 0:
                    buffer = memoryview(bytearray(step))
                    self.reader.read_into(file, source_offset, buffer)
                    _write_all(self.descriptor, buffer, target_offset)
                    copied = step
                source_offset += copied
                target_offset += copied
                count -= copied
                self.progress(copied)

    def _stop_if_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise Cancelled


def _copy_file_range(source: int, target: int, count: int, source_offset: int, target_offset: int) -> int:
    """How many bytes the kernel copied from file to file; 0 where it cannot, and the caller must do it by hand."""
    if not hasattr(os, "copy_file_range"):
        return 0
    try:
        return os.copy_file_range(source, target, count, source_offset, target_offset)
    except OSError as error:
        if error.errno in _NO_COPY_FILE_RANGE:
            return 0
        raise


def _write_all(descriptor: int, data: memoryview, byte_offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, byte_offset)
        data = data[count:]
        byte_offset += count


def _end(record: Record) -> int:
    return record.byte_offset + record.num_bytes


def check_written(plan: Plan, directory: Path) -> None:
    """Reads every header back with the safetensors library and compares it with the plan (FAULTS S18).

    Raises `TargetError` for a file that is not what was planned.
    """
    from safetensors import SafetensorError, safe_open

    for file in plan.files:
        expected = {
            planned.tensor.name: (planned.tensor.dtype.safetensors, list(planned.tensor.source.shape))
            for planned in file.tensors
        }
        try:
            with safe_open(directory / file.name, framework="numpy") as written:
                found = {
                    name: (written.get_slice(name).get_dtype(), list(written.get_slice(name).get_shape()))
                    for name in written.keys()  # noqa: SIM118 - it is no mapping
                }
                metadata = written.metadata()
        except (SafetensorError, OSError) as error:
            raise TargetError(_bad_output(file, str(error))) from error
        if found != expected or metadata != {"format": "pt"} or not _has_header(file, directory / file.name):
            raise TargetError(_bad_output(file, "its header is not the one that was planned"))
    if plan.index is not None and (directory / INDEX_NAME).read_bytes() != plan.index:
        raise TargetError(Problem("bad-output", INDEX_NAME, _NOT_AS_WRITTEN))


def _has_header(file: OutputFile, path: Path) -> bool:
    """Whether the header is the planned one to the byte: names and shapes alone do not say where the data lies."""
    with path.open("rb") as stream:
        return stream.read(len(file.header)) == file.header and path.stat().st_size == file.num_bytes


def _bad_output(file: OutputFile, reason: str) -> Problem:
    return Problem("bad-output", file.name, f"{_NOT_AS_WRITTEN}: {reason}")
