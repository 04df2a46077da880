"""`merger.picture.names`: tensors that differ in numbers only, under one name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merger.picture.names import joint_name, pattern_of, runs_text


def joint(*names: str) -> tuple[str, int]:
    patterns = [pattern_of(name) for name in names]
    assert len({pattern for pattern, _ in patterns}) == 1
    return joint_name(patterns[0][0], [numbers for _, numbers in patterns])


def test_layers_become_a_range() -> None:
    assert joint(*(f"model.layers.{n}.mlp.weight" for n in range(32))) == ("model.layers.{0-31}.mlp.weight", 32)


def test_gaps_in_the_range_are_told() -> None:
    assert joint("a.0.w", "a.1.w", "a.3.w", "a.4.w", "a.5.w", "a.9.w") == ("a.{0, 1, 3-5, 9}.w", 6)


def test_layers_and_experts_are_ranges_of_their_own() -> None:
    names = [f"layers.{layer}.experts.{expert}.w" for layer in range(3) for expert in range(4)]
    assert joint(*names) == ("layers.{0-2}.experts.{0-3}.w", 12)
    assert joint(*names[:-1]) == ("layers.{0-2}.experts.{0-3}.w", 12)


def test_a_name_alone_stays_what_it_is() -> None:
    assert joint("model.layers.7.w") == ("model.layers.7.w", 1)


def test_a_number_that_all_have_stays_a_number() -> None:
    assert joint("block.2.layers.0", "block.2.layers.1") == ("block.2.layers.{0, 1}", 2)


@pytest.mark.parametrize("name", ["fc1.weight", "a.01.w", "a.\u0661.w", "a.1234567.w", "", "..", "a.-1", "a.1 .b"])
def test_what_only_looks_like_a_number_is_none(name: str) -> None:
    pattern, numbers = pattern_of(name)
    assert numbers == ()
    assert joint_name(pattern, [()]) == (name, 1)


@given(st.sets(st.integers(0, 40)))
def test_runs_say_just_the_numbers(numbers: set[int]) -> None:
    said: set[int] = set()
    for part in filter(None, runs_text(numbers).split(", ")):
        low, _, high = part.partition("-")
        said |= set(range(int(low), int(high or low) + 1))
    assert said == numbers
