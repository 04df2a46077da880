"""Reads the files of many ranks, in several processes where there is enough in them to pay for these.

A child is a Python of its own that is told paths and hands back records (see `rank_codec`). It is started as a command
rather than forked or spawned by `multiprocessing`: a fork would take over the locks of whatever threads the caller
has, and a spawn would run the caller's main module again. A child imports neither torch nor what the caller has
imported. It keeps nothing and writes nothing but its answers, so it ends with the pipe they go through, whatever
becomes of its parent. What a child does not answer is read here.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from merger.errors import ArchiveError, Problem
from merger.sharding import DealOrder
from merger.sources import rank_codec
from merger.sources.rank_part import RankPart, read_rank_part

# What a file was found to be, or what is wrong with it.
Answer: TypeAlias = RankPart | tuple[Problem, ...]

# Reading takes some 40 us for each tensor of each rank, and a child a tenth of a second to start: below this, in all,
# children gain nothing that would be noticed.
_MIN_PARTS_FOR_CHILDREN = 30_000

# Before each answer, with the number of its bytes: another program than ours says something else.
_HEAD = re.compile(rb"merger ([0-9]{12})\n")
_HEAD_BYTES = 20
_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from merger.sources.rank_reading import serve; serve()"


def read_rank_parts(paths: dict[int, Path], shard_order: DealOrder | None, *, workers: int) -> list[Answer]:
    """What the files of ranks are found to be, in the order of the ranks, read by at most `workers` processes.

    The answers are the same, and come in the same order, with any number of them.
    """
    todo = sorted(paths.items())
    answers: list[Answer] = []
    # How much there is to read is known from the first file that can be read.
    while todo and not (answers and isinstance(answers[-1], RankPart)):
        rank, path = todo.pop(0)
        answers.append(_read(path, rank, shard_order))
    num_parts = len(answers[-1].parts) * len(todo) if answers and isinstance(answers[-1], RankPart) else 0
    if workers > 1 and num_parts >= _MIN_PARTS_FOR_CHILDREN and _can_start():
        return answers + _read_in_children(todo, shard_order, min(workers, len(todo)))
    return answers + [_read(path, rank, shard_order) for rank, path in todo]


def serve() -> None:
    """What a child does: reads the files that it is told on stdin, and writes an answer for each to stdout."""
    # It makes no cycles, and looking for them takes a quarter of the time.
    gc.disable()
    request = json.load(sys.stdin.buffer)
    for raw_path, rank in request["files"]:
        answer = _read(Path(os.fsdecode(raw_path.encode("latin1"))), rank, request["shard_order"])
        data = _encoded(answer)
        sys.stdout.buffer.write(b"merger %012d\n" % len(data) + data)
        sys.stdout.buffer.flush()


def _read(path: Path, rank: int, shard_order: DealOrder | None) -> Answer:
    try:
        return read_rank_part(path, rank, shard_order)
    except ArchiveError as error:
        return error.problems


def _encoded(answer: Answer) -> bytes:
    """One byte that says which it is, and the answer."""
    if isinstance(answer, RankPart):
        return b"+" + rank_codec.encode(answer)
    return b"-" + json.dumps([(problem.kind, problem.where, problem.message) for problem in answer]).encode()


def _decoded(data: bytes, path: Path) -> Answer:
    if data[:1] == b"+":
        return rank_codec.decode(data[1:], path)
    return tuple(Problem(*fields) for fields in json.loads(data[1:]))


def _can_start() -> bool:
    """Whether `sys.executable` is a Python that runs a command: within another program it is that program."""
    return bool(sys.executable) and "python" in Path(sys.executable).name and not getattr(sys, "frozen", False)


def _read_in_children(
    files: Sequence[tuple[int, Path]], shard_order: DealOrder | None, num_children: int
) -> list[Answer]:
    """Child n reads every `num_children`-th file from the n-th on, so that all are busy to the end."""
    children = [_Child() for _ in range(num_children)]
    try:
        for number, child in enumerate(children):
            child.start(files[number::num_children], shard_order)
        answers = []
        for number, (rank, path) in enumerate(files):
            data = children[number % num_children].next_answer()
            answers.append(_read(path, rank, shard_order) if data is None else _decoded(data, path))
        return answers
    finally:
        for child in children:
            child.end()


class _Child:
    """A process that reads files; one that was not started, or dies, has no answers."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, files: Sequence[tuple[int, Path]], shard_order: DealOrder | None) -> None:
        """Starts the process, if that can be, with the files that it is to read."""
        # Bytes of paths as they are, whatever encoding either side takes them for.
        listed = [(os.fsencode(path).decode("latin1"), rank) for rank, path in files]
        request = json.dumps({"shard_order": shard_order, "files": listed}).encode()
        # Where the package was found through an import hook, no entry of the path leads to it.
        search = [*sys.path, str(Path(__file__).parents[2])]
        with suppress(OSError):
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own code
                [sys.executable, "-S", "-c", _CHILD, *search],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what fails there is done again here, and told then
                start_new_session=True,  # Ctrl-C is for the parent, which ends its children
            )
            assert self._process.stdin is not None
            self._process.stdin.write(request)
            self._process.stdin.close()

    def next_answer(self) -> bytes | None:
        """The answer to the next of the child's files, None where there is none."""
        if self._process is None:
            return None
        assert self._process.stdout is not None
        head = _HEAD.fullmatch(self._process.stdout.read(_HEAD_BYTES))
        data = self._process.stdout.read(int(head[1])) if head else b""
        if head is None or len(data) < int(head[1]):
            self.end()
            return None
        return data

    def end(self) -> None:
        """Ends the process, if it runs."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        with suppress(OSError), process:
            pass
