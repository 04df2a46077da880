"""What may be computed of stored tensors on the way to the output, as data: the one list of it.

Pure: which operation on which element types, and how small the pieces may be in which it is done. `computing.py` does
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from merger.dtypes import DType

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


Operation: TypeAlias = Reduce


def can_reduce(kind: str, dtype: DType) -> bool:
    """Whether elements of a type can be reduced so."""
    return dtype.name in _REDUCIBLE.get(kind, ())
