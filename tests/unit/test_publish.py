from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from merger import publish
from merger.errors import TargetError
from merger.publish import check_target, published
from tests.unit.stored import open_descriptors

ROOT = Path(__file__).parent.parent.parent
IS_ROOT = os.geteuid() == 0


@pytest.fixture(autouse=True)
def _no_leak() -> Iterator[None]:
    """No test leaves a file open, whatever goes wrong in it."""
    before = open_descriptors()
    yield
    assert open_descriptors() - before == set()


def fill(folder: Path, text: str = "new") -> None:
    (folder / "model.safetensors").write_text(text)
    (folder / "sub").mkdir()
    (folder / "sub" / "code.py").write_text(text)


def model(folder: Path, text: str = "old") -> Path:
    """A directory that looks like a model."""
    folder.mkdir(parents=True)
    fill(folder, text)
    return folder


def publish_to(target: Path, text: str = "new", *, overwrite: bool = False) -> None:
    with published(target, 100, overwrite=overwrite) as staging:
        fill(staging, text)


def text_of(folder: Path) -> str:
    """What the model at `folder` holds, which must be whole."""
    texts = {path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == [
        "model.safetensors",
        "sub",
        "sub/code.py",
    ]
    [text] = texts
    return text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(TargetError) as caught:
        call()
    return str(caught.value)


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


# What the target may be.


def test_a_target_that_does_not_exist_or_is_empty_may_be_written(tmp_path: Path) -> None:
    check_target(tmp_path / "a" / "b", overwrite=False, sources=())
    check_target(tmp_path, overwrite=False, sources=())


def test_a_target_that_holds_something_is_refused(tmp_path: Path) -> None:
    """S16."""
    for name in ["g", "f", "e", "d", "c", "b", "a"]:
        (tmp_path / name).touch()
    assert message_of(lambda: check_target(tmp_path, overwrite=False, sources=())) == (
        f"{tmp_path}: is not empty (it holds a, b, c, d, e and 2 more); choose another directory, or replace the whole "
        "of it with --overwrite"
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_a_model_may_be_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    check_target(tmp_path, overwrite=True, sources=())


def test_what_is_no_model_is_not_even_overwritten(tmp_path: Path) -> None:
    """S16: --overwrite with the home directory by mistake."""
    (tmp_path / "thesis.tex").touch()
    assert message_of(lambda: check_target(tmp_path, overwrite=True, sources=())) == (
        f"{tmp_path}: holds no model that could be replaced (it holds thesis.tex); choose another directory"
    )


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_no_target(overwrite: bool, tmp_path: Path) -> None:  # noqa: FBT001 - a parameter
    (tmp_path / "out").touch()
    assert message_of(lambda: check_target(tmp_path / "out", overwrite=overwrite, sources=())) == (
        f"{tmp_path}/out: is a file; choose a directory that does not exist yet"
    )


@pytest.mark.parametrize("target", [".", "ckpt", "ckpt/../ckpt", "link"])
def test_what_is_read_is_never_the_target_nor_in_it(target: str, tmp_path: Path) -> None:
    (tmp_path / "ckpt" / "actor").mkdir(parents=True)
    (tmp_path / "link").symlink_to("ckpt")
    call = lambda: check_target(tmp_path / target, overwrite=True, sources=(tmp_path / "ckpt" / "actor",))  # noqa: E731
    assert message_of(call) == (f"{tmp_path / target}: is, or contains, what is to be read; choose another directory")


def test_a_target_within_the_source_may_be_written(tmp_path: Path) -> None:
    check_target(tmp_path / "merged", overwrite=False, sources=(tmp_path,))


def test_a_mount_point_that_is_not_empty_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume of a container: nothing can be renamed to it, so nothing in it can be swapped out whole."""
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    fill(tmp_path)
    assert message_of(lambda: check_target(tmp_path, overwrite=True, sources=())) == (
        f"{tmp_path}: is a mount point that is not empty (it holds model.safetensors, sub), and no finished directory "
        "can take its place; choose a directory inside it, or empty it"
    )


# Publishing.


def test_the_target_appears_when_all_is_written(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with published(target, 100, overwrite=False) as staging:
        fill(staging)
        assert not target.exists()
        assert names(tmp_path) == [".out.lock", ".out.merging"]
    assert text_of(target) == "new"
    assert names(tmp_path) == ["out"]


def test_parents_are_made(tmp_path: Path) -> None:
    publish_to(tmp_path / "a" / "b" / "out")
    assert text_of(tmp_path / "a" / "b" / "out") == "new"
    assert names(tmp_path / "a" / "b") == ["out"]


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    publish_to(tmp_path / "out")
    assert text_of(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out"]


def test_a_model_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """S16: nothing of the old one stays."""
    (model(tmp_path / "out") / "stale.safetensors").write_text("old")
    publish_to(tmp_path / "out", overwrite=True)
    assert text_of(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("target", ["out", "out/", "./out", "sub/../out", "out/."])
def test_relative_targets_are_those_of_the_shell(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    publish_to(Path(target))
    assert text_of(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out", "sub"]


def test_the_current_directory_can_be_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    publish_to(Path())
    assert text_of(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_a_link_and_what_it_names_is_written(exists: bool, tmp_path: Path) -> None:  # noqa: FBT001
    if exists:
        model(tmp_path / "disk" / "model-7")
    (tmp_path / "latest").symlink_to("disk/model-7")
    publish_to(tmp_path / "latest", overwrite=True)
    assert (tmp_path / "latest").readlink() == Path("disk/model-7")
    assert text_of(tmp_path / "disk" / "model-7") == "new"
    assert names(tmp_path) == ["disk", "latest"]
    assert names(tmp_path / "disk") == ["model-7"]


def test_a_target_below_a_link_is_written_there(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "scratch").symlink_to("disk")
    publish_to(tmp_path / "scratch" / "out")
    assert text_of(tmp_path / "disk" / "out") == "new"
    assert names(tmp_path / "disk") == ["out"]


# Whatever ends a run.


class Stop(BaseException):
    """Stands for what a program does not catch."""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, Stop])
@pytest.mark.parametrize("existing", ["nothing", "empty", "model"])
def test_an_error_in_the_block_leaves_the_target_as_it_was(
    existing: str, error: type[BaseException], tmp_path: Path
) -> None:
    """L9."""
    target = tmp_path / "a" / "out"
    if existing == "empty":
        target.mkdir(parents=True)
    elif existing == "model":
        model(target)

    def call() -> None:
        with published(target, 100, overwrite=True) as staging:
            fill(staging)
            raise error

    with pytest.raises(error):
        call()
    if existing == "nothing":
        assert names(tmp_path) == []
    elif existing == "empty":
        assert (names(target.parent), names(target)) == (["out"], [])
    else:
        assert (names(target.parent), text_of(target)) == (["out"], "old")


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("error", [OSError(errno.EBUSY, "Device or resource busy"), KeyboardInterrupt()])
def test_a_failing_rename_leaves_the_old_model(
    step: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L9: the first moves the old model away, the second puts the new one in its place."""
    target = model(tmp_path / "out")
    real, calls = Path.rename, 0

    def rename(path: Path, to: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == step:
            raise error
        return real(path, to)

    monkeypatch.setattr(Path, "rename", rename)
    if isinstance(error, OSError):
        assert message_of(lambda: publish_to(target, overwrite=True)) == (
            f"{target}: cannot be written (Device or resource busy); nothing was left there; make room or choose "
            "another place"
        )
    else:
        with pytest.raises(KeyboardInterrupt):
            publish_to(target, overwrite=True)
    assert text_of(target) == "old"
    assert names(tmp_path) == ["out"]


KILLED = """
import os, signal, sys
from pathlib import Path
from merger.publish import published

target, renames = Path(sys.argv[1]), int(sys.argv[2])
real = Path.rename

def rename(path, to):
    global renames
    if renames == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    renames -= 1
    return real(path, to)

Path.rename = rename
with published(target, 100, overwrite=True) as staging:
    (staging / "model.safetensors").write_text("killed")
    if renames < 0:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("renames", [-1, 0, 1], ids=["while-writing", "before-renames", "between-renames"])
def test_after_a_killed_run_the_next_one_finds_the_old_model_and_succeeds(renames: int, tmp_path: Path) -> None:
    """L9."""
    target = model(tmp_path / "out")
    assert run_python(KILLED, target, renames).returncode == -signal.SIGKILL
    assert ".out.merging" in names(tmp_path)
    assert (tmp_path / "out").exists() == (renames < 1)
    # Without --overwrite the old model is kept, and put back where it was missing.
    assert message_of(lambda: publish_to(target)) == (
        f"{target}: is not empty (it holds model.safetensors, sub); choose another directory, or replace the whole of "
        "it with --overwrite"
    )
    assert text_of(target) == "old"
    assert names(tmp_path) == ["out"]
    publish_to(target, overwrite=True)
    assert text_of(target) == "new"
    assert names(tmp_path) == ["out"]


def test_a_run_killed_without_an_old_model_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    """L9."""
    target = tmp_path / "out"
    assert run_python(KILLED, target, 0).returncode == -signal.SIGKILL
    assert names(tmp_path) == [".out.lock", ".out.merging"]
    publish_to(target)
    assert text_of(target) == "new"
    assert names(tmp_path) == ["out"]


def test_an_old_model_is_put_back_where_somebody_made_an_empty_directory_meanwhile(tmp_path: Path) -> None:
    model(tmp_path / ".out.replaced")
    (tmp_path / "out").mkdir()
    message_of(lambda: publish_to(tmp_path / "out"))
    assert text_of(tmp_path / "out") == "old"
    assert names(tmp_path) == ["out"]


def test_what_a_run_killed_after_both_renames_left_is_removed(tmp_path: Path) -> None:
    model(tmp_path / ".out.replaced")
    model(tmp_path / "out", "finished")
    message_of(lambda: publish_to(tmp_path / "out"))
    assert text_of(tmp_path / "out") == "finished"
    assert names(tmp_path) == ["out"]


# Two writers.

HOLDER = """
import sys
from pathlib import Path
from merger.publish import published

with published(Path(sys.argv[1]), 100, overwrite=False) as staging:
    (staging / "model.safetensors").write_text("holder")
    print("holding", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that is writing `tmp_path / "out"` until it is sent a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / "out"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        yield process
        if process.poll() is None:
            process.communicate("\n")


def test_of_two_processes_one_writes_and_the_other_is_told(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    """S17."""
    target = tmp_path / "out"
    for overwrite in (False, True):
        assert message_of(lambda overwrite=overwrite: publish_to(target, overwrite=overwrite)) == (  # type: ignore[misc]
            f"{target}: is being written by another process; wait for it, or end it"
        )
    assert names(tmp_path) == [".out.lock", ".out.merging"]
    holder.communicate("\n", timeout=30)
    assert holder.returncode == 0
    assert (target / "model.safetensors").read_text() == "holder"
    assert names(tmp_path) == ["out"]


def test_two_targets_side_by_side_do_not_disturb_each_other(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    publish_to(tmp_path / "other")
    assert text_of(tmp_path / "other") == "new"
    holder.communicate("\n", timeout=30)
    assert names(tmp_path) == ["other", "out"]


def test_a_lock_of_a_killed_process_is_taken_over(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    """S17, L9."""
    holder.kill()
    holder.wait(30)
    publish_to(tmp_path / "out")
    assert text_of(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out"]


def test_a_run_that_finished_since_the_target_was_checked_is_not_overwritten(tmp_path: Path) -> None:
    """S17: both looked, one wrote, then the other comes."""
    target = tmp_path / "out"
    check_target(target, overwrite=False, sources=())
    publish_to(target, "first")
    assert message_of(lambda: publish_to(target, "second")) == (
        f"{target}: is not empty (it holds model.safetensors, sub); choose another directory, or replace the whole of "
        "it with --overwrite"
    )
    assert text_of(target) == "first"


def test_a_lock_file_removed_before_it_was_locked_is_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S17: its holder removes it, just between our opening and locking it; once it is made anew, once not."""
    lock = tmp_path / ".out.lock"
    real, calls = fcntl.flock, 0

    def flock(descriptor: int, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls <= 2:
            lock.unlink()
        if calls == 1:
            lock.touch()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with published(tmp_path / "out", 100, overwrite=False) as staging:
        fill(staging)
        assert calls == 3
        assert lock.exists()
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_where_the_file_system_has_no_locks_it_goes_on_without(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    publish_to(tmp_path / "out")
    assert text_of(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out"]


# Places that cannot be written.


def test_too_little_space_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L9."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=999))
    target = tmp_path / "a" / "out"

    def call() -> None:
        with published(target, 1_000_000, overwrite=False):
            raise AssertionError

    assert message_of(call) == (
        f"{target}: needs 1,000,000 bytes but only 999 are free there; make room, or choose another disk"
    )
    assert names(tmp_path) == []


@pytest.mark.parametrize("code", sorted(publish._UNWRITABLE))
@pytest.mark.parametrize("existing", [True, False])
def test_a_disk_that_fills_up_is_told_and_nothing_stays(existing: bool, code: int, tmp_path: Path) -> None:  # noqa: FBT001
    """L9."""
    target = model(tmp_path / "out") if existing else tmp_path / "out"

    def call() -> None:
        with published(target, 100, overwrite=True) as staging:
            fill(staging)
            raise OSError(code, os.strerror(code))

    assert message_of(call) == (
        f"{target}: cannot be written ({os.strerror(code)}); nothing was left there; make room or choose another place"
    )
    assert names(tmp_path) == (["out"] if existing else [])


def test_other_errors_in_the_block_are_passed_on_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"), published(tmp_path / "out", 1, overwrite=False):
        raise FileNotFoundError(errno.ENOENT, "gone")
    assert names(tmp_path) == []


LIMITED = """
import resource, sys
from pathlib import Path
from merger.errors import TargetError
from merger.publish import published
from merger.writer import write_bytes

resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    with published(Path(sys.argv[1]), 100, overwrite=False) as staging:
        write_bytes(staging / "fits", bytes(50_000))
        write_bytes(staging / "does not", bytes(50_001))
except TargetError as error:
    print(error)
"""


def test_a_limit_of_file_sizes_is_told(tmp_path: Path) -> None:
    """L9."""
    target = tmp_path / "a" / "out"
    run = run_python(LIMITED, target)
    assert (run.stdout, run.stderr) == (
        f"{target}: cannot be written (File too large); nothing was left there; make room or choose another place\n",
        "",
    )
    assert names(tmp_path) == []


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    place = tmp_path / "mount"
    place.mkdir()
    if not IS_ROOT or shutil.which("mount") is None:
        pytest.skip("only root may mount")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip("nothing can be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_real_disk_that_fills_up_is_told_and_nothing_stays(mount: Path) -> None:
    """L9."""
    target = mount / "out"

    def call() -> None:
        with published(target, 100, overwrite=False) as staging:
            (staging / "large").write_bytes(bytes(300_000))

    assert message_of(call) == (
        f"{target}: cannot be written (No space left on device); nothing was left there; make room or choose another "
        "place"
    )
    assert names(mount) == []


def test_a_real_disk_that_is_too_small_is_told(mount: Path) -> None:
    """L9."""
    call = lambda: published(mount / "out", 300_000, overwrite=False).__enter__()  # noqa: E731
    assert message_of(call) == (
        f"{mount}/out: needs 300,000 bytes but only 262,144 are free there; make room, or choose another disk"
    )


def test_an_empty_mount_point_is_filled_and_then_refused_but_a_directory_in_it_is_not(mount: Path) -> None:
    publish_to(mount)
    assert text_of(mount) == "new"
    assert message_of(lambda: publish_to(mount, overwrite=True)) == (
        f"{mount}: is a mount point that is not empty (it holds model.safetensors, sub), and no finished directory "
        "can take its place; choose a directory inside it, or empty it"
    )
    publish_to(mount / "out")
    assert text_of(mount / "out") == "new"


def test_a_mount_point_that_fills_up_is_told_and_emptied(mount: Path) -> None:
    """L9."""

    def call() -> None:
        with published(mount, 100, overwrite=False) as staging:
            (staging / "large").write_bytes(bytes(300_000))

    assert message_of(call) == (
        f"{mount}: cannot be written (No space left on device); nothing was left there; make room or choose another "
        "place"
    )
    assert names(mount) == []


def test_what_loaders_look_for_comes_into_a_mount_point_last(mount: Path) -> None:
    """L9: until then no loader takes for a model what a killed run leaves."""
    moved = []
    sys.addaudithook(lambda event, arguments: moved.append(Path(arguments[1])) if event == "os.rename" else None)
    with published(mount, 100, overwrite=False) as staging:
        for name in ("tokenizer.json", "model.safetensors.index.json", "config.json", "model-00001.safetensors", "a"):
            (staging / name).touch()
    assert [path.name for path in moved if path.parent == mount] == [
        "a",
        "model-00001.safetensors",
        "tokenizer.json",
        "model.safetensors.index.json",
        "config.json",
    ]


def test_a_second_writer_of_a_mount_point_is_told(mount: Path) -> None:
    """S17."""
    with published(mount, 100, overwrite=False) as staging:
        fill(staging)
        assert message_of(lambda: publish_to(mount)) == (
            f"{mount}: is being written by another process; wait for it, or end it"
        )
    assert text_of(mount) == "new"


def test_a_list_of_moved_names_leads_nowhere_else(mount: Path) -> None:
    (mount.parent / "precious").mkdir()
    (mount / ".merging.names").write_text("../precious\0..\0.\0/\0\0")
    publish_to(mount)
    assert text_of(mount) == "new"
    assert names(mount.parent) == ["mount", "precious"]


def test_a_read_only_disk_is_told(mount: Path) -> None:
    """L9."""
    subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
    for target in (mount / "out", mount / "a" / "out"):
        assert message_of(lambda target=target: publish_to(target)) == (  # type: ignore[misc]
            f"{target}: cannot be written (Read-only file system); nothing was left there; make room or choose another "
            "place"
        )


UNPRIVILEGED = """
import os, sys
from pathlib import Path
from merger.errors import TargetError
from merger.publish import check_target, published

if os.geteuid() == 0:
    os.setuid(65534)
for name in sys.argv[1:]:
    try:
        check_target(Path(name), overwrite=True, sources=())
        with published(Path(name), 100, overwrite=False):
            print("entered")
    except TargetError as error:
        print(error)
"""


def test_a_directory_that_may_not_be_written_is_told() -> None:
    """L9: beside it, below it, below one that may not be entered, and one that may not be listed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hidden").mkdir(mode=0o000)
        (folder / "unlisted").mkdir(mode=0o300)
        folder.chmod(0o555)
        targets = [folder / "out", folder / "a" / "out", folder / "hidden" / "out", folder / "unlisted"]
        run = run_python(UNPRIVILEGED, *targets)
        folder.chmod(0o700)
        (folder / "hidden").chmod(0o700)
        reason = "cannot be written (Permission denied); nothing was left there; make room or choose another place"
        assert run.stderr == ""
        assert run.stdout.splitlines() == [f"{target}: {reason}" for target in targets]
        assert names(folder) == ["hidden", "unlisted"]


def test_a_name_that_is_too_long_is_told_and_no_parents_stay(tmp_path: Path) -> None:
    """L9."""
    long = "x" * 300
    for target in (tmp_path / "a" / long, tmp_path / "a" / long / "out"):
        assert message_of(lambda target=target: publish_to(target)) == (  # type: ignore[misc]
            f"{target}: cannot be written (File name too long); nothing was left there; make room or choose another "
            "place"
        )
        assert names(tmp_path) == []


def test_a_parent_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for target, reason in (
        (tmp_path / "file" / "out", "File exists"),
        (tmp_path / "file" / "a" / "b", "Not a directory"),
    ):
        assert message_of(lambda target=target: publish_to(target)) == (  # type: ignore[misc]
            f"{target}: cannot be written ({reason}); nothing was left there; make room or choose another place"
        )
    assert names(tmp_path) == ["file"]


def test_everything_is_brought_to_disk_before_the_target_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append(f"{path.relative_to(tmp_path)} {'after' if (tmp_path / 'out').exists() else 'before'}")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    publish_to(tmp_path / "out")
    assert sorted(synced) == [
        ". after",
        ".out.merging before",
        ".out.merging/model.safetensors before",
        ".out.merging/sub before",
        ".out.merging/sub/code.py before",
    ]
