"""Computes what is not a copy, in bands of bounded size: beside `casting.py`, where torch works on weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from merger.dtypes import DType
from merger.operations import Reduce
from merger.tensors import Computation, StoredTensor, bands

if TYPE_CHECKING:
    import numpy as np
    import torch

# Reads the rectangle [offsets, offsets + sizes) of a stored tensor, as opaque elements.
Read: TypeAlias = Callable[[StoredTensor, Sequence[int], Sequence[int]], "np.ndarray[Any, np.dtype[Any]]"]

# A few such bands are in memory at a time, in up to eight bytes per element. More of them would be slower for the
# overhead of each, larger ones for the processor's cache.
_BAND_ELEMENTS = 1 << 20


def band_grid(computation: Computation) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The bands, as (offsets, sizes) in row-major order, in which a computation is to be done."""
    return bands(computation.shape, _BAND_ELEMENTS)


def compute_band(computation: Computation, offsets: tuple[int, ...], sizes: tuple[int, ...], read: Read) -> memoryview:
    """The bytes of one band of the result, in row-major order."""
    import torch

    with torch.no_grad():
        result = _reduce(computation, computation.operation, offsets, sizes, read)
        return result.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _reduce(
    computation: Computation, operation: Reduce, offsets: tuple[int, ...], sizes: tuple[int, ...], read: Read
) -> torch.Tensor:
    """The inputs reduced in the order of their mesh coordinates, which is that of ranks where these ascend.

    torch's collectives add in an order that differs from element to element, and round after each addition. Of two
    ranks the result is the same; of more it is here nearer to the exact sum. Source: gloo/allreduce.cc.
    """
    import torch

    join: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "sum": torch.add,
        "avg": torch.add,
        "product": torch.mul,
        "max": torch.maximum,
        "min": torch.minimum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
    wide = computation.dtype.is_floating and operation.kind in ("sum", "avg", "product")
    total: torch.Tensor | None = None
    for tensor in computation.inputs:
        part = _as_torch(read(tensor, offsets, sizes), tensor.dtype)
        part = part.double() if wide else part
        total = part if total is None else join[operation.kind](total, part)
    assert total is not None, "a reduction has inputs"
    if operation.kind == "avg":
        total = total / len(computation.inputs)
    return total.to(getattr(torch, computation.dtype.name))


def _as_torch(elements: np.ndarray[Any, np.dtype[Any]], dtype: DType) -> torch.Tensor:
    import torch

    flat: torch.Tensor = torch.frombuffer(elements.reshape(-1).view("u1").data, dtype=getattr(torch, dtype.name))
    return flat.reshape(elements.shape)
