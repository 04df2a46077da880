"""Changes the element type of a block of elements. The one place where torch computes on weights."""

from __future__ import annotations

from merger.dtypes import DType


def cast_block(block: memoryview, source: DType, target: DType) -> tuple[memoryview, int]:
    """The elements of `block` as `target`, rounded to nearest even as torch does, and how many overflowed.

    An element overflows where it was finite and no longer is. `block` holds whole elements of `source`, which like
    `target` is a floating type.
    """
    import torch

    assert source.is_floating, source
    assert target.is_floating, target
    elements = torch.frombuffer(block, dtype=getattr(torch, source.name))
    result = elements.to(getattr(torch, target.name))
    # Widening, and narrowing to bfloat16 but for the last half step of its range, keep what is finite finite.
    overflowed = 0
    if target.itemsize < source.itemsize and not bool(torch.isfinite(result).all()):
        overflowed = int((torch.isfinite(elements) & ~torch.isfinite(result)).sum())
    return result.view(torch.uint8).numpy().data, overflowed
