"""Reads a file in the format that `torch.save` wrote before torch 1.6, and still does where it is asked to.

It is five pickles, one after the other, and then the storages: a magic number, the version of the protocol, what the
machine was like, the object, and the keys of its storages in the order in which they follow. Each storage is a count
of its elements in eight bytes, and their bytes. There are no checksums, and nothing says where the object's pickle
ends but the pickle itself; so all that can be checked is that every storage is there, is as large as the pickle says,
and that the last one ends where the file does.

Source: torch/serialization.py (`_legacy_save`), torch/csrc/serialization.cpp (`THPStorage_writeFileRaw`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from merger.errors import ArchiveError, Problem
from merger.sources import fields, unpickler
from merger.sources.inert import Inert, StorageRef
from merger.sources.unpickler import CutShortError
from merger.tensors import Record

# The magic number is pickled first: a protocol, from protocol 4 on a frame, and an integer of ten bytes.
_MAGIC = re.compile(rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL)
_MAGIC_BYTES = 32
_PROTOCOL_VERSION = 1001

# How much of a file is read at first to find the end of its pickles; four times as much whenever that is not enough.
# 5,000 DTensors take 2 MB.
_FIRST_BYTES = 4 << 20
_MAX_BYTES = 512 << 20
_COUNT_BYTES = 8
_COPY_AGAIN = "copy it again from where it was saved"
_DAMAGED = f"The file is damaged, or torch.save did not write it; {_COPY_AGAIN}."


def is_legacy(head: bytes) -> bool:
    """Whether a file that begins with `head`, of at least 32 bytes where it has them, is of this format."""
    return _MAGIC.match(head[:_MAGIC_BYTES]) is not None


def read_legacy(fd: int, num_bytes: int, *, where: str) -> tuple[Inert, dict[str, Record]]:
    """The inert object in the open file `fd`, of `num_bytes`, and its storages by name ("data/" and the key).

    Raises:
        UnsafePickleError: a pickle asks for a class or function that is not on the list; nothing was run.
        ArchiveError: the file is cut short or damaged, or was written on a big-endian machine.
    """
    limit = min(num_bytes, _MAX_BYTES)
    window = min(limit, _FIRST_BYTES)
    while True:
        data = os.pread(fd, window, 0)
        try:
            value, keys, refs, end = _pickles(data, where)
        except CutShortError:
            if window == limit:
                raise
            window = min(limit, 4 * window)
        else:
            return value, _records(fd, num_bytes, end, _of_storages(keys, refs, where), where)


def _pickles(data: bytes, where: str) -> tuple[Inert, Inert, Sequence[StorageRef], int]:
    """The object, the list of storage keys, the storages that the object names, and where the pickles end."""
    magic = _MAGIC.match(data)
    assert magic is not None, "asked before"
    version, end, _ = unpickler.load_next(data, magic.end(), where=where)
    if version != _PROTOCOL_VERSION or version.__class__ is not int:
        raise _damaged(where, f"Its protocol version is {fields.shown(version)}, not {_PROTOCOL_VERSION}")
    system, end, _ = unpickler.load_next(data, end, where=where)
    if system.__class__ is not dict or system.get("little_endian") is not True:
        message = (
            "It was saved on a machine that is not little-endian; only little-endian files can be read. "
            "Load and save it again on a little-endian machine."
        )
        raise ArchiveError(Problem("byte-order", where, message))
    value, end, refs = unpickler.load_next(data, end, where=where)
    keys, end, _ = unpickler.load_next(data, end, where=where)
    return value, keys, refs, end


def _of_storages(keys: Inert, refs: Sequence[StorageRef], where: str) -> dict[str, StorageRef]:
    """The storages by key, in the order of the file."""
    by_key: dict[str, StorageRef] = {}
    for ref in refs:
        # The first mention says the element type that a storage was counted in.
        by_key.setdefault(ref.key, ref)
    if keys.__class__ is not list or any(key.__class__ is not str for key in keys):
        raise _damaged(where, "Its storage keys are no list of texts")
    if len(set(keys)) != len(keys) or set(keys) != set(by_key):
        raise _damaged(where, f"It lists {len(keys)} storages, and its tensors name {len(by_key)}: not the same ones")
    return {key: by_key[key] for key in keys}


def _records(fd: int, num_bytes: int, start: int, storages: dict[str, StorageRef], where: str) -> dict[str, Record]:
    records: dict[str, Record] = {}
    for number, (key, ref) in enumerate(storages.items(), 1):
        header = os.pread(fd, _COUNT_BYTES, start)
        count = int.from_bytes(header, "little", signed=True)
        size = ref.num_elements * (ref.dtype.itemsize if ref.dtype else 1)
        if len(header) == _COUNT_BYTES and count != ref.num_elements:
            clause = f"Storage {number} of {len(storages)} has {count:,} elements, not the {ref.num_elements:,}"
            raise _damaged(where, f"{clause} that its tensors name")
        start += _COUNT_BYTES
        if start + size > num_bytes:
            message = (
                f"The file is cut short: storage {number} of {len(storages)} should end at byte {start + size:,}, the "
                f"file has {num_bytes:,}. The copy or the save was not finished; {_COPY_AGAIN}."
            )
            raise ArchiveError(Problem("truncated", where, message))
        records[f"data/{key}"] = Record(f"data/{key}", start, size, None)
        start += size
    if start != num_bytes:
        raise _damaged(where, f"Its last storage ends at byte {start:,}, but the file has {num_bytes:,}")
    return records


def _damaged(where: str, clause: str) -> ArchiveError:
    return ArchiveError(Problem("damaged-archive", where, f"{clause}. {_DAMAGED}"))
