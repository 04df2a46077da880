from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merger import reading
from merger.errors import ArchiveError
from merger.reading import SourceReader, read_bands, read_chunk, read_rectangle
from merger.tensors import SourceFile
from tests.unit.stored import Piece, columns, elements, grid, open_descriptors, random_tensor, store, whole

CHANGED = "rank_0.bin: changed while it was being merged; wait until the run has finished saving, then start again"


def source(path: Path, data: bytes) -> SourceFile:
    path.write_bytes(data)
    return SourceFile(path, len(data), path.stat().st_mtime_ns, 0)


ROOT = Path(__file__).parents[2]


@pytest.fixture
def many(tmp_path: Path) -> list[SourceFile]:
    """200 files that hold their own number, thrice."""
    return [source(tmp_path / f"rank_{number}.bin", bytes([number] * 3)) for number in range(200)]


@pytest.fixture(autouse=True)
def _no_leak() -> Iterator[None]:
    """No test leaves a file open."""
    before = open_descriptors()
    yield
    assert open_descriptors() - before == set()


def read(reader: SourceReader, file: SourceFile, byte_offset: int, count: int) -> bytes:
    buffer = bytearray(count)
    reader.read_into(file, byte_offset, memoryview(buffer))
    return bytes(buffer)


def test_no_more_files_are_open_than_may_be_however_many_are_read(
    many: list[SourceFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_OPEN_FILES", 64)
    before = open_descriptors()
    with SourceReader() as reader:
        for file in [*many, *many]:
            assert read(reader, file, 1, 2) == bytes([int(file.path.stem[5:])] * 2)
        assert len(open_descriptors() - before) == 64


def test_the_limit_is_half_of_what_the_process_may_open() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); from merger import reading; "
        "print(reading.MAX_OPEN_FILES)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "128\n"


def test_the_file_used_last_stays_open_and_the_one_not_used_longest_is_closed(
    many: list[SourceFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_OPEN_FILES", 64)
    with SourceReader() as reader:
        for file in many[:64]:
            read(reader, file, 0, 1)
        read(reader, many[0], 0, 1)
        read(reader, many[64], 0, 1)
        names = {Path(entry.split(" -> ")[1]).name for entry in open_descriptors()}
    assert "rank_0.bin" in names
    assert "rank_64.bin" in names
    assert "rank_1.bin" not in names


def test_a_file_in_use_is_not_closed_by_others(many: list[SourceFile]) -> None:
    with SourceReader() as reader, reader.descriptor(many[7]) as descriptor:
        for file in many:
            if file is not many[7]:
                read(reader, file, 0, 1)
        assert os.pread(descriptor, 3, 0) == bytes([7] * 3)


def test_workers_on_more_files_than_may_be_open_read_the_right_bytes(
    many: list[SourceFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 2 open files and 8 workers every read closes somebody else's file, if it may."""
    monkeypatch.setattr(reading, "MAX_OPEN_FILES", 2)
    start = threading.Barrier(8)
    with SourceReader() as reader:

        def work(worker: int) -> list[bytes]:
            start.wait(10)
            return [read(reader, many[(worker * 25 + step) % 200], 0, 3) for step in range(200)]

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(work, range(8)))
    assert results == [[bytes([(worker * 25 + step) % 200] * 3) for step in range(200)] for worker in range(8)]


def test_reads_that_return_less_than_asked_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = source(tmp_path / "rank_0.bin", bytes(range(100)))
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    with SourceReader() as reader:
        assert read(reader, file, 10, 80) == bytes(range(10, 90))


def test_a_read_past_the_end_says_that_the_file_changed(tmp_path: Path) -> None:
    file = source(tmp_path / "rank_0.bin", bytes(100))
    with pytest.raises(ArchiveError) as caught, SourceReader() as reader:
        read(reader, file, 90, 11)
    assert str(caught.value) == CHANGED


def test_a_read_of_nothing_at_the_end_is_fine(tmp_path: Path) -> None:
    file = source(tmp_path / "rank_0.bin", bytes(100))
    with SourceReader() as reader:
        assert read(reader, file, 100, 0) == b""


@pytest.mark.parametrize("change", ["longer", "shorter", "touched", "removed"])
def test_a_file_that_changed_since_its_header_was_read_is_refused(change: str, tmp_path: Path) -> None:
    file = source(tmp_path / "rank_0.bin", bytes(100))
    file.path.unlink()
    if change != "removed":
        file.path.write_bytes(bytes({"longer": 101, "shorter": 99, "touched": 100}[change]))
        os.utime(file.path, ns=(0, file.mtime_ns + (change == "touched")))
    with pytest.raises(ArchiveError) as caught, SourceReader() as reader:
        read(reader, file, 0, 1)
    assert str(caught.value) == CHANGED
    assert [problem.kind for problem in caught.value.problems] == ["changed-file"]


def read_while_written(files: list[SourceFile], error: type[BaseException] | None = None) -> None:
    """Reads all files in turn; the first is written to after it was read; then `error` may follow."""
    with SourceReader() as reader:
        read(reader, files[0], 0, 1)
        os.utime(files[0].path, ns=(0, files[0].mtime_ns + 1))
        for file in files[1:]:
            read(reader, file, 0, 1)
        if error is not None:
            raise error


def test_a_file_written_while_it_is_open_is_refused_at_the_end(many: list[SourceFile]) -> None:
    with pytest.raises(ArchiveError) as caught:
        read_while_written(many[:2])
    assert str(caught.value) == CHANGED


def test_a_file_written_while_it_is_open_is_refused_when_it_makes_room(many: list[SourceFile]) -> None:
    with pytest.raises(ArchiveError) as caught:
        read_while_written(many[:66])
    assert str(caught.value) == CHANGED


def test_an_error_in_the_block_is_not_hidden_by_a_changed_file(many: list[SourceFile]) -> None:
    with pytest.raises(KeyboardInterrupt):
        read_while_written(many[:2], KeyboardInterrupt)


def test_a_disk_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = source(tmp_path / "rank_0.bin", bytes(100))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ArchiveError) as caught, SourceReader() as reader:
        read(reader, file, 0, 1)
    assert str(caught.value) == ("rank_0.bin: cannot be read (Input/output error); check the disk and the permissions")


def test_a_file_that_may_not_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = source(tmp_path / "rank_0.bin", bytes(100))

    def fail(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file.path))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(ArchiveError) as caught, SourceReader() as reader:
        read(reader, file, 0, 1)
    assert str(caught.value) == "rank_0.bin: cannot be read (Permission denied); check the disk and the permissions"


@st.composite
def rectangles(draw: st.DrawFn) -> tuple[Any, ...]:
    """A tensor's shape, its cuts, how each piece lies, and a rectangle in it."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - start)) for start, size in zip(offsets, shape, strict=True)]
    pieces = [
        Piece(
            *box,
            file=draw(st.integers(0, 2)),
            order=tuple(draw(st.permutations(range(len(shape))))),
            gap=draw(st.integers(0, 9)),
            lead=draw(st.integers(0, 2)),
            joined=draw(st.booleans()),
        )
        for box in grid(cuts)
    ]
    return shape, pieces, offsets, sizes


@given(rectangles(), st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.int64, torch.complex128]))
def test_any_rectangle_of_any_pieces_is_that_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[Any, ...], dtype: torch.dtype
) -> None:
    shape, pieces, offsets, sizes = case
    tensor = random_tensor(dtype, shape)
    stored = store(tmp_path_factory.mktemp("source"), {"w": (tensor, pieces)})["w"]
    with SourceReader() as reader:
        found = read_rectangle(reader, stored, offsets, sizes)
    expected = elements(tensor)[tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))]
    assert found.shape == tuple(sizes)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("max_bytes", [1, 4, 12, 24, 28, 72, 10_000])
def test_bands_follow_one_another_and_are_no_larger_than_asked(max_bytes: int, tmp_path: Path) -> None:
    tensor = torch.arange(4 * 6 * 3, dtype=torch.int32).reshape(4, 6, 3)
    pieces = [Piece(*box) for box in grid([[0, 4], [0, 2, 6], [0, 3]])]
    stored = store(tmp_path, {"w": (tensor, pieces)})["w"]
    with SourceReader() as reader:
        found = list(read_bands(reader, stored, max_bytes))
    assert b"".join(band.tobytes() for _, band in found) == tensor.numpy().tobytes()
    assert all(band.nbytes <= max(4, max_bytes) for _, band in found)
    assert [int(band.reshape(-1).view("i4")[0]) for _, band in found] == [first for first, _ in found]


def test_an_empty_tensor_has_no_bands_and_one_without_dims_has_one(tmp_path: Path) -> None:
    empty, scalar = torch.empty(0, 3), torch.tensor(2.5)
    stored = store(tmp_path, {"empty": (empty, []), "scalar": (scalar, [whole(scalar)])})
    with SourceReader() as reader:
        assert list(read_bands(reader, stored["empty"], 8)) == []
        [(first, band)] = read_bands(reader, stored["scalar"], 8)
    assert (first, band.shape, band.tobytes()) == (0, (), scalar.numpy().tobytes())


@pytest.mark.parametrize("gap", [0, 1, 8, 200])
def test_no_more_than_four_times_what_is_wanted_is_read(
    gap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = random_tensor(torch.float32, (20, 10))
    stored = store(tmp_path, {"w": (tensor, [whole(tensor, gap=gap)])})["w"]
    counts: list[int] = []
    real = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], byte_offset: int) -> int:
        counts.append(real(descriptor, buffers, byte_offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    with SourceReader() as reader:
        found = read_chunk(reader, stored.chunks[0], 4, (0, 0), (20, 10))
    assert found.tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    assert sum(counts) <= 4 * tensor.nbytes
    # In one go where rows are close to each other, else row by row.
    assert counts == ([40] * 20 if gap == 200 else [(19 * (10 + gap) + 10) * 4])


def test_an_expanded_tensor_is_read_from_its_one_element(tmp_path: Path) -> None:
    value = torch.tensor([7], dtype=torch.int64)
    stored = store(tmp_path, {"w": (value, [whole(value)])})["w"]
    [chunk] = stored.chunks
    expanded = type(chunk)((0, 0), (3, 2), chunk.file, chunk.byte_offset, (0, 0), chunk.record)
    with SourceReader() as reader:
        found = read_chunk(reader, expanded, 8, (0, 0), (3, 2))
    assert found.tolist() == [[7, 7]] * 3


def test_replicas_are_read_once_and_the_first_stands(tmp_path: Path) -> None:
    tensor = torch.arange(6).reshape(2, 3)
    stored = store(tmp_path, {"w": (tensor, [whole(tensor), whole(tensor, file=1)])})["w"]
    (tmp_path / "rank_1.bin").unlink()
    with SourceReader() as reader:
        assert read_rectangle(reader, stored, (0, 0), (2, 3)).tolist() == tensor.tolist()


def test_column_pieces_are_read_without_what_lies_between_them(tmp_path: Path) -> None:
    tensor = random_tensor(torch.int16, (5, 8))
    stored = store(tmp_path, {"w": (tensor, columns(tensor, 4, gap=3))})["w"]
    with SourceReader() as reader:
        found = read_rectangle(reader, stored, (1, 1), (3, 6))
    assert found.tobytes() == tensor[1:4, 1:7].contiguous().numpy().tobytes()
