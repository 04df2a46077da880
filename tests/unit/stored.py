"""Lays tensors in files by a plan of pieces, with numpy alone: what the code under test has to read back."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from merger.dtypes import BY_NAME
from merger.plan import OutputTensor, Plan, plan_output
from merger.tensors import Chunk, Record, SourceFile, StoredTensor

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# What lies between the pieces; no tensor is made of it.
FILLER = b"\xa5"
_RECORD_ALIGNMENT = 16


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor and how it lies in its file.

    `order` names the dims from the outermost in memory to the innermost (None: row-major), `gap` is how many elements
    lie between its innermost runs, `lead` and `tail` how many elements of filler its record holds around it. A piece
    that is `joined` lies in the same record as the one before it in the file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int = 0
    order: tuple[int, ...] | None = None
    gap: int = 0
    lead: int = 0
    tail: int = 0
    joined: bool = False


def whole(tensor: torch.Tensor, **how: Any) -> Piece:
    """A piece that is the whole tensor."""
    return Piece((0,) * tensor.dim(), tuple(tensor.shape), **how)


def rows(tensor: torch.Tensor, num_ranks: int, **how: Any) -> list[Piece]:
    """Equal cuts of the first dim, one per file."""
    step = tensor.shape[0] // num_ranks
    rest = tuple(tensor.shape[1:])
    return [Piece((rank * step, *(0 for _ in rest)), (step, *rest), file=rank, **how) for rank in range(num_ranks)]


def columns(tensor: torch.Tensor, num_ranks: int, **how: Any) -> list[Piece]:
    """Equal cuts of the second dim of a matrix, one per file."""
    step = tensor.shape[1] // num_ranks
    return [Piece((0, rank * step), (tensor.shape[0], step), file=rank, **how) for rank in range(num_ranks)]


def grid(cuts: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The rectangles (offsets, sizes) between cut positions that begin with 0 and end with the size of each dim."""
    return [
        (tuple(start for start, _ in box), tuple(stop - start for start, stop in box))
        for box in product(*(tuple(pairwise(positions)) for positions in cuts))
    ]


def store(
    folder: Path, tensors: Mapping[str, tuple[torch.Tensor, Sequence[Piece]]], *, checked: bool = True
) -> dict[str, StoredTensor]:
    """Writes `rank_<n>.bin` files that hold the pieces and says where they lie, with CRC-32s if `checked`."""
    folder.mkdir(parents=True, exist_ok=True)
    contents: dict[int, bytearray] = {}
    spans: dict[int, list[tuple[int, int]]] = {}
    placed: list[tuple[str, Piece, int, tuple[int, ...], int]] = []
    for name, (tensor, pieces) in tensors.items():
        for piece in pieces:
            data, strides = _encode(elements(tensor), piece)
            content, records = contents.setdefault(piece.file, bytearray()), spans.setdefault(piece.file, [])
            content += FILLER * (-len(content) % _RECORD_ALIGNMENT)
            if not piece.joined or not records:
                content += FILLER * _RECORD_ALIGNMENT
                records.append((len(content), len(content)))
            itemsize = tensor.element_size()
            content += FILLER * (piece.lead * itemsize)
            placed.append((name, piece, len(content), strides, len(records) - 1))
            content += data + FILLER * (piece.tail * itemsize)
            records[-1] = (records[-1][0], len(content))
    files = {
        number: _write(folder / f"rank_{number}.bin", bytes(content), number) for number, content in contents.items()
    }
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    for name, piece, byte_offset, strides, number in placed:
        start, stop = spans[piece.file][number]
        crc32 = zlib.crc32(contents[piece.file][start:stop]) if checked else None
        record = Record(f"data/{number}", start, stop - start, crc32)
        chunks[name].append(Chunk(piece.offsets, piece.sizes, files[piece.file], byte_offset, strides, record))
    return {
        name: StoredTensor(name, BY_NAME[dtype_name(tensor)], tuple(tensor.shape), tuple(chunks[name]))
        for name, (tensor, _) in tensors.items()
    }


def plan_for(
    stored: Mapping[str, StoredTensor], casts: Mapping[str, str] | None = None, max_shard_size: int = 1 << 40
) -> Plan:
    """A plan that writes the tensors under their own names, cast where `casts` names a type."""
    outputs = [
        OutputTensor(name, BY_NAME[(casts or {}).get(name, tensor.dtype.name)], tensor)
        for name, tensor in stored.items()
    ]
    return plan_output(outputs, max_shard_size=max_shard_size)


def elements(tensor: torch.Tensor) -> Array:
    """A tensor as numpy elements of raw bytes, so that any type and any NaN can be compared."""
    flat = tensor.contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return np.frombuffer(data, dtype=f"V{tensor.element_size()}").reshape(tuple(tensor.shape))


def random_tensor(dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """A tensor of random bits, NaNs included; bools are 0 or 1."""
    num_bytes = prod(shape) * dtype.itemsize
    data = bytearray(random.Random(seed).randbytes(num_bytes))
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    return torch.frombuffer(data, dtype=dtype).reshape(tuple(shape)) if data else torch.empty(tuple(shape), dtype=dtype)


def dtype_name(tensor: torch.Tensor) -> str:
    """The name in torch of an element type, without the prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def open_descriptors() -> set[str]:
    """The descriptors of this process that lead to files on disk, as 'number -> path'."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            target = str(link.readlink())
            if target.startswith("/") and not target.startswith(("/proc/", "/dev/")):
                found.add(f"{link.name} -> {target}")
    return found


def _encode(array: Array, piece: Piece) -> tuple[bytes, tuple[int, ...]]:
    part = array[tuple(slice(start, start + size) for start, size in zip(piece.offsets, piece.sizes, strict=True))]
    order = piece.order or tuple(range(part.ndim))
    part = part.transpose(order)
    shape = (*part.shape[:-1], part.shape[-1] + piece.gap) if part.ndim else ()
    memory = np.frombuffer(bytearray(FILLER * (prod(shape) * array.itemsize)), dtype=array.dtype).reshape(shape)
    memory[tuple(slice(0, size) for size in part.shape)] = part
    strides = [0] * part.ndim
    step = 1
    for dim, size in zip(reversed(order), reversed(shape), strict=True):
        strides[dim] = step
        step *= size
    return memory.tobytes(), tuple(strides)


def _write(path: Path, data: bytes, rank: int) -> SourceFile:
    path.write_bytes(data)
    status = path.stat()
    return SourceFile(path, status.st_size, status.st_mtime_ns, rank)
