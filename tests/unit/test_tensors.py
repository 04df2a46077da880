"""The rectangle algebra, with numpy's views and strides as the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from merger.dtypes import BY_NAME
from merger.tensors import (
    Chunk,
    Record,
    SourceFile,
    StoredTensor,
    as_real_pairs,
    bands,
    distinct_chunks,
    intersection,
    is_contiguous,
    is_row_run,
    num_bytes,
    row_major_strides,
)

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def slices(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


@st.composite
def rectangles(draw: st.DrawFn, shape: tuple[int, ...]) -> Rectangle:
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return offsets, sizes


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], rank: int = 0, byte_offset: int = 0) -> Chunk:
    file = SourceFile(Path(f"rank_{rank}.pt"), 1 << 20, 1, rank)
    return Chunk(offsets, sizes, file, byte_offset, row_major_strides(sizes), Record("data/0", 0, 1 << 20, None))


def stored(shape: tuple[int, ...], *chunks: Chunk, dtype: str = "float32") -> StoredTensor:
    return StoredTensor("w", BY_NAME[dtype], shape, chunks)


@given(SHAPES)
def test_row_major_strides_are_those_of_a_contiguous_array(shape: tuple[int, ...]) -> None:
    # numpy gives arrays without elements the strides of arrays with one where there is none.
    if 0 in shape:
        event("empty")
        return
    array = np.zeros(shape, dtype=np.int64)
    assert row_major_strides(shape) == tuple(stride // 8 for stride in array.strides)


@pytest.mark.parametrize(
    ("shape", "strides"), [((), ()), ((7,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 0, 4), (0, 4, 1))]
)
def test_row_major_strides_of_a_few_shapes(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert row_major_strides(shape) == strides


@given(st.data())
def test_strides_are_contiguous_where_they_walk_the_elements_in_order(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=4).map(tuple))
    strides = data.draw(
        st.one_of(
            st.just(row_major_strides(sizes)),
            st.permutations(row_major_strides(sizes)).map(tuple),
            st.tuples(*(st.integers(1, 9) for _ in sizes)),
        )
    )
    places = [
        sum(int(index) * stride for index, stride in zip(position, strides, strict=True))
        for position in np.ndindex(sizes)
    ]
    expected = places == list(range(len(places)))
    event(f"contiguous: {expected}")
    assert is_contiguous(sizes, strides) == expected


@pytest.mark.parametrize(
    ("sizes", "strides"), [((3, 0), (1, 1)), ((0,), (1,)), ((0, 3), (3, 1)), ((2, 0, 3), (3, 3, 1))]
)
def test_a_tensor_without_elements_is_contiguous_whatever_its_strides(
    sizes: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """An empty (3, 0) has the strides (1, 1) in torch."""
    assert is_contiguous(sizes, strides)


@given(st.data())
def test_a_rectangle_is_a_row_run_where_its_elements_follow_one_another(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4).map(tuple))
    # One index thick, or as wide as the tensor, as often as not: else hardly any would be a run.
    sizes = tuple(data.draw(st.one_of(st.sampled_from([1, size]), st.integers(1, size))) for size in shape)
    offsets = tuple(data.draw(st.integers(0, full - size)) for full, size in zip(shape, sizes, strict=True))
    elements = np.arange(np.prod(shape, dtype=int)).reshape(shape)[slices(offsets, sizes)].ravel()
    expected = bool((np.diff(elements) == 1).all())
    event(f"run: {expected}")
    assert is_row_run(shape, sizes) == expected


@pytest.mark.parametrize(
    ("shape", "sizes", "expected"),
    [
        ((5, 3), (2, 3), True),
        ((5, 3), (1, 2), True),
        ((5, 3), (2, 2), False),
        ((5, 3, 2), (2, 2, 2), False),
        ((5, 3, 2), (1, 2, 2), True),
        ((5, 3, 2), (2, 3, 1), False),
        ((5, 1, 2), (3, 1, 2), True),
    ],
)
def test_row_runs_of_a_few_rectangles(shape: tuple[int, ...], sizes: tuple[int, ...], expected: bool) -> None:  # noqa: FBT001 - a table reads by its columns
    assert is_row_run(shape, sizes) is expected


@given(SHAPES, st.integers(1, 40))
def test_bands_are_runs_that_give_every_element_once_and_in_order(shape: tuple[int, ...], limit: int) -> None:
    elements = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    cut = [elements[slices(offsets, sizes)].ravel() for offsets, sizes in bands(shape, limit)]
    event(f"bands: {'several' if len(cut) > 1 else len(cut)}")
    assert all(0 < part.size <= limit for part in cut)
    assert [index for part in cut for index in part.tolist()] == list(range(elements.size))


def test_bands_of_a_few_shapes() -> None:
    assert list(bands((), 1)) == [((), ())]
    assert list(bands((0, 3), 4)) == []
    assert list(bands((5,), 2)) == [((0,), (2,)), ((2,), (2,)), ((4,), (1,))]
    assert list(bands((3, 4), 8)) == [((0, 0), (2, 4)), ((2, 0), (1, 4))]
    assert list(bands((2, 3), 2)) == [
        ((0, 0), (1, 2)),
        ((0, 2), (1, 1)),
        ((1, 0), (1, 2)),
        ((1, 2), (1, 1)),
    ]


@given(st.data())
def test_the_intersection_is_where_two_masks_are_both_set(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    first, second = data.draw(rectangles(shape)), data.draw(rectangles(shape))
    masks = [np.zeros(shape, dtype=bool) for _ in range(3)]
    masks[0][slices(*first)] = True
    masks[1][slices(*second)] = True
    shared = intersection(*first, *second)
    if shared is not None:
        masks[2][slices(*shared)] = True
        assert masks[2].any()
    event(f"shared: {shared is not None}")
    assert np.array_equal(masks[0] & masks[1], masks[2])


def test_two_elements_without_dims_share_that_element() -> None:
    assert intersection((), (), (), ()) == ((), ())


def test_num_bytes_counts_the_whole_tensor_once_whatever_its_replicas() -> None:
    tensor = stored((4, 3), chunk((0, 0), (4, 3)), chunk((0, 0), (4, 3), rank=1), dtype="bfloat16")
    assert num_bytes(tensor) == 24
    assert num_bytes(stored((), dtype="int64")) == 8
    assert num_bytes(stored((0, 9))) == 0


def test_distinct_chunks_are_the_first_of_each_rectangle_by_their_offsets() -> None:
    low, low_again = chunk((0, 0), (2, 3), rank=3), chunk((0, 0), (2, 3), rank=1)
    high, high_again = chunk((2, 0), (2, 3), rank=2), chunk((2, 0), (2, 3), rank=0)
    assert distinct_chunks(stored((4, 3), high, low, high_again, low_again)) == (low, high)


def test_rectangles_that_begin_alike_but_differ_in_size_are_both_distinct() -> None:
    small, large = chunk((0,), (2,)), chunk((0,), (3,), rank=1)
    assert distinct_chunks(stored((3,), small, large)) == (small, large)


@given(st.data())
def test_complex_elements_as_pairs_are_the_bytes_that_numpy_views_as_float64(data: st.DataObject) -> None:
    """The elements of a transposed and cut complex128 array, read by the strides of the pairs."""
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))
    array = np.arange(2 * np.prod(shape, dtype=int), dtype=np.float64).view(np.complex128).reshape(shape).T
    piece = Chunk(
        tuple(2 for _ in array.shape),
        array.shape,
        SourceFile(Path("rank_0.pt"), array.nbytes, 1, 0),
        0,
        tuple(stride // 16 for stride in array.strides),
        Record("data/0", 0, array.nbytes, None),
    )
    whole = tuple(size + 2 for size in array.shape)
    pairs = as_real_pairs(StoredTensor("w", BY_NAME["complex128"], whole, (piece,)))
    assert (pairs.fqn, pairs.dtype.name, pairs.shape) == ("w", "float64", (*whole, 2))
    [part] = pairs.chunks
    assert (part.offsets, part.sizes) == ((*piece.offsets, 0), (*array.shape, 2))
    assert (part.file, part.byte_offset, part.record) == (piece.file, piece.byte_offset, piece.record)
    buffer = array.T.ravel().view(np.float64)
    read = np.lib.stride_tricks.as_strided(buffer, part.sizes, [8 * stride for stride in part.strides])
    assert np.array_equal(read, np.stack([array.real, array.imag], axis=-1))


def test_only_complex128_is_taken_for_pairs() -> None:
    with pytest.raises(AssertionError, match=r"^complex64$"):
        as_real_pairs(stored((2,), dtype="complex64"))
