"""The demonstration that a newcomer starts with: it says what it does, and fails where a step of it does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from fixtures import demo
from fixtures.case import Case


@pytest.fixture
def made_before(monkeypatch: pytest.MonkeyPatch, copy_of: Callable[[str], Path]) -> Callable[[str], Path]:
    """`made_before(case)` is a copy of that case, which the demonstration takes for what it made."""

    def put(name: str) -> Path:
        made = copy_of(name)

        def make(_: Case, out: Path) -> None:
            shutil.copytree(made, out)

        monkeypatch.setattr(demo, "make", make)
        return made

    return put


def test_the_demonstration_makes_merges_verifies_and_loads(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fixtures", "demo", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line in (
        "$ merger inspect out/checkpoint",
        "$ merger merge out/checkpoint out/merged",
        "the same: 27 tensors, 55.39 kB",
        "missing keys: none; unexpected keys: none",
        "logits of shape (2, 8, 101): equal, difference 0",
        "The result lies in out/merged",
        f"`merger` is {sys.executable} -m merger",
    ):
        assert line in lines
    assert [line for line in lines if len(line) > 80 and sys.executable not in line] == []
    assert (tmp_path / "out/merged/model.safetensors").is_file()


def test_long_paths_have_lines_of_their_own() -> None:
    folder = "a folder " * 5
    assert demo._broken(["merger", "merge", f"{folder}in", f"{folder}out"]) == (
        f"merger merge \\\n    '{folder}in' \\\n    '{folder}out'"
    )
    assert demo._broken(["merger", "merge", "in", "out"]) == "merger merge in out"


def test_a_step_that_fails_fails_the_demonstration(
    made_before: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made_before("qwen2-fp32-w4+ranks_missing")
    assert demo.demo(tmp_path / "out") == 2
    assert capfd.readouterr().err.endswith("failed with exit code 2\n")


def test_other_logits_than_those_before_sharding_fail_the_demonstration(
    made_before: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = made_before("qwen2-fp32-w4") / "truth" / "truth_logits.safetensors"
    told = load_file(path)
    save_file({**told, "logits": told["logits"] + 0.5}, path)
    assert demo.demo(tmp_path / "out") == 1
    assert "NOT equal, difference 0.5" in capfd.readouterr().out
