"""Adapters and a value head in one checkpoint, as PPO leaves them: each is written by itself. S15, S20."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

import merger
from fixtures import models, side_files
from tests.unit.peft_models import Tensors, folded, saved

HEAD = {"v_head.summary.bias": torch.tensor([0.5]), "v_head.summary.weight": torch.arange(24.0).reshape(1, 24)}
# How the wrapper of trl saves what it holds, and what its modules are called where FSDP saves them.
Naming = Literal["trl", "wrapper", "ddp"]
NAMINGS: tuple[Naming, ...] = ("trl", "wrapper", "ddp")


@dataclass(frozen=True)
class Made:
    """Checkpoints of one rank, with all weights or with adapters alone, and what peft makes of them."""

    whole: Path
    alone: Path
    base: Path
    model: Tensors
    adapter: Tensors
    unfolded: Tensors


@pytest.fixture(params=NAMINGS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    model: Any = models.build("llama", torch.float32)
    models.Materialiser(model).fill(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how transformers asks itself
        model.save_pretrained(tmp_path / "base")
        unfolded = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        settings = LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj"], bias="all", init_lora_weights=False)
        peft: PeftModel = get_peft_model(model, settings)
    state = {name: tensor.clone() for name, tensor in peft.state_dict().items()}
    alone = {name: tensor for name, tensor in state.items() if "lora_" in name}
    whole = saved(named(state, request.param), tmp_path / "whole")
    adapters = saved(named(alone, request.param), tmp_path / "alone")
    for folder in (whole, adapters):
        side_files.write("llama", torch.float32, folder / "huggingface")
        settings.save_pretrained(str(folder))
    adapter = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(peft).items()}
    return Made(whole, adapters, tmp_path / "base", folded(peft), adapter, unfolded)


def named(state: Tensors, naming: Naming) -> Tensors:
    before = {"trl": ("", ""), "wrapper": ("pretrained_model.", ""), "ddp": ("module.pretrained_model.", "module.")}
    model, head = before[naming]
    return {**{model + name: one for name, one in state.items()}, **{head + name: one for name, one in HEAD.items()}}


def equal(path: Path, expected: Tensors) -> bool:
    found = load_file(path)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("mode", ["merge", "both", "base", "adapter"])
@pytest.mark.parametrize("has_base", [True, False])
def test_model_adapter_and_head_are_each_written_as_asked(
    mode: Any,
    has_base: bool,  # noqa: FBT001 - a parameter of the test
    made: Made,
    tmp_path: Path,
) -> None:
    """Never is the head part of the adapter, nor lost where that is written alone: it was trained too."""
    source, out = made.whole if has_base else made.alone, tmp_path / "out"
    base = made.base if not has_base and mode != "adapter" else None
    report = merger.merge(source, out, lora=mode, base=base)
    files = {path.relative_to(out).as_posix() for path in out.rglob("*.safetensors")}
    assert equal(out / "value_head.safetensors", HEAD)
    assert report.value_head == tuple(HEAD)
    if mode != "merge":
        files.remove("lora_adapter/adapter_model.safetensors")
        assert equal(out / "lora_adapter" / "adapter_model.safetensors", made.adapter)
    if mode != "adapter":
        files.remove("model.safetensors")
        assert equal(out / "model.safetensors", made.unfolded if mode == "base" else made.model)
    assert files == {"value_head.safetensors"}
    assert not [name for name in report.dropped if "v_head" in name or "lora_" in name]
    assert merger.verify_merge(out, source, base=base).is_equal


def test_adapters_alone_with_a_head_give_both_without_a_model(made: Made, tmp_path: Path) -> None:
    """A head is no base weight."""
    report = merger.merge(made.alone, tmp_path / "out")
    assert report.weight_files == ("value_head.safetensors", "lora_adapter/adapter_model.safetensors")
    assert equal(tmp_path / "out" / "lora_adapter" / "adapter_model.safetensors", made.adapter)
    assert equal(tmp_path / "out" / "value_head.safetensors", HEAD)
    assert (
        "the value head is in value_head.safetensors, beside the adapter: v_head.summary.bias, v_head.summary.weight"
    ) in report.notes


def test_without_a_config_the_head_is_a_tensor_like_others(made: Made, tmp_path: Path) -> None:
    merger.merge(made.whole, tmp_path / "out", weights_only=True)
    assert equal(tmp_path / "out" / "model.safetensors", {**made.model, **HEAD})
    assert equal(tmp_path / "out" / "lora_adapter" / "adapter_model.safetensors", made.adapter)
