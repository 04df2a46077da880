from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from merger.checksums import checksum_error, fastest_crc32
from merger.errors import ChecksumError
from merger.tensors import Record, SourceFile


@pytest.mark.parametrize("data", [b"", b"a", b"123456789", bytes(range(256)) * 300], ids=len)
def test_the_fast_checksum_is_that_of_zip_files(data: bytes) -> None:
    assert fastest_crc32()(memoryview(data), 0) == zlib.crc32(data)


def test_the_checksum_of_the_check_string_is_the_published_one() -> None:
    assert fastest_crc32()(memoryview(b"123456789"), 0) == 0xCBF43926


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 4096, 9999, 10_000])
def test_a_checksum_can_be_computed_piece_by_piece(cut: int) -> None:
    data = memoryview(bytes(range(250)) * 40)
    crc32 = fastest_crc32()
    assert crc32(data[cut:], crc32(data[:cut], 0)) == zlib.crc32(data)


def error_of(rank: int | None) -> ChecksumError:
    file = SourceFile(Path("/data/model_world_size_4_rank_2.pt"), 100, 0, rank)
    return checksum_error(file, Record("archive/data/7", 64, 32, 0x00C0FFEE), 0x0000BEEF, "model.norm.weight")


def test_the_error_names_file_key_rank_record_and_both_checksums() -> None:
    """S21."""
    assert str(error_of(2)) == (
        "model_world_size_4_rank_2.pt: model.norm.weight: the bytes on disk (rank 2) are not those that were saved: "
        "record archive/data/7 has CRC-32 0000beef, its archive recorded 00c0ffee; copy the file again from where it "
        "was written, or use another step's checkpoint (--no-checksum merges the damaged bytes)"
    )


def test_the_error_of_a_file_without_rank_names_none() -> None:
    assert str(error_of(None)).startswith(
        "model_world_size_4_rank_2.pt: model.norm.weight: the bytes on disk are not those that were saved: record"
    )


def test_the_kind_is_stable() -> None:
    assert [problem.kind for problem in error_of(2).problems] == ["checksum"]
