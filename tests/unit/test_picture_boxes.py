"""`merger.picture.boxes`: regions on paper. They tile the box, and their lengths are those of the tensor."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merger.picture.boxes import Box, box_of
from merger.picture.regions import Rectangle, divide


def box(shape: tuple[int, ...], *pieces: Rectangle) -> Box:
    division = divide(shape, list(enumerate(pieces)))
    assert division is not None
    return box_of(shape, division)


def test_rows_run_down_and_columns_across() -> None:
    drawn = box((8, 4), ((0, 0), (2, 4)), ((2, 0), (6, 1)), ((2, 1), (6, 3)))
    places = {placed.region.owners[0]: placed for placed in drawn.regions if placed.region.offsets[0] == 2}
    assert places[1].x == 0
    assert places[1].width == pytest.approx(drawn.width / 4)
    assert places[2].x == pytest.approx(drawn.width / 4)
    assert places[2].y == places[1].y == pytest.approx(drawn.height / 4)
    assert not drawn.is_stretched


def test_a_vector_is_a_bar_cut_across() -> None:
    drawn = box((10,), ((0,), (4,)), ((4,), (6,)))
    assert drawn.height == 26
    assert [(placed.y, placed.height) for placed in drawn.regions] == [(0, 26), (0, 26)]
    assert drawn.regions[0].width == pytest.approx(0.4 * drawn.width)


def test_one_element_is_a_square() -> None:
    drawn = box((), ((), ()))
    assert [(placed.width, placed.height) for placed in drawn.regions] == [(26, 26)]


def test_no_elements_are_an_empty_square() -> None:
    drawn = box((0, 4))
    assert (drawn.width, drawn.height, drawn.regions) == (26, 26, ())


@pytest.mark.parametrize(("shape", "least", "greatest"), [((1, 10**6), 0.44, 0.46), ((10**6, 1), 1.39, 1.41)])
def test_a_very_long_matrix_is_drawn_less_long(shape: tuple[int, int], least: float, greatest: float) -> None:
    drawn = box(shape, ((0, 0), shape))
    assert least < drawn.height / drawn.width < greatest


def test_a_hole_of_one_row_in_a_million_can_be_seen() -> None:
    rows = 1_000_000
    drawn = box((rows, 8), ((0, 0), (500_000, 8)), ((500_001, 0), (499_999, 8)))
    hole = drawn.regions[1]
    assert (hole.region.status, hole.height) == ("hole", 6)
    assert drawn.is_stretched


def test_many_rows_have_room_for_their_numbers() -> None:
    drawn = box((20, 400), *(((row, 0), (1, 400)) for row in range(20)))
    assert drawn.height == 20 * 12


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Rectangle]]:
    """A tensor of up to four dims, cut along some of them in pieces of like size, each with an owner."""
    num_pieces = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    step = draw(st.integers(1, 50))
    shape = tuple(count * step for count in num_pieces)
    rectangles: list[Rectangle] = [((), ())]
    for count in num_pieces:
        rectangles = [
            ((*offsets, step * index), (*sizes, step)) for offsets, sizes in rectangles for index in range(count)
        ]
    return shape, rectangles


@given(grids())
def test_areas_are_those_of_the_elements_and_tile_the_box(grid: tuple[tuple[int, ...], list[Rectangle]]) -> None:
    shape, rectangles = grid
    drawn = box(shape, *rectangles)
    area = drawn.width * drawn.height
    for placed in drawn.regions:
        assert placed.width * placed.height == pytest.approx(area * prod(placed.region.sizes) / prod(shape))
        assert placed.x + placed.width <= drawn.width + 1e-6
        assert placed.y + placed.height <= drawn.height + 1e-6
    assert sum(placed.width * placed.height for placed in drawn.regions) == pytest.approx(area)
    for index, one in enumerate(drawn.regions):
        for other in drawn.regions[:index]:
            across = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            down = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert min(across, down) < 1e-6, "no two regions overlap"
