"""Names of tensors that differ in numbers only, as one: "layers.{0-31}.weight".

Pure. Only parts of a name that are numbers count, as in `layers.3.mlp`; not those within a part, as in `fc1`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TypeAlias

# The parts of a name between dots; None stands for a number.
Pattern: TypeAlias = tuple[str | None, ...]

# Layers and experts have fewer digits; what has more is no number of either.
_MAX_DIGITS = 6


def pattern_of(name: str) -> tuple[Pattern, tuple[int, ...]]:
    """A name without its numbers, and the numbers."""
    parts = name.split(".")
    are_numbers = [_is_number(part) for part in parts]
    pattern = tuple(None if is_number else part for part, is_number in zip(parts, are_numbers, strict=True))
    return pattern, tuple(int(part) for part, is_number in zip(parts, are_numbers, strict=True) if is_number)


def joint_name(pattern: Pattern, numbers: Sequence[tuple[int, ...]]) -> tuple[str, int]:
    """The name of tensors of one pattern, and how many tensors it could stand for.

    That is more than there are `numbers` where they are not all combinations of what stands in each place.
    """
    places = [sorted(set(place)) for place in zip(*numbers, strict=True)]
    texts = iter(places)
    parts = []
    for part in pattern:
        if part is not None:
            parts.append(part)
            continue
        found = next(texts)
        parts.append(str(found[0]) if len(found) == 1 else f"{{{runs_text(found)}}}")
    return ".".join(parts), prod(len(place) for place in places)


def runs_text(numbers: Iterable[int]) -> str:
    """Numbers with runs of three and more shortened: "0-3, 7, 9"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts: list[str] = []
    for low, high in runs:
        parts += [f"{low}-{high}"] if high - low > 1 else [str(number) for number in range(low, high + 1)]
    return ", ".join(parts)


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal() and len(part) <= _MAX_DIGITS and (part == "0" or part[0] != "0")
