"""The page that a report is printed on: how wide it is, whether it has colours, and how lines are broken for it.

A terminal narrower than 80 columns has narrower lines; everywhere else they have 80, so that a log reads the same
whoever made it. Colours are those of a terminal that shows them, and of no file.
"""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

# No narrower: beside the labels there would be no room for a word.
_MIN_WIDTH, _MAX_WIDTH = 40, 80

Style: TypeAlias = Literal["heading", "good", "bad"]

# Bold, green and red by the numbers of ECMA-48, which every terminal that has colours obeys.
_CODES: dict[Style, str] = {"heading": "1", "good": "32", "bad": "31"}


class Stream(Protocol):
    """What is asked of an output stream."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""

    def fileno(self) -> int:
        """The number that the system knows it by."""


@dataclass(frozen=True, slots=True)
class Page:
    """`width` in columns. Without `is_coloured` no style shows."""

    width: int = _MAX_WIDTH
    is_coloured: bool = False

    def line(self, text: str, style: Style | None = None) -> list[str]:
        """A line that is not broken: what is in it, such as a path, is to be copied."""
        return [self._styled(printable(text), style)]

    def naming(self, words: str, path: object, style: Style | None = None) -> list[str]:
        """`words` and a path, which is never broken: it has a line of its own where both are too long for one."""
        whole = printable(f"{words} {path}")
        if len(whole) <= self.width:
            return [self._styled(whole, style)]
        return [*self.wrapped("", words, style), *self.line(f"  {path}", style)]

    def wrapped(self, first: str, text: str, style: Style | None = None, *, rest: int | None = None) -> list[str]:
        """`text` after `first`, broken between words; further lines begin at `rest`, or else below its beginning."""
        text = printable(text)
        if text and len(first) + len(text) <= self.width:
            return [self._styled(first + text, style)]
        lines = textwrap.wrap(
            text,
            self.width,
            initial_indent=first,
            subsequent_indent=" " * (len(first) if rest is None else rest),
            break_long_words=False,
            break_on_hyphens=False,
        )
        return [self._styled(line, style) for line in lines]

    def items(self, first: str, items: Sequence[str]) -> list[str]:
        """All items on one line, or where they are too long each on its own."""
        joined = first + (", ".join(items) or "none")
        if len(joined) <= self.width:
            return self.line(joined)
        rest = " " * len(first)
        return [line for at, item in enumerate(items) for line in self.wrapped(rest if at else first, item)]

    def command(self, first: str, *parts: Sequence[str]) -> list[str]:
        """A command to paste: `parts` are words that stay together, and a line that goes on ends in a backslash."""
        lines, rest = [first], " " * (len(first) + 2)
        for part in map(shlex.join, parts):
            joined = lines[-1] + part if lines[-1] in (first, rest) else f"{lines[-1]} {part}"
            if lines[-1] in (first, rest) or len(joined) + len(" \\") <= self.width:
                lines[-1] = joined
            else:
                lines[-1] += " \\"
                lines.append(rest + part)
        return [printable(line) for line in lines]

    def message(self, first: str, text: str, style: Style) -> list[str]:
        """Like `wrapped`, but that only `first` has the style, and that line breaks within `text` stay."""
        lines = []
        for at, part in enumerate(text.splitlines()):
            bullet = first if at == 0 else "  - " if part.startswith("  - ") else ""
            lines += self.wrapped(bullet, part if at == 0 else part.removeprefix(bullet), rest=min(len(bullet), 4))
        if lines and lines[0].startswith(first):
            lines[0] = self._styled(first, style) + lines[0].removeprefix(first)
        return lines

    def _styled(self, text: str, style: Style | None) -> str:
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if self.is_coloured and style is not None else text


def page_of(stream: Stream, environment: Mapping[str, str]) -> Page:
    """The page that a stream is: a terminal has its own width and, unless the environment says otherwise, colours."""
    return Page(_width_of(stream), shows_colour(stream, environment))


def shows_colour(stream: Stream, environment: Mapping[str, str]) -> bool:
    """Whether to colour: a NO_COLOR that is not empty forbids it, then FORCE_COLOR asks for it (0 forbids it).

    Without either, a terminal has colours, unless TERM says "dumb" or nothing is known of it.
    """
    if environment.get("NO_COLOR"):
        return False
    if forced := environment.get("FORCE_COLOR"):
        return forced != "0"
    return is_able(stream, environment)


def is_able(stream: Stream, environment: Mapping[str, str]) -> bool:
    """Whether a stream is a terminal that obeys more than line breaks."""
    return stream.isatty() and environment.get("TERM", "dumb") != "dumb"


def _width_of(stream: Stream) -> int:
    if not stream.isatty():
        return _MAX_WIDTH
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return _MAX_WIDTH
    # Some terminals do not know how wide they are, and say 0.
    return max(_MIN_WIDTH, min(_MAX_WIDTH, columns or _MAX_WIDTH))


def printable(line: str) -> str:
    """Escapes what a terminal would obey rather than show: names come from files that are not to be trusted."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def joined(lines: Iterable[str]) -> str:
    """Lines as a text to print."""
    return "\n".join(lines)
