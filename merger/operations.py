"""What may be computed of stored tensors on the way to the output, as data: the one list of it.

Pure: which operation on which element types, and how small the pieces may be in which it is done. `computing.py` does
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias

from merger.dtypes import DType

FoldLayout: TypeAlias = Literal["linear", "transposed", "conv", "experts", "transposed_experts"]

# By the names that torch's `Partial` placement gives them. A sum of bools is no sum, and the average of whole numbers
# is none: torch refuses that too.
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
_INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8"})
_REDUCIBLE = {
    "sum": _FLOATS | _INTEGERS,
    "avg": _FLOATS,
    "product": _FLOATS | _INTEGERS,
    "max": _FLOATS | _INTEGERS | {"bool"},
    "min": _FLOATS | _INTEGERS | {"bool"},
    "band": _INTEGERS,
    "bor": _INTEGERS,
    "bxor": _INTEGERS,
}


@dataclass(frozen=True, slots=True)
class Reduce:
    """Element by element over all inputs, which have the shape and type of the result.

    `kind` is "sum", "avg", "product", "max", "min", "band", "bor" or "bxor". Floating sums and products are taken in
    float64 and rounded once.
    """

    kind: str


@dataclass(frozen=True, slots=True)
class Fold:
    """A weight with LoRA folded in: W + scaling * B A, in float32 (float64 where W is), rounded once.

    The inputs are W, A of shape (rank, inputs) and B of shape (outputs, rank). How the product lies in W:

    * "linear": W is (outputs, inputs); "transposed": (inputs, outputs), as embeddings and the Conv1D of GPT-2 have it.
    * "conv": W is (outputs, inputs, *kernel), A (rank, inputs, *kernel), B (outputs, rank, 1, ...).
    * "experts": W is (experts, outputs, inputs), "transposed_experts" (experts, inputs, outputs); A is (experts * rank,
      inputs) with the expert as the slow index, B (outputs, rank * experts) with the expert as the fast one.

    With `is_dora` a fourth input has the lengths that the vectors along the inputs, one per output, are given in the
    end.
    Source: `get_delta_weight` of the classes in peft/tuners/lora/layer.py, `merge_unsafe` of those in variants.py.
    """

    layout: FoldLayout
    scaling: float
    is_dora: bool = False


@dataclass(frozen=True, slots=True)
class AddScaled:
    """The first input plus `scaling` times the second, of one shape, in float32 (float64 where the first is)."""

    scaling: float


@dataclass(frozen=True, slots=True)
class Zeros:
    """Every element is zero; there are no inputs."""


@dataclass(frozen=True, slots=True)
class Convert:
    """What a function makes of the inputs, all of them whole, as tensors of torch; it may be called more than once."""

    function: Callable[[Sequence[Any]], Any]


Operation: TypeAlias = Reduce | Fold | AddScaled | Zeros | Convert


def least_elements(operation: Operation, shape: tuple[int, ...]) -> int:
    """How many elements of the row-major order have to be computed together, at least."""
    if isinstance(operation, Convert):
        # All: for each band the function would do all of its work anew.
        return prod(shape)
    if not isinstance(operation, Fold):
        return 1
    # Whole rows, which the product gives at once, and whose length DoRA asks for.
    return prod(shape[1:]) if operation.layout == "conv" else shape[-1]


def can_reduce(kind: str, dtype: DType) -> bool:
    """Whether elements of a type can be reduced so."""
    return dtype.name in _REDUCIBLE.get(kind, ())
