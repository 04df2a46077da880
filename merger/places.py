"""Where an output is built, and how what was built becomes the target.

Beside its target it is renamed as a whole. A mount point cannot be renamed to, so in an empty one the output is built
inside, and its entries are moved up one by one, what loaders look for last.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

# Without these a directory is no model to any loader, so they come when all the rest is there.
_LAST = ("model.safetensors.index.json", "config.json")


@dataclass(frozen=True, slots=True)
class Place:
    """A target and what lies by it while it is made.

    `staging` is the directory to build in, `lock` the file whose holder is the only writer, `parent` the directory that
    holds both. `aside` is where an old model waits for the moment between two renames; in a mount point, the file that
    lists what is being moved up.
    """

    target: Path
    parent: Path
    staging: Path
    lock: Path
    aside: Path
    is_mount: bool


def place_of(target: Path) -> Place:
    """How `target` is made: inside itself where it is a mount point, else beside."""
    if target.is_mount():
        staging, lock, aside = (target / f".merging{end}" for end in ("", ".lock", ".names"))
        return Place(target, target, staging, lock, aside, is_mount=True)
    staging, lock, aside = (target.parent / f".{target.name}.{end}" for end in ("merging", "lock", "replaced"))
    return Place(target, target.parent, staging, lock, aside, is_mount=False)


def content(place: Place) -> list[str]:
    """What lies in an existing target, by name, without what a run that did not end has left there."""
    names = {path.name for path in place.target.iterdir()}
    if place.is_mount:
        names -= {place.staging.name, place.lock.name, place.aside.name, *_moved(place)}
    return sorted(names)


def publish(place: Place) -> None:
    """Makes what was built the target."""
    if place.is_mount:
        _move_up(place)
        return
    if place.target.exists() and content(place):
        place.target.rename(place.aside)
    place.staging.rename(place.target)


def recover(place: Place) -> None:
    """Removes what a run that did not end left here, and puts back an old model that it had moved away."""
    if place.is_mount:
        for name in _moved(place):
            _remove(place.target / name)
        place.aside.unlink(missing_ok=True)
    shutil.rmtree(place.staging, ignore_errors=True)
    if not place.is_mount and place.aside.exists():
        if place.target.exists() and content(place):
            shutil.rmtree(place.aside, ignore_errors=True)
        else:
            place.aside.rename(place.target)


def _move_up(place: Place) -> None:
    names = sorted(
        (path.name for path in place.staging.iterdir()),
        key=lambda name: (_LAST.index(name) if name in _LAST else -1, name),
    )
    with place.aside.open("x", encoding="utf-8", errors="surrogateescape") as file:
        # Each with an end, and one more, so that a list that was cut is known as such: then nothing had been moved.
        file.write("".join(f"{name}\0" for name in (*names, "")))
        file.flush()
        os.fsync(file.fileno())
    for name in names:
        (place.staging / name).rename(place.target / name)
    place.aside.unlink()


def _moved(place: Place) -> list[str]:
    """The names of what a run that did not end had moved, or was about to move, up into a mount point."""
    if not place.aside.exists():
        return []
    names = place.aside.read_text(encoding="utf-8", errors="surrogateescape").split("\0")
    is_whole = names[-2:] == ["", ""]
    # Whoever may write there could have written this list: it never leads out of the target.
    return [name for name in names[:-2] if Path(name).name == name != ".."] if is_whole else []


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
