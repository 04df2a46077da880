"""Fixtures for all tests: real ranks, and checkpoints that they made, each made once per test run."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

from fixtures.cases import CASES, copy_with_fault, make, writable_copy
from fixtures.ranks import RankPool

# CI asks the same questions every time; `--hypothesis-profile fuzz` asks new ones, for as long as it is given. What
# fails then is kept in .hypothesis and tried first by the next such run. No deadlines: a core that is shared with other
# ranks says nothing about the code.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60)
settings.register_profile("fuzz", deadline=None, max_examples=200, print_blob=True)
settings.load_profile("ci")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Repeats a property, with a new seed each time, until its share of MERGER_FUZZ_MINUTES is over or it fails."""
    begin = time.monotonic()
    result = yield
    minutes = float(os.environ.get("MERGER_FUZZ_MINUTES", "0"))
    if minutes and _is_property(pyfuncitem):
        # Every worker has its part of the properties to run, and all of the minutes to run them in.
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        share = 60 * minutes * workers / sum(map(_is_property, pyfuncitem.session.items))
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        while time.monotonic() - begin < share:
            pyfuncitem.obj(**arguments)
    return result


def _is_property(item: pytest.Item) -> bool:
    return item.get_closest_marker("hypothesis") is not None


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Real ranks, one pool per test process; they start when a test first runs something on them."""
    with RankPool() as ranks:
        yield ranks


@pytest.fixture(scope="session")
def checkpoint(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(case)` is a folder with `checkpoint/` and `truth/`: made once for all workers, and read-only."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made-cases"
    root.mkdir(exist_ok=True)

    def made(name: str) -> Path:
        case, out, partial = CASES[name], root / name, root / f"{name}.partial"
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
