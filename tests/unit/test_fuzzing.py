"""What `nox -s fuzz` does with properties, seen from outside, on a machine that says that it is one for CI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROPERTIES = """
from hypothesis import event, given
from hypothesis import strategies as st


@given(st.integers(0, 10**6))
def test_fails(number):
    with open("drawn.txt", "a") as file:
        print(number, file=file)
    event("odd" if number % 2 else "even")
    assert number < 1000


@given(st.booleans())
def test_passes(bit):
    event(f"bit {bit:d}")
"""


def fuzzed(folder: Path) -> str:
    """Writes the properties and runs them for a second; what pytest printed."""
    (folder / "conftest.py").write_text("from tests.fuzzing import pytest_pyfunc_call, pytest_terminal_summary\n")
    (folder / "test_properties.py").write_text(PROPERTIES)
    (folder / "pytest.ini").write_text("[pytest]\n")
    root = str(Path(__file__).resolve().parent.parent.parent)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--hypothesis-profile=fuzz", "-p", "no:xdist", "-p", "no:cacheprovider"],
        cwd=folder,
        env={**os.environ, "CI": "1", "MERGER_FUZZ_MINUTES": "0.02", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    return done.stdout


def test_a_failing_example_is_kept_and_tried_first_and_all_are_counted(tmp_path: Path) -> None:
    output = fuzzed(tmp_path)
    assert (
        f"The failing example is kept in {tmp_path}/.hypothesis/examples\n"
        "and is the first that the next run tries: nox -s fuzz -- test_properties.py::test_fails\n"
    ) in output
    counts = r"(\d+) examples in (\d+) runs, \d+ s\n    (.*)$"
    fails = re.search(rf"^test_properties.py::test_fails: failed, {counts}", output, re.MULTILINE)
    passes = re.search(rf"^test_properties.py::test_passes: passed, {counts}", output, re.MULTILINE)
    assert fails is not None, output
    assert passes is not None, output
    assert (sum(map(int, re.findall(r" (\d+)", fails[3]))), fails[2]) == (int(fails[1]), "1")
    examples, runs = int(passes[1]), int(passes[2])
    assert (examples, passes[3]) == (2 * runs, f"bit 0 {runs}, bit 1 {runs}")
    assert runs > 1
    (tmp_path / "drawn.txt").unlink()
    fuzzed(tmp_path)
    assert (tmp_path / "drawn.txt").read_text().splitlines()[0] == "1000"
