"""Runs the command on a terminal of its own: a real one as far as the system knows, of a size that the test sets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_on_terminal(
    *words: str | Path, columns: int = 80, is_error_only: bool = False, **environment: str
) -> tuple[int, str]:
    """The exit code, and all that came to the terminal, with line ends as everywhere else.

    With `is_error_only`, the terminal is stderr alone, and stdout goes nowhere.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    told = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    started = subprocess.Popen(
        [sys.executable, "-m", "merger", *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if is_error_only else theirs,
        stderr=theirs,
        env={**told, "TERM": "xterm-256color", **environment},
        cwd=ROOT,
    )
    os.close(theirs)
    read = b""
    with contextlib.suppress(OSError):  # that is how a terminal ends on Linux
        while block := os.read(ours, 1 << 16):
            read += block
    os.close(ours)
    return started.wait(60), read.decode().replace("\r\n", "\n")
