"""Whatever ends a merge, at whatever moment: the target is never half-made, and the next run succeeds and tidies up.

Merges run in processes of their own, so that they can be killed. Some are killed from outside at random moments; others
end themselves, at a chosen one of the steps that change the file system, which Python's audit events tell.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Literal, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file

import merger

ROOT = Path(__file__).parents[2]
Before: TypeAlias = Literal["nothing", "a model"]

# Runs the command line, and sends itself signal NUMBER when it is about to take step STEP of those that change the file
# system, or when a thread that copies opens its source (STEP is "copying").
STEPPED = """
import os, signal, sys, threading

number, wanted = int(sys.argv[1]), sys.argv[2]
sys.dont_write_bytecode = True
from merger.cli import main

CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree"}
steps = 0
sent = False

def watch(event, arguments):
    global steps, sent
    is_open = event == "open"
    if wanted == "copying":
        now = is_open and threading.current_thread() is not threading.main_thread()
    elif event in CHANGES or (is_open and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)):
        steps += 1
        now = str(steps) == wanted
    else:
        now = False
    if now and not sent:
        sent = True
        os.kill(os.getpid(), number)

sys.addaudithook(watch)
sys.exit(main(sys.argv[3:]))
"""

# The same, where the target is said to be a mount point.
MOUNTED = STEPPED.replace(
    "from merger.cli import main",
    "from pathlib import Path\nfrom merger.cli import main\nPath.is_mount = lambda path: path.name == 'out'",
)

LIMITED = """
import resource, sys

resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
from merger.cli import main

sys.exit(main(sys.argv[1:]))
"""


def started(
    *arguments: str | int | Path, code: str | None = None, prefix: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    program = ("-c", code) if code else ("-m", "merger")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*prefix, sys.executable, *program, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of a process, and what it wrote to stderr."""
    _, errors = process.communicate()
    return process.returncode, errors


def saved(folder: Path, num_rows: int) -> Path:
    """A checkpoint of one rank, of eight tensors of 1000 columns."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(num_rows)
    state = {f"layers.{i}.weight": torch.randn(num_rows, 1000, generator=generator) for i in range(8)}
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of 60 MB."""
    checkpoint = saved(tmp_path_factory.mktemp("large") / "checkpoint", 1875)
    yield checkpoint
    shutil.rmtree(checkpoint)


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """Where to merge to; emptied afterwards, since pytest would keep gigabytes of models."""
    folder = tmp_path / "folder"
    folder.mkdir()
    yield folder / "out"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("small") / "checkpoint", 1)


OLD = {"old": torch.arange(1000.0)}


def prepared(out: Path, before: Before) -> list[str | Path]:
    """Makes `out` what it is to be before the merge; returns the options that the merge needs then."""
    shutil.rmtree(out, ignore_errors=True)
    if before == "nothing":
        return ["--weights-only"]
    out.mkdir()
    (out / "config.json").write_text("{}")
    save_file(OLD, out / "model.safetensors")
    return ["--weights-only", "--overwrite"]


@functools.cache
def truth(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = torch.load(checkpoint / "model_world_size_1_rank_0.pt", weights_only=True)
    return tensors


def is_whole(out: Path, names: set[str], tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a directory holds these files and, in one of them, these tensors, bit for bit."""
    if {path.name for path in out.iterdir()} != names:
        return False
    found = load_file(out / "model.safetensors")
    return found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def state_of(out: Path, checkpoint: Path) -> Literal["absent", "old", "new", "half-made"]:
    if not out.exists():
        return "absent"
    if is_whole(out, {"merger_report.json", "model.safetensors"}, truth(checkpoint)):
        return "new"
    return "old" if is_whole(out, {"config.json", "model.safetensors"}, OLD) else "half-made"


def assert_next_run_succeeds(checkpoint: Path, out: Path) -> None:
    merger.merge(checkpoint, out, weights_only=True, overwrite=True)
    assert state_of(out, checkpoint) == "new"
    assert names_in(out.parent) == {"out"}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def duration(large: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """How many seconds a whole merge of the large checkpoint takes on this machine, now."""
    out = tmp_path_factory.mktemp("measured") / "out"
    begin = time.monotonic()
    assert ended(started("merge", large, out, "--weights-only")) == (0, "")
    end = time.monotonic()
    shutil.rmtree(out)
    return end - begin


@pytest.mark.parametrize("before", ["nothing", "a model"])
@pytest.mark.parametrize("moment", range(10))
def test_a_merge_that_is_killed_at_a_random_moment_leaves_no_half_made_target(
    large: Path, duration: float, out: Path, before: Before, moment: int
) -> None:
    """L9: tenths of a whole run, each with its own random moment; the last may come after the end."""
    seed = f"{before} {moment}"
    delay = duration * 1.2 * (moment + random.Random(seed).random()) / 10
    process = started("merge", large, out, *prepared(out, before))
    time.sleep(delay)
    process.kill()
    code, _ = ended(process)
    found = state_of(out, large)
    told = f"seed {seed!r}: killed after {delay:.3f} of {duration:.3f} s: exit {code}, {found}, {names_in(out.parent)}"
    assert code in (-signal.SIGKILL, 0), told
    assert found in (("absent", "new") if before == "nothing" else ("absent", "old", "new")), told
    assert code != 0 or found == "new", told
    assert_next_run_succeeds(large, out)


@pytest.mark.parametrize("before", ["nothing", "a model"])
def test_a_merge_that_is_killed_before_any_of_its_steps_leaves_no_half_made_target(
    small: Path, out: Path, before: Before
) -> None:
    """L9: every change of the file system, the renames among them, once as the one that never came."""
    found = []
    for step in count(1):
        options = prepared(out, before)
        code, errors = ended(started(signal.SIGKILL, step, "merge", small, out, *options, code=STEPPED))
        found.append(state_of(out, small))
        assert_next_run_succeeds(small, out)
        if code == 0:
            break
        assert (code, errors) == (-signal.SIGKILL, ""), step
    # Once the new model is there, it stays; the old one is away for one step at most.
    order = ["absent", "new"] if before == "nothing" else ["old", "absent", "new"]
    assert list(dict.fromkeys(found)) == order
    assert found == sorted(found, key=order.index)
    assert before == "nothing" or found.count("absent") == 1
    assert len(found) > 8


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_merge_into_a_mount_point_that_ends_before_any_of_its_steps_never_looks_finished(
    small: Path, out: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """L9: the volume of a container, to which no directory can be renamed; what loaders look for comes last."""
    monkeypatch.setattr(Path, "is_mount", lambda path: path == out)
    options = ("--weights-only", "--max-shard-size", "20000")
    index = "model.safetensors.index.json"
    files = {index, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "merger_report.json"}
    found = []
    for step in count(1):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        code, _ = ended(started(number, step, "merge", small, out, *options, code=MOUNTED))
        found.append(names_in(out))
        assert index not in found[-1] or files <= found[-1], step
        assert number == signal.SIGKILL or found[-1] in (set(), files), step
        if index not in found[-1] or ".merging.names" in found[-1]:
            merger.merge(small, out, weights_only=True, max_shard_size=20000)
        assert names_in(out) - files <= {".merging", ".merging.lock"}, step
        assert {name for path in out.glob("*.safetensors") for name in load_file(path)} == truth(small).keys()
        if code == 0:
            break
    assert len(found) > 12
    assert number == signal.SIGINT or any(names & files and index not in names for names in found)


SIGNALS = [
    (signal.SIGINT, (130, "merger: interrupted; nothing half-made was left behind\n")),
    (signal.SIGTERM, (143, "merger: terminated; nothing half-made was left behind\n")),
]


@pytest.mark.parametrize(("number", "result"), SIGNALS, ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("before", ["nothing", "a model"])
def test_a_merge_that_is_interrupted_amid_copying_says_so_and_leaves_nothing(
    large: Path, out: Path, before: Before, number: int, result: tuple[int, str]
) -> None:
    """L9."""
    options = prepared(out, before)
    assert ended(started(number, "copying", "merge", large, out, *options, code=STEPPED)) == result
    assert state_of(out, large) == ("absent" if before == "nothing" else "old")
    assert names_in(out.parent) == (set() if before == "nothing" else {"out"})


def test_a_merge_that_is_interrupted_before_any_of_its_steps_leaves_nothing_beside_the_target(
    small: Path, out: Path
) -> None:
    """L9: during the swap and the tidying too."""
    found = []
    for step in count(1):
        options = prepared(out, "a model")
        result = ended(started(signal.SIGINT, step, "merge", small, out, *options, code=STEPPED))
        found.append(state_of(out, small))
        assert names_in(out.parent) == {"out"}, step
        if result == (0, ""):
            break
        assert result == SIGNALS[0][1], step
    # Between the two renames, the old one is put back.
    assert list(dict.fromkeys(found)) == ["old", "new"]
    assert len(found) > 8


@pytest.mark.parametrize("before", ["nothing", "a model"])
def test_a_limit_on_the_size_of_files_is_one_message_and_leaves_nothing(large: Path, out: Path, before: Before) -> None:
    """L9."""
    options = prepared(out, before)
    code, errors = ended(started("merge", large, out, *options, code=LIMITED))
    assert code == 2
    assert errors == (
        f"merger: error: {out}: cannot be written (File too large); nothing was left there; make room or choose "
        "another place\n"
    )
    assert state_of(out, large) == ("absent" if before == "nothing" else "old")
    assert names_in(out.parent) == (set() if before == "nothing" else {"out"})


def bound_by_permissions() -> tuple[str, ...]:
    """What to put before a command so that the permissions of files bind it; they do not bind root."""
    if os.geteuid() != 0:
        return ()
    without = ("setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override")
    if shutil.which("setpriv") is None or subprocess.run([*without, "true"], check=False).returncode != 0:
        pytest.skip("permissions do not bind root, and it cannot give up its rights here")
    return without


@pytest.mark.parametrize("target", ["out", "above/out"])
def test_a_read_only_parent_is_one_message(small: Path, tmp_path: Path, target: str) -> None:
    """L9."""
    prefix = bound_by_permissions()
    parent = tmp_path / "read-only"
    parent.mkdir(mode=0o555)
    code, errors = ended(started("merge", small, parent / target, "--weights-only", prefix=prefix))
    assert code == 2
    assert errors == (
        f"merger: error: {parent / target}: cannot be written (Permission denied); nothing was left there; make room "
        "or choose another place\n"
    )
    assert names_in(parent) == set()


@pytest.mark.parametrize("before", ["nothing", "a model"])
def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    small: Path, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, before: Before
) -> None:
    """L9: one byte short is refused, and just enough is enough."""
    merger.merge(small, tmp_path / "measured", weights_only=True)
    needed = sum(path.stat().st_size for path in (tmp_path / "measured").iterdir())
    prepared(out, before)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(merger.TargetError) as caught:
        merger.merge(small, out, weights_only=True, overwrite=True)
    assert str(caught.value) == (
        f"{out}: needs {needed:,} bytes but only {needed - 1:,} are free there; make room, or choose another disk"
    )
    assert state_of(out, small) == ("absent" if before == "nothing" else "old")
    assert names_in(out.parent) == (set() if before == "nothing" else {"out"})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    assert_next_run_succeeds(small, out)
