"""The shapes that a picture consists of. Pure data: positions in pixels, from the upper left corner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias
from unicodedata import east_asian_width

from merger.picture.palette import Paint

# The width of a letter of a monospaced font, as a part of its size; of an East Asian one twice that.
_LETTER = 0.602

Style: TypeAlias = Literal[
    "title", "heading", "name", "fact", "note", "bad", "number", "small-number", "bad-number", "tick"
]
FONT_SIZES: dict[Style, float] = {
    "title": 18,
    "heading": 12,
    "name": 11.5,
    "fact": 11,
    "note": 11,
    "bad": 11,
    "number": 10.5,
    "small-number": 8,
    "bad-number": 10.5,
    "tick": 8.5,
}


@dataclass(frozen=True, slots=True)
class Surface:
    """A rectangle that something lies on: the page, a card, a card with problems, an empty outline."""

    x: float
    y: float
    width: float
    height: float
    kind: Literal["page", "card", "bad-card", "outline"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A painted rectangle; `title` is shown where the pointer rests on it."""

    x: float
    y: float
    width: float
    height: float
    paint: Paint
    title: str


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text; `x` is its start or its middle, `y` its base line."""

    x: float
    y: float
    text: str
    style: Style
    is_centred: bool = False
    title: str = ""


Shape: TypeAlias = Surface | Cell | Words


@dataclass(frozen=True, slots=True)
class Group:
    """Shapes that belong together, those behind first; their origin lies at (`x`, `y`) of the page."""

    x: float
    y: float
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """A page; `label` says in a line what it shows."""

    width: float
    height: float
    label: str
    groups: tuple[Group, ...]


def text_width(text: str, style: Style) -> float:
    """How wide a line is, in pixels."""
    letters = sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)
    return letters * _LETTER * FONT_SIZES[style]


def wrapped(text: str, style: Style, width: float, *, max_lines: int, breaks: str = " ") -> list[str]:
    """Breaks a text behind one of `breaks`, or where it must; what is over `max_lines` ends in "..."."""
    room = max(4, int(width / (_LETTER * FONT_SIZES[style])))
    lines: list[str] = []
    rest = text
    while rest:
        line = _fitting(rest, room)
        if len(line) < len(rest):
            last = max((line.rfind(letter) for letter in breaks), default=-1)
            line = line[: last + 1] if last > 0 else line
        lines.append(line.rstrip())
        rest = rest[len(line) :]
        if len(lines) == max_lines and rest:
            return [*lines[:-1], lines[-1][: room - 3] + "..."]
    return lines


def _fitting(text: str, room: int) -> str:
    """The longest start of a text that is at most `room` letters wide; one letter at least."""
    used = 0
    for index, letter in enumerate(text):
        used += 2 if east_asian_width(letter) in "WF" else 1
        if used > room and index:
            return text[:index]
    return text


def stacked(lines: Sequence[str], style: Style, x: float, y: float, *, title: str = "") -> tuple[list[Words], float]:
    """Lines of text one under the other, the first with its top at `y`; and where the next may begin."""
    step = FONT_SIZES[style] * 1.32
    words = [
        Words(x, y + step * index + FONT_SIZES[style], line, style, title=title) for index, line in enumerate(lines)
    ]
    return words, y + step * len(lines)


def shown(text: str) -> str:
    """A text without what would be obeyed rather than shown, or is no letter of XML: that is escaped, as in Python."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
