"""`verify` and `verify_merge` on models of real ranks: ties, configs from elsewhere, side files, logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import merger

TIED = "qwen2-fp32-w4"
DIVERGED = "qwen2-fp32-w4+tied_diverged"


def unlike(report: merger.VerifyReport) -> dict[str, str]:
    return {one.name: one.detail for one in report.comparisons if one.status != "equal"}


def test_a_name_that_only_the_reference_holds_is_compared_with_what_it_is_tied_to(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """S12: on either side, and whichever of the two is sharded."""
    merger.merge(checkpoint(TIED) / "checkpoint", tmp_path / "out")
    same = merger.verify(tmp_path / "out", checkpoint(TIED) / "checkpoint")
    assert (unlike(same), len(same.comparisons)) == ({}, 27)
    other = merger.verify(tmp_path / "out", checkpoint(DIVERGED) / "checkpoint")
    assert unlike(other) == {"lm_head.weight": "largest difference 1"}
    assert unlike(merger.verify(checkpoint(DIVERGED) / "checkpoint", tmp_path / "out")) == {
        "lm_head.weight": "largest difference 1"
    }


def test_a_tie_that_broke_after_the_merge_is_a_difference(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    merger.merge(checkpoint(TIED) / "checkpoint", tmp_path / "out")
    report = merger.verify_merge(tmp_path / "out", checkpoint(DIVERGED) / "checkpoint")
    assert unlike(report) == {"lm_head.weight": "(101, 24), not in the output"}


def test_what_the_merge_took_from_elsewhere_is_given_again_or_taken_from_the_output(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, config = checkpoint(TIED) / "checkpoint", checkpoint("qwen2-bf16-w4") / "checkpoint" / "huggingface"
    merger.merge(folder, tmp_path / "out", config=config)
    for given in (config, None):
        report = merger.verify_merge(tmp_path / "out", folder, config=given)
        assert report.is_equal
        assert report.notes == ("merged again as merger_report.json says: dtype auto, unexpected error",)


def test_side_files_that_were_edited_are_told_and_are_no_difference(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    merger.merge(checkpoint(TIED) / "checkpoint", tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").unlink()
    (tmp_path / "out" / "chat_template.jinja").write_text("{{ messages }}")
    report = merger.verify_merge(tmp_path / "out", checkpoint(TIED) / "checkpoint")
    assert report.is_equal
    assert report.notes[1:] == ("not as the merge wrote them: chat_template.jinja, tokenizer.json (missing)",)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "keep"}, {"weights_only": True}], ids=str)
def test_without_a_report_a_merge_is_told_from_its_names_and_types(
    options: dict[str, object], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoint("qwen2-fp32-w4-config-bf16") / "checkpoint"
    merger.merge(folder, tmp_path / "out", report=False, **options)  # type: ignore[arg-type]  # options of a table
    assert unlike(merger.verify_merge(tmp_path / "out", folder)) == {}
