"""Where the output goes: full, taken, unwritable and too small places, with a checkpoint that real ranks made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import merger
from merger.errors import TargetError

CASE = "qwen2-fp32-w4"

# Merges with progress that waits for a line once the first bytes are written.
SLOW_MERGE = """
import sys, merger
asked = []
def wait(done, total):
    if not asked:
        asked.append(done)
        print("writing", flush=True)
        sys.stdin.readline()
merger.merge(sys.argv[1], sys.argv[2], progress=wait)
"""

# Merges where no file may grow beyond 20,000 bytes, as on a disk with a quota.
LIMITED_MERGE = """
import resource, sys
from merger.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(main(["merge", sys.argv[1], sys.argv[2]]))
"""


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_target_with_stale_files_is_refused_or_swapped_out_whole(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """S16."""
    folder, out = checkpoint(CASE) / "checkpoint", tmp_path / "out"
    merger.merge(folder, out, max_shard_size="20KB")
    stale = set(files(out))
    assert "model.safetensors.index.json" in stale
    with pytest.raises(TargetError) as caught:
        merger.merge(folder, out)
    assert str(caught.value) == (
        f"{out}: is not empty (it holds chat_template.jinja, config.json, generation_config.json, "
        f"merger_report.json, model-00001-of-00003.safetensors and {len(stale) - 5} more); choose "
        "another directory, or replace the whole of it with --overwrite"
    )
    merger.merge(folder, out, overwrite=True)
    merger.merge(folder, tmp_path / "fresh")
    assert files(out) == files(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out"]


def test_of_two_writers_one_wins_and_the_other_is_told(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """S17."""
    folder, out = str(checkpoint(CASE) / "checkpoint"), tmp_path / "out"
    first = subprocess.Popen(
        [sys.executable, "-c", SLOW_MERGE, folder, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdin is not None
    assert first.stdout is not None
    assert first.stdout.readline() == "writing\n"
    second = subprocess.run(
        [sys.executable, "-m", "merger", "merge", folder, str(out)], capture_output=True, text=True, check=False
    )
    assert (second.returncode, second.stdout) == (2, "")
    assert second.stderr == (f"merger: error: {out}: is being written by another process; wait for it, or end it\n")
    first.communicate("go on\n")
    assert first.returncode == 0
    assert merger.verify(folder, out).is_equal
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_limit_on_files_leaves_nothing(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """L9."""
    folder, out = str(checkpoint(CASE) / "checkpoint"), tmp_path / "deep" / "out"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED_MERGE, folder, str(out)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"merger: error: {out}: cannot be written (File too large); nothing was left there; make room or choose "
        "another place\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_space_is_checked_before_anything_is_written(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L9."""
    folder, out = checkpoint(CASE) / "checkpoint", tmp_path / "out"
    merger.merge(folder, out)
    needed = sum(map(len, files(out).values()))
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(TargetError) as caught:
        merger.merge(folder, tmp_path / "other")
    assert str(caught.value) == (
        f"{tmp_path / 'other'}: needs {needed:,} bytes but only 1,000 are free there; make room, or choose another disk"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
