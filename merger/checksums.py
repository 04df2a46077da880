"""CRC-32 of bytes that stream by, at several GB/s, and what to say where it is not the recorded one."""

from __future__ import annotations

from collections.abc import Callable

from merger.errors import ChecksumError, Problem
from merger.tensors import Record, SourceFile

Crc32 = Callable[[memoryview, int], int]


def fastest_crc32() -> Crc32:
    """A function (data, running value) -> CRC-32 as in zip files.

    `isal` computes it at several GB/s on one core, the standard library's zlib at about one.
    """
    from isal import isal_zlib

    function: Crc32 = isal_zlib.crc32
    return function


def checksum_error(file: SourceFile, record: Record, found: int, fqn: str) -> ChecksumError:
    """The error for a record whose bytes are not those that were saved (FAULTS S21)."""
    owner = "" if file.rank is None else f" (rank {file.rank})"
    return ChecksumError(
        Problem(
            "checksum",
            f"{file.path.name}: {fqn}",
            f"the bytes on disk{owner} are not those that were saved: record {record.name} has CRC-32 {found:08x}, "
            f"its archive recorded {record.crc32:08x}; copy the file again from where it was written, "
            "or use another step's checkpoint (--no-checksum merges the damaged bytes)",
        )
    )
