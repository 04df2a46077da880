"""Changes the element type of a block of elements. The one place where torch computes on weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merger.dtypes import DType

if TYPE_CHECKING:
    import torch


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
    overflowed = 0
    # The range decides, not the size: bfloat16 and float16 are alike in size, but not in range.
    if torch.finfo(result.dtype).max < torch.finfo(elements.dtype).max and not bool(_is_finite(result).all()):
        overflowed = int((_is_finite(elements) & ~_is_finite(result)).sum())
    return result.view(torch.uint8).numpy().data, overflowed


def _is_finite(elements: torch.Tensor) -> torch.Tensor:
    import torch

    # torch.isfinite knows no 8-bit types; float32 holds each of their values.
    return torch.isfinite(elements if elements.element_size() > 1 else elements.float())
