"""`merger.single_file`: one output file, whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from merger.errors import TargetError
from merger.single_file import check_file, write_file


def refusal(target: Path, *, overwrite: bool = False) -> str:
    with pytest.raises(TargetError) as caught:
        write_file(target, b"new", overwrite=overwrite)
    return str(caught.value)


def test_a_file_is_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_file(tmp_path / "a.svg", b"content", overwrite=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.svg": b"content"}


def test_it_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "a.svg", b"", overwrite=False)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.svg").stat().st_mode) == 0o640


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b"old"), lambda path: path.symlink_to("nowhere")])
def test_what_exists_is_refused_and_left_alone(tmp_path: Path, make: object) -> None:
    assert callable(make)
    target = tmp_path / "a.svg"
    make(target)
    assert refusal(target) == f"{target}: exists; choose another name, or replace it with --overwrite"
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]
    assert target.is_symlink() or target.read_bytes() == b"old"


def test_what_exists_is_replaced_where_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_bytes(b"old")
    write_file(tmp_path / "a.svg", b"new", overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.svg": b"new"}


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real.svg").write_bytes(b"old")
    (tmp_path / "a.svg").symlink_to("real.svg")
    write_file(tmp_path / "a.svg", b"new", overwrite=True)
    assert (tmp_path / "a.svg").is_symlink()
    assert (tmp_path / "real.svg").read_bytes() == b"new"


def test_a_file_that_came_to_be_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.svg"
    sync = os.fsync

    def slow_disk(descriptor: int) -> None:
        target.write_bytes(b"of another")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_disk)
    assert refusal(target) == f"{target}: exists; choose another name, or replace it with --overwrite"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.svg": b"of another"}


def test_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.svg").mkdir()
    assert refusal(tmp_path / "a.svg", overwrite=True) == f"{tmp_path}/a.svg: is a directory; give the name of a file"


def test_a_place_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "none" / "a.svg"
    assert refusal(target) == (
        f"{target}: cannot be written (there is no directory {tmp_path}/none); nothing was left there; make room or "
        "choose another place"
    )


def test_a_full_disk_leaves_what_was_there() -> None:
    """L9: on the device that is always full."""
    target = Path("/dev/full")
    assert refusal(target / "a.svg") == (
        "/dev/full/a.svg: cannot be written (there is no directory /dev/full); nothing was left there; make room or "
        "choose another place"
    )


def test_a_file_that_may_not_grow_leaves_what_was_there(tmp_path: Path) -> None:
    """L9: the limit on the size of files, which says EFBIG where a full disk says ENOSPC."""
    import resource
    import signal

    (tmp_path / "a.svg").write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, limits[1]))
    try:
        message = refusal(tmp_path / "a.svg", overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert message == (
        f"{tmp_path}/a.svg: cannot be written (File too large); nothing was left there; make room or choose another "
        "place"
    )
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.svg": b"old"}


def test_the_look_beforehand_writes_nothing(tmp_path: Path) -> None:
    check_file(tmp_path / "a.svg", overwrite=False)
    assert list(tmp_path.iterdir()) == []
