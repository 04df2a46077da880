"""Adapters as `PeftModel.save_pretrained` writes them: the tensors by its names, and adapter_config.json.

Pure. What is written goes through the plan and the writer like the model does.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from merger.huggingface.lora import BASE_LAYER, PREFIX, Lora, LoraModule, peft_name
from merger.huggingface.lora_settings import LoraSettings
from merger.huggingface.lora_targets import Target
from merger.tensors import StoredTensor

FOLDER = "lora_adapter"
WEIGHTS_NAME = f"{FOLDER}/adapter_model.safetensors"
CONFIG_NAME = f"{FOLDER}/adapter_config.json"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter to be written: its tensors by the names that peft gives them, and the bytes of its settings."""

    tensors: Mapping[str, StoredTensor]
    config: bytes


def export(lora: Lora, settings: LoraSettings, targets: list[Target] | None) -> Adapter:
    """The adapter of a checkpoint. `targets` are the parameters that it changes, None where the base is not known."""
    tensors: dict[str, StoredTensor] = {}
    for module in lora.modules:
        for factor, tensor in module.factors.items():
            # What peft holds as a parameter has no ".weight", and a magnitude kept the name that it had as one.
            is_layer = factor in ("lora_A", "lora_B")
            tensors[f"{PREFIX}{module.wrapper}.{factor}" + (".weight" if is_layer else "")] = tensor
        if module.bias is not None:
            tensors[f"{PREFIX}{module.wrapper}.lora_B.bias"] = module.bias
    tensors |= {PREFIX + name: tensor for name, tensor in lora.trained.items()}
    bias = settings.stated("bias")
    for name, tensor in lora.base.items():
        own = peft_name(lora.saved_as[name], name)
        if name.rpartition(".")[2] == "bias" and (
            bias == "all" or (bias == "lora_only" and own.endswith(f".{BASE_LAYER}.bias"))
        ):
            # The copy that was trained is in its place, where there is one.
            tensors.setdefault(PREFIX + own, tensor)
    return Adapter(tensors, _config(lora, settings, targets))


def _config(lora: Lora, settings: LoraSettings, targets: list[Target] | None) -> bytes:
    """The settings that were found, or where only alpha is known what follows from the tensors."""
    config = dict(settings.config) if settings.config is not None else _told(lora, settings, targets)
    config["lora_alpha"] = settings.alpha
    # What adapter_config.json leaves out another file may state, or the tensors tell; peft would take its defaults.
    if settings.rank is not None:
        config["r"] = settings.rank
    else:
        told = _told(lora, settings, targets)
        config |= {key: told[key] for key in ("r", "rank_pattern") if told[key]}
    for key, value in (
        ("rank_pattern", settings.rank_pattern),
        ("alpha_pattern", settings.alpha_pattern),
        ("use_rslora", settings.use_rslora),
    ):
        if value and config.get(key) is None:
            config[key] = value
    if settings.path is not None and settings.config == config:
        return settings.path.read_bytes()
    return json.dumps(config, indent=2, sort_keys=True).encode()


def _told(lora: Lora, settings: LoraSettings, targets: list[Target] | None) -> dict[str, Any]:
    ranks = _ranks(lora, targets)
    ((rank, _),) = Counter(ranks.values()).most_common(1)
    parameters = [target.name for target in targets or () if not target.name.endswith(".weight")]
    layers = [module for module in lora.modules if not any(name.startswith(f"{module.name}.") for name in parameters)]
    return {
        "peft_type": "LORA",
        "task_type": settings.task_type,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(
            target.layout == "transposed" and not target.module.is_embedding for target in targets or ()
        ),
        "init_lora_weights": True,
        "use_rslora": settings.use_rslora,
        "use_dora": any(module.magnitude is not None for module in lora.modules),
        "lora_bias": any(module.bias is not None for module in lora.modules),
        "rank_pattern": {name: own for name, own in ranks.items() if own != rank},
        "alpha_pattern": dict(settings.alpha_pattern),
        "target_modules": _target_modules(lora, layers),
        "target_parameters": parameters or None,
        "modules_to_save": sorted({name.rpartition(".")[0] for name in lora.trained}) or None,
    }


def _ranks(lora: Lora, targets: list[Target] | None) -> dict[str, int]:
    """The rank of each layer, or wrapped parameter, by its name."""
    found = {target.module.wrapper for target in targets or ()}
    others = {module.name: module.first.shape[0] for module in lora.modules if module.wrapper not in found}
    return {**others, **{target.name.removesuffix(".weight"): target.rank for target in targets or ()}}


def _target_modules(lora: Lora, layers: list[LoraModule]) -> list[str]:
    """The last parts of the layers' names, or where other layers of the model end so too their whole names."""
    wrapped = {module.name for module in layers}
    others = {name.rpartition(".")[0] for name in lora.base} - wrapped
    found = set()
    for name in wrapped:
        end = name.rpartition(".")[2]
        is_shared = any(other == end or other.endswith(f".{end}") for other in others)
        found.add(name if is_shared else end)
    return sorted(found)
