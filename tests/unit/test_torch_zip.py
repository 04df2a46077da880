"""One archive as a whole: what it is when it is sound, and that no damage to it goes unseen."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from merger.errors import ArchiveError, Problem, UnsafePickleError
from merger.sources.dtensor import DTensor, PlainTensor
from merger.sources.torch_zip import read_archive
from merger.tensors import SourceFile

ROOT = Path(__file__).parents[2]
ARCHIVES = ROOT / "tests" / "data" / "archives"
SMALL = ARCHIVES / "2.14.1" / "fsdp2_uneven_w4" / "model_world_size_4_rank_1.pt"
COPY_AGAIN = "copy it again from where it was saved."


def problem_of(path: Path, error: type[ArchiveError] = ArchiveError) -> Problem:
    with pytest.raises(error) as caught:
        read_archive(path)
    assert type(caught.value) is error
    (problem,) = caught.value.problems
    assert problem.where == path.name
    return problem


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def zipped(path: Path, records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """A zip archive as Python's zipfile writes it: without data descriptors, and not aligned."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return path


def unzipped(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


# Sound archives.


def test_an_archive_has_its_file_records_and_entries(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(6, dtype=torch.float32), "step": 3}, path)
    archive = read_archive(path, rank=5)
    status = path.stat()
    with zipfile.ZipFile(path) as file:
        recorded = b"".join(struct.pack("<I", info.CRC) for info in file.infolist())
    assert archive.file == SourceFile(path, status.st_size, status.st_mtime_ns, 5, zlib.crc32(recorded))
    assert archive.checksums
    assert list(archive.entries) == ["w", "step"]
    assert archive.entries["step"] == 3
    record = archive.records["data/0"]
    data = struct.pack("<6f", *range(6))
    assert (record.name, record.num_bytes, record.crc32) == ("data/0", 24, zlib.crc32(data))
    assert path.read_bytes()[record.byte_offset :][:24] == data
    assert record.byte_offset % 64 == 0


def test_an_archive_saved_without_checksums_says_so(tmp_path: Path) -> None:
    """L14."""
    path = tmp_path / "x.pt"
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        torch.save({"w": torch.ones(6)}, path)
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    archive = read_archive(path)
    assert not archive.checksums
    assert {record.crc32 for record in archive.records.values()} == {None}


def test_an_archive_packed_again_without_compression_is_read(tmp_path: Path) -> None:
    original = read_archive(SMALL)
    archive = read_archive(zipped(tmp_path / "x.pt", unzipped(SMALL)))
    assert list(archive.entries) == list(original.entries)
    assert {r.name: (r.num_bytes, r.crc32) for r in archive.records.values()} == {
        r.name: (r.num_bytes, r.crc32) for r in original.records.values()
    }


def test_an_archive_with_more_records_than_a_plain_zip_can_count_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"step": 1}, 2))
        for i in range(65_536):
            archive.writestr(f"x/data/{i}", b"")
    found = read_archive(tmp_path / "x.pt")
    assert len(found.records) == 65_537
    assert found.entries == {"step": 1}


def test_a_record_of_more_than_4_gib_is_found(tmp_path: Path) -> None:
    """A sparse file: the header of a large record, a hole, and what zipfile writes after it."""
    path = tmp_path / "x.pt"
    size = (4 << 30) + 12
    storage = b"ctorch\nByteStorage\n"
    pid = b"(X\x07\x00\x00\x00storage" + storage + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu\x8a\x05"
    pid += size.to_bytes(5, "little") + b"tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"\x8a\x05" + (size - 3).to_bytes(5, "little")
    tensor += b"K\x03\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
    data = b"\x80\x02}X\x01\x00\x00\x00w" + tensor + b"s."
    name = b"x/data/0"
    extra = struct.pack("<HHQQ", 1, 16, size, size)
    header = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 45, 0, 0, 0, 0, 7, 2**32 - 1, 2**32 - 1, len(name), len(extra))
    with path.open("wb") as file:
        file.write(header + name + extra)
        file.truncate(file.tell() + size)
        file.seek(0, os.SEEK_END)
        pickle_at = file.tell()
        second = b"x/data.pkl"
        crc = zlib.crc32(data)
        file.write(struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 45, 0, 0, 0, 0, crc, len(data), len(data), len(second), 0))
        file.write(second + data)
        start = file.tell()
        central = "<4sHHHHHHIIIHHHHHII"
        big = 2**32 - 1
        file.write(
            struct.pack(central, b"PK\1\2", 45, 45, 0, 0, 0, 0, 7, big, big, 8, 20, 0, 0, 0, 0, 0) + name + extra
        )
        wide = struct.pack("<HHQ", 1, 8, pickle_at)
        sizes = (len(data), len(data), len(second), len(wide))
        file.write(struct.pack(central, b"PK\1\2", 45, 45, 0, 0, 0, 0, crc, *sizes, 0, 0, 0, 0, big) + second + wide)
        end = file.tell()
        file.write(struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, end - start, start))
        file.write(struct.pack("<4sIQI", b"PK\6\7", 0, end, 1))
        file.write(struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 2, 2, end - start, big, 0))
    entry = read_archive(path).entries["w"]
    assert isinstance(entry, PlainTensor)
    assert (entry.local.record.byte_offset, entry.local.record.num_bytes) == (30 + 8 + 20, size)
    assert entry.local.byte_offset == 30 + 8 + 20 + size - 3


class Pipe(io.RawIOBase):
    """A file that cannot be sought in, so that sizes follow their records, as they do in what torch writes."""

    def __init__(self) -> None:
        self.data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += bytes(data)
        return len(data)


@pytest.mark.parametrize("wide", [False, True])
def test_both_widths_of_data_descriptors_are_read_and_checked(tmp_path: Path, *, wide: bool) -> None:
    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w") as archive, archive.open("x/data.pkl", "w", force_zip64=wide) as file:
        file.write(pickle.dumps({"step": 1}, 2))
    path = written(tmp_path / "x.pt", pipe.data)
    assert read_archive(path).entries == {"step": 1}
    descriptor = pipe.data.index(b"PK\7\x08")
    damaged = bytearray(pipe.data)
    damaged[descriptor + 4] ^= 1
    clause = "Record x/data.pkl has another size or checksum than its directory entry says"
    assert problem_of(written(path, bytes(damaged))) == damage(clause, path)


def test_reading_imports_neither_torch_nor_numpy_nor_pickle() -> None:
    code = (
        "import sys; from pathlib import Path; from merger.sources.torch_zip import read_archive; "
        f"read_archive(Path({str(SMALL)!r})); print(sorted({{'torch', 'numpy', 'pickle'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# Files that are no archive (L2, L14).


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"", "empty-file", f"The file is empty (0 bytes): it was never written to its end; {COPY_AGAIN}"),
        (
            b"  <!DOCTYPE html><html><title>404</title></html>",
            "not-an-archive",
            (
                "The file is 48 bytes of an HTML page, not a torch.save archive: a download returned an error or a "
                "login page; download it again."
            ),
        ),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
            "not-an-archive",
            (
                "The file is 65 bytes of a Git LFS pointer, not the torch.save archive that it stands for; fetch it "
                "with `git lfs pull`."
            ),
        ),
        (
            b"Not Found\n",
            "not-an-archive",
            f"The file is 10 bytes of text, not a torch.save archive; {COPY_AGAIN}",
        ),
        (
            pickle.dumps({"a": 1}, 4),
            "not-an-archive",
            (
                "The file is 21 bytes of a bare pickle, not a torch.save archive; load it with what wrote it, and save "
                "it with torch.save."
            ),
        ),
        (
            bytes(4096),
            "not-an-archive",
            (
                "The file is 4,096 bytes of zeros at its start, not a torch.save archive: space was reserved, but "
                f"never filled; {COPY_AGAIN}"
            ),
        ),
        (
            b"\x00\x01\x02\x03",
            "not-an-archive",
            f"The file is 4 bytes of something else than a torch.save archive; {COPY_AGAIN}",
        ),
        (
            SMALL.read_bytes()[:5000],
            "truncated",
            (
                "The file is cut short: its 5,000 bytes begin as a torch.save archive, but the directory at the end is "
                f"missing. The copy or the save was not finished; {COPY_AGAIN}"
            ),
        ),
    ],
)
def test_a_file_that_is_no_archive_is_named_for_what_it_is(
    tmp_path: Path, data: bytes, kind: str, message: str
) -> None:
    """L2."""
    path = written(tmp_path / "model_world_size_4_rank_2.pt", data)
    assert problem_of(path) == Problem(kind, "model_world_size_4_rank_2.pt", message)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    assert problem_of(tmp_path / "none.pt") == Problem(
        "unreadable", "none.pt", "The file cannot be read: No such file or directory."
    )


@pytest.mark.parametrize("kind", ["directory", "pipe", "device"])
def test_what_is_no_regular_file_is_neither_waited_for_nor_read_without_end(kind: str, tmp_path: Path) -> None:
    """L2."""
    path = tmp_path / "rank.pt"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert problem_of(path) == Problem(
        "not-an-archive", "rank.pt", "This is no regular file; put the rank's file here."
    )


# Archives that torch.save did not write.


def damage(clause: str, path: Path) -> Problem:
    return Problem(
        "damaged-archive",
        path.name,
        f"{clause}. The file ({path.stat().st_size:,} bytes) is damaged, or another program than torch.save wrote it; "
        f"{COPY_AGAIN}",
    )


def test_a_compressed_record_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    """L11: 200 MB of NONE in a deflated pickle of 200 kB."""
    path = zipped(tmp_path / "x.pt", {"x/data.pkl": b"\x80\x02" + b"N" * 200_000_000}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 250_000
    assert problem_of(path) == damage("Record x/data.pkl is compressed; torch.save stores records as they are", path)


def test_a_zip_without_a_pickle_or_with_two_is_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.pt", {"x/readme": b"hello"})
    assert problem_of(path) == damage("It is a zip archive with 0 data.pkl records; torch.save writes one", path)
    path = zipped(tmp_path / "y.pt", {"x/data.pkl": b"", "y/data.pkl": b""})
    assert problem_of(path) == damage("It is a zip archive with 2 data.pkl records; torch.save writes one", path)
    path = zipped(tmp_path / "z.pt", {})
    assert problem_of(path) == damage("It is a zip archive without records", path)


def test_a_record_listed_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}.")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("x/data.pkl", b"\x80\x02].")
    assert problem_of(path) == damage("Its directory lists x/data.pkl twice", path)


def test_bytes_before_the_first_record_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x.pt", b"#!/bin/sh\n" + SMALL.read_bytes())
    # zipfile reads an archive with something in front of it, by moving all offsets.
    assert zipfile.is_zipfile(path)
    assert problem_of(path) == damage("Its first record begins at byte 10, not at the start of the file", path)


def edited(path: Path, edit: Callable[[bytearray], None]) -> Path:
    data = bytearray(SMALL.read_bytes())
    edit(data)
    return written(path, bytes(data))


def central(data: bytearray, name: bytes) -> int:
    """Where the directory entry of a record begins."""
    return data.rindex(name, 0, data.rindex(b"PK\5\6")) - 46


def test_records_that_overlap_are_refused(tmp_path: Path) -> None:
    def edit(data: bytearray) -> None:
        at = central(data, b"model_world_size_4_rank_1/data/2")
        other = central(data, b"model_world_size_4_rank_1/data/1P")
        data[at + 42 : at + 46] = data[other + 42 : other + 46]

    path = edited(tmp_path / "x.pt", edit)
    clause = "Record model_world_size_4_rank_1/data/1 does not end where the next one begins"
    assert problem_of(path) == damage(clause, path)


@pytest.mark.parametrize(
    ("name", "offset", "value", "clause"),
    [
        ("data/1", 8, b"\x09\x08", "Record stem/data/1 is encrypted"),
        ("data/1", 10, b"\x08\x00", "Record stem/data/1 is compressed; torch.save stores records as they are"),
        ("data/1", 24, b"\xff\x00", "Record stem/data/1 is compressed; torch.save stores records as they are"),
        ("data/1", 8, b"\x08\x00", "Record stem/data/1 has another header than its directory entry says"),
        ("data/1", 8, b"\x00\x08", "Record stem/data/1 has another header than its directory entry says"),
        ("data/1", 16, b"\x01\x02", "Record stem/data/1 has another size or checksum than its directory entry says"),
        ("data/1", 46, b"S", "Record Stem/data/1 has another header than its directory entry says"),
        # Moved behind all others.
        ("data/1", 42, b"\x00\x00\x00\x7f", "Record stem/data/0 does not end where the next one begins"),
        (
            ".data/serialization_id",
            42,
            b"\x00\x00\x00\x7f",
            "Record stem/version does not end where the next one begins",
        ),
    ],
)
def test_a_directory_entry_that_its_record_denies_is_refused(
    tmp_path: Path, name: str, offset: int, value: bytes, clause: str
) -> None:
    path = tmp_path / "stem.pt"
    torch.save({"a": torch.ones(2), "b": torch.ones(3)}, path)
    data = bytearray(path.read_bytes())
    at = central(data, f"stem/{name}".encode())
    data[at + offset : at + offset + len(value)] = value
    assert problem_of(written(path, bytes(data))) == damage(clause, path)


@pytest.mark.parametrize(
    ("at", "value", "clause"),
    [
        # In the local header of the first record: CRC-32, packed size, size, and a longer extra field.
        (14, b"\xff", "Record x/data.pkl has another size or checksum than its directory entry says"),
        (18, b"\xff", "Record x/data.pkl has another size or checksum than its directory entry says"),
        (22, b"\xff", "Record x/data.pkl has another size or checksum than its directory entry says"),
        (28, b"\x01", "Record x/data.pkl does not end where the next one begins"),
    ],
)
def test_a_header_without_a_descriptor_that_its_directory_entry_denies_is_refused(
    tmp_path: Path, at: int, value: bytes, clause: str
) -> None:
    path = zipped(tmp_path / "x.pt", {"x/data.pkl": b"\x80\x02}.", "x/version": b"3\n"})
    data = bytearray(path.read_bytes())
    data[at : at + 1] = value
    assert problem_of(written(path, bytes(data))) == damage(clause, path)


def test_checksums_in_some_records_only_are_refused(tmp_path: Path) -> None:
    """Else a pickle could be changed at will by also saying that it was saved without a checksum."""
    path = zipped(tmp_path / "x.pt", {"x/data.pkl": b"\x80\x02}.", "x/version": b"3\n"})
    data = bytearray(path.read_bytes())
    at = central(data, b"x/data.pkl")
    data[14:18] = data[at + 16 : at + 20] = bytes(4)
    assert problem_of(written(path, bytes(data))) == Problem(
        "damaged-archive",
        "x.pt",
        "Some of its records have checksums and its data.pkl has none. The file is damaged; copy it again.",
    )


def test_a_pickle_that_is_too_large_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("merger.sources.torch_zip._MAX_PICKLE_BYTES", 3)
    path = zipped(tmp_path / "x.pt", {"x/data.pkl": b"\x80\x02}."})
    assert problem_of(path) == Problem(
        "bad-pickle", "x.pt", "Its data.pkl has 4 bytes; a state dict has a few million at most."
    )


def test_a_big_endian_archive_is_refused(tmp_path: Path) -> None:
    records = unzipped(SMALL) | {"model_world_size_4_rank_1/byteorder": b"big"}
    assert problem_of(zipped(tmp_path / "x.pt", records)) == Problem(
        "byte-order",
        "x.pt",
        "Its byte order is 'big'; only little-endian files can be read. "
        "Load it with torch.load and save it again on a little-endian machine.",
    )
    del records["model_world_size_4_rank_1/byteorder"]
    assert "five" in read_archive(zipped(tmp_path / "x.pt", records)).entries


def test_a_large_record_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.pt", {"x/data.pkl": b"\x80\x02}.", "x/code": bytes(70_000)})
    assert problem_of(path) == Problem(
        "damaged-archive", "x.pt", "It has a record 'code' of 70,000 bytes, which no state dict has."
    )


# What the pickle holds.


def test_a_changed_byte_of_the_pickle_is_found_by_its_checksum(tmp_path: Path) -> None:
    """S21: torch.load reads this file, with a tensor under another name."""

    def edit(data: bytearray) -> None:
        data[data.index(b"five") + 3] ^= 1

    path = edited(tmp_path / "x.pt", edit)
    pkl = path.read_bytes()[SMALL.read_bytes().index(b"\x80\x02ccollections") :]
    size = read_archive(SMALL).records["data.pkl"].num_bytes
    recorded = read_archive(SMALL).records["data.pkl"].crc32
    assert problem_of(path) == Problem(
        "checksum",
        "x.pt",
        f"The checksum of data.pkl is {zlib.crc32(pkl[:size]):08x}, but {recorded:08x} was recorded when it was saved. "
        f"The file is damaged; {COPY_AGAIN}",
    )


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([torch.ones(1)], "a list"),
        (torch.ones(1), "a tensor"),
        (torch.nn.Parameter(torch.ones(1)), "a tensor"),
        (5, "5"),
        ("text", "a str"),
        (None, "None"),
        (torch.device("cpu"), "a device"),
        ({0: torch.ones(1)}, "a dict with 0 as a key"),
    ],
)
def test_a_file_that_holds_no_state_dict_says_what_it_holds(tmp_path: Path, value: object, found: str) -> None:
    path = tmp_path / "x.pt"
    torch.save(value, path)
    assert problem_of(path) == Problem("not-a-state-dict", "x.pt", f"The file holds {found}, not a state dict.")


@pytest.mark.parametrize("key", ["model", "state_dict", "module"])
def test_a_state_dict_within_a_dict_is_named(tmp_path: Path, key: str) -> None:
    path = tmp_path / "x.pt"
    torch.save({"epoch": 3, key: torch.nn.Linear(2, 2).state_dict()}, path)
    assert problem_of(path) == Problem(
        "not-a-state-dict",
        "x.pt",
        f"The file holds a dict with a nested state dict under '{key}', not a state dict. "
        f"Save that part by itself: torch.save(checkpoint['{key}'], path).",
    )


class RunsCommand:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_hostile_archive_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    """L11."""
    path, marker = tmp_path / "x.pt", tmp_path / "ran"
    torch.save({"w": torch.ones(3), "x": RunsCommand(f"touch {marker}")}, path, pickle_protocol=protocol)
    assert problem_of(path, UnsafePickleError) == Problem(
        "unsafe-pickle",
        "x.pt",
        f"data.pkl asks for {os.name}.system, which is not among the classes that sharded checkpoints are made of. "
        "Nothing of it was run. If you trust the origin of this file, save it again with tensors only.",
    )
    assert not marker.exists()


def test_an_unknown_class_is_refused_and_named(tmp_path: Path) -> None:
    """L11."""
    path = tmp_path / "x.pt"
    torch.save({"head": torch.nn.Linear(2, 2)}, path)
    assert problem_of(path, UnsafePickleError).message.startswith("data.pkl asks for torch.nn.modules.linear.Linear, ")


# Any damage at all.


def data_ranges() -> list[range]:
    """The bytes of tensor data in the small archive; not those of the mesh, which are read here."""
    archive = read_archive(SMALL)
    used = {entry.local.record for entry in archive.entries.values() if isinstance(entry, PlainTensor | DTensor)}
    return [range(record.byte_offset, record.byte_offset + record.num_bytes) for record in used]


def test_a_flip_of_any_bit_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    """S21: all bits of the file, but for tensor data, whose checksums are verified where it is copied."""
    whole = read_archive(SMALL)
    path = tmp_path / SMALL.name
    shutil.copyfile(SMALL, path)
    original = SMALL.read_bytes()
    tensor_data = {at for span in data_ranges() for at in span}
    pkl = whole.records["data.pkl"]
    # Within the pickle, whose checksum is taken first of all, a sample will do.
    sampled = {at for at in range(pkl.byte_offset, pkl.byte_offset + pkl.num_bytes) if at % 16}
    refused = unchanged = 0
    with path.open("r+b", buffering=0) as file:
        for at in range(len(original)):
            if at in tensor_data or at in sampled:
                continue
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([original[at] ^ 1 << bit]), at)
                try:
                    found = read_archive(path)
                except ArchiveError as error:
                    refused += 1
                    assert {problem.where for problem in error.problems} == {SMALL.name}  # noqa: PT017
                else:
                    unchanged += 1
                    assert found.entries == whole.entries, f"bit {bit} of byte {at}"
                    assert found.records == whole.records, f"bit {bit} of byte {at}"
            os.pwrite(file.fileno(), original[at : at + 1], at)
    # Padding and time stamps are what may change; most other bits are load-bearing.
    assert refused > unchanged > 0


def test_a_file_cut_at_any_length_is_refused(tmp_path: Path) -> None:
    """L2."""
    path = tmp_path / SMALL.name
    shutil.copyfile(SMALL, path)
    for length in range(path.stat().st_size - 1, -1, -1):
        os.truncate(path, length)
        assert problem_of(path).kind in ("truncated", "damaged-archive", "not-an-archive", "empty-file")


def test_bytes_after_the_end_of_an_archive_change_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "x.pt", SMALL.read_bytes() + b"trailing")
    assert read_archive(path).entries == read_archive(SMALL).entries


def test_a_changed_pickle_with_an_honest_checksum_is_read_or_refused_and_never_crashes(tmp_path: Path) -> None:
    """L11: what a hostile writer can do that damage cannot."""
    random = Random(0)
    records = unzipped(SMALL)
    name = "model_world_size_4_rank_1/data.pkl"
    original = records[name]
    kinds: set[str] = set()
    for _ in range(500):
        data = bytearray(original)
        at, other = random.randrange(len(data)), random.randrange(len(data))
        if random.random() < 0.5:
            data[at] = random.randrange(256)
        else:
            data[at : at + random.randrange(8)] = data[other : other + random.randrange(8)]
        path = zipped(tmp_path / "x.pt", records | {name: bytes(data)})
        try:
            read_archive(path)
        except ArchiveError as error:
            kinds.update(problem.kind for problem in error.problems)
    assert kinds == {"bad-pickle", "unsafe-pickle", "bad-tensor"}
