"""The rectangle algebra: new tensors over the same bytes, for every change of shape that moves no data.

Each function takes stored tensors and returns one whose chunks lie where theirs do, as numpy's views and joins would
have it. Replicas stay replicas: chunks of one rectangle are cut alike, whatever their strides. Pure, as `tensors.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from merger.tensors import Chunk, StoredTensor, row_major_strides


def narrow(tensor: StoredTensor, dim: int, start: int, size: int) -> StoredTensor:
    """The indices [start, start + size) of a dim."""
    assert 0 <= start <= start + size <= tensor.shape[dim], (tensor.shape, dim, start, size)
    chunks = []
    for chunk in tensor.chunks:
        first, last = chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]
        low, high = max(first, start), min(last, start + size)
        if low < high:
            offsets, sizes = _put(chunk.offsets, dim, 1, (low - start,)), _put(chunk.sizes, dim, 1, (high - low,))
            byte_offset = chunk.byte_offset + (low - first) * chunk.strides[dim] * tensor.dtype.itemsize
            chunks.append(replace(chunk, offsets=offsets, sizes=sizes, byte_offset=byte_offset))
    return replace(tensor, shape=_put(tensor.shape, dim, 1, (size,)), chunks=tuple(chunks))


def select(tensor: StoredTensor, dim: int, index: int) -> StoredTensor:
    """One index of a dim, which goes."""
    return squeeze(narrow(tensor, dim, index, 1), dim)


def permute(tensor: StoredTensor, dims: Sequence[int]) -> StoredTensor:
    """The dims in another order: dim d of the result is dim `dims[d]` of the tensor."""
    assert sorted(dims) == list(range(len(tensor.shape))), (tensor.shape, dims)

    def ordered(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in dims)

    chunks = tuple(
        replace(chunk, offsets=ordered(chunk.offsets), sizes=ordered(chunk.sizes), strides=ordered(chunk.strides))
        for chunk in tensor.chunks
    )
    return replace(tensor, shape=ordered(tensor.shape), chunks=chunks)


def transpose(tensor: StoredTensor, dim: int, other: int) -> StoredTensor:
    """Two dims in each other's place."""
    dims = list(range(len(tensor.shape)))
    dims[dim], dims[other] = other, dim
    return permute(tensor, dims)


def squeeze(tensor: StoredTensor, dim: int) -> StoredTensor:
    """A dim of size one less."""
    assert tensor.shape[dim] == 1, (tensor.shape, dim)
    return _exchanged(tensor, dim, 1, ())


def unsqueeze(tensor: StoredTensor, dim: int) -> StoredTensor:
    """A dim of size one more, before what is dim `dim` now."""
    return _exchanged(tensor, dim, 0, (1,))


def concat(tensors: Sequence[StoredTensor], dim: int) -> StoredTensor:
    """Tensors of one element type one after the other along a dim, in which alone their shapes may differ."""
    first = tensors[0]
    assert all(tensor.dtype == first.dtype for tensor in tensors), [str(tensor.dtype) for tensor in tensors]
    assert len({_put(tensor.shape, dim, 1, ()) for tensor in tensors}) == 1, [tensor.shape for tensor in tensors]
    chunks: list[Chunk] = []
    start = 0
    for tensor in tensors:
        chunks += (
            replace(chunk, offsets=_put(chunk.offsets, dim, 1, (chunk.offsets[dim] + start,)))
            for chunk in tensor.chunks
        )
        start += tensor.shape[dim]
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return StoredTensor(f"{first.fqn}{more}", first.dtype, _put(first.shape, dim, 1, (start,)), tuple(chunks))


def stack(tensors: Sequence[StoredTensor], dim: int) -> StoredTensor:
    """Tensors of one element type and shape one after the other along a new dim."""
    return concat([unsqueeze(tensor, dim) for tensor in tensors], dim)


def reshape(tensor: StoredTensor, shape: Sequence[int]) -> StoredTensor:
    """The elements, in row-major order, in another shape of as many.

    A chunk that is no rectangle of the new shape, or whose strides do not fit it, is cut into several.
    """
    shape = tuple(shape)
    assert prod(shape) == prod(tensor.shape), (tensor.shape, shape)
    if 0 in shape:
        return replace(tensor, shape=shape, chunks=())
    for dim in reversed(range(len(tensor.shape))):
        if tensor.shape[dim] == 1:
            tensor = squeeze(tensor, dim)
    wide = tuple(size for size in shape if size != 1)
    steps = sorted({prod(wide), *row_major_strides(tensor.shape), *row_major_strides(wide)}, reverse=True)
    if any(outer % inner for outer, inner in pairwise(steps)):
        # Dims that do not nest, such as (4, 6) and (6, 4): all becomes one row first.
        tensor = _merged(tensor, tensor.shape, (prod(wide),))
        steps = [prod(wide), *row_major_strides(wide)]
    fine = tuple(outer // inner for outer, inner in pairwise(steps))
    tensor = _merged(_split(tensor, fine), fine, wide)
    for dim, size in enumerate(shape):
        if size == 1:
            tensor = unsqueeze(tensor, dim)
    return tensor


def _split(tensor: StoredTensor, fine: tuple[int, ...]) -> StoredTensor:
    """Every dim as the dims of `fine` that make it up."""
    for dim, parts in reversed(list(enumerate(_runs(fine, tensor.shape)))):
        if len(parts) > 1:
            tensor = _split_dim(tensor, dim, parts)
    return tensor


def _split_dim(tensor: StoredTensor, dim: int, parts: tuple[int, ...]) -> StoredTensor:
    inner = row_major_strides(parts)
    chunks = []
    for chunk in tensor.chunks:
        start, size, stride = chunk.offsets[dim], chunk.sizes[dim], chunk.strides[dim]
        strides = _put(chunk.strides, dim, 1, tuple(step * stride for step in inner))
        for offsets, sizes in _boxes(start, start + size, parts):
            passed = sum(offset * step for offset, step in zip(offsets, inner, strict=True)) - start
            within = tuple(passed if place == dim else 0 for place in range(len(tensor.shape)))
            placed, sized = _put(chunk.offsets, dim, 1, offsets), _put(chunk.sizes, dim, 1, sizes)
            chunks.append(_part(chunk, tensor.dtype.itemsize, within, offsets=placed, sizes=sized, strides=strides))
    return replace(tensor, shape=_put(tensor.shape, dim, 1, parts), chunks=tuple(chunks))


def _boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The fewest rectangles (offsets, sizes) that make up the elements [start, stop) of the row-major order."""
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row, rest = prod(shape[1:]), shape[1:]
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if head or first == last:
        end = row if first < last else tail
        yield from (((first, *offsets), (1, *sizes)) for offsets, sizes in _boxes(head, end, rest))
        if first == last:
            return
        first += 1
    if first < last:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    if tail:
        yield from (((last, *offsets), (1, *sizes)) for offsets, sizes in _boxes(0, tail, rest))


def _merged(tensor: StoredTensor, fine: tuple[int, ...], wide: tuple[int, ...]) -> StoredTensor:
    """Every run of the dims `fine` that makes up a dim of `wide` as that dim."""
    for dim, parts in enumerate(_runs(fine, wide)):
        for _ in parts[1:]:
            tensor = _merged_pair(tensor, dim)
    return tensor


def _merged_pair(tensor: StoredTensor, dim: int) -> StoredTensor:
    """A dim and the one behind it as one; where chunks of one rectangle are no runs of it, index by index."""
    width = tensor.shape[dim + 1]
    replicas: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Chunk]] = defaultdict(list)
    for chunk in tensor.chunks:
        replicas[chunk.offsets, chunk.sizes].append(chunk)
    chunks = []
    for (offsets, sizes), same in replicas.items():
        is_run = sizes[dim + 1] == width and all(chunk.strides[dim] == chunk.strides[dim + 1] * width for chunk in same)
        step = sizes[dim] if is_run else 1
        for index in range(0, sizes[dim], step):
            within = tuple(index if place == dim else 0 for place in range(len(sizes)))
            placed = _put(offsets, dim, 2, ((offsets[dim] + index) * width + offsets[dim + 1],))
            sized = _put(sizes, dim, 2, (step * sizes[dim + 1],))
            for chunk in same:
                strides = _put(chunk.strides, dim, 1, ())
                part = _part(chunk, tensor.dtype.itemsize, within, offsets=placed, sizes=sized, strides=strides)
                chunks.append(part)
    return replace(tensor, shape=_put(tensor.shape, dim, 2, (tensor.shape[dim] * width,)), chunks=tuple(chunks))


def _runs(fine: Sequence[int], wide: Sequence[int]) -> list[tuple[int, ...]]:
    """For each size of `wide` the next sizes of `fine` whose product it is; none is one."""
    runs = []
    start = 0
    for size in wide:
        stop = start
        while prod(fine[start:stop]) < size:
            stop += 1
        runs.append(tuple(fine[start:stop]))
        start = stop
    return runs


def _exchanged(tensor: StoredTensor, dim: int, count: int, sizes: tuple[int, ...]) -> StoredTensor:
    """Dims of size one, of which there are `count` from `dim` on, exchanged for others of size one."""
    chunks = tuple(
        replace(
            chunk,
            offsets=_put(chunk.offsets, dim, count, tuple(0 for _ in sizes)),
            sizes=_put(chunk.sizes, dim, count, sizes),
            strides=_put(chunk.strides, dim, count, sizes),
        )
        for chunk in tensor.chunks
    )
    return replace(tensor, shape=_put(tensor.shape, dim, count, sizes), chunks=chunks)


def _part(
    chunk: Chunk,
    itemsize: int,
    within: Sequence[int],
    *,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
) -> Chunk:
    """A part of a chunk that begins at the local index `within`, with its own place and dims."""
    passed = sum(index * stride for index, stride in zip(within, chunk.strides, strict=True))
    return replace(
        chunk, offsets=offsets, sizes=sizes, strides=strides, byte_offset=chunk.byte_offset + passed * itemsize
    )


def _put(values: Sequence[int], dim: int, count: int, new: tuple[int, ...]) -> tuple[int, ...]:
    """The values with `new` in the place of `count` of them from `dim` on."""
    return (*values[:dim], *new, *values[dim + count :])
