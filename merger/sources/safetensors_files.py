"""A Hugging Face model directory: safetensors files, with an index where there are several. Reads headers only."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from merger.checkpoint import Checkpoint
from merger.dtypes import BY_SAFETENSORS
from merger.errors import ArchiveError, NotACheckpointError, Problem
from merger.tensors import Chunk, Record, SourceFile, StoredTensor, row_major_strides

FORMAT = "Hugging Face model directory"
# The limit that the safetensors library itself sets to a header (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
_MAX_HEADER_BYTES = 100_000_000


def read_model_directory(folder: Path) -> Checkpoint:
    """Reads the headers of all safetensors files that the index names, or of all in `folder` where there is no index.

    Raises `ArchiveError` for a file that is not whole, `NotACheckpointError` for an index that does not fit the files.
    """
    problems: list[Problem] = []
    files: list[SourceFile] = []
    tensors: dict[str, StoredTensor] = {}
    for path in _weight_files(folder):
        try:
            file, found = _read_file(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(Problem("broken-safetensors", path.name, f"is no whole safetensors file: {error}"))
            continue
        files.append(file)
        for fqn, tensor in found.items():
            if fqn in tensors:
                other = tensors[fqn].chunks
                held_by = other[0].file.path.name if other else "another file"
                problems.append(Problem("duplicate-key", path.name, f"holds {fqn}, and so does {held_by}"))
            tensors[fqn] = tensor
    if problems:
        raise ArchiveError(problems)
    return Checkpoint(
        path=folder,
        format=FORMAT,
        world_size=1,
        files=tuple(files),
        tensors=tensors,
        layouts={},
        others={},
        config_dir=folder if (folder / "config.json").is_file() else None,
        notes=(),
        problems=(),
    )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NotACheckpointError(Problem("broken-index", index.name, 'is no JSON with a "weight_map"')) from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        listed = ", ".join(missing)
        raise NotACheckpointError(Problem("broken-index", index.name, f"names files that are not there: {listed}"))
    return [folder / name for name in names]


def _read_file(path: Path) -> tuple[SourceFile, dict[str, StoredTensor]]:
    status = path.stat()
    file = SourceFile(path, status.st_size, status.st_mtime_ns, None)
    with path.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if header_bytes > min(_MAX_HEADER_BYTES, status.st_size):
            raise ValueError(f"it has {status.st_size:,} bytes, its header alone claims {header_bytes:,}")
        header: dict[str, Any] = json.loads(stream.read(header_bytes))
    start = 8 + header_bytes
    tensors = {}
    for fqn, entry in header.items():
        if fqn == "__metadata__":
            continue
        dtype = BY_SAFETENSORS[entry["dtype"]]
        shape = tuple(int(size) for size in entry["shape"])
        first, last = (int(offset) for offset in entry["data_offsets"])
        if last - first != prod(shape) * dtype.itemsize or first < 0 or start + last > status.st_size:
            raise ValueError(f"{fqn} lies outside the file, or its size is not that of its shape")
        record = Record(fqn, start + first, last - first, None)
        chunk = Chunk((0,) * len(shape), shape, file, start + first, row_major_strides(shape), record)
        tensors[fqn] = StoredTensor(fqn, dtype, shape, (chunk,) if last > first else ())
    return file, tensors
