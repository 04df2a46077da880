"""`merger.picture.regions`: who holds which elements, against a mask of every single one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from merger.checkpoint import Owed
from merger.picture.regions import BROKEN, Division, Rectangle, Region, coarsen, dims_drawn, divide


def divided(shape: tuple[int, ...], pieces: Sequence[tuple[int, Rectangle]], **how: Any) -> Division:
    division = divide(shape, pieces, **how)
    assert division is not None
    return division


def test_rows_of_ranks() -> None:
    division = divided((5, 3), [(0, ((0, 0), (3, 3))), (1, ((3, 0), (2, 3)))])
    assert division == Division(
        ((0, 3, 5), (0, 3)),
        (Region((0, 0), (3, 3), "held", (0,)), Region((3, 0), (2, 3), "held", (1,))),
    )


def test_replicas_share_a_region() -> None:
    pieces = [(0, ((0,), (2,))), (1, ((2,), (2,))), (2, ((0,), (2,))), (3, ((2,), (2,)))]
    assert divided((4,), pieces).regions == (
        Region((0,), (2,), "replicated", (0, 2)),
        Region((2,), (2,), "replicated", (1, 3)),
    )


def test_a_tensor_without_dims_is_one_region() -> None:
    assert divided((), [(0, ((), ())), (1, ((), ()))]) == Division((), (Region((), (), "replicated", (0, 1)),))


def test_a_tensor_without_elements_has_none() -> None:
    assert divided((3, 0), []) == Division(((0, 3), (0,)), ())


def test_rows_that_nobody_holds_are_a_hole() -> None:
    """S11."""
    division = divided((6, 2), [(0, ((0, 0), (2, 2))), (2, ((5, 0), (1, 2)))])
    assert [(region.offsets, region.sizes, region.status) for region in division.regions] == [
        ((0, 0), (2, 2), "held"),
        ((2, 0), (3, 2), "hole"),
        ((5, 0), (1, 2), "held"),
    ]


def test_a_hole_says_whose_it_was() -> None:
    """L1."""
    division = divided((4,), [(0, ((0,), (2,)))], owed=[Owed(1, (2,), (2,), "missing")])
    assert division.regions[1] == Region((2,), (2,), "hole", (), (1,))


def test_a_missing_replica_is_no_hole() -> None:
    division = divided((4,), [(0, ((0,), (4,)))], owed=[Owed(1, (0,), (4,), "missing")])
    assert division.regions == (Region((0,), (4,), "lacking", (0,), (1,)),)


def test_only_the_elements_of_two_rectangles_overlap() -> None:
    """S11."""
    division = divided((5,), [(0, ((0,), (3,))), (1, ((2,), (3,)))])
    assert division.regions == (
        Region((0,), (2,), "held", (0,)),
        Region((2,), (1,), "overlap", (0, 1)),
        Region((3,), (2,), "held", (1,)),
    )


@pytest.mark.parametrize("reason", ["odd", "misfit"])
def test_the_piece_of_a_rank_that_cannot_be_believed_is_its_own_kind_of_broken(reason: Any) -> None:
    """S11."""
    division = divided((4,), [(0, ((0,), (2,)))], owed=[Owed(1, (2,), (2,), reason)])
    assert division.regions[1] == Region((2,), (2,), reason, (), (1,))


def test_replicas_that_differ_are_broken() -> None:
    """S5."""
    pieces = [(0, ((0,), (2,))), (1, ((0,), (2,))), (0, ((2,), (2,))), (1, ((2,), (2,)))]
    division = divided((4,), pieces, differing=[((2,), (2,))])
    assert [region.status for region in division.regions] == ["replicated", "differ"]


def test_where_the_files_do_not_tell_nothing_is_held() -> None:
    assert divided((4, 4), [], is_told=False).regions == (Region((0, 0), (4, 4), "untold", ()),)


def test_what_lies_outside_of_the_shape_is_cut_off() -> None:
    pieces: list[tuple[int, Rectangle]] = [(0, ((0,), (9,))), (1, ((7,), (2,))), (2, ((0, 0), (1, 1)))]
    assert divided((4,), pieces).regions == (Region((0,), (4,), "held", (0,)),)


def test_what_is_cut_too_finely_is_not_divided() -> None:
    corners: list[tuple[int, Rectangle]] = [(rank, ((rank, rank), (1, 1))) for rank in range(300)]
    assert divide((300, 300), corners) is None
    stacked: list[tuple[int, Rectangle]] = [(rank, ((0, rank), (200, 100))) for rank in range(200)]
    assert divide((200, 300), stacked + [(0, ((row, 0), (1, 300))) for row in range(200)]) is None


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, Rectangle]], list[Owed]]:
    """A tensor with any rectangles of up to six ranks, some of them owed."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    found: list[tuple[int, Rectangle]] = []
    for _ in range(draw(st.integers(0, 6))):
        offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
        found.append((draw(st.integers(0, 5)), (offsets, sizes)))
    split = draw(st.integers(0, len(found)))
    owed = [Owed(rank, offsets, sizes, "missing") for rank, (offsets, sizes) in found[split:]]
    return shape, found[:split], owed


def counts(shape: tuple[int, ...], regions: tuple[Region, ...]) -> np.ndarray[Any, np.dtype[np.int_]]:
    """How many regions each element lies in."""
    mask = np.zeros(shape, dtype=int)
    for region in regions:
        mask[area(region.offsets, region.sizes)] += 1
    return mask


def area(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


class TestEveryElement:
    """Every element lies in exactly one region, and that says who holds it."""

    @given(tensors())
    def test_is_coloured_once_and_by_its_holders(
        self, tensor: tuple[tuple[int, ...], list[tuple[int, Rectangle]], list[Owed]]
    ) -> None:
        shape, pieces, owed = tensor
        division = divided(shape, pieces, owed=owed)
        assert (counts(shape, division.regions) == 1).all()
        for region in division.regions:
            ranges = (range(at, at + size) for at, size in zip(region.offsets, region.sizes, strict=True))
            for index in product(*ranges):
                assert set(region.owners) == {rank for rank, rectangle in pieces if holds(rectangle, index)}
                assert set(region.owed_by) == {one.rank for one in owed if holds((one.offsets, one.sizes), index)}
            assert (region.status == "hole") == (not region.owners)

    @given(tensors(), st.integers(1, 12))
    def test_is_coloured_once_when_regions_are_joined(
        self, tensor: tuple[tuple[int, ...], list[tuple[int, Rectangle]], list[Owed]], limit: int
    ) -> None:
        shape, pieces, owed = tensor
        exact = divided(shape, pieces, owed=owed)
        joined = coarsen(exact, limit)
        event(f"joined {len(exact.regions) > len(joined.regions)}")
        assert len(joined.regions) <= max(limit, 1)
        assert (counts(shape, joined.regions) == 1).all()
        assert sum(region.num_pieces for region in joined.regions) == len(exact.regions)
        for region in exact.regions:
            (around,) = (one for one in joined.regions if contains(one, region))
            assert set(region.owners) <= set(around.owners)
            # What is broken never hides behind what is whole.
            assert around.status in BROKEN or region.status not in BROKEN


def holds(rectangle: Rectangle, index: tuple[int, ...]) -> bool:
    return all(low <= at < low + size for at, low, size in zip(index, *rectangle, strict=True))


def contains(outer: Region, inner: Region) -> bool:
    return all(
        at <= start and start + size <= at + length
        for at, length, start, size in zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    )


def test_joining_keeps_what_is_broken_apart() -> None:
    pieces: list[tuple[int, Rectangle]] = [(rank, ((rank,), (1,))) for rank in range(512) if rank != 100]
    joined = coarsen(divided((512,), pieces, owed=[Owed(100, (100,), (1,), "missing")]), 128)
    assert len(joined.regions) <= 128
    assert [region for region in joined.regions if region.status in BROKEN] == [
        Region((100,), (1,), "hole", (), (100,))
    ]


def test_few_regions_are_left_as_they_are() -> None:
    division = divided((4,), [(0, ((0,), (2,))), (1, ((2,), (2,)))])
    assert coarsen(division, 2) is division


@pytest.mark.parametrize(
    ("shape", "pieces", "expected"),
    [
        ((), [], ((), ())),
        ((4,), [(0, ((0,), (2,)))], ((), (0,))),
        ((4, 4), [(0, ((0, 0), (4, 2)))], ((0,), (1,))),
        ((4, 4, 4), [(0, ((0, 0, 0), (4, 4, 4)))], ((0,), (1, 2))),
        ((4, 4, 4), [(0, ((0, 0, 0), (2, 4, 4)))], ((0,), (1, 2))),
        ((4, 4, 4), [(0, ((0, 0, 0), (4, 2, 4)))], ((1,), (0, 2))),
        ((4, 4, 4), [(0, ((0, 0, 0), (2, 4, 2)))], ((0,), (2, 1))),
        ((4, 4, 4, 4), [(0, ((0, 0, 0, 0), (4, 2, 4, 2)))], ((1,), (3, 0, 2))),
    ],
)
def test_what_is_cut_runs_outermost(
    shape: tuple[int, ...], pieces: list[tuple[int, Rectangle]], expected: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    assert dims_drawn(shape, divided(shape, pieces)) == expected


def test_the_volumes_of_all_owners_add_up() -> None:
    pieces: list[tuple[int, Rectangle]] = [(rank, ((rank * 3, 0), (3, 4))) for rank in range(3)]
    assert sum(prod(region.sizes) for region in divided((9, 4), pieces).regions) == 36
