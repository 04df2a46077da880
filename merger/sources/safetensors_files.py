"""A Hugging Face model directory: safetensors files, with an index where there are several. Reads headers only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TypeGuard

from merger.checkpoint import Checkpoint
from merger.dtypes import BY_SAFETENSORS
from merger.errors import ArchiveError, NotACheckpointError, Problem, listed
from merger.plan import VALUE_HEAD_FILE
from merger.tensors import Chunk, Record, SourceFile, StoredTensor, row_major_strides

FORMAT = "Hugging Face model directory"
# The limit that the safetensors library itself sets to a header (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
_MAX_HEADER_BYTES = 100_000_000
# A file begins with the length of its header, a little-endian number.
_LENGTH_BYTES = 8
_INDEX_NAME = "model.safetensors.index.json"
# Names that a message lists, so that it stays readable.


def read_model_directory(folder: Path) -> Checkpoint:
    """Reads the headers of the safetensors files that make the model in `folder`.

    They are those that `transformers` loads: model.safetensors, else what the index names; where there is neither, all.
    A value head that lies beside them is read too.
    Raises `ArchiveError` for a file that is not whole, `NotACheckpointError` for an index that does not fit the files.
    """
    weight_map = _weight_map(folder)
    problems: list[Problem] = []
    files: list[SourceFile] = []
    tensors: dict[str, StoredTensor] = {}
    beside = [path for path in [folder / VALUE_HEAD_FILE] if path.is_file()]
    for path in dict.fromkeys([*_weight_files(folder, weight_map), *beside]):
        try:
            file, found = _read_file(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            problems.append(Problem("broken-safetensors", path.name, f"is no whole safetensors file: {reason}"))
            continue
        files.append(file)
        for fqn, tensor in found.items():
            if fqn in tensors:
                other = [chunk.file for chunk in tensors[fqn].chunks if isinstance(chunk.file, SourceFile)]
                held_by = other[0].path.name if other else "another file"
                problems.append(Problem("duplicate-key", path.name, f"holds {fqn}, and so does {held_by}"))
            tensors[fqn] = tensor
    if problems:
        raise ArchiveError(problems)
    if absent := sorted(fqn for fqn in weight_map if fqn not in tensors):
        raise NotACheckpointError(
            Problem("broken-index", _INDEX_NAME, f"names tensors that no file holds ({len(absent)}): {listed(absent)}")
        )
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


def _weight_map(folder: Path) -> dict[str, str]:
    """What the index says of which tensor is in which file; nothing where it does not count."""
    index = folder / _INDEX_NAME
    if (folder / "model.safetensors").is_file() or not index.is_file():
        return {}
    try:
        content = json.loads(index.read_bytes())
    except (ValueError, RecursionError):
        content = None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise NotACheckpointError(
            Problem("broken-index", index.name, 'is no JSON with a "weight_map" of tensor names to file names')
        )
    return weight_map


def _weight_files(folder: Path, weight_map: Mapping[str, str]) -> list[Path]:
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not weight_map:
        return sorted(folder.glob("*.safetensors"))
    present = {path.name for path in folder.iterdir() if path.is_file()}
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if name not in present]:
        raise NotACheckpointError(
            Problem("broken-index", _INDEX_NAME, f"names files that are not there ({len(missing)}): {listed(missing)}")
        )
    return [folder / name for name in names]


def _read_file(path: Path) -> tuple[SourceFile, dict[str, StoredTensor]]:
    """The tensors of a file in the order of its header. Raises `ValueError` or `OSError` where it is not whole."""
    with path.open("rb") as stream:
        status = os.fstat(stream.fileno())
        file = SourceFile(path, status.st_size, status.st_mtime_ns, None)
        if file.num_bytes < _LENGTH_BYTES:
            raise ValueError(f"it has {file.num_bytes} bytes, too few for any header")
        header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if _LENGTH_BYTES + header_bytes > file.num_bytes or header_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"it has {file.num_bytes:,} bytes, its header alone claims {header_bytes:,}")
        header = _parse_header(stream.read(header_bytes))
    start = _LENGTH_BYTES + header_bytes
    tensors = {fqn: _tensor(fqn, entry, file, start) for fqn, entry in header.items() if fqn != "__metadata__"}
    _check_cover(tensors, start, file.num_bytes)
    return file, tensors


def _parse_header(data: bytes) -> dict[str, object]:
    try:
        # Decoded here, since json would guess at UTF-16 and UTF-32 too.
        header = json.loads(data.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError(f"its header is a JSON {type(header).__name__}, not an object")  # noqa: TRY004 - the file's fault
    return header


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("it has a key twice")
    return result


def _tensor(fqn: str, entry: object, file: SourceFile, start: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    tag, shape, data_offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(tag, str) or not _is_counts(shape) or not _is_range(data_offsets):
        raise ValueError(f"the header entry of {fqn} does not have a dtype, a shape and data_offsets")
    if tag not in BY_SAFETENSORS:
        raise ValueError(f"{fqn} is of the unknown type {tag}")
    dtype = BY_SAFETENSORS[tag]
    first, last = data_offsets
    size = prod(shape) * dtype.itemsize
    if last - first != size:
        raise ValueError(f"{fqn} has {last - first:,} bytes, its shape {shape} of {tag} needs {size:,}")
    record = Record(fqn, start + first, size, None)
    chunk = Chunk((0,) * len(shape), tuple(shape), file, start + first, row_major_strides(shape), record)
    return StoredTensor(fqn, dtype, tuple(shape), (chunk,) if size else ())


def _check_cover(tensors: Mapping[str, StoredTensor], start: int, num_bytes: int) -> None:
    """Raises `ValueError` unless the tensors follow one another from the header to the end of the file."""
    position = start
    records = [chunk.record for tensor in tensors.values() for chunk in tensor.chunks]
    for record in sorted(records, key=lambda record: record.byte_offset):
        if record.byte_offset != position:
            raise ValueError(f"{record.name} begins at byte {record.byte_offset:,}, not at {position:,} as it should")
        position += record.num_bytes
    if position != num_bytes:
        raise ValueError(f"it has {num_bytes:,} bytes, its header tells of {position:,}")


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _is_range(value: object) -> TypeGuard[list[int]]:
    return _is_counts(value) and len(value) == 2  # noqa: PLR2004 - a first and a last
