"""The directory of a `torch.save` archive, checked against the file: its records and where they lie.

The central directory is read with the standard library's zipfile, which is lenient; so every record is looked up. The
records must follow one another without gap or overlap from the first byte of the file to the central directory, and
each local header and data descriptor must say what the directory says. Then a flipped bit cannot move a record.

Source: APPNOTE.TXT of the ZIP format, sections 4.3 and 4.4; caffe2/serialize/inline_container.cc in torch.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections import Counter
from sys import intern
from typing import BinaryIO

from merger.errors import ArchiveError, Problem
from merger.sources.lookalikes import problem_of_no_archive
from merger.tensors import Record

# Signature, version, flags, method, time, date, CRC-32, packed size, size, length of name, length of extra field.
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = struct.Struct("<4sIII")
_DESCRIPTOR_64 = struct.Struct("<4sIQQ")
_HAS_DESCRIPTOR = 0x8
_ENCRYPTED = 0x1
_UTF8_NAME = 0x800
# Stands in a 32-bit field where the value is in the extra field for zip64.
_IN_ZIP64 = 0xFFFFFFFF

# What zipfile raises on bad input, besides BadZipFile.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    struct.error,
    NotImplementedError,
    UnicodeDecodeError,
    OverflowError,
    ValueError,
    IndexError,
    EOFError,
)


class _DamageError(Exception):
    """What does not fit together, as a clause."""


def read_records(file: BinaryIO, num_bytes: int, *, where: str) -> tuple[str, dict[str, Record]]:
    """The stem of the archive and its records by name without it ("data.pkl", "data/3"), in the order of the file.

    `file` is the open file, of `num_bytes`. Records outside of the stem are left out.

    Raises:
        ArchiveError: it is no archive, it is cut short, or directory and file disagree; `where` is its Problem's place.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
            end = archive.start_dir
    except _ZIP_ERRORS:
        raise ArchiveError(problem_of_no_archive(file.fileno(), num_bytes, where=where)) from None
    try:
        return _by_stem(_checked(file.fileno(), infos, end))
    except _DamageError as error:
        message = (
            f"{error}. The file ({num_bytes:,} bytes) is damaged, or another program than torch.save wrote it; "
            "copy it again from where it was saved."
        )
        raise ArchiveError(Problem("damaged-archive", where, message)) from None


def _by_stem(records: list[Record]) -> tuple[str, dict[str, Record]]:
    stems = [record.name.removesuffix("/data.pkl") for record in records if record.name.endswith("/data.pkl")]
    if len(stems) != 1:
        raise _DamageError(f"It is a zip archive with {len(stems)} data.pkl records; torch.save writes one")
    prefix = f"{stems[0]}/"
    return stems[0], {
        name: Record(name, record.byte_offset, record.num_bytes, record.crc32)
        for record in records
        if record.name.startswith(prefix) and (name := intern(record.name[len(prefix) :]))
    }


def _checked(fd: int, infos: list[zipfile.ZipInfo], end: int) -> list[Record]:
    """The records of a directory that ends, in the file, before `end`."""
    repeated = [name for name, count in Counter(info.orig_filename for info in infos).items() if count > 1]
    if repeated:
        raise _DamageError(f"Its directory lists {_printable(repeated[0])} twice")
    if not infos:
        raise _DamageError("It is a zip archive without records")
    starts = [info.header_offset for info in infos]
    if starts[0] != 0:
        raise _DamageError(f"Its first record begins at byte {starts[0]}, not at the start of the file")
    return [_record(fd, info, next_start) for info, next_start in zip(infos, [*starts[1:], end], strict=True)]


def _record(fd: int, info: zipfile.ZipInfo, next_start: int) -> Record:
    """The record of one directory entry, after which another begins at `next_start`."""
    name = _printable(info.orig_filename)
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise _DamageError(f"Record {name} is compressed; torch.save stores records as they are")
    if info.flag_bits & _ENCRYPTED:
        raise _DamageError(f"Record {name} is encrypted")
    raw_name = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8_NAME else "cp437")
    header = os.pread(fd, _LOCAL.size + len(raw_name), info.header_offset)
    if len(header) != _LOCAL.size + len(raw_name):
        raise _DamageError(f"Record {name} lies outside of the file")
    signature, _, flags, method, _, _, crc32, packed, size, name_length, extra_length = _LOCAL.unpack_from(header)
    if (
        signature != b"PK\x03\x04"
        or (flags, method, name_length) != (info.flag_bits, info.compress_type, len(raw_name))
        or header[_LOCAL.size :] != raw_name
    ):
        raise _DamageError(f"Record {name} has another header than its directory entry says")
    start = info.header_offset + len(header) + extra_length
    gap = next_start - (start + info.file_size)
    if flags & _HAS_DESCRIPTOR:
        sizes = (info.file_size, info.file_size)
        if gap == _DESCRIPTOR.size and info.file_size < _IN_ZIP64:
            expected = _DESCRIPTOR.pack(b"PK\x07\x08", info.CRC, *sizes)
        elif gap == _DESCRIPTOR_64.size:
            expected = _DESCRIPTOR_64.pack(b"PK\x07\x08", info.CRC, *sizes)
        else:
            raise _DamageError(f"Record {name} does not end where the next one begins")
        if os.pread(fd, gap, start + info.file_size) != expected:
            raise _DamageError(f"Record {name} has another size or checksum than its directory entry says")
    elif gap != 0:
        raise _DamageError(f"Record {name} does not end where the next one begins")
    elif crc32 != info.CRC or any(n not in (info.file_size, _IN_ZIP64) for n in (packed, size)):
        raise _DamageError(f"Record {name} has another size or checksum than its directory entry says")
    return Record(info.orig_filename, start, info.file_size, info.CRC)


def _printable(name: str) -> str:
    return name if name.isascii() and name.isprintable() else ascii(name)
