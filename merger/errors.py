"""The ways in which a checkpoint, a request or a target can be wrong.

A fault is data first: a `Problem` says of what kind it is, where it was found, and what was found, expected
and to be done. Checks return lists of them; the public functions raise them all at once, as one `MergerError`.
Every error that a user can cause derives from `MergerError`; `assert` is for mistakes of our own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One fault.

    `kind` is a stable slug for programs, such as "missing-ranks"; `where` names the file, rank or tensor (it may be
    empty); `message` says in a sentence or two what was found, what was expected and what to do.
    """

    kind: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class MergerError(ValueError):
    """What went wrong, as one or more problems; the text of the error lists all of them."""

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        assert self.problems, "an error needs a problem"
        super().__init__(_render(self.problems))

    def __reduce__(self) -> tuple[type[MergerError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class NotACheckpointError(MergerError):
    """The folder holds no checkpoint that can be read, or one of another format."""


class ArchiveError(MergerError):
    """A file is not a whole and honest `torch.save` archive."""


class UnsafePickleError(ArchiveError):
    """A pickle asks for something that is not on the list of known inert classes; nothing of it was run."""


class CheckpointError(MergerError):
    """The files can be read one by one, but together they are not one whole checkpoint."""


class ChecksumError(MergerError):
    """Bytes on disk are not the bytes that were saved."""


class ModelError(MergerError):
    """The tensors are not those of the architecture, or the architecture cannot be told."""


class TargetError(MergerError):
    """The output cannot be written where it was asked for."""


class UploadError(MergerError):
    """The model could not be uploaded; it lies complete where it was merged to."""


class Faults:
    """Gathers the problems of several checks, each in a `with` block of its own, to raise them all at once."""

    def __init__(self) -> None:
        self._errors: list[MergerError] = []

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, MergerError):
            self._errors.append(error)
        return isinstance(error, MergerError)

    def raise_all(self) -> None:
        """Raises what was gathered, if anything: as the kind that all of it is, else as a plain `MergerError`."""
        if not self._errors:
            return
        kinds = {type(error) for error in self._errors}
        kind = kinds.pop() if len(kinds) == 1 else MergerError
        raise kind([problem for error in self._errors for problem in error.problems])


def listed(items: Iterable[object], most: int = 5) -> str:
    """Names and the like for people: the first few, and how many more there are.

    >>> listed("abc", most=2)
    'a, b and 1 more'
    """
    found = [str(item) for item in items]
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def refused_target(kind: str, target: Path, message: str) -> TargetError:
    """The error of a target that is not to be written, or cannot be."""
    return TargetError(Problem(kind, str(target), message))


def unwritable_target(target: Path, error: OSError) -> TargetError:
    """What the file system said of a target, for people; nothing may have been left there."""
    reason = error.strerror or str(error)
    message = f"cannot be written ({reason}); nothing was left there; make room or choose another place"
    return refused_target("target-unwritable", target, message)


def _render(problems: tuple[Problem, ...]) -> str:
    if len(problems) == 1:
        return str(problems[0])
    lines = [f"{len(problems)} problems:", *(f"  - {problem}" for problem in problems)]
    return "\n".join(lines)
