"""What a file is that should be a `torch.save` archive and is none, and what to do about it (pure but for one read)."""

from __future__ import annotations

import os

from merger.errors import Problem

_ZIP_START = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"
_ZIP_END_BYTES = 22
_HEAD_BYTES = 512
_PICKLE_STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_COPY_AGAIN = "copy it again from where it was saved"


def problem_of_no_archive(fd: int, num_bytes: int, *, where: str) -> Problem:
    """The Problem of a file of `num_bytes` that zipfile cannot read, from its first and last bytes."""
    head = os.pread(fd, _HEAD_BYTES, 0)
    tail = os.pread(fd, _ZIP_END_BYTES, max(0, num_bytes - _ZIP_END_BYTES))
    found = f"is {num_bytes:,} bytes of"
    if num_bytes == 0:
        return Problem(
            "empty-file", where, f"The file is empty (0 bytes): it was never written to its end; {_COPY_AGAIN}."
        )
    if head.startswith(_ZIP_START):
        if tail.startswith(_ZIP_END):
            message = f"The directory of this torch.save archive ({num_bytes:,} bytes) is damaged; {_COPY_AGAIN}."
            return Problem("damaged-archive", where, message)
        message = (
            f"The file is cut short: its {num_bytes:,} bytes begin as a torch.save archive, but the directory at the "
            f"end is missing. The copy or the save was not finished; {_COPY_AGAIN}."
        )
        return Problem("truncated", where, message)
    return Problem("not-an-archive", where, f"The file {found} {_guess(head)}")


def _guess(head: bytes) -> str:
    start = head.lstrip().lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return (
            "an HTML page, not a torch.save archive: a download returned an error or a login page; download it again."
        )
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the torch.save archive that it stands for; fetch it with `git lfs pull`."
    if head.startswith(_PICKLE_STARTS):
        return "a bare pickle, not a torch.save archive; load it with what wrote it, and save it with torch.save."
    if not head.strip(b"\0"):
        return f"zeros at its start, not a torch.save archive: space was reserved, but never filled; {_COPY_AGAIN}."
    if all(byte in b"\t\n\r\f" or byte >= 0x20 for byte in head):  # noqa: PLR2004  no control characters: text
        return f"text, not a torch.save archive; {_COPY_AGAIN}."
    return f"something else than a torch.save archive; {_COPY_AGAIN}."
