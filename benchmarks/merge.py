"""Memory and time of merges of one checkpoint, side by side with `cp` of its rank files.

    python -m fixtures make qwen2-0.5b-fp32-w4 BIG      # 2 GB of float32 on four ranks, once
    python benchmarks/merge.py BIG/checkpoint

Every round runs all commands one after the other, so that a busy machine is busy for all of them; what is told is the
median over the rounds of each time as a multiple of `cp`'s, which means more than seconds do. Peak memory is the
largest resident set of the process. The page cache is warm, as it is when a run has just finished saving.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    merge = [sys.executable, "-m", "merger", "merge", str(options.checkpoint), "OUT", "--quiet"]
    copy = "mkdir OUT && cp -- " + " ".join(f"'{path}'" for path in options.checkpoint.glob("model_world_size_*"))
    commands = {
        "cp of the rank files, then sync": ["sh", "-c", f"{copy} OUT && sync OUT/*"],
        "inspect": [sys.executable, "-m", "merger", "inspect", str(options.checkpoint)],
        "merge --dtype keep --weights-only": [*merge, "--dtype", "keep", "--weights-only"],
        "... --no-checksum": [*merge, "--dtype", "keep", "--weights-only", "--no-checksum"],
        "merge --dtype keep": [*merge, "--dtype", "keep"],
        "merge --dtype bfloat16": [*merge, "--dtype", "bfloat16"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    peaks: dict[str, int] = dict.fromkeys(commands, 0)
    with tempfile.TemporaryDirectory(dir=options.checkpoint.absolute().parent) as folder:
        for _ in range(options.rounds):
            for name, command in commands.items():
                out = Path(folder) / "out"
                started = time.perf_counter()
                peaks[name] = max(peaks[name], _peak_memory([word.replace("OUT", str(out)) for word in command]))
                seconds[name].append(time.perf_counter() - started)
                shutil.rmtree(out, ignore_errors=True)
    base = seconds["cp of the rank files, then sync"]
    print(f"{os.cpu_count()} cores, {options.rounds} rounds")
    print(f"{'command':36}  {'times cp':>8}  {'seconds':>8}  {'peak MB':>8}")
    for name, taken in seconds.items():
        ratio = statistics.median(one / other for one, other in zip(taken, base, strict=True))
        print(f"{name:36}  {ratio:8.2f}  {statistics.median(taken):8.2f}  {peaks[name] / 1e6:8.0f}")


def _peak_memory(command: list[str]) -> int:
    """Runs a command and returns the largest resident set it had, in bytes."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"failed: {command}")
    return int(usage.ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
