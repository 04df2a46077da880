"""Reads one `torch.save` file: where its storages lie, and its state dict as typed, inert entries, not tensor data.

It is a zip archive, or of the format of before torch 1.6, which is read by `torch_legacy`. Neither torch nor the pickle
module is used: files are untrusted, and what they pickle is never run. All that can be wrong with the file by itself is
found here (but for the checksums of tensor data, which the writer verifies on the bytes that it copies); whether files
fit together is for others to say.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from merger.errors import ArchiveError, Problem
from merger.sources import unpickler
from merger.sources.inert import Inert
from merger.sources.state_dict import decode_state_dict
from merger.sources.torch_legacy import is_legacy, read_legacy
from merger.sources.zip_directory import read_records
from merger.tensors import Record, SourceFile

# 5,000 DTensors take 2 MB of pickle. More than this is no state dict, and is not read into memory.
_MAX_PICKLE_BYTES = 512 << 20
# Enough to tell the two formats apart.
_HEAD_BYTES = 32
# Records other than the pickle and tensor data (version, byteorder, serialization_id) have 40 bytes at most.
_MAX_NOTE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Archive:
    """A rank file as it was read.

    `records` by name without the archive's stem ("data/3", "data.pkl"); of a file in the old format the storages only,
    by the keys that it gives them ("data/94063"). `entries` is the state dict: each value is a
    PlainTensor, DTensor or ShardedTensor of the modules beside this one, or a plain Python value. `checksums` is False
    where the file was saved without; then every `Record.crc32` is None. `is_legacy` says that it is in the old format.
    """

    file: SourceFile
    records: dict[str, Record]
    entries: dict[str, object]
    checksums: bool
    is_legacy: bool


def read_archive(path: Path, *, rank: int | None = None) -> Archive:
    """Reads the directory and the state dict of the file at `path`, which `torch.save` wrote.

    `rank` is the rank that the file's name says: it is kept in `Archive.file`, and resolves a sub-mesh in those rare
    files (of torch 2.10.0) that do not say themselves which rank saved them.

    Raises:
        UnsafePickleError: its pickle asks for a class or function that is not on the list; nothing was run.
        ArchiveError: it cannot be read, is no archive, is damaged, or holds no state dict.
    """
    where = path.name
    try:
        if path.exists() and not path.is_file():
            # A pipe would be waited for, and a device read without end.
            raise ArchiveError(Problem("not-an-archive", where, "This is no regular file; put the rank's file here."))
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            source = SourceFile(path, status.st_size, status.st_mtime_ns, rank)
            with unpickler.gc_paused():
                return _read(file, source, where)
    except OSError as error:
        message = f"The file cannot be read: {error.strerror or error}."
        raise ArchiveError(Problem("unreadable", where, message)) from error


def _read(file: BinaryIO, source: SourceFile, where: str) -> Archive:
    fd = file.fileno()
    read = _checked_reader(fd, where)
    legacy = is_legacy(os.pread(fd, _HEAD_BYTES, 0))
    if legacy:
        value, records = read_legacy(fd, source.num_bytes, where=where)
        checksums = False
    else:
        _, records = read_records(file, source.num_bytes, where=where)
        records, checksums = _without_absent_checksums(records, where)
        source = replace(source, recorded_crc32=_crc32_of_checksums(records))
        _check_notes(records, read, where)
        value = _pickled(records, read, where)
    entries = decode_state_dict(value, records, read_record=read, where=where, file_rank=source.rank)
    return Archive(source, records, entries, checksums, legacy)


def _without_absent_checksums(records: dict[str, Record], where: str) -> tuple[dict[str, Record], bool]:
    """The records, and whether they have checksums: `torch.serialization.set_crc32_options(False)` writes zeros."""
    pickle = records["data.pkl"]
    if pickle.crc32 != 0 or pickle.num_bytes == 0:
        return records, True
    if any(record.crc32 for record in records.values()):
        message = "Some of its records have checksums and its data.pkl has none. The file is damaged; copy it again."
        raise ArchiveError(Problem("damaged-archive", where, message))
    return {name: Record(name, r.byte_offset, r.num_bytes, None) for name, r in records.items()}, False


def _crc32_of_checksums(records: dict[str, Record]) -> int | None:
    """One number for all that was recorded of a file's content: the CRC-32 of its CRC-32s, in the order of the file."""
    recorded = [record.crc32 for record in records.values() if record.crc32 is not None]
    return zlib.crc32(b"".join(crc32.to_bytes(4, "little") for crc32 in recorded)) if recorded else None


def _checked_reader(fd: int, where: str) -> Callable[[Record], bytes]:
    """A function that returns the bytes of a record, which its checksum confirms."""

    def read(record: Record) -> bytes:
        # pread returns less than was asked for beyond 2 GiB only, and no such record is read here.
        data = os.pread(fd, record.num_bytes, record.byte_offset)
        if record.crc32 is not None and zlib.crc32(data) != record.crc32:
            message = (
                f"The checksum of {record.name} is {zlib.crc32(data):08x}, but {record.crc32:08x} was recorded when it "
                "was saved. The file is damaged; copy it again from where it was saved."
            )
            raise ArchiveError(Problem("checksum", where, message))
        return data

    return read


def _check_notes(records: dict[str, Record], read: Callable[[Record], bytes], where: str) -> None:
    """Checks the small records that say how the archive was written."""
    for name, record in records.items():
        if name == "data.pkl" or name.startswith("data/"):
            continue
        if record.num_bytes > _MAX_NOTE_BYTES:
            message = f"It has a record {name!a} of {record.num_bytes:,} bytes, which no state dict has."
            raise ArchiveError(Problem("damaged-archive", where, message))
        data = read(record)
        # Files without this record are little-endian (torch.load takes them for the reader's own order).
        if name == "byteorder" and data != b"little":
            message = (
                f"Its byte order is {data.decode('latin1')!a}; only little-endian files can be read. "
                "Load it with torch.load and save it again on a little-endian machine."
            )
            raise ArchiveError(Problem("byte-order", where, message))


def _pickled(records: dict[str, Record], read: Callable[[Record], bytes], where: str) -> Inert:
    pickle = records["data.pkl"]
    if pickle.num_bytes > _MAX_PICKLE_BYTES:
        message = f"Its data.pkl has {pickle.num_bytes:,} bytes; a state dict has a few million at most."
        raise ArchiveError(Problem("bad-pickle", where, message))
    return unpickler.load(read(pickle), where=where)
