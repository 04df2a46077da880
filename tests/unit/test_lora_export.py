"""Adapters as peft writes them, where its own settings are not beside the checkpoint. S15, S23."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

import merger
from merger.errors import ModelError
from tests.unit.peft_models import EXPERTS, Tensors, base_of, saved, under_peft

META: dict[str, Any] = {"r": 3, "lora_alpha": 12}


def adapters_of(model: PeftModel) -> Tensors:
    """What trainers save that save the adapters alone."""
    return {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}


def base_folder(model: PeftModel, folder: Path) -> Path:
    folder.mkdir()
    save_file(base_of(model), folder / "model.safetensors", {"format": "pt"})
    return folder


def exported(out: Path) -> tuple[Tensors, dict[str, Any]]:
    folder = out / "lora_adapter"
    return load_file(folder / "adapter_model.safetensors"), json.loads((folder / "adapter_config.json").read_text())


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["wide", "embed"], "use_dora": True, "modules_to_save": ["head"]},
        {"target_modules": ["wide", "turned"], "lora_bias": True},
        {"target_parameters": EXPERTS},
    ],
    ids=["dora and a trained copy", "lora_bias", "experts"],
)
def test_tensors_have_the_names_that_peft_gives_them(settings: dict[str, Any], tmp_path: Path) -> None:
    """Those that it does not know peft passes over, and so would use the base model as it is."""
    model = under_peft(**settings)
    merger.merge(saved(model, tmp_path / "checkpoint"), tmp_path / "out", lora="adapter", weights_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a model that is not on the hub
        model.save_pretrained(str(tmp_path / "peft"), save_embedding_layers=False)
    found, _ = exported(tmp_path / "out")
    expected = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_rank_of_fused_experts_is_told_by_the_base(tmp_path: Path) -> None:
    """Their factors have rank x experts rows."""
    model = under_peft(target_modules=["wide"], target_parameters=EXPERTS)
    folder = saved(adapters_of(model), tmp_path / "checkpoint", **META)
    base = base_folder(model, tmp_path / "base")
    report = merger.merge(folder, tmp_path / "out", base=base, lora="adapter", weights_only=True)
    _, config = exported(tmp_path / "out")
    assert (config["r"], config["rank_pattern"]) == (3, {})
    assert config["target_parameters"] == sorted(EXPERTS)
    assert report.lora is not None
    assert report.lora.ranks == {3: 5}


@pytest.mark.parametrize("meta", [META, {"lora_alpha": 12}], ids=["with r", "alpha alone"])
def test_the_rank_of_fused_experts_without_a_base_is_not_guessed(meta: dict[str, Any], tmp_path: Path) -> None:
    model = under_peft(target_modules=["wide"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    folder = saved(adapters_of(model), tmp_path / "checkpoint", **meta)
    with pytest.raises(ModelError) as caught:
        merger.merge(folder, tmp_path / "out")
    assert str(caught.value) == (
        "experts: has factors of shape (15, 7) and (6, 15), which may be those of several experts in one parameter "
        "(and 1 more): which one, and of what rank, is not known without the model. Put adapter_config.json beside the "
        "checkpoint, name a folder with the model's config by --config DIR, or the base model by --base DIR."
    )
    assert not (tmp_path / "out").exists()


def test_the_rank_of_experts_is_the_one_that_settings_state(tmp_path: Path) -> None:
    model = under_peft(target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    folder = saved(model, tmp_path / "checkpoint")
    torch.save(adapters_of(model), folder / "model_world_size_1_rank_0.pt")
    report = merger.merge(folder, tmp_path / "out")
    assert report.lora is not None
    assert report.lora.ranks == {3: 2}
    assert exported(tmp_path / "out")[1]["r"] == 3


def test_experts_of_a_rank_of_their_own_are_exported_without_a_base(tmp_path: Path) -> None:
    """One parameter is no nested wrapper, and its 5 x 4 rows are no multiple of the rank of other layers."""
    model = under_peft(
        r=8, target_modules=["wide"], target_parameters=EXPERTS[:1], rank_pattern={"experts.gate_up_proj": 4}
    )
    folder = saved(model, tmp_path / "checkpoint")
    state = adapters_of(model)
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    merger.merge(folder, tmp_path / "out")
    found, config = exported(tmp_path / "out")
    assert found.keys() == {name.replace(".default", "") for name in state}
    assert (config["r"], config["rank_pattern"]) == (8, {"experts.gate_up_proj": 4})


@pytest.mark.parametrize(
    "meta",
    [
        {"r": 3, "lora_alpha": 12, "use_rslora": True},
        {"lora_alpha": 12},
        {"r": 7, "lora_alpha": 12, "rank_pattern": {"wide": 3}, "alpha_pattern": {"wide": 5}},
    ],
    ids=["rslora", "alpha alone", "patterns"],
)
def test_what_peft_would_take_otherwise_is_stated(meta: dict[str, Any], tmp_path: Path) -> None:
    """Where adapter_config.json leaves it out."""
    folder = saved(adapters_of(under_peft(target_modules=["wide"])), tmp_path / "checkpoint", **meta)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["wide"]}')
    merger.merge(folder, tmp_path / "out")
    expected = {"peft_type": "LORA", "target_modules": ["wide"], "r": 3, **meta}
    assert exported(tmp_path / "out")[1] == expected


def test_the_alphas_of_single_layers_are_exported_without_a_config_of_peft(tmp_path: Path) -> None:
    """Left out, the layers would count as strongly as all others."""
    meta = {"r": 3, "lora_alpha": 12, "alpha_pattern": {"wide": 5}}
    folder = saved(adapters_of(under_peft(target_modules=["wide", "square"])), tmp_path / "checkpoint", **meta)
    merger.merge(folder, tmp_path / "out")
    config = exported(tmp_path / "out")[1]
    assert (config["lora_alpha"], config["alpha_pattern"]) == (12, {"wide": 5})


@pytest.mark.parametrize("stated", [0, "3", None])
def test_ranks_that_are_not_stated_are_those_of_the_tensors(stated: object, tmp_path: Path) -> None:
    """Each layer's own, or peft could not load the adapter."""
    model = under_peft(target_modules=["wide", "square", "turned"], rank_pattern={"wide": 2}, fan_in_fan_out=False)
    folder = saved(adapters_of(model), tmp_path / "checkpoint", lora_alpha=12)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": stated}))
    merger.merge(folder, tmp_path / "out")
    expected = {"peft_type": "LORA", "r": 3, "rank_pattern": {"wide": 2}, "lora_alpha": 12}
    assert exported(tmp_path / "out")[1] == expected
