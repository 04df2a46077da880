"""How the merges of what other releases of torch wrote are summed up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fixtures.compat import Outcome, compat, table
from fixtures.conformance import Judgement
from fixtures.conformance.report import Score
from fixtures.elsewhere import OWN_TORCH, Made

ROOT = Path(__file__).parents[2]
RIGHT = (Judgement("a", (), "right"), Judgement("b", (), "refused rightly"))
SKIPPED = Judgement("c", (), "skipped", "AttributeError: it came later")
WRONG = Judgement("d", (), "wrong silently", "w: 1 of 6 elements differ, the first at [0, 0]")


def outcome(version: str, *judgements: Judgement, failed: tuple[str, ...] = ()) -> Outcome:
    cases = tuple(judgement.case for judgement in judgements if judgement.verdict != "skipped")
    skipped = {judgement.case: judgement.reason for judgement in judgements if judgement.verdict == "skipped"}
    made = Made(f"{version}+cpu", "5.24.0", cases, skipped, failed)
    return Outcome(version, made, Score("own", "own {ckpt} {out}", "any", "2026-01-31", judgements))


def test_each_release_is_a_line_with_what_was_not_made_apart() -> None:
    outcomes = [
        outcome("2.15.0", *RIGHT),
        outcome("2.9.1", *RIGHT, SKIPPED, WRONG),
        outcome("2.14.0", *RIGHT, SKIPPED, failed=("c",)),
        Outcome("9.9.9", None, None),
    ]
    assert table(outcomes) == [
        "torch            right  refused rightly  skipped  wrong  not made",
        "2.15.0+cpu           1                1        0      0         0",
        "2.9.1+cpu            1                1        1      1         0",
        "2.14.0+cpu           1                1        0      0         1",
        "9.9.9            failed, as told above",
    ]


def test_what_is_excused_is_right_and_what_is_wrong_or_not_there_is_not() -> None:
    assert outcome("2.9.1", *RIGHT, SKIPPED).is_right
    assert not outcome("2.9.1", *RIGHT, WRONG).is_right
    assert not outcome("2.14.0", *RIGHT, SKIPPED, failed=("c",)).is_right
    assert not outcome("2.9.1", SKIPPED).is_right
    assert not Outcome("9.9.9", None, None).is_right


def test_the_cases_are_written_for_the_release_that_is_pinned() -> None:
    (pinned,) = re.findall(r"^torch==(\d+)\.(\d+)\.", (ROOT / "constraints" / "test.txt").read_text(), re.MULTILINE)
    assert (int(pinned[0]), int(pinned[1])) == OWN_TORCH


def test_a_release_that_cannot_be_installed_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert compat(["0.0.1"], ["*"], tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0.0.1            failed, as told above"
    assert list(tmp_path.iterdir()) == []
