"""Fixtures for all tests: real ranks, and checkpoints that they made, each made once per test run."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import pytest

from fixtures import architectures
from fixtures.cases import CASES, copy_with_fault, make, writable_copy
from fixtures.elsewhere import excuse_for, too_old_for
from fixtures.ranks import RankFailure, RankPool
from tests.fuzzing import pytest_pyfunc_call, pytest_terminal_summary

__all__ = ["pytest_pyfunc_call", "pytest_terminal_summary"]  # hooks, which pytest looks for here

P = ParamSpec("P")
T = TypeVar("T")


@pytest.fixture(scope="session", autouse=True)
def _no_forced_colour() -> Iterator[None]:
    """What the command prints into a pipe has no colour, though whoever runs the tests may want theirs in colour."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FORCE_COLOR", raising=False)
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Real ranks, one pool per test process; they start when a test first runs something on them."""
    with _Pool(limit=300.0) as ranks:  # other test processes may have the cores
        yield ranks


class _Pool(RankPool):
    """Skips a test where an older torch than the pinned one cannot make what it asks for, with what torch said."""

    def run(
        self, world_size: int, body: Callable[Concatenate[int, int, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        try:
            return super().run(world_size, body, *args, **kwargs)
        except RankFailure as error:
            if reason := excuse_for(error):
                pytest.skip(reason)
            raise


@pytest.fixture(scope="session")
def checkpoint(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(case)` is a folder with `checkpoint/` and `truth/`: made once for all workers, and read-only."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made-cases"
    root.mkdir(exist_ok=True)

    def made(name: str) -> Path:
        case, out, partial = CASES[name], root / name, root / f"{name}.partial"
        assert "large" not in case.marks, f"{name} takes gigabytes, which a machine may have no room for"
        if reason := too_old_for(case):
            pytest.skip(reason)
        with _locked(root / f"{name}.lock"):
            if not out.exists():
                shutil.rmtree(partial, ignore_errors=True)
                if case.base is None:
                    make(case, partial, pool)
                else:
                    copy_with_fault(made(case.base), case, partial)
                for path in partial.rglob("*"):
                    if path.is_file():
                        path.chmod(0o444)
                partial.rename(out)
        return out

    return made


@pytest.fixture(scope="session")
def architecture_shards(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of every architecture of `fixtures.architectures`: made once for all workers."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    out, partial = root / "architectures", root / "architectures.partial"
    with _locked(root / "architectures.lock"):
        if not out.exists():
            shutil.rmtree(partial, ignore_errors=True)
            architectures.make(pool, partial)
            partial.rename(out)
    return out


@pytest.fixture(scope="session")
def copy_of(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`copy_of(case)` is a fresh copy of what `checkpoint(case)` gives, to be edited by one test."""

    def copied(name: str) -> Path:
        return writable_copy(checkpoint(name), tmp_path_factory.mktemp("copy") / name)

    return copied


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock against the other worker processes, until the block ends or this process does."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
