from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from merger import writer
from merger.checksums import checksum_error
from merger.dtypes import BY_NAME
from merger.errors import ArchiveError, ChecksumError, TargetError
from merger.plan import Plan
from merger.tensors import StoredTensor
from merger.writer import INDEX_NAME, check_written, write_plan
from tests.unit.stored import (
    FILLER,
    Piece,
    columns,
    elements,
    grid,
    open_descriptors,
    plan_for,
    random_tensor,
    rows,
    store,
    whole,
)

ROOT = Path(__file__).parent.parent.parent
WRITABLE = sorted(name for name, dtype in BY_NAME.items() if dtype.safetensors is not None)
CASTS = ["float32", "float16", "bfloat16"]


@pytest.fixture(autouse=True)
def _no_leak() -> Iterator[None]:
    """No test leaves a file open, whatever goes wrong in it."""
    before = open_descriptors()
    yield
    assert open_descriptors() - before == set()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BLOCK_BYTES", 64)
    monkeypatch.setattr(writer, "BAND_BYTES", 128)


def write(plan: Plan, folder: Path, *, check_sums: bool = True, workers: int = 2) -> dict[str, torch.Tensor]:
    """Runs a plan in a new folder and loads all that was written."""
    folder.mkdir(parents=True)
    write_plan(plan, folder, check_sums=check_sums, workers=workers, progress=lambda _: None)
    return load(folder)


def load(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), elements(tensor).tobytes()) for name, tensor in tensors.items()
    }


def count_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many bytes are read into memory, and how many go from file to file, from now on."""
    counts = {"preadv": 0, "copy_file_range": 0}
    lock = threading.Lock()

    def counting(name: str, real: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            count = real(*arguments)
            with lock:
                counts[name] += count
            return count

        return call

    for name in counts:
        monkeypatch.setattr(os, name, counting(name, getattr(os, name)))
    return counts


def flip(path: Path, byte_offset: int) -> None:
    """Flips a bit, and keeps the time of change: what a disk does."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[byte_offset] ^= 0x10
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@st.composite
def stored_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, list[Piece], str | None]:
    """A tensor, how it is cut and lies in files, and what it is cast to."""
    dtype = BY_NAME[draw(st.sampled_from(WRITABLE))]
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    tensor = random_tensor(getattr(torch, dtype.name), shape, seed=draw(st.integers(0, 3)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    boxes = grid(cuts) if prod(shape) else []
    boxes += draw(st.lists(st.sampled_from(boxes), max_size=2)) if boxes else []
    is_plain = draw(st.booleans())
    pieces = [
        Piece(
            *box,
            file=draw(st.integers(0, 3)),
            order=None if is_plain else tuple(draw(st.permutations(range(len(shape))))),
            gap=0 if is_plain else draw(st.integers(0, 9)),
            lead=draw(st.integers(0, 5)),
            tail=draw(st.integers(0, 5)),
            joined=draw(st.booleans()),
        )
        for box in draw(st.permutations(boxes))
    ]
    cast = draw(st.sampled_from([None, *CASTS])) if dtype.is_floating else None
    return tensor, pieces, cast


@given(
    st.lists(stored_tensors(), max_size=4),
    st.sampled_from([8, 16, 64, 1 << 20]),
    st.sampled_from([1, 16, 64, 1 << 20]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([100, 1 << 40]),
    st.booleans(),
)
def test_whatever_lies_in_the_files_comes_out_bit_for_bit(  # noqa: PLR0917 - Hypothesis passes what it draws in order
    tmp_path_factory: pytest.TempPathFactory,
    cases: list[tuple[torch.Tensor, list[Piece], str | None]],
    block_bytes: int,
    band_bytes: int,
    workers: int,
    max_shard_size: int,
    check_sums: bool,  # noqa: FBT001 - drawn
) -> None:
    """S2, S13: any shapes, types, cuts, strides, padding, sharing of records, replicas, casts and block edges."""
    folder = tmp_path_factory.mktemp("case")
    tensors = {f"w{number}": case[0] for number, case in enumerate(cases)}
    casts = {f"w{number}": case[2] for number, case in enumerate(cases) if case[2] is not None}
    stored = store(folder / "source", {f"w{number}": case[:2] for number, case in enumerate(cases)})
    plan = plan_for(stored, casts, max_shard_size)
    event(f"bands: {any(planned.copies is None for file in plan.files for planned in file.tensors)}")
    event(f"casts: {len(casts)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BLOCK_BYTES", block_bytes)
        patch.setattr(writer, "BAND_BYTES", band_bytes)
        written = write(plan, folder / "out", check_sums=check_sums, workers=workers)
    expected = {
        name: tensor.to(getattr(torch, casts[name])) if name in casts else tensor for name, tensor in tensors.items()
    }
    # Which bits a NaN has after a cast is left to the processor: torch itself gives other ones in longer blocks.
    for name in casts:
        written[name], expected[name] = (
            torch.where(side.isnan(), torch.nan, side) for side in (written[name], expected[name])
        )
    assert bits(written) == bits(expected)
    check_written(plan, folder / "out")
    size = sum(path.stat().st_size for path in (folder / "out").glob("*.safetensors"))
    assert size == sum(file.num_bytes for file in plan.files)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("workers", [1, 8])
def test_the_same_plan_gives_the_same_bytes_whatever_the_workers(workers: int, tmp_path: Path) -> None:
    tensors = {f"w{number}": random_tensor(torch.float32, (16, 8), number) for number in range(20)}
    stored = store(tmp_path, {name: (tensor, rows(tensor, 4)) for name, tensor in tensors.items()})
    plan = plan_for(stored, dict.fromkeys(tensors, "bfloat16"), max_shard_size=3000)
    write(plan, tmp_path / "one", workers=1)
    write(plan, tmp_path / "other", workers=workers)
    for file in plan.files:
        assert (tmp_path / "one" / file.name).read_bytes() == (tmp_path / "other" / file.name).read_bytes()
    assert len(plan.files) > 1
    assert (tmp_path / "other" / INDEX_NAME).read_bytes() == plan.index


def two_weights(folder: Path, how: str, *, checked: bool = True) -> tuple[dict[str, torch.Tensor], Plan]:
    """Two tensors on two ranks, such that they are copied, cast, or assembled from columns."""
    tensors = {"a": random_tensor(torch.float32, (8, 12)), "b": random_tensor(torch.float32, (8, 12), 1)}
    if how == "cast":
        tensors = {name: torch.nan_to_num(tensor) for name, tensor in tensors.items()}
    cut = columns if how == "bands" else rows
    stored = store(folder, {name: (t, cut(t, 2, lead=2, tail=3)) for name, t in tensors.items()}, checked=checked)
    return tensors, plan_for(stored, dict.fromkeys(tensors, "bfloat16") if how == "cast" else None)


def record_of(plan: Plan, name: str, number: int) -> Any:
    [source] = [planned.tensor.source for file in plan.files for planned in file.tensors if planned.tensor.name == name]
    return source.chunks[number]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("how", ["copy", "cast", "bands"])
@pytest.mark.parametrize("where", ["first", "last", "lead", "tail"])
def test_a_flipped_bit_in_a_record_is_found(how: str, where: str, tmp_path: Path) -> None:
    """S21: also in the padding of a record, since what was saved is the record."""
    _, plan = two_weights(tmp_path, how)
    chunk = record_of(plan, "b", 1)
    record = chunk.record
    end = record.byte_offset + record.num_bytes
    byte_offset = {
        "first": chunk.byte_offset,
        "last": chunk.byte_offset + 8 * 6 * 4 - 1,
        "lead": record.byte_offset,
        "tail": end - 1,
    }[where]
    flip(tmp_path / "rank_1.bin", byte_offset)
    found = zlib.crc32((tmp_path / "rank_1.bin").read_bytes()[record.byte_offset : end])
    with pytest.raises(ChecksumError) as caught:
        write(plan, tmp_path / "out")
    assert str(caught.value) == (
        "rank_1.bin: b: the bytes on disk (rank 1) are not those that were saved: record data/1 has CRC-32 "
        f"{found:08x}, its archive recorded {record.crc32:08x}; copy the file again from where it was written, "
        "or use another step's checkpoint (--no-checksum merges the damaged bytes)"
    )


@pytest.mark.parametrize("how", ["copy", "bands"])
def test_without_checksums_damaged_bytes_are_copied_as_they_are(how: str, tmp_path: Path) -> None:
    tensors, plan = two_weights(tmp_path, how)
    chunk = record_of(plan, "b", 0)
    flip(tmp_path / "rank_0.bin", chunk.byte_offset)
    written = write(plan, tmp_path / "out", check_sums=False)
    damaged = elements(tensors["b"]).tobytes()
    damaged = bytes([damaged[0] ^ 0x10]) + damaged[1:]
    assert elements(written["a"]).tobytes() == elements(tensors["a"]).tobytes()
    assert elements(written["b"]).tobytes() == damaged


def test_records_without_a_checksum_are_copied_unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, plan = two_weights(tmp_path, "copy", checked=False)
    counts = count_calls(monkeypatch)
    assert bits(write(plan, tmp_path / "out")) == bits(tensors)
    assert counts == {"preadv": 0, "copy_file_range": 2 * 8 * 12 * 4}


def test_a_record_is_read_once_for_its_checksum_and_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, plan = two_weights(tmp_path, "copy")
    counts = count_calls(monkeypatch)
    assert bits(write(plan, tmp_path / "out")) == bits(tensors)
    # Each of four records has five elements of filler besides its share.
    assert counts == {"preadv": 2 * 8 * 12 * 4 + 4 * 5 * 4, "copy_file_range": 2 * 8 * 12 * 4}


@pytest.mark.parametrize("max_shard_size", [1 << 40, 500])
def test_a_record_shared_by_tensors_and_output_files_is_read_once(
    max_shard_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"w{number}": random_tensor(torch.float32, (10, 10), number) for number in range(6)}
    pieces = {name: (tensor, [whole(tensor, joined=True)]) for name, tensor in tensors.items()}
    plan = plan_for(store(tmp_path, pieces), max_shard_size=max_shard_size)
    counts = count_calls(monkeypatch)
    assert bits(write(plan, tmp_path / "out", workers=6)) == bits(tensors)
    assert counts == {"preadv": 6 * 400, "copy_file_range": 6 * 400}


def test_columns_are_read_at_most_twice_and_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, plan = two_weights(tmp_path, "bands")
    counts = count_calls(monkeypatch)
    assert bits(write(plan, tmp_path / "out")) == bits(tensors)
    assert counts == {"preadv": 2 * 2 * 8 * 12 * 4 + 4 * 5 * 4, "copy_file_range": 0}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "refusal",
    [errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EBADF, "zero", "missing"],
    ids=lambda refusal: refusal if isinstance(refusal, str) else errno.errorcode[refusal],
)
def test_where_the_kernel_cannot_copy_bytes_go_through_memory(
    refusal: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, plan = two_weights(tmp_path, "copy")

    def refuse(*_: object) -> int:
        if isinstance(refusal, int):
            raise OSError(refusal, os.strerror(refusal))
        return 0

    if refusal == "missing":
        monkeypatch.delattr(os, "copy_file_range")
    else:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    assert bits(write(plan, tmp_path / "out")) == bits(tensors)


@pytest.mark.usefixtures("small_blocks")
def test_copies_and_writes_that_do_less_than_asked_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, plan = two_weights(tmp_path, "copy")
    copy, pwrite = os.copy_file_range, os.pwrite
    monkeypatch.setattr(os, "copy_file_range", lambda src, dst, count, *at: copy(src, dst, min(count, 5), *at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
    assert bits(write(plan, tmp_path / "out")) == bits(tensors)


def test_other_errors_of_the_kernel_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = two_weights(tmp_path, "copy")

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "copy_file_range", fail)
    with pytest.raises(OSError, match="No space left on device"):
        write(plan, tmp_path / "out")


@pytest.mark.parametrize("how", ["copy", "cast", "bands"])
def test_progress_adds_up_to_the_bytes_of_the_output(how: str, tmp_path: Path) -> None:
    _, plan = two_weights(tmp_path, how)
    steps: list[int] = []
    (tmp_path / "out").mkdir()
    write_plan(plan, tmp_path / "out", check_sums=True, workers=3, progress=steps.append)
    assert sum(steps) == plan.total_size


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("how", ["copy", "cast", "bands"])
def test_an_error_in_the_progress_callback_ends_the_writing(how: str, tmp_path: Path) -> None:
    _, plan = two_weights(tmp_path, how)
    (tmp_path / "out").mkdir()

    def fail(_: int) -> None:
        raise RuntimeError("the bar broke")

    with pytest.raises(RuntimeError, match="the bar broke"):
        write_plan(plan, tmp_path / "out", check_sums=True, workers=2, progress=fail)


@pytest.mark.usefixtures("small_blocks")
def test_after_one_worker_fails_the_others_stop_and_the_rest_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"w{number:03}": random_tensor(torch.uint8, (64, 64), number) for number in range(100)}
    tensors["w001"] = random_tensor(torch.uint8, (400, 1024))
    stored = store(tmp_path, {name: (tensor, [whole(tensor)]) for name, tensor in tensors.items()})
    plan = plan_for(stored)
    first = plan.files[0].tensors[0].tensor.source
    flip(tmp_path / "rank_0.bin", first.chunks[0].byte_offset)
    (tmp_path / "out").mkdir()
    steps: list[int] = []
    failed = threading.Event()

    def notice(*arguments: Any) -> ChecksumError:
        failed.set()
        return checksum_error(*arguments)

    def slow(count: int) -> None:
        # The second worker waits for the first to fail, then both are slow, so that nothing is left to chance.
        if threading.current_thread().name.endswith("_1"):
            failed.wait(20)
        if failed.is_set():
            time.sleep(0.002)
        steps.append(count)

    monkeypatch.setattr(writer, "checksum_error", notice)
    with pytest.raises(ChecksumError):
        write_plan(plan, tmp_path / "out", check_sums=True, workers=2, progress=slow)
    assert sum(steps) < 400 * 1024


@pytest.mark.usefixtures("small_blocks")
def test_ctrl_c_stops_the_workers_before_it_goes_on(tmp_path: Path) -> None:
    """L9: nobody writes any more when the staging directory is removed."""
    tensors = {f"w{number}": random_tensor(torch.uint8, (400, 1024), number) for number in range(4)}
    stored = store(tmp_path, {name: (tensor, [whole(tensor)]) for name, tensor in tensors.items()})
    plan = plan_for(stored)
    (tmp_path / "out").mkdir()
    steps: list[int] = []

    def interrupt(count: int) -> None:
        if not steps:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        steps.append(count)
        time.sleep(0.002)

    with pytest.raises(KeyboardInterrupt):
        write_plan(plan, tmp_path / "out", check_sums=True, workers=2, progress=interrupt)
    assert sum(steps) < 400 * 1024
    before = len(steps)
    time.sleep(0.01)
    assert len(steps) == before


def test_a_source_that_changed_after_planning_is_refused(tmp_path: Path) -> None:
    _, plan = two_weights(tmp_path, "copy")
    path = tmp_path / "rank_1.bin"
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ArchiveError) as caught:
        write(plan, tmp_path / "out")
    assert str(caught.value) == (
        "rank_1.bin: changed while it was being merged; wait until the run has finished saving, then start again"
    )


def test_an_output_file_that_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    _, plan = two_weights(tmp_path, "copy")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        write_plan(plan, tmp_path / "out", check_sums=True, workers=1, progress=lambda _: None)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"precious"


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("cut", [rows, columns])
def test_overflows_of_a_cast_are_counted_per_tensor(cut: Callable[..., list[Piece]], tmp_path: Path) -> None:
    fine, large = torch.full((8, 16), 2.0), torch.full((8, 16), 1.0)
    large[3, 5:9] = 1e6
    large[0, 0] = -1e6
    large[7, 15] = float("inf")
    stored = store(tmp_path, {"fine": (fine, cut(fine, 2)), "large": (large, cut(large, 2))})
    (tmp_path / "out").mkdir()
    plan = plan_for(stored, {"fine": "float16", "large": "float16"})
    result = write_plan(plan, tmp_path / "out", check_sums=True, workers=2, progress=lambda _: None)
    assert result.overflows == {"large": 5}


def test_nothing_of_the_filler_between_pieces_is_written(tmp_path: Path) -> None:
    zeros = torch.zeros(6, 7)
    pieces = [Piece(*box, gap=3, lead=2, tail=4) for box in grid([[0, 2, 6], [0, 3, 7]])]
    written = write(plan_for(store(tmp_path, {"w": (zeros, pieces)})), tmp_path / "out")
    assert FILLER not in elements(written["w"]).tobytes()


HEADER_CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "name": lambda header: header.update(c=header.pop("b")),
    "type": lambda header: header["b"].update(dtype="I32"),
    "shape": lambda header: header["b"].update(shape=[12, 8]),
    "swapped": lambda header: (
        header["a"].update(data_offsets=[384, 768]),
        header["b"].update(data_offsets=[0, 384]),
    )[0],
    "metadata": lambda header: header["__metadata__"].update(format="tf"),
    "more metadata": lambda header: header["__metadata__"].update(more="x"),
}


@pytest.mark.parametrize("change", HEADER_CHANGES)
def test_a_header_that_is_not_the_planned_one_is_refused(change: str, tmp_path: Path) -> None:
    """S18."""
    _, plan = two_weights(tmp_path, "copy")
    write(plan, tmp_path / "out")
    check_written(plan, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    HEADER_CHANGES[change](header)
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    path.write_bytes(len(data).to_bytes(8, "little") + data + content[size:])
    load_file(path)
    with pytest.raises(TargetError) as caught:
        check_written(plan, tmp_path / "out")
    assert str(caught.value) == (
        "model.safetensors: was written, but does not read back as it should; the disk or file system is not to be "
        "trusted: its header is not the one that was planned"
    )


@pytest.mark.parametrize(("right", "wrong"), [(b"[8,12]", b"[12,8]"), (b'"pt"', b'"tf"'), (b'"F32"', b'"I32"')])
def test_a_header_that_was_planned_wrong_is_refused(right: bytes, wrong: bytes, tmp_path: Path) -> None:
    """S18: what is written is compared with the tensors themselves too."""
    _, plan = two_weights(tmp_path, "copy")
    [file] = plan.files
    plan = replace(plan, files=(replace(file, header=file.header.replace(right, wrong)),))
    write(plan, tmp_path / "out")
    with pytest.raises(TargetError, match="its header is not the one that was planned"):
        check_written(plan, tmp_path / "out")


@pytest.mark.parametrize("damage", ["cut", "removed", "garbage"])
def test_an_output_file_that_cannot_be_read_back_is_refused(damage: str, tmp_path: Path) -> None:
    """S18."""
    _, plan = two_weights(tmp_path, "copy")
    write(plan, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    if damage != "removed":
        path.write_bytes(content[:-1] if damage == "cut" else b"\xff" * 100)
    with pytest.raises(TargetError) as caught:
        check_written(plan, tmp_path / "out")
    beginning = (
        "model.safetensors: was written, but does not read back as it should; the disk or file system is not to be "
        "trusted: "
    )
    assert str(caught.value).startswith(beginning)
    assert [problem.kind for problem in caught.value.problems] == ["bad-output"]


def test_an_index_that_does_not_read_back_is_refused(tmp_path: Path) -> None:
    """S18."""
    tensors = {name: random_tensor(torch.uint8, (100,)) for name in "ab"}
    stored = store(tmp_path, {name: (tensor, [whole(tensor)]) for name, tensor in tensors.items()})
    plan = plan_for(stored, max_shard_size=100)
    write(plan, tmp_path / "out")
    check_written(plan, tmp_path / "out")
    (tmp_path / "out" / INDEX_NAME).write_bytes(b"{}")
    with pytest.raises(TargetError) as caught:
        check_written(plan, tmp_path / "out")
    assert str(caught.value) == (
        "model.safetensors.index.json: was written, but does not read back as it should; the disk or file system is "
        "not to be trusted"
    )


MEASURE = """
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from pathlib import Path
from merger.dtypes import BY_NAME
from merger.plan import OutputTensor, plan_output
from merger.tensors import Chunk, Record, SourceFile, StoredTensor, row_major_strides
from merger.writer import check_written, write_plan

folder, how = Path(sys.argv[1]), sys.argv[2]

def source(name, num_bytes):
    path = folder / name
    with path.open("xb") as file:
        file.truncate(num_bytes)
    return SourceFile(path, num_bytes, path.stat().st_mtime_ns, None)

def tensor(name, shape, ranks, layout):
    chunks = []
    for rank in range(ranks):
        sizes = (shape[0], shape[1] // ranks) if layout == "columns" else (shape[0] // ranks, shape[1])
        offsets = (0, rank * sizes[1]) if layout == "columns" else (rank * sizes[0], 0)
        size = sizes[0] * sizes[1] * 4
        file = source(f"{name}_{rank}.bin", size)
        strides = (1, sizes[0]) if layout == "transposed" else row_major_strides(sizes)
        # The checksum of so many zeros is not known here; the reading of a record for it is bounded by the same block.
        chunks.append(Chunk(offsets, sizes, file, 0, strides, Record("data/0", 0, size, None)))
    return StoredTensor(name, BY_NAME["float32"], shape, tuple(chunks))

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024

most = 0
def watch(_):
    global most
    most = max(most, len(os.listdir("/proc/self/fd")))

def run(stored, name):
    plan = plan_output([OutputTensor(stored.fqn, stored.dtype, stored)], max_shard_size=1 << 40)
    (folder / name).mkdir()
    write_plan(plan, folder / name, check_sums=True, workers=2, progress=watch)
    return plan

os.fsync = lambda descriptor: None
ranks = 300 if how == "rows" else 4
run(tensor("small", (2400, 8), ranks, how), "warm")
before, most = peak(), 0
plan = run(tensor("large", (76800, 1024), ranks, how), "out")
written = (folder / "out" / "model.safetensors").stat().st_size
print(json.dumps({"grown": peak() - before, "open": most, "written": written}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("how", ["rows", "columns", "transposed"])
def test_memory_and_open_files_do_not_grow_with_what_is_written(how: str, tmp_path: Path) -> None:
    """L15: 315 MB; from 300 files where they are cut in rows."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path, how], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stderr == ""
    measured = json.loads(run.stdout)
    (tmp_path / "out" / "model.safetensors").unlink()
    assert measured["written"] > 300_000_000
    assert measured["grown"] < 60_000_000
    assert measured["open"] < 100


def test_a_tensor_of_many_small_chunks_is_written_with_few_open_files(tmp_path: Path) -> None:
    tensor = random_tensor(torch.int16, (200, 3))
    stored: Mapping[str, StoredTensor] = store(tmp_path, {"w": (tensor, rows(tensor, 200))})
    assert bits(write(plan_for(stored), tmp_path / "out")) == bits({"w": tensor})
