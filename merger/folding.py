"""The arithmetic of LoRA on bands of rows: what peft's `merge_and_unload` gives, without the whole weight in memory.

torch alone: `computing.py` brings the tensors, all in the type to compute in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merger.operations import FoldLayout

if TYPE_CHECKING:
    import torch


def product_band(
    layout: FoldLayout,
    first: torch.Tensor,
    second: torch.Tensor,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    *,
    num_experts: int,
) -> torch.Tensor:
    """The band [offsets, offsets + sizes) of B A, laid out as the weight is; the band has whole rows.

    `first` is A. `second` is B, of which for the layouts "linear" and "conv" only the rows of the band.
    """
    rows = slice(offsets[0], offsets[0] + sizes[0])
    if layout == "linear":
        return second @ first
    if layout == "transposed":
        return (second @ first[:, rows]).T
    if layout == "conv":
        return (second.flatten(1) @ first.flatten(1)).reshape(sizes)
    factors_a = first.reshape(num_experts, -1, first.shape[1])[rows]  # (experts, rank, inputs)
    factors_b = second.reshape(second.shape[0], -1, num_experts)[..., rows].permute(2, 0, 1)  # (experts, outputs, rank)
    within = slice(offsets[1], offsets[1] + sizes[1])
    if layout == "experts":
        return factors_b[:, within] @ factors_a
    return (factors_b @ factors_a[:, :, within]).transpose(1, 2)


def row_lengths(total: torch.Tensor) -> torch.Tensor:
    """The length of each row of a weight, all other dims taken together."""
    import torch

    lengths: torch.Tensor = torch.linalg.vector_norm(total.flatten(1), dim=1)
    return lengths


def with_lengths(total: torch.Tensor, lengths: torch.Tensor, wanted: torch.Tensor, *, by_row: bool) -> torch.Tensor:
    """`total` with its rows, or its columns, scaled from `lengths` to those that are `wanted` (DoRA)."""
    factor = wanted / lengths
    return (factor.reshape(-1, *(1 for _ in total.shape[1:])) if by_row else factor) * total
