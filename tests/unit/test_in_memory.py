"""From the hub back into memory, for adapters that are on names in memory: layouts made by hand. S19."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from merger.errors import ModelError
from merger.huggingface.architecture import Architecture, HubLayout
from merger.huggingface.in_memory import fitting
from merger.huggingface.movements import Movement
from merger.huggingface.movements import stored as as_it_is
from merger.reading import SourceReader, read_bands
from merger.tensors import StoredTensor
from tests.unit.stored import elements, store, whole

# Three experts of 2 rows and 4 columns in one tensor; on the hub each is one, and lies the other way round.
FUSED, SHAPES = "experts.weight", {"experts.weight": (3, 2, 4), "norm.weight": (2,)}
ONES = [f"experts.{number}.weight" for number in range(3)]


def one_expert(number: int) -> Movement:
    cut = Movement("narrow", (1, 2, 4), (as_it_is(FUSED, (3, 2, 4)),), (0, number, 1))
    return Movement("permute", (4, 2), (Movement("reshape", (2, 4), (cut,), ((2, 4),)),), ((1, 0),))


def architecture(movements: Mapping[str, Movement]) -> Architecture:
    def of(shapes: dict[str, tuple[int, ...]], hub: HubLayout | None) -> Architecture:
        return Architecture(
            class_name="TestModel",
            shapes=shapes,
            ties=(),
            keep_fp32=frozenset(),
            keep_fp32_in_float16=frozenset(),
            ignore_unexpected=(),
            dtype=None,
            hub=hub,
        )

    on_hub = of({name: movement.shape for name, movement in movements.items()}, None)
    return of(SHAPES, HubLayout(on_hub, movements, movements))


MODEL = architecture(
    {**{name: one_expert(at) for at, name in enumerate(ONES)}, "norm.weight": as_it_is("norm.weight", (2,))}
)
VALUES = torch.arange(24, dtype=torch.float32).reshape(3, 2, 4)

Stored = Callable[..., dict[str, StoredTensor]]


@pytest.fixture
def base(tmp_path: Path) -> Stored:
    """`base(name=tensor)` is the base model as it is on the hub, with some tensors others, or not there."""

    def made(**others: torch.Tensor | None) -> dict[str, StoredTensor]:
        tensors: dict[str, Any] = {name: VALUES[at].T.contiguous() for at, name in enumerate(ONES)}
        tensors |= {"norm.weight": torch.ones(2), **others}
        return store(tmp_path, {name: (one, [whole(one)]) for name, one in tensors.items() if one is not None})

    return made


def fitted(tensors: Mapping[str, StoredTensor], *layers: str, model: Architecture | None = MODEL) -> Any:
    return fitting(model, tensors, frozenset(layers))


def message(tensors: Mapping[str, StoredTensor], *layers: str, model: Architecture = MODEL) -> str:
    with pytest.raises(ModelError) as caught:
        fitted(tensors, *layers, model=model)
    return str(caught.value)


def test_experts_of_the_hub_become_the_one_tensor_that_adapters_are_on(base: Stored) -> None:
    found = fitted(base(), "experts", "norm")
    assert found.keys() == SHAPES.keys()
    with SourceReader() as reader:
        data = b"".join(band.tobytes() for _, band in read_bands(reader, found[FUSED], 1 << 20))
    assert np.frombuffer(data, "V4").tobytes() == elements(VALUES).tobytes()


def test_a_base_that_has_the_layers_stays_as_it_is(base: Stored) -> None:
    tensors = base()
    assert fitted(tensors, "norm", "experts.1") is tensors
    assert fitted(tensors, "experts", model=None) is tensors
    assert fitted(tensors, "attention") is tensors  # which it has in neither way; told where it is folded


def test_a_part_that_is_not_there_or_of_another_shape_is_told(base: Stored) -> None:
    tensors = base(**{ONES[0]: torch.ones(2, 4), ONES[2]: None})
    assert message(tensors, "experts") == (
        f"{FUSED}: is made of 3 tensors of the base model, of which 2 are not there or not of the shape that "
        f"config.json asks for: {ONES[0]} (has (2, 4), not (4, 2)), {ONES[2]}. Name the whole base model "
        "by --base DIR."
    )


def test_parts_of_several_types_are_told(base: Stored) -> None:
    tensors = base(**{ONES[1]: torch.ones(4, 2, dtype=torch.bfloat16)})
    assert message(tensors, "experts") == (
        f"{FUSED}: is one tensor in memory, and of several types on the hub (bfloat16, float32); give as base a model "
        "directory with one type for all of it"
    )


def test_what_is_no_movement_has_no_way_back(base: Stored) -> None:
    """As where the hub holds what was computed of it."""
    two_of_three = architecture({name: one_expert(at) for at, name in enumerate(ONES[:2])})
    tensors = base(**{ONES[2]: None, "norm.weight": None})
    assert message(tensors, "experts", model=two_of_three) == (
        f"{FUSED}: is made on the hub of other tensors, and cannot be made of these again; give as base a model "
        "directory with the names and shapes in memory"
    )


def test_adapters_on_single_experts_need_a_base_that_has_them(tmp_path: Path) -> None:
    """There is no one tensor of which the factors of one expert are those."""
    tensors = store(
        tmp_path, {FUSED: (VALUES, [whole(VALUES)]), "norm.weight": (torch.ones(2), [whole(torch.ones(2))])}
    )
    assert message(tensors, "norm", "experts.2", "experts.1") == (
        "experts.1: is a layer that the adapters are on, and the base model has it under the names and in the shapes "
        "in which TestModel is in memory, where it is part of another; name as base a model directory as "
        "save_pretrained writes it, or leave --base out to write the adapter alone"
    )
