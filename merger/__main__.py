"""The `merger` command, and `python -m merger`, which is the same."""

import signal
import sys

from merger.cli import main


def run() -> int:
    """Runs the command and returns its exit code; Ctrl-C changes nothing any more once it is done."""
    code = main()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(run())
