"""Computes what is not a copy, in bands of bounded size: beside `casting.py`, where torch works on weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from merger.dtypes import DType
from merger.folding import product_band, row_lengths, with_lengths
from merger.operations import AddScaled, Convert, Fold, Reduce, Zeros, least_elements
from merger.tensors import Computation, StoredTensor, bands

if TYPE_CHECKING:
    import numpy as np
    import torch

    Kept: TypeAlias = "memoryview | torch.Tensor"

# Reads the rectangle [offsets, offsets + sizes) of a stored tensor, as opaque elements.
Read: TypeAlias = Callable[[StoredTensor, Sequence[int], Sequence[int]], "np.ndarray[Any, np.dtype[Any]]"]

# A few such bands are in memory at a time, in up to eight bytes per element. More of them would be slower for the
# overhead of each, larger ones for the processor's cache.
_BAND_ELEMENTS = 1 << 20


class Keep(Protocol):
    """Gives what was made under a key before, or makes it; old ones are forgotten, so that memory is bounded."""

    def __call__(self, key: tuple[Computation, object], make: Callable[[], Kept], /) -> Any:  # noqa: ANN401 - as made
        """What `make` returned for this key."""


def band_grid(computation: Computation) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The bands, as (offsets, sizes) in row-major order, in which a computation is to be done."""
    least = least_elements(computation.operation, computation.shape)
    return bands(computation.shape, max(_BAND_ELEMENTS, least))


@dataclass(frozen=True, slots=True)
class _Band:
    """A band that is to be computed, and how what it needs is come by."""

    computation: Computation
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Read
    keep: Keep

    def of(self, tensor: StoredTensor) -> torch.Tensor:
        """The same band of an input."""
        return _wide(self.computation, self.read(tensor, self.offsets, self.sizes), tensor)

    def rows_of(self, tensor: StoredTensor) -> torch.Tensor:
        """Those rows of an input, at their whole width, that the band has."""
        offsets = (self.offsets[0], *(0 for _ in tensor.shape[1:]))
        return _wide(self.computation, self.read(tensor, offsets, (self.sizes[0], *tensor.shape[1:])), tensor)

    def whole(self, index: int) -> torch.Tensor:
        """All of an input, kept for the next band: a factor, which is small beside the weight."""
        tensor = self.computation.inputs[index]
        zeros = tuple(0 for _ in tensor.shape)
        found: torch.Tensor = self.keep(
            (self.computation, index), lambda: _wide(self.computation, self.read(tensor, zeros, tensor.shape), tensor)
        )
        return found


def compute_band(
    computation: Computation, offsets: tuple[int, ...], sizes: tuple[int, ...], read: Read, keep: Keep
) -> memoryview:
    """The bytes of one band of the result, in row-major order. The band is one of the computation's grid."""
    import torch

    band = _Band(computation, offsets, sizes, read, keep)
    with torch.no_grad():
        match computation.operation:
            case Reduce(kind):
                result = _reduced(band, kind)
            case Fold() as fold:
                result = _folded(band, fold)
            case AddScaled(scaling):
                one, other = map(band.of, computation.inputs)
                result = one + other * scaling
            case Zeros():
                result = torch.zeros(sizes)
            case Convert(function):
                result = _converted(band, function)
        rounded = result.to(getattr(torch, computation.dtype.name))
        return rounded.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _reduced(band: _Band, kind: str) -> torch.Tensor:
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
    inputs = band.computation.inputs
    wide = band.computation.dtype.is_floating and kind in ("sum", "avg", "product")
    total: torch.Tensor | None = None
    for tensor in inputs:
        part = _as_torch(band.read(tensor, band.offsets, band.sizes), tensor.dtype)
        part = part.double() if wide else part
        total = part if total is None else join[kind](total, part)
    assert total is not None, "a reduction has inputs"
    return total / len(inputs) if kind == "avg" else total


def _folded(band: _Band, fold: Fold) -> torch.Tensor:
    total = _without_lengths(band, fold)
    if not fold.is_dora:
        return total
    wanted = band.whole(3).flatten()
    if fold.layout == "transposed":
        lengths = band.keep((band.computation, "lengths"), lambda: _column_lengths(band, fold))
        return with_lengths(total, lengths, wanted, by_row=False)
    rows = slice(band.offsets[0], band.offsets[0] + band.sizes[0])
    return with_lengths(total, row_lengths(total), wanted[rows], by_row=True)


def _without_lengths(band: _Band, fold: Fold) -> torch.Tensor:
    """A band of the weight and the scaled product added, before DoRA."""
    weight, _, second = band.computation.inputs[:3]
    factor = band.rows_of(second) if fold.layout in ("linear", "conv") else band.whole(2)
    num_experts = band.computation.shape[0]
    delta = product_band(fold.layout, band.whole(1), factor, band.offsets, band.sizes, num_experts=num_experts)
    return band.of(weight) + delta * fold.scaling


def _column_lengths(band: _Band, fold: Fold) -> torch.Tensor:
    """The length of each column of the folded weight, which takes a pass over all of it."""
    squares: torch.Tensor | None = None
    for offsets, sizes in band_grid(band.computation):
        part = _without_lengths(replace(band, offsets=offsets, sizes=sizes), fold).double().square().sum(0)
        squares = part if squares is None else squares + part
    assert squares is not None, "a weight has rows"
    return squares.sqrt().to(band.whole(1).dtype)


def _wide(computation: Computation, elements: np.ndarray[Any, np.dtype[Any]], tensor: StoredTensor) -> torch.Tensor:
    import torch

    wide = torch.float64 if computation.dtype.name == "float64" else torch.float32
    return _as_torch(elements, tensor.dtype).to(wide)


def _converted(band: _Band, function: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
    """All of the result: the one computation that takes as much memory as its inputs and its result have bytes."""
    computation = band.computation
    inputs = [
        _as_torch(band.read(tensor, (0,) * len(tensor.shape), tensor.shape), tensor.dtype)
        for tensor in computation.inputs
    ]
    result = function(inputs)
    assert (tuple(result.shape), str(result.dtype)) == (computation.shape, f"torch.{computation.dtype}"), result.dtype
    return result


def _as_torch(elements: np.ndarray[Any, np.dtype[Any]], dtype: DType) -> torch.Tensor:
    import torch

    flat: torch.Tensor = torch.frombuffer(elements.reshape(-1).view("u1").data, dtype=getattr(torch, dtype.name))
    return flat.reshape(elements.shape)
