"""A model with one layer of each kind that peft wraps, put under peft and saved as a trainer on one rank would."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, TypeAlias

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

import merger

Tensors: TypeAlias = dict[str, torch.Tensor]


class Experts(nn.Module):
    """Fused weights of experts as transformers 5 has them: (experts, outputs, inputs), or the other way round."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.gate_up_proj = nn.Parameter(torch.empty(5, *((6, 14) if is_transposed else (14, 6))))
        self.down_proj = nn.Parameter(torch.empty(5, *((7, 6) if is_transposed else (6, 7))))


class Tiny(nn.Module):
    """Nothing is ever computed with it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.wide = nn.Linear(6, 8)
        self.square = nn.Linear(6, 6, bias=False)
        self.turned = Conv1D(9, 6)
        self.turned_square = Conv1D(6, 6)
        self.line = nn.Conv1d(3, 4, 3)
        self.image = nn.Conv2d(3, 4, 3)
        self.point = nn.Conv2d(3, 4, 1)
        self.experts = Experts(is_transposed=False)
        self.turned_experts = Experts(is_transposed=True)
        self.head = nn.Linear(6, 11, bias=False)


EXPERTS = ["experts.gate_up_proj", "experts.down_proj", "turned_experts.gate_up_proj", "turned_experts.down_proj"]


def filled(model: nn.Module) -> None:
    """Gives it values of about the sizes that training leaves, the same on every run."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        parameter.data = (value.abs() + 0.5 if "magnitude" in name else value * 0.3).to(parameter.dtype)


def under_peft(
    dtype: torch.dtype = torch.float32, *, adapter: str = "default", autocast: bool = False, **settings: Any
) -> PeftModel:
    """The model of `dtype` under LoRA of rank 3 and alpha 12, unless `settings` say otherwise.

    With `autocast` the adapters are float32 whatever the model is.
    """
    config = LoraConfig(**{"r": 3, "lora_alpha": 12, "init_lora_weights": False, **settings})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that fit one kind of layer only
        model = get_peft_model(Tiny().to(dtype), config, adapter_name=adapter, autocast_adapter_dtype=autocast)
    filled(model)
    return model


def saved(state: Tensors | PeftModel, folder: Path, **meta: object) -> Path:
    """The rank file of a run on one rank; beside it peft's settings, or `meta` as RL trainers write it."""
    folder.mkdir()
    tensors = state.state_dict() if isinstance(state, PeftModel) else state
    torch.save(tensors, folder / "model_world_size_1_rank_0.pt")
    if meta:
        (folder / "lora_train_meta.json").write_text(json.dumps(meta))
    elif isinstance(state, PeftModel):
        for config in state.peft_config.values():
            config.save_pretrained(str(folder))
    return folder


def merged(folder: Path, out: Path, **options: Any) -> Tensors:
    """The weights that a merge writes, without an architecture."""
    merger.merge(folder, out, weights_only=True, **options)
    found: Tensors = load_file(out / "model.safetensors")
    return found


def folded(model: PeftModel) -> Tensors:
    """The weights with the adapter folded in by peft; `model` is of no use afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ties that come apart
        plain: Any = model.merge_and_unload()
    return {name: tensor.detach() for name, tensor in plain.state_dict().items()}


def base_of(model: PeftModel) -> Tensors:
    """The weights as they were before peft came, by their names then."""
    return {
        name.removeprefix("base_model.model.")
        .replace(".base_layer", "")
        .replace(".original_module", ""): tensor.clone()
        for name, tensor in model.state_dict().items()
        if "lora_" not in name and ".modules_to_save." not in name
    }
