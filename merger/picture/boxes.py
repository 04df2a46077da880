"""The place of every region in a box on paper, in pixels. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod, sqrt
from typing import TypeAlias

from merger.picture.regions import BROKEN, Division, Region, dims_drawn

# What is cut in rows leaves room for numbers at its right.
_MAX_WIDTH, _MAX_WIDTH_OF_ROWS = 270.0, 224.0
_MAX_HEIGHT = 264.0
# The area and the narrowest and widest form of the box of a matrix.
_AREA = 22_000.0
_LEAST_RATIO, _GREATEST_RATIO = 0.45, 1.4
_BAR_HEIGHT = 26.0
# What a number needs to be read, across and down.
_ROOM_ACROSS, _ROOM_DOWN = 22.0, 12.0
# What is thinner cannot be seen; what is broken has to be.
_THINNEST, _THINNEST_BROKEN = 2.0, 6.0

# The starts of an interval of each of several dims, and where it lies: (position, length).
_Spans: TypeAlias = dict[tuple[int, ...], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class PlacedRegion:
    """A region and its rectangle in the box, from the upper left corner of the box."""

    x: float
    y: float
    width: float
    height: float
    region: Region


@dataclass(frozen=True, slots=True)
class Box:
    """A tensor on paper. `is_stretched` where thin regions are drawn thicker than they are."""

    width: float
    height: float
    regions: tuple[PlacedRegion, ...]
    is_stretched: bool


def box_of(shape: tuple[int, ...], division: Division) -> Box:
    """Draws a divided tensor: rows down, columns across, lengths within the box as the counts of elements."""
    if 0 in shape or not shape:
        # No dims, and so one element; or none at all.
        dot = tuple(PlacedRegion(0.0, 0.0, _BAR_HEIGHT, _BAR_HEIGHT, region) for region in division.regions)
        return Box(_BAR_HEIGHT, _BAR_HEIGHT, dot, is_stretched=False)
    down, across = dims_drawn(shape, division)
    width, height = _size(shape, division, down, across)
    rows, rows_stretched = _spans(division, down, height)
    columns, columns_stretched = _spans(division, across, width)
    placed = []
    for region in division.regions:
        y, region_height = rows[tuple(region.offsets[dim] for dim in down)]
        x, region_width = columns[tuple(region.offsets[dim] for dim in across)]
        placed.append(PlacedRegion(x, y, region_width, region_height, region))
    return Box(width, height, tuple(placed), rows_stretched or columns_stretched)


def _size(
    shape: tuple[int, ...], division: Division, down: Sequence[int], across: Sequence[int]
) -> tuple[float, float]:
    num_across = prod(len(division.edges[dim]) - 1 for dim in across)
    if not down:
        return _MAX_WIDTH, _BAR_HEIGHT
    num_down = prod(len(division.edges[dim]) - 1 for dim in down)
    ratio = prod(shape[dim] for dim in down) / prod(shape[dim] for dim in across)
    ratio = min(max(ratio, _LEAST_RATIO), _GREATEST_RATIO)
    width = max(sqrt(_AREA / ratio), num_across * _ROOM_ACROSS)
    height = max(sqrt(_AREA * ratio), num_down * _ROOM_DOWN)
    return min(width, _MAX_WIDTH_OF_ROWS if num_across == 1 else _MAX_WIDTH), min(height, _MAX_HEIGHT)


def _spans(division: Division, dims: Sequence[int], length: float) -> tuple[_Spans, bool]:
    """Where the intervals of several dims lie along one side, the first dim outermost; and whether some are stretched.

    Each interval of a dim is divided by those of the next: so what is cut in several dims stays one rectangle, and its
    length stays true.
    """
    spans: _Spans = {(): (0.0, length)}
    stretched = False
    for dim in dims:
        cuts = division.edges[dim]
        broken = {region.offsets[dim] for region in division.regions if region.status in BROKEN}
        floors = [_THINNEST_BROKEN if start in broken else _THINNEST for start in cuts[:-1]]
        sizes = [stop - start for start, stop in pairwise(cuts)]
        inner: _Spans = {}
        for starts, (position, outer_length) in spans.items():
            lengths = _lengths(sizes, outer_length, floors)
            stretched |= any(
                abs(one - outer_length * size / cuts[-1]) > 1 for one, size in zip(lengths, sizes, strict=True)
            )
            positions = accumulate(lengths[:-1], initial=position)
            for start, at, one in zip(cuts[:-1], positions, lengths, strict=True):
                key = (*starts, start)
                inner[key] = (at, one)
        spans = inner
    return spans, stretched


def _lengths(sizes: Sequence[int], total: float, floors: Sequence[float]) -> list[float]:
    """Shares of `total` as the sizes are, but none below its floor as long as there is room for all floors."""
    if sum(floors) >= total:
        return [total * floor / sum(floors) for floor in floors]
    fixed: set[int] = set()
    while True:
        rest = total - sum(floors[index] for index in fixed)
        free = sum(size for index, size in enumerate(sizes) if index not in fixed)
        shares = [floors[index] if index in fixed else rest * size / free for index, size in enumerate(sizes)]
        short = {index for index, share in enumerate(shares) if share < floors[index]} - fixed
        if not short:
            return shares
        fixed |= short
