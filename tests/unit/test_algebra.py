"""The rectangle algebra, with numpy's own views and joins as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from merger.algebra import concat, narrow, permute, reshape, select, squeeze, stack, transpose, unsqueeze
from merger.dtypes import BY_NAME
from merger.tensors import Chunk, Record, SourceFile, StoredTensor, distinct_chunks, row_major_strides
from tests.unit.stored import grid

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

INT64 = BY_NAME["int64"]
FILLER = -1


@dataclass
class Files:
    """Files in memory, one per rank; `store` lays a tensor in them."""

    contents: dict[int, Array]

    def store(self, array: Array, data: st.DataObject) -> StoredTensor:
        """The array cut by a random grid, each cell held by one to three ranks, each in a memory order of its own."""
        cuts = [[0, size] for size in array.shape]
        for _ in range(data.draw(st.integers(0, 3)) if array.size else 0):
            dim = data.draw(st.integers(0, array.ndim - 1)) if array.ndim else None
            if dim is not None:
                cuts[dim] = sorted({*cuts[dim], data.draw(st.integers(0, array.shape[dim]))})
        dims = tuple(range(array.ndim))
        memory_order = st.one_of(st.just(dims), st.permutations(dims).map(tuple))
        ways = data.draw(st.lists(st.tuples(memory_order, st.sampled_from([0, 0, 2])), min_size=1, max_size=3))
        chunks = []
        for number, (offsets, sizes) in enumerate(grid(cuts)):
            cell = array[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
            for rank in range(len(ways)):
                # The replicas of one cell lie otherwise in memory, and those of the next otherwise again.
                order, gap = ways[(rank + number) % len(ways)]
                chunks.append(self._put(cell, offsets, rank, order, gap))
        if data.draw(st.booleans()):
            chunks.reverse()
        return StoredTensor("w", INT64, array.shape, tuple(chunks))

    def _put(self, cell: Array, offsets: tuple[int, ...], rank: int, order: tuple[int, ...], gap: int) -> Chunk:
        laid = cell.transpose(order)
        memory = np.full((*laid.shape[:-1], laid.shape[-1] + gap) if laid.ndim else (), FILLER)
        memory[tuple(slice(0, size) for size in laid.shape)] = laid
        strides = [0] * cell.ndim
        for dim, stride in zip(order, row_major_strides(memory.shape), strict=True):
            strides[dim] = stride
        before = self.contents.get(rank, np.zeros(0, dtype=np.int64))
        self.contents[rank] = np.concatenate([before, np.full(1, FILLER), memory.ravel()])
        file = SourceFile(Path(f"rank_{rank}.pt"), 0, 1, rank)
        return Chunk(offsets, cell.shape, file, 8 * (len(before) + 1), tuple(strides), Record("data/0", 0, 0, None))

    def check(self, tensor: StoredTensor, expected: Array) -> None:
        """Every chunk, replicas too, leads to what `expected` holds in its place; every element is held once."""
        assert tensor.shape == expected.shape
        count = np.zeros(tensor.shape, dtype=np.int64)
        for chunk in tensor.chunks:
            memory = self.contents[_rank(chunk)][chunk.byte_offset // 8 :]
            part = np.lib.stride_tricks.as_strided(memory, chunk.sizes, [8 * stride for stride in chunk.strides])
            assert np.array_equal(part, expected[_place(chunk)])
        for chunk in distinct_chunks(tensor):
            count[_place(chunk)] += 1
        assert (count == 1).all()
        event(f"replicas: {len(tensor.chunks) > len(distinct_chunks(tensor))}")
        event(f"elements: {tensor.shape.count(0) == 0}")


def _rank(chunk: Chunk) -> int:
    assert isinstance(chunk.file, SourceFile)
    assert chunk.file.rank is not None
    return chunk.file.rank


def _place(chunk: Chunk) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))


# Sizes that nest in one another and sizes that do not, few of them empty; no more elements than a person can look at.
SIZES = st.sampled_from([1, 2, 3, 4, 6, 2, 3, 4, 6, 12, 0])
SHAPES = st.lists(SIZES, max_size=4).map(tuple).filter(lambda shape: prod(shape) <= 48)


def numbered(shape: tuple[int, ...], start: int = 0) -> Array:
    return np.arange(start, start + int(np.prod(shape, dtype=int))).reshape(shape)


def draw_shape_of(count: int, data: st.DataObject) -> tuple[int, ...]:
    """A shape of `count` elements."""
    if count == 0:
        return data.draw(st.sampled_from([(0,), (2, 0), (0, 3, 1)]))
    shape: list[int] = []
    while count > 1:
        factor = data.draw(st.sampled_from([n for n in range(2, count + 1) if count % n == 0]))
        shape.append(factor)
        count //= factor
    for _ in range(data.draw(st.integers(0, 2))):
        shape.insert(data.draw(st.integers(0, len(shape))), 1)
    return tuple(shape)


def step(tensor: StoredTensor, array: Array, data: st.DataObject) -> tuple[StoredTensor, Array]:
    """One operation of the algebra, and what numpy has for it."""
    dims = array.ndim
    kinds = ["reshape", "unsqueeze", "permute"] + (["narrow", "transpose"] if dims else [])
    if 0 not in array.shape and dims:
        kinds.append("select")
    if 1 in array.shape:
        kinds.append("squeeze")
    kind = data.draw(st.sampled_from(kinds))
    event(kind)
    if kind == "reshape":
        shape = draw_shape_of(array.size, data)
        return reshape(tensor, shape), array.reshape(shape)
    if kind == "unsqueeze":
        dim = data.draw(st.integers(0, dims))
        return unsqueeze(tensor, dim), np.expand_dims(array, dim)
    if kind == "permute":
        order = data.draw(st.permutations(range(dims)))
        return permute(tensor, order), array.transpose(order)
    if kind == "squeeze":
        dim = data.draw(st.sampled_from([dim for dim in range(dims) if array.shape[dim] == 1]))
        return squeeze(tensor, dim), array.squeeze(dim)
    dim = data.draw(st.integers(0, dims - 1))
    if kind == "transpose":
        other = data.draw(st.integers(0, dims - 1))
        return transpose(tensor, dim, other), array.swapaxes(dim, other)
    if kind == "select":
        index = data.draw(st.integers(0, array.shape[dim] - 1))
        return select(tensor, dim, index), array.take(index, dim)
    start = data.draw(st.integers(0, array.shape[dim]))
    size = data.draw(st.integers(0, array.shape[dim] - start))
    return narrow(tensor, dim, start, size), array.take(range(start, start + size), dim)


@settings(max_examples=200)  # one alone says little: most chunkings need no cut
@given(st.data())
def test_any_chain_of_operations_gives_what_numpy_gives(data: st.DataObject) -> None:
    files = Files({})
    array = numbered(data.draw(SHAPES))
    tensor = files.store(array, data)
    for _ in range(data.draw(st.integers(2, 5))):
        tensor, array = step(tensor, array, data)
    assert (tensor.fqn, tensor.dtype) == ("w", INT64)
    files.check(tensor, array)


@given(st.data())
def test_tensors_joined_along_a_dim_are_what_numpy_concatenates(data: st.DataObject) -> None:
    files = Files({})
    shape = data.draw(SHAPES.filter(bool))
    dim = data.draw(st.integers(0, len(shape) - 1))
    widths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    arrays = [numbered((*shape[:dim], width, *shape[dim + 1 :]), 1000 * i) for i, width in enumerate(widths)]
    joined = concat([files.store(array, data) for array in arrays], dim)
    files.check(joined, np.concatenate(arrays, dim))


@given(st.data())
def test_tensors_joined_along_a_new_dim_are_what_numpy_stacks(data: st.DataObject) -> None:
    files = Files({})
    shape = data.draw(SHAPES)
    dim = data.draw(st.integers(0, len(shape)))
    arrays = [numbered(shape, 1000 * i) for i in range(data.draw(st.integers(1, 3)))]
    joined = stack([files.store(array, data) for array in arrays], dim)
    files.check(joined, np.stack(arrays, dim))


# how chunks are cut


def whole(shape: tuple[int, ...], *ranks: int, strides: tuple[int, ...] | None = None) -> StoredTensor:
    chunks = tuple(
        Chunk(
            (0,) * len(shape),
            shape,
            SourceFile(Path(f"rank_{rank}.pt"), 0, 1, rank),
            64,
            strides or row_major_strides(shape),
            Record("data/0", 64, 8192, None),
        )
        for rank in ranks or (0,)
    )
    return StoredTensor("w", INT64, shape, chunks)


def boxes(tensor: StoredTensor) -> list[tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]]:
    return [(chunk.offsets, chunk.sizes, chunk.byte_offset, chunk.strides) for chunk in tensor.chunks]


def test_one_expert_of_a_stack_is_one_unbroken_piece() -> None:
    assert boxes(select(whole((4, 6, 5)), 0, 2)) == [((0, 0), (6, 5), 64 + 8 * 60, (5, 1))]


@pytest.mark.parametrize("shape", [(4, 30), (24, 5), (2, 2, 30), (2, 12, 5), (1, 4, 6, 5, 1), (120,), (8, 3, 5)])
def test_a_contiguous_piece_stays_one_where_dims_nest(shape: tuple[int, ...]) -> None:
    [piece] = reshape(whole((4, 6, 5)), shape).chunks
    assert (piece.sizes, piece.byte_offset) == (shape, 64)


def test_dims_that_do_not_nest_need_no_cut_where_a_piece_is_one_run() -> None:
    assert boxes(reshape(whole((4, 6)), (6, 4))) == [((0, 0), (6, 4), 64, (4, 1))]


def test_rows_that_are_dealt_out_in_turn_are_cut_one_by_one() -> None:
    """As rotary embeddings have it: the two halves of a head, (2, 3) rows, become (3, 2)."""
    halves = reshape(whole((6, 5)), (2, 3, 5))
    assert boxes(reshape(transpose(halves, 0, 1), (6, 5))) == [
        ((0, 0), (2, 5), 64, (15, 1)),
        ((2, 0), (2, 5), 64 + 8 * 5, (15, 1)),
        ((4, 0), (2, 5), 64 + 8 * 10, (15, 1)),
    ]


def test_a_part_of_a_dim_that_is_split_is_cut_at_the_edges() -> None:
    [part] = narrow(whole((12,)), 0, 1, 10).chunks
    middle = StoredTensor("w", INT64, (12,), (replace(part, offsets=(1,)),))
    assert boxes(reshape(middle, (3, 4))) == [
        ((0, 1), (1, 3), 72, (4, 1)),
        ((1, 0), (1, 4), 72 + 8 * 3, (4, 1)),
        ((2, 0), (1, 3), 72 + 8 * 7, (4, 1)),
    ]


def test_replicas_of_other_strides_are_cut_alike_and_stay_replicas() -> None:
    """A row-major copy would need no cut; the transposed one beside it does."""
    row_major, transposed = whole((2, 3), 0), whole((2, 3), 1, strides=(1, 2))
    flat = reshape(StoredTensor("w", INT64, (2, 3), row_major.chunks + transposed.chunks), (6,))
    assert [(_rank(chunk), chunk.offsets, chunk.sizes, chunk.strides) for chunk in flat.chunks] == [
        (0, (0,), (3,), (1,)),
        (1, (0,), (3,), (2,)),
        (0, (3,), (3,), (1,)),
        (1, (3,), (3,), (2,)),
    ]


def test_a_part_without_elements_has_no_chunks() -> None:
    assert narrow(whole((4, 3)), 0, 2, 0) == StoredTensor("w", INT64, (0, 3), ())
    assert reshape(whole((0, 3)), (3, 0)).chunks == ()


def test_a_joined_tensor_is_called_by_its_first_and_how_many_more() -> None:
    assert concat([whole((2,))] * 3, 0).fqn == "w and 2 more"
    assert concat([whole((2,))], 0).fqn == "w"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: narrow(whole((4,)), 0, 3, 2),
        lambda: select(whole((4,)), 0, 4),
        lambda: squeeze(whole((4,)), 0),
        lambda: permute(whole((4, 3)), (0, 0)),
        lambda: reshape(whole((4, 3)), (5,)),
        lambda: concat([whole((4, 3)), whole((4, 2))], 0),
        lambda: stack([whole((4,)), whole((3,))], 0),
    ],
)
def test_what_numpy_refuses_is_a_mistake_of_ours(wrong: Callable[[], StoredTensor]) -> None:
    with pytest.raises(AssertionError):
        wrong()
