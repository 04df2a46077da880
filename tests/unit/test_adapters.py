"""What is asked of a merge with adapters and cannot be given is refused, and before any other model is read. S15."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import merger
from merger.cli import main
from merger.errors import MergerError
from tests.unit.peft_models import folded, merged, saved, under_peft

NOWHERE = Path("/nowhere")


@pytest.fixture
def adapters_alone(tmp_path: Path) -> Path:
    model = under_peft(target_modules=["wide"])
    state = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    return saved(state, tmp_path / "checkpoint", r=3, lora_alpha=12)


@pytest.fixture
def with_base(tmp_path: Path) -> Path:
    return saved(under_peft(target_modules=["wide"]), tmp_path / "checkpoint")


@pytest.fixture
def without_lora(tmp_path: Path) -> Path:
    return saved({"wide.weight": torch.ones(2, 2)}, tmp_path / "checkpoint")


def problems(checkpoint: Path, **options: Any) -> list[tuple[str, str, str]]:
    """Kind, place and words of all that a merge is refused for; nothing is left behind."""
    out = checkpoint.parent / "out"
    with pytest.raises(MergerError) as caught:
        merger.merge(checkpoint, out, weights_only=True, **options)
    assert not out.exists()
    return [(one.kind, one.where, one.message) for one in caught.value.problems]


def test_options_for_adapters_are_refused_where_there_are_none(without_lora: Path) -> None:
    words = "is for checkpoints with LoRA adapters, and this one has none; leave it out"
    asked: dict[str, Any] = {"lora_alpha": 3, "lora_adapter": "default", "base": NOWHERE}
    assert problems(without_lora, **asked) == [("no-lora", name, words) for name in asked]
    for mode in ("merge", "adapter", "base"):
        assert problems(without_lora, lora=mode) == [("no-lora", "lora", words)]
    merger.merge(without_lora, without_lora.parent / "out", weights_only=True, lora="both")


def test_a_base_is_refused_where_the_checkpoint_has_its_own(with_base: Path) -> None:
    words = (
        f"is not needed: {with_base} holds the base weights that were trained with, and others would give another "
        "model; leave --base out"
    )
    assert problems(with_base, base=NOWHERE) == [("base-not-needed", "/nowhere", words)]


@pytest.mark.parametrize("mode", ["merge", "base"])
def test_a_model_is_not_asked_of_adapters_alone(mode: str, adapters_alone: Path) -> None:
    words = (
        f"{adapters_alone} holds adapters alone, so there is no model to write: name the base model by --base DIR, or "
        "write the adapter by --lora adapter"
    )
    assert problems(adapters_alone, lora=mode) == [("no-base", "", words)]


def test_a_base_that_is_not_there_is_told(adapters_alone: Path) -> None:
    ((kind, where, _),) = problems(adapters_alone, base=NOWHERE)
    assert (kind, where) == ("not-a-model", "/nowhere")


def test_adapters_alone_are_written_as_they_are_whatever_type_a_model_would_have(adapters_alone: Path) -> None:
    out = adapters_alone.parent / "out"
    report = merger.merge(adapters_alone, out, dtype="bfloat16")
    assert "the adapter is in the types in which it was saved: --dtype is for the model" in report.notes
    assert report.casts == {}


TOLD: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"r": 3}, "alpha not known", ["--lora-alpha", "N"]),
    ({"r": 3, "lora_alpha": 12}, "alpha 12", []),
    ({"r": 3, "lora_alpha": 12}, "alpha 12; adapters default, second", ["--lora-adapter", "NAME"]),
]


@pytest.mark.parametrize(("meta", "told", "options"), TOLD)
def test_an_inspection_says_what_a_merge_has_to_be_told(
    meta: dict[str, Any], told: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = under_peft(target_modules=["wide"])
    if "second" in told:
        model.add_adapter("second", model.peft_config["default"])
    state = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    checkpoint = saved(state, tmp_path / "c", **meta)
    assert main(["inspect", str(checkpoint)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"lora 1 layer, r 3, {told}; adapters alone, without base weights config none" in out
    words = out.rpartition("next: ")[2].replace("\\ ", "").split()
    assert words == ["merger", "merge", str(checkpoint), "OUT", *options]


def test_an_alpha_that_is_asked_for_is_not_that_of_layers_with_their_own(tmp_path: Path) -> None:
    """S23: as in peft, where alpha_pattern goes before lora_alpha."""
    kinds: dict[str, Any] = {"target_modules": ["wide", "square"], "alpha_pattern": {"square": 5}}
    checkpoint = saved(under_peft(**kinds), tmp_path / "checkpoint")
    tensors = merged(checkpoint, tmp_path / "out", lora_alpha=24)
    expected = folded(under_peft(lora_alpha=24, **kinds))
    for name in ("wide.weight", "square.weight"):
        torch.testing.assert_close(tensors[name], expected[name])
    notes = merger.merge(checkpoint, tmp_path / "again", lora_alpha=24, weights_only=True).notes
    assert (
        "alpha is 24, as asked, whatever adapter_config.json states, but where its alpha_pattern states others for "
        "single layers"
    ) in notes
