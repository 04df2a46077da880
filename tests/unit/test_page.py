"""Lines for a terminal and for a log, and the command on a real terminal (`ptys`)."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

import merger
from merger.page import Page, shows_colour
from tests.unit.archives import ARCHIVES
from tests.unit.ptys import run_on_terminal

CHECKPOINT = ARCHIVES / "2.14.1" / "fsdp2_hsdp_w4"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Stream:
    """An output stream that may be a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def fileno(self) -> int:
        raise OSError


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with a short name, so that a line is no longer than it has to be."""
    monkeypatch.chdir(tmp_path)
    folder = Path(os.path.relpath(tmp_path / "ckpt", Path(__file__).parents[2]))
    shutil.copytree(CHECKPOINT, tmp_path / "ckpt")
    return folder


@pytest.mark.parametrize(
    ("is_terminal", "environment", "expected"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {}, False),
        (False, {"TERM": "xterm"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, True),
        (False, {"FORCE_COLOR": "1"}, True),
        (True, {"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        (True, {"TERM": "xterm", "FORCE_COLOR": "0"}, False),
        (True, {"TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_a_terminal_has_colours_unless_the_environment_says_otherwise(
    *, is_terminal: bool, environment: dict[str, str], expected: bool
) -> None:
    assert shows_colour(Stream(is_terminal=is_terminal), environment) is expected


def test_a_command_can_be_pasted_however_it_is_broken() -> None:
    words = ["merger", "merge", "/a long way/ckpt", "/out", "--config", "DIR"]
    for width in (40, 60, 80):
        lines = Page(width).command("next: ", words[:2], words[2:3], words[3:4], words[4:])
        pasted = "\n".join(lines).removeprefix("next: ")
        assert shlex.split(pasted.replace("\\\n", "")) == words
        assert max(map(len, lines)) <= width


def test_a_message_keeps_its_bullets_and_breaks_between_words() -> None:
    message = "2 problems:\n  - rank 0: it is short of bytes\n  - rank 1: it is not there"
    assert Page(30).message("merger: error: ", message, "bad") == [
        "merger: error: 2 problems:",
        "  - rank 0: it is short of",
        "    bytes",
        "  - rank 1: it is not there",
    ]
    assert Page(80, is_coloured=True).message("merger: error: ", "no", "bad") == ["\x1b[31mmerger: error: \x1b[0mno"]


@pytest.mark.parametrize("columns", [60, 80])
def test_on_a_terminal_reports_have_colours_and_fit(checkpoint: Path, columns: int) -> None:
    out = checkpoint.parent / "out"
    commands = (
        (("inspect", checkpoint, "--tensors", "*"), 0, "\x1b[32mno fault found"),
        (("merge", checkpoint, out, "--weights-only"), 0, "\x1b[1mmerged 4 ranks"),
        (("verify", out, "--source", checkpoint), 0, "\x1b[32mthe same: 17 tensors"),
        (("verify", checkpoint, out), 0, "\x1b[32mthe same: 17 tensors"),
        (("verify", ARCHIVES / "2.14.1" / "fsdp2_uneven_w4", out), 1, "\x1b[31mnot the same: "),
        (("merge", checkpoint, out, "--weights-only"), 2, "\x1b[31mmerger: error: \x1b[0m"),
    )
    for words, code, shown in commands:
        found, text = run_on_terminal(*words, columns=columns)
        assert found == code, text
        assert shown in text
        last = text.rstrip("\n").split("\r")[-1]  # a progress bar goes before, and is wiped out
        assert re.search(r"^next: ", last, re.MULTILINE) or code == 2
        plain = [COLOUR.sub("", line) for line in last.split("\n")]
        assert [line for line in plain if len(line) > columns and len(line.split()) > 3] == []
        assert text.isascii()


def test_the_environment_takes_the_colours_away(checkpoint: Path) -> None:
    for code, text in (
        run_on_terminal("inspect", checkpoint, NO_COLOR="1"),
        run_on_terminal("inspect", checkpoint, TERM="dumb"),
    ):
        assert (code, "\x1b" in text) == (0, False)


def test_a_bar_shows_how_many_bytes_are_done_on_a_terminal_alone(checkpoint: Path) -> None:
    out = checkpoint.parent / "out"
    merge = ("merge", checkpoint, out, "--weights-only")
    for words, label in (
        (merge, "merging"),
        (("verify", out, "--source", checkpoint), "comparing"),
        (("verify", checkpoint, out), "comparing"),
    ):
        code, text = run_on_terminal(*words, is_error_only=True)
        assert code == 0
        assert re.search(
            rf"{label}: +[0-9]+%\|[#0-9 ]*\| [0-9.]+k?/3\.94k \[[0-9:]+<[0-9:?]+, +[0-9?.]+[kMG]?B/s\]", text
        )
        assert text.endswith(" \r")
        assert max(len(line) for line in text.split("\r")) < 80
    for flag in ("--quiet", "--json"):
        assert run_on_terminal(*merge, "--overwrite", flag, is_error_only=True) == (0, "")
        assert run_on_terminal("verify", checkpoint, out, flag, is_error_only=True) == (0, "")
    assert run_on_terminal(*merge, "--overwrite", is_error_only=True, TERM="dumb") == (0, "")


def test_progress_of_a_verification_counts_every_byte(tmp_path: Path) -> None:
    report = merger.merge(CHECKPOINT, tmp_path / "out", weights_only=True)
    calls: list[tuple[int, int]] = []
    merger.verify(CHECKPOINT, tmp_path / "out", progress=lambda *call: calls.append(call))
    assert calls[-1] == (report.num_bytes, report.num_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
