"""Cases made in one place to be judged in another, where another torch may be installed."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from fixtures import elsewhere
from fixtures.__main__ import main
from fixtures.cases import CASES
from fixtures.elsewhere import Made, make_all, read_made
from fixtures.ranks import RankPool

OWN = f"{sys.executable} -m merger merge {{ckpt}} {{out}}"
OWN_WEIGHTS_ONLY = f"{sys.executable} -m merger merge --weights-only {{ckpt}} {{out}}"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cases that can be made and one that its entry in the table excuses."""
    out = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CASES, "tensors-columns", replace(CASES["tensors-columns"], since=(99, 1)))
        lines: list[str] = []
        make_all(["tensors-bools", "tensors-columns", "tensors-permuted"], out, lines.append)
    assert lines == [
        "made     tensors-bools",
        "skipped  tensors-columns",
        "         torch before 99.1 makes something else of it",
        "made     tensors-permuted",
    ]
    return out


def test_what_was_made_says_by_what(here: Path) -> None:
    assert read_made(here) == Made(
        torch.__version__,
        transformers.__version__,
        ("tensors-bools", "tensors-permuted"),
        {"tensors-columns": "torch before 99.1 makes something else of it"},
        (),
    )
    assert sorted(path.name for path in here.iterdir()) == ["made.json", "tensors-bools", "tensors-permuted"]


def test_a_merger_is_judged_on_what_was_made_elsewhere(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No ranks are started, and what is not there is told with the reason."""
    words = ["judge", "--made", str(here), "--command", OWN, "--weights-only-command", OWN_WEIGHTS_ONLY]
    assert main(words) == 0
    assert capsys.readouterr().out == (
        "right            tensors-bools                                   S4 S13\n"
        "skipped          tensors-columns                                 S10\n"
        "                 torch before 99.1 makes something else of it\n"
        "refused rightly  tensors-permuted                                S22\n"
        "\n"
        "right               1\n"
        "refused rightly     1\n"
        "skipped             1\n"
        "in all              3\n"
    )


def test_what_is_wrong_there_is_wrong_here(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made"
    shutil.copytree(here, made)
    truth = made / "tensors-bools" / "truth" / "truth.safetensors"
    data = bytearray(truth.read_bytes())
    data[-1] ^= 1
    truth.write_bytes(data)
    words = ["judge", "--made", str(made), "--command", OWN, "--weights-only-command", OWN_WEIGHTS_ONLY]
    assert main([*words, "--cases", "tensors-bools"]) == 1
    assert "wrong silently   tensors-bools" in capsys.readouterr().out


def test_what_should_have_been_made_and_was_not_is_wrong(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = json.loads((here / "made.json").read_text())
    (tmp_path / "made.json").write_text(json.dumps({**made, "failed": ["tensors-columns"]}))
    words = ["judge", "--made", str(tmp_path), "--command", OWN, "--cases", "tensors-columns"]
    assert main([*words, "--weights-only-command", OWN_WEIGHTS_ONLY]) == 1
    assert capsys.readouterr().out.endswith("\n1 of the skipped should have been made: tensors-columns\n")


@pytest.mark.parametrize(
    ("own", "excuse", "state"),
    [((99, 0), "has no attribute 'float7'", "skipped"), ((99, 0), "float8", "FAILED "), ((2, 0), "float7", "FAILED ")],
)
def test_a_release_is_excused_for_what_it_is_known_to_lack_if_it_is_older_than_the_cases(
    own: tuple[int, int], excuse: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is what the ranks say. A release that lacks something it should have is a failure."""
    monkeypatch.setattr(elsewhere, "OWN_TORCH", own)
    monkeypatch.setattr(elsewhere, "EXCUSES", (excuse,))
    (spec, *_) = CASES["tensors-columns"].tensors
    lacking = replace(CASES["tensors-columns"], tensors=(replace(spec, dtype="float7"),))
    monkeypatch.setitem(CASES, "tensors-columns", lacking)
    lines: list[str] = []
    made = make_all(["tensors-columns"], tmp_path / "made", lines.append)
    reason = "AttributeError: module 'torch' has no attribute 'float7'"
    assert lines == [f"{state}  tensors-columns", f"         {reason}"]
    assert made.skipped == {"tensors-columns": reason}
    assert made.failed == (() if state == "skipped" else ("tensors-columns",))


def test_ranks_that_die_are_no_matter_of_what_a_release_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "OWN_TORCH", (99, 0))
    monkeypatch.setattr(elsewhere, "make", _killed)
    made = make_all(["tensors-columns"], tmp_path / "made", lambda _: None)
    assert made.skipped == {"tensors-columns": "exit code 7"}
    assert made.failed == ("tensors-columns",)


def _killed(case: object, out: Path, pool: RankPool) -> None:  # noqa: ARG001 - the signature of `make`
    pool.run(1, _exit)


def _exit(rank: int, world_size: int) -> None:  # noqa: ARG001 - what a pool calls
    import os

    os._exit(7)


def test_a_model_that_transformers_does_not_have_yet_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "llava-fp32-w4", replace(CASES["llava-fp32-w4"], transformers_since=(99, 1)))
    made = make_all(["llava-fp32-w4"], tmp_path / "made", lambda _: None)
    assert made.skipped == {"llava-fp32-w4": "transformers before 99.1 has no such model"}
    assert made.failed == ()


def test_a_folder_that_nothing_was_made_in_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", "--made", str(tmp_path), "--command", OWN]) == 2
    assert capsys.readouterr().err == (
        f"error: there is no made.json in {tmp_path}. `python -m fixtures make-all` makes one.\n"
    )


def test_faults_are_not_made_with_another_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make-all", str(tmp_path / "out"), "--cases", "*+hole"]) == 1
    assert json.loads((tmp_path / "out" / "made.json").read_text())["cases"] == []
    assert capsys.readouterr().out.endswith(": 0 made, 0 not, of which 0 failed\n")
