"""Lays a picture out on one page: a heading, what is wrong with the whole, a side bar, and cards in columns. Pure."""

from __future__ import annotations

from merger.picture import cards, sidebar
from merger.picture.cards import card_of
from merger.picture.panels import Picture
from merger.picture.shapes import Group, Scene, Shape, Surface, shown, stacked, wrapped
from merger.picture.sidebar import sidebar_of

_MARGIN = 24.0
_GAP = 14.0
_COLUMNS = 3
_CARDS_AT = _MARGIN + sidebar.WIDTH + 26.0
WIDTH = _CARDS_AT + _COLUMNS * cards.WIDTH + (_COLUMNS - 1) * _GAP + _MARGIN


def scene_of(picture: Picture) -> Scene:
    """The whole page."""
    heading, y = _heading(picture)
    bar, bar_height = sidebar_of(picture)
    placed, bottom = _cards(picture, y)
    height = max(y + bar_height, bottom) + _MARGIN
    page = Group(0, 0, (Surface(0, 0, WIDTH, height, "page"),))
    label = f"{shown(picture.title)}: {', '.join(picture.facts)}"
    return Scene(WIDTH, height, label, (page, Group(0, 0, heading), Group(_MARGIN, y, tuple(bar)), *placed))


def _heading(picture: Picture) -> tuple[tuple[Shape, ...], float]:
    width = WIDTH - 2 * _MARGIN
    lines = wrapped(shown(picture.title), "title", width, max_lines=2, breaks="/ ")
    title, y = stacked(lines, "title", _MARGIN, _MARGIN - 6)
    facts, y = stacked([", ".join(picture.facts)], "fact", _MARGIN, y + 2)
    shapes: list[Shape] = [*title, *facts]
    y += 12
    if picture.problems:
        top, problems = y, []
        y += 10
        for problem in picture.problems:
            lines = wrapped(shown(problem), "bad", width - 24, max_lines=6)
            words, y = stacked(lines, "bad", _MARGIN + 12, y)
            problems += words
            y += 4
        shapes += [Surface(_MARGIN, top, width, y + 6 - top, "bad-card"), *problems]
        y += 18
    return tuple(shapes), y


def _cards(picture: Picture, y: float) -> tuple[list[Group], float]:
    """Cards in the order of reading, each where its column is shortest; and where they end."""
    groups = []
    bottoms = [y] * _COLUMNS
    for panel in picture.panels:
        card, height = card_of(panel, picture)
        column = bottoms.index(min(bottoms))
        groups.append(Group(_CARDS_AT + column * (cards.WIDTH + _GAP), bottoms[column], tuple(card)))
        bottoms[column] += height + _GAP
    y = max(bottoms)
    words, below = stacked(_left_out(picture), "note", 0, 0)
    return [*groups, Group(_CARDS_AT, y, tuple(words))], y + below


def _left_out(picture: Picture) -> list[str]:
    lines = []
    if not picture.panels:
        lines.append("no tensor to draw")
    if picture.num_left_out:
        lines.append(f"{picture.num_left_out:,} more tensors are not drawn; pick some with --tensors GLOB")
    if picture.num_unmatched:
        lines.append(f"{picture.num_unmatched:,} tensors that --tensors does not match are not drawn")
    return lines
