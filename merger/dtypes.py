"""The one table of element types: what torch, its pickles and safetensors call them, and how many bytes they take.

Pure: it holds names and numbers, and imports neither torch nor numpy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    `name` is torch's ("float32"), `storage` the class its pickles name ("FloatStorage"; None where torch pickles an
    untyped storage), `safetensors` the tag in a safetensors header ("F32"; None where that format has none).
    """

    name: str
    itemsize: int
    is_floating: bool
    storage: str | None
    safetensors: str | None

    def __str__(self) -> str:
        return self.name


# Source: torch/storage.py (_dtype_to_storage_type_map) and safetensors' `Dtype` enum (0.8).
_TABLE = (
    DType("float64", 8, True, "DoubleStorage", "F64"),
    DType("float32", 4, True, "FloatStorage", "F32"),
    DType("float16", 2, True, "HalfStorage", "F16"),
    DType("bfloat16", 2, True, "BFloat16Storage", "BF16"),
    DType("float8_e4m3fn", 1, True, None, "F8_E4M3"),
    DType("float8_e5m2", 1, True, None, "F8_E5M2"),
    DType("float8_e4m3fnuz", 1, True, None, "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", 1, True, None, "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 1, True, None, "F8_E8M0"),
    DType("int64", 8, False, "LongStorage", "I64"),
    DType("int32", 4, False, "IntStorage", "I32"),
    DType("int16", 2, False, "ShortStorage", "I16"),
    DType("int8", 1, False, "CharStorage", "I8"),
    DType("uint8", 1, False, "ByteStorage", "U8"),
    DType("uint16", 2, False, None, "U16"),
    DType("uint32", 4, False, None, "U32"),
    DType("uint64", 8, False, None, "U64"),
    DType("bool", 1, False, "BoolStorage", "BOOL"),
    DType("complex64", 8, False, "ComplexFloatStorage", "C64"),
    DType("complex128", 16, False, "ComplexDoubleStorage", None),
)

BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in _TABLE}
BY_STORAGE: dict[str, DType] = {dtype.storage: dtype for dtype in _TABLE if dtype.storage is not None}
BY_SAFETENSORS: dict[str, DType] = {dtype.safetensors: dtype for dtype in _TABLE if dtype.safetensors is not None}
