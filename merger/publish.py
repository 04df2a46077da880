"""Makes an output directory appear whole or not at all.

Everything is written into a directory by the target, which becomes the target when it is complete (`places.py` says
how). A lock keeps a second writer away. Whatever ends a run, the target is what it was before or the finished result;
what a killed run leaves by it is removed by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from merger.errors import listed, refused_target, unwritable_target
from merger.places import content, place_of, publish, recover

# File systems that have no locks (some network ones) say one of these; then there is no protection to be had.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}
# What a full, limited or read-only file system says while files are being written.
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# What makes a directory one that a merge wrote, where it has no weights of its own.
_OF_A_MODEL = ("config.json", "lora_adapter")
# Folders in which trainers save a step.
_STEP_FOLDER = re.compile(r"(checkpoint|global_step|iter|step)[-_]?[0-9]+")


def check_target(target: Path, *, overwrite: bool, sources: tuple[Path, ...]) -> None:
    """Raises `TargetError` unless `target` may be written.

    It may where it does not exist or is an empty directory, and with `overwrite` where it holds a model. It may never
    be, or contain, one of the `sources` that are read.
    """
    with _naming(target):
        _check_target(target, overwrite=overwrite, sources=sources)


def _check_target(target: Path, *, overwrite: bool, sources: tuple[Path, ...]) -> None:
    resolved = target.resolve()
    for source in sources:
        if source.resolve().is_relative_to(resolved):
            raise refused_target(
                "target-is-source", target, "is, or contains, what is to be read; choose another directory"
            )
    if not target.exists():
        return
    if not target.is_dir():
        raise refused_target("target-is-file", target, "is a file; choose a directory that does not exist yet")
    place = place_of(resolved)
    names = content(place)
    if not names:
        return
    if place.is_mount:
        raise refused_target(
            "target-is-mount",
            target,
            f"is a mount point that is not empty (it holds {listed(names)}), and no finished directory can take its "
            "place; choose a directory inside it, or empty it",
        )
    if not overwrite:
        raise refused_target(
            "target-not-empty",
            target,
            f"is not empty (it holds {listed(names)}); choose another directory, or replace the whole of it with "
            "--overwrite",
        )
    if (kept := _training_state(target)) is not None:
        raise refused_target(
            "target-holds-training-state",
            target,
            f"holds more than a model ({kept}), which --overwrite would delete; choose another directory",
        )
    if not any(name in _OF_A_MODEL or name.endswith((".safetensors", ".bin")) for name in names):
        raise refused_target(
            "target-not-a-model",
            target,
            f"holds no model that could be replaced (it holds {listed(names)}); choose another directory",
        )


def _training_state(target: Path) -> str | None:
    """A file or folder of which a run could not be resumed, or a history be restored, if it were deleted."""
    for path in sorted(target.rglob("*")):
        is_state = path.suffix in (".pt", ".pth", ".distcp") or path.name in (".git", ".metadata")
        if is_state or (path.is_dir() and _STEP_FOLDER.fullmatch(path.name)):
            return str(path.relative_to(target))
    return None


def check_room(target: Path, num_bytes: int) -> None:
    """Raises `TargetError` unless the place where `target` would be made can be written and has `num_bytes` free."""
    with _naming(target):
        parent = place_of(Path(os.path.abspath(target))).parent  # noqa: PTH100 - as `published` has it
        while not parent.exists():
            parent = parent.parent
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    _check_space(parent, target, num_bytes)


@contextmanager
def published(target: Path, num_bytes: int, *, overwrite: bool) -> Iterator[Path]:
    """Yields an empty directory by `target`, which becomes `target` when the block ends without an error.

    An existing target is replaced as a whole, under the rules of `check_target`. Needs `num_bytes` of free space.
    Raises `TargetError` where the place cannot be written, is too small, or another process is writing the same target.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100 - not resolve(): a target that is a link stays one
    with _naming(target):
        if target.is_symlink():
            target = target.resolve()
    with _naming(target):
        place = place_of(target)
    created = _make_parents(place.parent, target)
    try:
        with _lock(place.lock, target):
            recover(place)
            # Again, now that nobody else writes here: another run may have finished since the caller looked.
            check_target(target, overwrite=overwrite, sources=())
            _check_space(place.parent, target, num_bytes)
            try:
                with _naming(target):
                    place.staging.mkdir()
                yield place.staging
                _sync_tree(place.staging)
                with _naming(target):
                    publish(place)
                _sync_directory(place.parent)
            finally:
                _surely(lambda: recover(place))
    except OSError as error:
        if error.errno in _UNWRITABLE:
            raise unwritable_target(target, error) from error
        raise
    finally:
        _remove_empty(created)


@contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Turns what the file system says into an error that names the target."""
    try:
        yield
    except OSError as error:
        raise unwritable_target(target, error) from error


def _surely(tidy: Callable[[], None]) -> None:
    """Tidies, and where Ctrl-C or SIGTERM comes amid it begins again: what is left is the size of a model."""
    try:
        tidy()
    except BaseException:
        tidy()
        raise


def _make_parents(parent: Path, target: Path) -> list[Path]:
    """Makes the directories above the target; returns those made, innermost first."""
    missing: list[Path] = []
    directory = parent
    try:
        while not directory.exists():
            missing.append(directory)
            directory = directory.parent
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _remove_empty(missing)
        raise unwritable_target(target, error) from error
    return missing


def _remove_empty(directories: list[Path]) -> None:
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()


@contextmanager
def _lock(path: Path, target: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file, which exists only as long as somebody holds or wants it."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise unwritable_target(target, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    raise refused_target(
                        "target-locked", target, "is being written by another process; wait for it, or end it"
                    ) from None
                raise
        # The holder before us may have removed the file between our opening and locking it: then it is not the lock.
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        _surely(lambda: path.unlink(missing_ok=True))
        os.close(descriptor)


def _check_space(parent: Path, target: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise refused_target(
            "no-space",
            target,
            f"needs {num_bytes:,} bytes but only {free:,} are free there; make room, or choose another disk",
        )


def _sync_tree(directory: Path) -> None:
    """Brings all files and directories to disk, so that after a power cut too the rename implies the content."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        else:
            _sync_directory(path)
    _sync_directory(directory)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
