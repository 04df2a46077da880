from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from merger.dtypes import BY_NAME
from merger.operations import can_reduce

TYPES = [name for name, dtype in BY_NAME.items() if can_reduce("sum", dtype)]
JOINS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip


@pytest.mark.parametrize("kind", JOINS)
@pytest.mark.parametrize("name", BY_NAME)
def test_what_can_be_reduced_is_what_torch_can_join_in_the_same_type(kind: str, name: str) -> None:
    """Of the types that gloo knows; the others are refused."""
    value = torch.ones(2).to(getattr(torch, name))
    if can_reduce(kind, BY_NAME[name]):
        joined = JOINS[kind](value, value)
        assert (joined / 2 if kind == "avg" else joined).dtype == value.dtype


def test_an_unknown_reduction_is_none() -> None:
    assert not can_reduce("norm", BY_NAME["float32"])
    assert not can_reduce("avg", BY_NAME["int64"])
    assert not can_reduce("sum", BY_NAME["bool"])
    assert not can_reduce("sum", BY_NAME["float8_e4m3fn"])
