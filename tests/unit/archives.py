"""Genuine rank files of several torch versions, with what the ranks' `full_tensor()` was."""

from __future__ import annotations

from pathlib import Path

import torch

ARCHIVES = Path(__file__).parent.parent / "data" / "archives"
CASES = sorted(path for path in ARCHIVES.glob("*/*") if path.is_dir())
IDS = [f"{path.parent.name}-{path.name}" for path in CASES]


def truth(case: Path) -> dict[str, torch.Tensor]:
    """The whole tensors that the ranks held."""
    tensors: dict[str, torch.Tensor] = torch.load(case / "truth.pt", weights_only=True)
    return tensors


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor as type, shape and bytes, so that NaNs compare too."""
    flat = tensor.detach().contiguous().reshape(-1)
    return str(tensor.dtype), tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
