"""Reads one `torch.save` archive: its directory, and its state dict as typed, inert entries. No tensor data is read.

Neither torch nor the pickle module is used: files are untrusted, and what they pickle is never run. All that can be
wrong with the file by itself is found here (but for the checksums of tensor data, which the writer verifies on the
bytes that it copies); whether files fit together is for others to say.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from sys import intern

from merger.errors import ArchiveError, Problem
from merger.sources import unpickler
from merger.sources.dtensor import Decoder
from merger.sources.fields import MalformedError, shown
from merger.sources.inert import TENSOR_CALLS, Call, Inert
from merger.sources.zip_directory import read_records
from merger.tensors import Record, SourceFile

# 5,000 DTensors take 2 MB of pickle. More than this is no state dict, and is not read into memory.
_MAX_PICKLE_BYTES = 512 << 20
# Records other than the pickle and tensor data (version, byteorder, serialization_id) have 40 bytes at most.
_MAX_NOTE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Archive:
    """A rank file as it was read.

    `records` by name without the archive's stem ("data/3", "data.pkl"). `entries` is the state dict: each value is a
    PlainTensor, DTensor or ShardedTensor of the modules beside this one, or a plain Python value. `checksums` is False
    where the file was saved without; then every `Record.crc32` is None.
    """

    file: SourceFile
    records: dict[str, Record]
    entries: dict[str, object]
    checksums: bool


def read_archive(path: Path, *, rank: int | None = None) -> Archive:
    """Reads the directory and the state dict of the `torch.save` archive at `path`.

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
            _, records = read_records(file, status.st_size, where=where)
            records, checksums = _without_absent_checksums(records, where)
            source = SourceFile(path, status.st_size, status.st_mtime_ns, rank, _crc32_of_checksums(records))
            reader = _checked_reader(file.fileno(), where)
            _check_notes(records, reader, where)
            entries = _entries(records, reader, where, rank)
    except OSError as error:
        message = f"The file cannot be read: {error.strerror or error}."
        raise ArchiveError(Problem("unreadable", where, message)) from error
    return Archive(source, records, entries, checksums)


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
                "Load and save it again on a little-endian machine."
            )
            raise ArchiveError(Problem("byte-order", where, message))


def _entries(
    records: dict[str, Record], read: Callable[[Record], bytes], where: str, rank: int | None
) -> dict[str, object]:
    pickle = records["data.pkl"]
    if pickle.num_bytes > _MAX_PICKLE_BYTES:
        message = f"Its data.pkl has {pickle.num_bytes:,} bytes; a state dict has a few million at most."
        raise ArchiveError(Problem("bad-pickle", where, message))
    with unpickler.gc_paused():
        value = _state_dict(unpickler.load(read(pickle), where=where), where)
        decoder = Decoder(records, read_record=read, file_rank=rank)
        entries: dict[str, object] = {}
        for fqn, item in value.items():
            try:
                entries[intern(fqn)] = decoder.entry(item)
            except MalformedError as error:
                name = fqn if fqn.isprintable() else ascii(fqn)
                raise ArchiveError(Problem("bad-tensor", where, f"{name}: {error}.")) from None
        return entries


def _state_dict(value: Inert, where: str) -> dict[str, Inert]:
    """`value`, if it is a dict of names to tensors and such."""
    if value.__class__ is not dict:
        found = "a tensor" if _is_tensor(value) else shown(value)
        raise ArchiveError(Problem("not-a-state-dict", where, f"The file holds {found}, not a state dict."))
    state_dict: dict[Inert, Inert] = value
    for key, item in state_dict.items():
        if key.__class__ is not str:
            message = f"The file holds a dict with {shown(key)} as a key, not a state dict."
            raise ArchiveError(Problem("not-a-state-dict", where, message))
        if item.__class__ is dict and any(_is_tensor(part) for part in item.values()):
            message = (
                f"The file holds a dict with a nested state dict under {key!a}, not a state dict. "
                f"Save that part by itself: torch.save(checkpoint[{key!a}], path)."
            )
            raise ArchiveError(Problem("not-a-state-dict", where, message))
    return state_dict


def _is_tensor(value: Inert) -> bool:
    return value.__class__ is Call and value.func in TENSOR_CALLS
