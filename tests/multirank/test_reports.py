"""merger_report.json of checkpoints of real ranks: ties, drops and config.json; loaders pass over it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import merger

TIE = {"lm_head.weight": "model.embed_tokens.weight"}


def report_of(folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((folder / "merger_report.json").read_bytes())
    return fields


@pytest.mark.parametrize(
    ("name", "tied", "untied", "dropped"),
    [
        ("qwen2-fp32-w4", TIE, {}, ["lm_head.weight"]),
        ("qwen2-fp32-w4+tied_without_head", TIE, {}, []),
        ("qwen2-fp32-w4+tied_diverged", {}, TIE, []),
        ("llama-fp32-w4", {}, {}, []),
    ],
)
def test_every_tie_and_drop_is_in_the_report(
    *,
    name: str,
    tied: dict[str, str],
    untied: dict[str, str],
    dropped: list[str],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """S12, rule 7."""
    merger.merge(checkpoint(name) / "checkpoint", tmp_path / "out")
    report = report_of(tmp_path / "out")
    assert (report["tied"], report["untied"], report["dropped"]) == (tied, untied, dropped)
    assert report["options"]["config"] == "huggingface"
    assert report["side_files"] == sorted(
        path.name for path in (checkpoint(name) / "checkpoint" / "huggingface").iterdir()
    )


def test_a_config_from_elsewhere_is_called_so(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    merger.merge(
        checkpoint("qwen2-fp32-w4") / "checkpoint",
        tmp_path / "out",
        config=checkpoint("qwen2-bf16-w4") / "checkpoint" / "huggingface",
    )
    assert report_of(tmp_path / "out")["options"]["config"] == "elsewhere"


def test_transformers_passes_over_the_report(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    merger.merge(checkpoint("qwen2-fp32-w4") / "checkpoint", tmp_path / "out")
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values())
    for auto in (AutoConfig, AutoTokenizer, GenerationConfig):
        assert auto.from_pretrained(tmp_path / "out") is not None
