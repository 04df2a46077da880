"""Rank files read by children: the same answers as without them, whatever becomes of the children."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import merger
from merger.checks import Held
from merger.dtypes import BY_NAME
from merger.errors import Problem
from merger.sharding import Cut, Mesh, Placement
from merger.sources import rank_codec, rank_reading
from merger.sources.rank_part import Part, RankPart, read_rank_part
from merger.sources.rank_reading import read_rank_parts
from merger.tensors import Chunk, Record, SourceFile
from tests.unit.archives import ARCHIVES, CASES, IDS

FOUR_RANKS = ARCHIVES / "2.14.1" / "fsdp2_tp_uneven_w4"


def rank_files(folder: Path) -> dict[int, Path]:
    return {int(path.stem.rpartition("_")[2]): path for path in sorted(folder.glob("model_world_size_*.pt"))}


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that this process reads itself; children are started however little there is to read."""
    paths: list[Path] = []

    def read(path: Path, rank: int, shard_order: object) -> RankPart:
        paths.append(path)
        return read_rank_part(path, rank, shard_order)  # type: ignore[arg-type]  # as it was given

    monkeypatch.setattr(rank_reading, "read_rank_part", read)
    monkeypatch.setattr(rank_reading, "_MIN_PARTS_FOR_CHILDREN", 1)
    return paths


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Four ranks: the second cut short, the last a pickle that asks for os.system."""
    folder = tmp_path / "broken"
    shutil.copytree(FOUR_RANKS, folder)
    files = rank_files(folder)
    files[1].write_bytes(files[1].read_bytes()[:-500])
    data = files[3].read_bytes()
    start = data.index(b"collections\nOrderedDict")
    files[3].write_bytes(data[:start] + b"posix\nsystem".ljust(23, b"x") + data[start + 23 :])
    return folder


def python_that(folder: Path, does: str) -> str:
    """A program by the name of a Python that does something else."""
    path = folder / "python-of-another-kind"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return str(path)


# the way between processes


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_a_child_hands_over_is_what_it_read(case: Path) -> None:
    for rank, path in rank_files(case).items():
        part = read_rank_part(path, rank, None)
        assert rank_codec.decode(rank_codec.encode(part), path) == part


def test_all_that_a_part_can_hold_comes_over() -> None:
    file = SourceFile(Path("/run/x.pt"), 1 << 50, 1 << 60, 7, 0xFFFFFFFF)
    mesh = Mesh((2, 2), (3, 1, 2, 7), ("a", "b"))
    placements = (Placement("strided_shard", 1, split_factor=2), Placement("partial", reduce_op="avg"))
    held = Held(7, BY_NAME["bfloat16"], (8, 3), mesh, placements)
    unnamed = Held(7, BY_NAME["bfloat16"], (8, 3), Mesh((4,), mesh.ranks), placements[:1])
    plain = Held(7, BY_NAME["int64"], (), None, ())
    record, unchecked = Record("data/0", 1 << 45, 48, 0xFFFFFFFF), Record("data/1", 128, 8, None)
    pieces = (
        Chunk((0, 0), (2, 3), file, 1 << 45, (3, 1), record),
        Chunk((4, 0), (2, 3), file, (1 << 45) + 12, (3, 1), record),
    )
    part = RankPart(
        file,
        checksums=False,
        is_legacy=True,
        parts={
            "layers.0.w": Part(held, pieces),
            "layers.1.w": Part(held, ()),
            "layers.2.w": Part(unnamed, (), Problem("shard-order", "layers.2.w", "m\u00e9")),
            "n\u00e4me \udc80": Part(plain, (Chunk((), (), file, 128, (), unchecked),)),
            "zero": Part(plain, (Chunk((), (), file, 192, (), Record("data/2", 192, 8, 0)),)),
            "cut": Part(Held(7, BY_NAME["float16"], (3,), None, (), Cut((((0,), (3,)), ((3,), (0,))), (0, None))), ()),
            "step": Part(None, (), other="int"),
            "sharded": Part(None, (), Problem("sharded-tensor", "sharded", "m")),
        },
        problems=(Problem("wrong-rank", "x.pt", "m"),),
    )
    found = rank_codec.decode(rank_codec.encode(part), file.path)
    assert found == part
    assert list(found.parts) == list(part.parts)


# the same with any number of processes


@pytest.mark.parametrize("workers", [2, 3, 9])
def test_children_read_what_one_process_reads(workers: int, read_here: list[Path]) -> None:
    paths = rank_files(FOUR_RANKS)
    expected = [read_rank_part(path, rank, None) for rank, path in paths.items()]
    assert read_rank_parts(paths, None, workers=workers) == expected
    assert read_here == [paths[0]]


def test_few_tensors_are_read_without_children(read_here: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_reading, "_MIN_PARTS_FOR_CHILDREN", 1000)
    paths = rank_files(FOUR_RANKS)
    read_rank_parts(paths, None, workers=2)
    assert read_here == list(paths.values())


def test_one_worker_has_no_children(read_here: list[Path]) -> None:
    paths = rank_files(FOUR_RANKS)
    read_rank_parts(paths, None, workers=1)
    assert read_here == list(paths.values())


@pytest.mark.parametrize("shard_order", ["group", "coordinate"])
def test_children_are_told_how_pieces_were_dealt(shard_order: str, read_here: list[Path]) -> None:
    assert read_here == []
    alone, shared = (
        merger.inspect(FOUR_RANKS, shard_order=shard_order, workers=workers)  # type: ignore[arg-type]  # drawn as text
        for workers in (1, 2)
    )
    assert shared == alone


def test_faults_that_children_find_are_told_whole_and_in_the_order_of_ranks(
    broken: Path, read_here: list[Path]
) -> None:
    alone = merger.inspect(broken, workers=1).problems
    assert [(problem.kind, problem.where) for problem in alone] == [
        ("truncated", "model_world_size_4_rank_1.pt"),
        ("checksum", "model_world_size_4_rank_3.pt"),
    ]
    read_here.clear()
    assert merger.inspect(broken, workers=2).problems == alone
    assert read_here == [rank_files(broken)[0]]


def test_a_first_file_that_cannot_be_read_does_not_keep_the_others_from_children(
    broken: Path, read_here: list[Path]
) -> None:
    files = rank_files(broken)
    files[0].write_bytes(b"")
    alone = merger.inspect(broken, workers=1).problems
    read_here.clear()
    assert merger.inspect(broken, workers=2).problems == alone
    assert read_here == [files[0], files[1], files[2]]


def test_the_same_bytes_are_written_with_any_number_of_workers(tmp_path: Path, read_here: list[Path]) -> None:
    for workers in (1, 2, 4):
        merger.merge(FOUR_RANKS, tmp_path / str(workers), weights_only=True, workers=workers)
    one, two, four = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("1", "2", "4"))
    assert one == two == four
    assert len(read_here) == 4 + 1 + 1


# whatever becomes of them


@pytest.mark.parametrize(
    "does",
    [
        pytest.param("exit 1", id="ends at once"),
        pytest.param("echo a program that says something of its own", id="says something else"),
        pytest.param("cat >/dev/null; echo 'merger 000000001000'; echo half of it", id="says half of it"),
        pytest.param("head -c 100 >/dev/null; kill -9 $$", id="is killed"),
    ],
)
def test_what_a_child_does_not_answer_is_read_here(
    does: str, tmp_path: Path, read_here: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", python_that(tmp_path, does))
    paths = rank_files(FOUR_RANKS)
    found = read_rank_parts(paths, None, workers=2)
    assert read_here == list(paths.values())
    assert found == [read_rank_part(path, rank, None) for rank, path in paths.items()]


@pytest.mark.parametrize("executable", ["", "/nowhere/python3", "/bin/cat"])
def test_where_there_is_no_python_to_start_all_is_read_here(
    executable: str, read_here: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    paths = rank_files(FOUR_RANKS)
    read_rank_parts(paths, None, workers=2)
    assert read_here == list(paths.values())


def test_a_child_imports_neither_torch_nor_numpy_nor_pickle() -> None:
    imported = "import merger.sources.rank_reading, json; print(json.dumps(sorted(sys.modules)))"
    script = f"import sys; sys.path[:] = sys.argv[1:]; {imported}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script, *sys.path], capture_output=True, text=True, check=True, timeout=60
    )
    assert {"torch", "transformers", "numpy", "pickle"}.isdisjoint(json.loads(done.stdout))


def test_a_child_ends_when_nobody_reads_its_answers() -> None:
    """As when its parent was killed."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", rank_reading._CHILD, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.close()
    files = [(str(path), rank) for rank, path in rank_files(FOUR_RANKS).items()]
    child.stdin.write(json.dumps({"shard_order": None, "files": files}).encode())
    child.stdin.close()
    assert child.wait(timeout=60) != 0


def test_ctrl_c_ends_the_children(tmp_path: Path) -> None:
    """The children here would sleep for minutes."""
    said = tmp_path / "pids"
    program = python_that(tmp_path, f'cat >/dev/null; echo $$ >> "{said}"; exec sleep 300')
    script = (
        "import signal, sys\n"
        "from merger.cli import main\n"
        "from merger.sources import rank_reading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it\n"
        "rank_reading._MIN_PARTS_FOR_CHILDREN = 1\n"
        f"sys.executable = {program!r}\n"
        f"sys.exit(main(['inspect', {str(FOUR_RANKS)!r}, '--workers', '2']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as parent:
        try:
            deadline = time.monotonic() + 60
            while len(pids := said.read_text().split() if said.exists() else []) < 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            parent.send_signal(signal.SIGINT)
            _, printed = parent.communicate(timeout=60)
        finally:
            parent.kill()
    assert (parent.returncode, printed) == (130, "merger: interrupted; nothing half-made was left behind\n")
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
