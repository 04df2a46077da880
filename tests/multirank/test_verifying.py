"""`verify` and `verify_merge` on models of real ranks: ties, configs from elsewhere, side files, logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import merger
from merger.cli import main
from merger.errors import MergerError, ModelError

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
        assert report.notes == ("merged again as merger_report.json says: --dtype auto --unexpected error",)


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


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The oracle: transformers itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).float()
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=tokens).logits
    return result


def test_logits_of_the_same_weights_are_the_same(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        merger.merge(checkpoint(TIED) / "checkpoint", tmp_path / name)
    assert main(["verify", str(tmp_path / "a"), str(tmp_path / "b"), "--logits"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines()[2:6] == [
        "  compared  26 equal",
        "  logits    largest difference 0, tolerance 0.001; 16 tokens (seed 0), in",
        "            float32",
        "the same: 26 tensors, 45.70 kB",
    ]


def test_the_largest_difference_of_logits_is_that_of_transformers(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    for dtype in ("float32", "bfloat16"):
        merger.merge(checkpoint(TIED) / "checkpoint", tmp_path / dtype, dtype=dtype)
    tokens = torch.randint(101, (1, 16), generator=torch.Generator().manual_seed(0))
    expected = float((logits(tmp_path / "bfloat16", tokens) - logits(tmp_path / "float32", tokens)).abs().max())
    assert expected > 0
    report = merger.verify(tmp_path / "bfloat16", tmp_path / "float32", atol=0.01, logits=True, logits_atol=expected)
    assert report.logits is not None
    assert (report.logits.max_difference, report.is_equal) == (expected, True)
    report = merger.verify(
        tmp_path / "bfloat16", tmp_path / "float32", atol=0.01, logits=True, logits_atol=expected / 2
    )
    assert {one.status for one in report.comparisons} == {"close"}
    assert not report.is_equal


def test_logits_of_other_shapes_are_a_difference(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merger.merge(checkpoint(TIED) / "checkpoint", tmp_path / "a")
    merger.merge(checkpoint("qwen2-value-fp32-w4") / "checkpoint", tmp_path / "b")
    assert main(["verify", str(tmp_path / "a"), str(tmp_path / "b"), "--logits"]) == 1
    assert "  logits    shape (1, 16, 101), the reference has (1, 16, 1); 16 tokens" in capsys.readouterr().out


def test_a_model_that_lacks_weights_has_no_logits(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    merger.merge(checkpoint(TIED) / "checkpoint", out)
    tensors = load_file(out / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        merger.verify(out, out, logits=True)
    assert str(caught.value) == (
        f"{out}: lacks weights of Qwen2ForCausalLM, which transformers would draw at random: model.norm.weight; there "
        "are no logits to compare"
    )


def test_a_sharded_checkpoint_has_no_logits(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint(TIED) / "checkpoint"
    merger.merge(folder, tmp_path / "out")
    for sides in ((folder, tmp_path / "out"), (tmp_path / "out", folder)):
        with pytest.raises(MergerError) as caught:
            merger.verify(*sides, logits=True)
        assert str(caught.value) == (
            f"logits: {folder} is no model directory, and nothing else can be run; merge it first"
        )
