"""Ctrl-C at the moments before and after the command's own work: one line, no traceback.

The command runs in a process of its own, which sends the signal to itself when it is about to import a given module:
that is a moment, where a time would be one on this machine alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import merger
from merger.starting import is_command
from tests.unit.archives import ARCHIVES

ROOT = Path(__file__).parents[2]
CHECKPOINT = ARCHIVES / "2.14.1" / "fsdp2_hsdp_w4"
INTERRUPTED = "merger: interrupted; nothing half-made was left behind\n"

# Python imports this by itself as it starts.
CUSTOMIZE = """
import os, signal, sys

wanted = os.environ["INTERRUPT_AT"]

def watch(event, arguments):
    global wanted
    if event == "import" and arguments[0] == wanted:
        wanted = None
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(watch)
"""

# What an installer makes of the entry in pyproject.toml.
SCRIPT = """
import sys
from merger.__main__ import run
if __name__ == "__main__":
    sys.exit(run())
"""


def interrupted_at(
    module: str, folder: Path, *words: str | Path, program: tuple[str | Path, ...] = ("-m", "merger")
) -> subprocess.CompletedProcess[str]:
    """Runs the command, which is interrupted when it is about to import `module`."""
    (folder / "sitecustomize.py").write_text(CUSTOMIZE)
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "INTERRUPT_AT": module}
    return subprocess.run(
        [sys.executable, *map(str, (*program, *words))],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=ROOT,
        # A test run in the background has Ctrl-C ignored, and hands that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


MOMENTS = ("merger.errors", "dataclasses", "merger.sources.rank_files", "merger.replay", "merger.cli", "argparse")


@pytest.mark.parametrize("module", MOMENTS)
def test_ctrl_c_while_the_command_is_imported_ends_it_in_one_line(module: str, tmp_path: Path) -> None:
    done = interrupted_at(module, tmp_path, "inspect", CHECKPOINT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", INTERRUPTED)


@pytest.mark.parametrize("module", ["merger.errors", "merger.cli"])
def test_so_it_does_by_the_name_that_is_installed(module: str, tmp_path: Path) -> None:
    script = tmp_path / "merger"
    script.write_text(SCRIPT)
    done = interrupted_at(module, tmp_path, "inspect", CHECKPOINT, program=(script,))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", INTERRUPTED)


@pytest.mark.parametrize("module", ["torch", "torch.nn"])
def test_ctrl_c_while_torch_is_imported_ends_it_in_one_line(module: str, tmp_path: Path) -> None:
    merger.merge(CHECKPOINT, tmp_path / "out", weights_only=True)
    done = interrupted_at(module, tmp_path, "verify", CHECKPOINT, tmp_path / "out")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", INTERRUPTED)


def test_a_program_that_imports_the_package_keeps_its_own_ctrl_c(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("try:\n    import merger\nexcept KeyboardInterrupt:\n    print('mine')\n")
    done = interrupted_at("merger.replay", tmp_path, program=(script,))
    assert (done.returncode, done.stdout, done.stderr) == (0, "mine\n", "")


@pytest.mark.parametrize(
    ("arguments", "original", "expected"),
    [
        (["/usr/bin/merger", "merge"], ["/usr/bin/python", "/usr/bin/merger", "merge"], True),
        (["-m", "merge"], ["python", "-X", "dev", "-m", "merger", "merge"], True),
        (["-m", "tests"], ["python", "-m", "pytest", "tests"], False),
        (["train.py"], ["python", "train.py", "-m", "merger"], False),
        ([""], ["python"], False),
        ([], [], False),
    ],
)
def test_the_command_is_told_by_how_the_process_was_started(
    *, arguments: list[str], original: list[str], expected: bool
) -> None:
    assert is_command(arguments, original) is expected
