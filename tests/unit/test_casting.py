from __future__ import annotations

import pytest
import torch

from merger.casting import cast_block
from merger.dtypes import BY_NAME
from tests.unit.stored import random_tensor

FLOATS = sorted(name for name, dtype in BY_NAME.items() if dtype.is_floating)
TARGETS = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def cast(values: list[float], source: str, target: str) -> tuple[list[float], int]:
    block = bytearray(torch.tensor(values, dtype=getattr(torch, source)).view(torch.uint8).numpy().tobytes())
    data, overflowed = cast_block(memoryview(block), BY_NAME[source], BY_NAME[target])
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, target)).tolist(), overflowed


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", FLOATS)
def test_a_cast_is_that_of_torch_for_all_bits(source: str, target: str) -> None:
    """Every bit pattern of the types of one or two bytes, 65,536 random ones of the wider."""
    itemsize = BY_NAME[source].itemsize
    if itemsize <= 2:
        bits = torch.arange(256**itemsize, dtype=torch.int32).to({1: torch.uint8, 2: torch.uint16}[itemsize])
        tensor = bits.view(getattr(torch, source))
    else:
        tensor = random_tensor(getattr(torch, source), (65_536,))
    expected = tensor.to(getattr(torch, target))
    block = memoryview(bytearray(tensor.view(torch.uint8).numpy().tobytes()))
    data, overflowed = cast_block(block, BY_NAME[source], BY_NAME[target])
    assert bytes(data) == expected.view(torch.uint8).numpy().tobytes()
    wide = tensor.double()
    # float64 holds every value of all types: what is finite there and is not afterwards has overflowed.
    assert overflowed == int((wide.isfinite() & ~expected.double().isfinite()).sum())


def test_halves_are_rounded_to_even() -> None:
    assert cast([1 + 2**-8, 1 + 3 * 2**-8], "float32", "bfloat16") == ([1.0, 1 + 2**-6], 0)


def test_values_beyond_the_range_become_infinite_and_are_counted() -> None:
    infinity = float("inf")
    assert cast([65519.0, 65520.0, -1e9, infinity], "float32", "float16") == (
        [65504.0, infinity, -infinity, infinity],
        2,
    )


def test_bfloat16_to_float16_can_overflow_though_both_have_two_bytes() -> None:
    assert cast([1.0, 1e10, -1e38], "bfloat16", "float16") == ([1.0, float("inf"), float("-inf")], 2)


def test_the_last_half_step_of_float32_overflows_bfloat16() -> None:
    assert cast([3.4e38], "float32", "bfloat16") == ([float("inf")], 1)


def test_infinities_and_nans_of_the_source_are_no_overflows() -> None:
    values, overflowed = cast([float("inf"), float("-inf"), float("nan")], "float32", "float16")
    assert (values[:2], values[2] != values[2], overflowed) == ([float("inf"), float("-inf")], True, 0)


def test_the_source_block_is_left_as_it_was() -> None:
    block = bytearray(torch.tensor([1.5, 2.5]).view(torch.uint8).numpy().tobytes())
    before = bytes(block)
    cast_block(memoryview(block), BY_NAME["float32"], BY_NAME["bfloat16"])
    assert bytes(block) == before
