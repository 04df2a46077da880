"""Makes one output file appear whole or not at all: for what is no model directory, which `publish` makes."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from merger.errors import TargetError, refused_target, unwritable_target


def check_file(target: Path, *, overwrite: bool) -> None:
    """Raises `TargetError` unless `target` may be written: where no file is, or with `overwrite` where one is."""
    try:
        if target.is_dir():
            raise refused_target("target-is-directory", target, "is a directory; give the name of a file")
        if os.path.lexists(target) and not overwrite:
            raise _exists(target)
        parent = _real(target).parent
        if not parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"there is no directory {parent}")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise unwritable_target(target, error) from error


def write_file(target: Path, content: bytes, *, overwrite: bool) -> None:
    """Writes `content` beside `target`, brings it to disk and gives it its name. Raises `TargetError`."""
    check_file(target, overwrite=overwrite)
    real = _real(target)
    partial = real.parent / f".merger-{os.getpid()}.partial"
    try:
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if overwrite:
                partial.replace(real)
            else:
                _rename_to_new(partial, real)
        finally:
            partial.unlink(missing_ok=True)
    except FileExistsError as error:
        raise _exists(target) from error
    except OSError as error:
        raise unwritable_target(target, error) from error


def _real(target: Path) -> Path:
    """Where the file lies: a link stays one."""
    return Path(os.path.realpath(target))


def _rename_to_new(partial: Path, real: Path) -> None:
    """A rename that replaces nothing, not even what came to be since we looked: a link and an unlink, where it can."""
    with suppress(PermissionError):  # what file systems without hard links say
        os.link(partial, real)
        return
    partial.rename(real)


def _exists(target: Path) -> TargetError:
    return refused_target("target-exists", target, "exists; choose another name, or replace it with --overwrite")
