"""What Ctrl-C does while the command still starts: it ends it in one line, as it does later on.

Half a second goes by until everything is imported, and whoever mistyped a path presses Ctrl-C just then. So this is the
first that the package imports. It imports next to nothing, and changes nothing for a program that uses the package.
"""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

INTERRUPTED = "merger: interrupted; nothing half-made was left behind"
INTERRUPTED_CODE = 130


def guard_start() -> None:
    """From here to `end_guard`, Ctrl-C ends the process without a traceback; only where this process is the command."""
    # Where a shell had SIGINT ignored, as for what runs in the background, that stays.
    if is_command(sys.argv, sys.orig_argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def end_guard() -> None:
    """From here on, Ctrl-C is a `KeyboardInterrupt` again, where the guard stood."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_command(arguments: list[str], original: list[str]) -> bool:
    """Whether a process with these `sys.argv` and `sys.orig_argv` is `merger ...` or `python -m merger ...`."""
    if arguments[:1] == ["-m"]:  # that is what stands there until Python has found the module
        return any(original[at : at + 2] == ["-m", "merger"] for at in range(len(original)))
    return bool(arguments) and os.path.basename(arguments[0]) == "merger"  # noqa: PTH119 - pathlib takes long to import


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    # An exception would be raised amid an import, and some turn that into another. There is nothing to tidy up.
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(INTERRUPTED_CODE)
