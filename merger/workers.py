"""How many workers a call has: threads that copy, and processes that read headers where ranks are many."""

from __future__ import annotations

import os

from merger.errors import Problem

# Copying is bound by the disk well before the processors; past four workers nothing was gained.
_MAX_DEFAULT = 4


def check_workers(asked: int | None) -> list[Problem]:
    """What is wrong with the number that was asked for."""
    if asked is None or asked > 0:
        return []
    return [Problem("bad-option", "workers", f"{asked} is no positive number")]


def num_workers(asked: int | None) -> int:
    """The number that was asked for; without one as many as there are processors, but at most four."""
    return asked or min(_MAX_DEFAULT, os.cpu_count() or 1)
