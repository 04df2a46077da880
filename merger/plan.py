"""From output tensors to a frozen plan: which files, their header bytes, and every copy into them.

Pure. What `writer.py` will do is all decided here, so that a plan can be shown, checked and tested before a byte moves.
File names, index and the split into files are those of `huggingface_hub.split_torch_state_dict_into_shards`; the bytes
of a file are those that `safetensors.serialize_file` writes for the same tensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from merger.dtypes import DType
from merger.errors import ModelError, Problem
from merger.tensors import (
    Chunk,
    StoredTensor,
    distinct_chunks,
    is_contiguous,
    is_row_run,
    row_major_strides,
)

# The order in which safetensors lays tensors of different types in one file, most aligned first
# (declaration order of the enum `Dtype` in safetensors/src/tensor.rs, reversed).
_FILE_ORDER = (
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16",
    "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL",
)  # fmt: skip
# A safetensors header is padded with spaces so that the data behind it is aligned (safetensors/src/tensor.rs).
_HEADER_ALIGNMENT = 8
# The key of a safetensors header that is no tensor.
_METADATA = "__metadata__"
# Of a head that is no part of the model. The name is that of LLaMA-Factory (V_HEAD_SAFE_WEIGHTS_NAME in
# llamafactory/extras/constants.py), which reads such a file beside a model; others pass over it.
VALUE_HEAD_FILE = "value_head.safetensors"


@dataclass(frozen=True, slots=True)
class Block:
    """Tensors that are to come into one file, as `save_pretrained` does with those that share memory.

    `name` is that of the first of them; `elements` is how many the memory holds, which is what counts when files are
    filled.
    """

    name: str
    elements: int


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to be written: under which name, as which element type, from which bytes, with which others."""

    name: str
    dtype: DType
    source: StoredTensor
    block: Block | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """A chunk whose elements follow one another both in its file and in the output.

    Its first element goes to byte `target_offset` of the output file.
    """

    chunk: Chunk
    target_offset: int


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor and its place in an output file, in bytes from the start of the file.

    `copies` cover it where every chunk is one run; where they are None it is assembled in bands of rows.
    """

    tensor: OutputTensor
    byte_offset: int
    num_bytes: int
    copies: tuple[Copy, ...] | None


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One safetensors file: its name, the bytes before the data, its tensors in the order of their bytes."""

    name: str
    header: bytes
    tensors: tuple[PlannedTensor, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All files of weights. `index` is model.safetensors.index.json, None for a single file.

    `total_size` is that of all tensor data, in bytes; the index states that of the model alone.
    """

    files: tuple[OutputFile, ...]
    index: bytes | None
    total_size: int


def plan_output(tensors: Sequence[OutputTensor], *, max_shard_size: int, num_parameters: int | None = None) -> Plan:
    """Plans the files for `tensors`, filled in the order given, each of at most `max_shard_size` bytes of data.

    A tensor larger than that gets a file of its own. `num_parameters` is the model's, which an index states as
    transformers 5 does where it is known. Raises `ModelError` for what a safetensors file cannot hold.
    """
    unwritable = [problem for tensor in tensors if (problem := _unwritable(tensor)) is not None]
    if unwritable:
        raise ModelError(unwritable)
    groups = _split(tensors, max_shard_size)
    files = []
    for number, group in enumerate(groups, start=1):
        suffix = "" if len(groups) == 1 else f"-{number:05d}-of-{len(groups):05d}"
        files.append(_plan_file(f"model{suffix}.safetensors", group))
    # Of a block all memory counts, as in the splitter that is followed here.
    counted = {tensor.block or tensor.name: _counted_bytes(tensor) for tensor in reversed(tensors)}
    index = None if len(files) == 1 else _index(files, sum(counted.values()), num_parameters)
    return Plan(tuple(files), index, sum(_num_bytes(tensor) for tensor in tensors))


def with_file(plan: Plan, name: str, tensors: Sequence[OutputTensor]) -> Plan:
    """The plan with one more file, `name`, whose tensors are not part of the model and not in its index.

    Raises `ModelError` for what a safetensors file cannot hold.
    """
    unwritable = [problem for tensor in tensors if (problem := _unwritable(tensor)) is not None]
    if unwritable:
        raise ModelError(unwritable)
    size = sum(_num_bytes(tensor) for tensor in tensors)
    return replace(plan, files=(*plan.files, _plan_file(name, tensors)), total_size=plan.total_size + size)


NOTHING = Plan((), None, 0)


def parse_size(text: str) -> int:
    """A size such as "5GB", "500MB" (powers of 1000, as Hugging Face counts) or "2GiB", in bytes.

    Raises `ValueError` where `text` is no size, or not a positive one.
    """
    units = {
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KIB": 2**10,
        "MIB": 2**20,
        "GIB": 2**30,
        "TIB": 2**40,
    }
    upper = text.strip().upper()
    unit = next((unit for unit in units if upper.endswith(unit)), "")
    number = upper.removesuffix(unit).strip()
    try:
        size = int(float(number) * units[unit]) if unit else int(number)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise ValueError(f"{text!r} is no size; write a number of bytes, or one with a unit such as 5GB or 500MB")
    return size


def _unwritable(tensor: OutputTensor) -> Problem | None:
    if tensor.name == _METADATA:
        message = f"a safetensors file keeps the name {_METADATA} for itself; rename the tensor before saving"
        return Problem("unwritable-name", tensor.name, message)
    if tensor.dtype.safetensors is None:
        message = (
            f"is {tensor.dtype}, which a safetensors file cannot hold; merge with --weights-only, which writes "
            "it as pairs of float64, or store it in another type when training"
        )
        return Problem("unwritable-dtype", tensor.name, message)
    return None


def _num_bytes(tensor: OutputTensor) -> int:
    return prod(tensor.source.shape) * tensor.dtype.itemsize


def _counted_bytes(tensor: OutputTensor) -> int:
    return _num_bytes(tensor) if tensor.block is None else tensor.block.elements * tensor.dtype.itemsize


def _split(tensors: Sequence[OutputTensor], max_shard_size: int) -> list[list[OutputTensor]]:
    """Fills files in order. A tensor too large for any goes alone and does not close the file being filled.

    A block counts as its first tensor, and the others go where that one went.
    """
    groups: list[list[OutputTensor]] = []
    homes: dict[Block, list[OutputTensor]] = {}
    current: list[OutputTensor] = []
    current_size = 0
    for tensor in tensors:
        if tensor.block in homes:
            homes[tensor.block].append(tensor)
            continue
        size = _counted_bytes(tensor)
        if size > max_shard_size:
            groups.append([tensor])
            if tensor.block is not None:
                homes[tensor.block] = groups[-1]
            continue
        if current_size + size > max_shard_size:
            groups.append(current)
            current, current_size = [], 0
        current.append(tensor)
        current_size += size
        if tensor.block is not None:
            homes[tensor.block] = current
    if current or not groups:
        groups.append(current)
    return groups


def _plan_file(name: str, tensors: Sequence[OutputTensor]) -> OutputFile:
    ordered = sorted(tensors, key=lambda tensor: (_FILE_ORDER.index(str(tensor.dtype.safetensors)), tensor.name))
    entries: dict[str, object] = {_METADATA: {"format": "pt"}}
    data_offsets = []
    position = 0
    for tensor in ordered:
        size = _num_bytes(tensor)
        entries[tensor.name] = {
            "dtype": tensor.dtype.safetensors,
            "shape": list(tensor.source.shape),
            "data_offsets": [position, position + size],
        }
        data_offsets.append(position)
        position += size
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % _HEADER_ALIGNMENT)
    start = 8 + len(header)
    planned = tuple(
        PlannedTensor(tensor, start + offset, _num_bytes(tensor), _copies(tensor, start + offset))
        for tensor, offset in zip(ordered, data_offsets, strict=True)
    )
    return OutputFile(name, len(header).to_bytes(8, "little") + header, planned, start + position)


def _copies(tensor: OutputTensor, byte_offset: int) -> tuple[Copy, ...] | None:
    shape = tensor.source.shape
    chunks = distinct_chunks(tensor.source)
    if not all(is_contiguous(chunk.sizes, chunk.strides) and is_row_run(shape, chunk.sizes) for chunk in chunks):
        return None
    strides = row_major_strides(shape)
    return tuple(
        Copy(
            chunk,
            byte_offset
            + tensor.dtype.itemsize * sum(index * step for index, step in zip(chunk.offsets, strides, strict=True)),
        )
        for chunk in chunks
    )


def _index(files: Sequence[OutputFile], total_size: int, num_parameters: int | None) -> bytes:
    """The index as `PreTrainedModel.save_pretrained` writes it."""
    weight_map = {planned.tensor.name: file.name for file in files for planned in file.tensors}
    metadata = {"total_size": total_size}
    if num_parameters is not None:
        metadata["total_parameters"] = num_parameters
    index = {"metadata": metadata, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
