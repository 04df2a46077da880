"""The card of one tensor, or of several that look the same: its name, its box, what is said of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from merger.checks import range_text, shape_text
from merger.picture.boxes import Box, PlacedRegion, box_of
from merger.picture.palette import about, labels_of, paint_of
from merger.picture.panels import Panel, Picture
from merger.picture.regions import BROKEN
from merger.picture.shapes import FONT_SIZES, Cell, Shape, Style, Surface, Words, shown, stacked, text_width, wrapped

WIDTH = 296.0
_PADDING = 12.0
_INNER = WIDTH - 2 * _PADDING
# The height of the frame of what is cut too finely to be drawn.
_OUTLINE_HEIGHT = 40.0
# Between numbers beside a box, down and across.
_TICKS_DOWN, _TICKS_ACROSS = 10.0, 16.0
_TICK_GAP = 4.0
# What a label leaves free of its cell, across.
_LABEL_MARGINS: dict[Style, float] = {"number": 4.0, "small-number": 2.0, "bad-number": 3.0}
# A tooltip of thousands of letters helps nobody.
_MAX_TITLE = 400


def card_of(panel: Panel, picture: Picture) -> tuple[list[Shape], float]:
    """The shapes of a card at the origin, and its height."""
    title = shown(panel.name)[:_MAX_TITLE]
    times = f" (x {panel.num_tensors:,})" if panel.num_tensors > 1 else ""
    lines = wrapped(shown(panel.name) + times, "name", _INNER, max_lines=3, breaks=". ")
    words, y = stacked(lines, "name", _PADDING, _PADDING, title=title)
    shapes: list[Shape] = [*words]
    y += 6
    if panel.division is None:
        shapes.append(Surface(_PADDING, y, _INNER, _OUTLINE_HEIGHT, "outline"))
        y += _OUTLINE_HEIGHT
    else:
        box = box_of(panel.shape, panel.division)
        drawn, height = _box(box, picture)
        shapes += [_moved(shape, _PADDING, y) for shape in drawn]
        y += height
    y += 6
    for text, style, max_lines in _texts(panel):
        y += 4 if style == "bad" else 0
        words, y = stacked(wrapped(shown(text), style, _INNER, max_lines=max_lines), style, _PADDING, y)
        shapes += words
    height = y + _PADDING - 4
    card = Surface(0, 0, WIDTH, height, "bad-card" if panel.is_broken else "card")
    return [card, *shapes], height


def _moved(shape: Shape, x: float, y: float) -> Shape:
    """The same shape further right and down."""
    return replace(shape, x=shape.x + x, y=shape.y + y)


def cell_words(x: float, y: float, width: float, height: float, labels: Sequence[str], *, is_bad: bool) -> list[Words]:
    """The first of `labels` that fits into a cell, in its middle; none where it is too small."""
    styles: tuple[Style, ...] = ("bad-number",) if is_bad else ("number", "small-number")
    for style in styles:
        for label in labels:
            size = FONT_SIZES[style]
            if label and text_width(label, style) + _LABEL_MARGINS[style] <= width and size <= height:
                middle = y + height / 2 + size * 0.36
                return [Words(x + width / 2, middle, label, style, is_centred=True)]
    return []


def _texts(panel: Panel) -> list[tuple[str, Style, int]]:
    meshes = ", ".join(mesh_letter(mesh) for mesh in panel.meshes)
    on = f"  mesh{'es' if len(panel.meshes) > 1 else ''} {meshes}" if meshes else ""
    texts: list[tuple[str, Style, int]] = [(f"{panel.dtype} {shape_text(panel.shape)}{on}", "fact", 3)]
    if panel.placements:
        texts.append((panel.placements, "fact", 4))
    texts += [(note, "note", 3) for note in panel.notes]
    texts += [(problem, "bad", 9) for problem in panel.problems]
    return texts


def mesh_letter(index: int) -> str:
    """The name that a mesh has on the page: A to Z, then A1 and so on."""
    return chr(ord("A") + index % 26) + (str(index // 26) if index >= 26 else "")  # noqa: PLR2004 - letters there are


def _box(box: Box, picture: Picture) -> tuple[list[Shape], float]:
    """The shapes of a box at the origin, and its height with the numbers below it."""
    if not box.regions:
        return [Surface(0, 0, box.width, box.height, "outline")], box.height
    kind, num_owners = picture.owner_kind, len(picture.owners)
    cells: list[Shape] = []
    words: list[Shape] = []
    inside: list[tuple[PlacedRegion, str, list[Words]]] = []
    for placed in box.regions:
        region = placed.region
        place = (placed.x, placed.y, placed.width, placed.height)
        title = f"{range_text(region.offsets, region.sizes)}: {about(region, kind)}"
        cells.append(Cell(*place, paint_of(region, num_owners), title))
        labels = labels_of(region, num_owners, kind)
        if region.status in BROKEN:
            words += cell_words(*place, labels, is_bad=True)
        else:
            inside.append((placed, labels[0], cell_words(*place, labels, is_bad=False)))
    outside = [(placed, label) for placed, label, found in inside if not found]
    if len(outside) > len(inside) / 2:
        # Numbers that stand now inside, now outside are harder to follow than those in one line.
        outside, inside = [(placed, label) for placed, label, _ in inside], []
    words += [word for _, _, found in inside for word in found]
    ticks, below = _ticks(box, outside)
    return [*cells, *words, *ticks], box.height + below


def _ticks(box: Box, unlabelled: Sequence[tuple[PlacedRegion, str]]) -> tuple[list[Shape], float]:
    """Numbers beside a box that is cut along one side, for pieces that are too small to be written into.

    As many as there is room for; also how much room they take below the box.
    """
    ticks: list[Shape] = []
    size = FONT_SIZES["tick"]
    if all(placed.width == box.width for placed in box.regions):
        bottom = -_TICKS_DOWN
        for placed, label in unlabelled:
            middle = placed.y + placed.height / 2
            if middle - bottom >= _TICKS_DOWN:
                ticks.append(Words(box.width + _TICK_GAP, middle + size * 0.36, label, "tick"))
                bottom = middle
        return ticks, 0.0
    if all(placed.height == box.height for placed in box.regions):
        right = -_TICKS_ACROSS
        for placed, label in unlabelled:
            middle, half = placed.x + placed.width / 2, text_width(label, "tick") / 2
            if middle - half >= right:
                ticks.append(Words(middle, box.height + size + 1, label, "tick", is_centred=True))
                right = middle + half + _TICK_GAP
        return ticks, size + 3 if ticks else 0.0
    return [], 0.0
