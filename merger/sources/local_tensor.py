"""The tensor that one rank holds: where its bytes lie in the file, from the inert record of a storage and a view of it.

Every size, stride and offset is checked against the record it points into, so that nothing after this can read outside
of it. No tensor data is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from sys import intern
from typing import TypeGuard

from merger.dtypes import DType
from merger.sources import fields
from merger.sources.fields import MalformedError
from merger.sources.inert import Call, Global, Inert, StorageRef
from merger.tensors import Record

REBUILD = frozenset({"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"})
# torch allows 64 dims in a view, and no model comes near it.
_MAX_DIMS = 64
# By how many elements the expanded and overlapping views of one file may be larger than their storages, together. A
# causal mask of 8,192 positions, saved as a view of one row, has a quarter of this; a few bytes could claim any number.
_MAX_REPEATED = 1 << 28


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """The tensor that one rank holds: `sizes` and `strides` in elements, and where the first of them lies.

    `byte_offset` is from the start of the file. All elements lie within `record`, which may have more bytes than these,
    or none where there are no elements. `device` is where the tensor was when it was saved.
    """

    dtype: DType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    record: Record
    byte_offset: int
    device: str


def is_local(value: Inert) -> TypeGuard[Call]:
    """Whether `value` is the call that makes a plain tensor of a storage."""
    return value.__class__ is Call and value.func in REBUILD


class LocalTensors:
    """Decodes the local tensors of one file, and counts what its views repeat. `records` by name ("data/3")."""

    __slots__ = ("_records", "_repeats_left")

    def __init__(self, records: Mapping[str, Record]) -> None:
        self._records = records
        self._repeats_left = _MAX_REPEATED

    def decode(self, func: str, args: tuple[Inert, ...]) -> LocalTensor:
        """The tensor that a call of `func`, one of `REBUILD`, stands for.

        Source: torch/_utils.py, `_rebuild_tensor_v2` and `_v3`.

        Raises:
            MalformedError: it is not as torch writes it, or does not fit into its record.
        """
        own_dtype = func.endswith("_v3")
        num_args = 7 if own_dtype else 6
        if not num_args <= len(args) <= num_args + 1 or args[0].__class__ is not StorageRef:
            raise MalformedError("is not made as torch makes tensors")
        # The optional last argument says that the values are to be conjugated or negated on reading.
        if len(args) > num_args and args[num_args]:
            raise MalformedError("is a lazily conjugated or negated view; save it with .resolve_conj().resolve_neg()")
        storage: StorageRef = args[0]
        dtype = args[6].dtype if own_dtype and args[6].__class__ is Global else storage.dtype
        if dtype is None:
            raise MalformedError("has no element type")
        record = self._records.get(f"data/{storage.key}")
        if record is None:
            raise MalformedError(f"its storage data/{storage.key} is not in the file")
        unit = storage.dtype.itemsize if storage.dtype else 1
        num_bytes = storage.num_elements * unit
        if num_bytes > record.num_bytes:
            raise MalformedError(f"its storage claims {num_bytes} bytes, {record.name} has {record.num_bytes}")
        start = record.byte_offset
        if storage.view is not None:
            start, num_bytes = start + storage.view[0] * unit, storage.view[1] * unit
        offset = fields.natural(args[1], "storage offset")
        sizes = fields.naturals(args[2], "shape")
        strides = fields.naturals(args[3], "stride")
        self._check_bounds(sizes, strides, offset, num_bytes // dtype.itemsize)
        # Of an empty tensor nothing is read, and up to torch 2.9 its offset may lead out of a storage of no elements.
        # The same integer object where it can be: half a million of these are kept for a large checkpoint.
        byte_offset = start + offset * dtype.itemsize if offset and 0 not in sizes else start
        return LocalTensor(dtype, sizes, strides, record, byte_offset, intern(storage.location))

    def _check_bounds(self, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int, num_elements: int) -> None:
        """That all elements of a tensor lie in a storage of `num_elements`, and are not many times these."""
        if len(sizes) != len(strides) or len(sizes) > _MAX_DIMS:
            raise MalformedError(f"it has {len(sizes)} sizes and {len(strides)} strides")
        if 0 in sizes:
            return
        last = offset
        for n, stride in zip(sizes, strides, strict=True):
            last += (n - 1) * stride
        if last >= num_elements:
            raise MalformedError(
                f"its shape {sizes}, stride {strides} and offset {offset} leave its storage of {num_elements} elements"
            )
        if prod(sizes) > num_elements:
            self._repeats_left -= prod(sizes) - num_elements
            if self._repeats_left < 0:
                raise MalformedError(
                    f"its shape {sizes} has many more elements than its storage of {num_elements}; if it is an "
                    "expanded view, save it with .contiguous()"
                )
