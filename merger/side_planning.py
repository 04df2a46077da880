"""Plans what lies beside the weights of a merge: which side files, what changes in config.json, what to say of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from merger.errors import ModelError, Problem
from merger.huggingface.expected import generation_config_complaint, read_config
from merger.huggingface.heads import value_model_config
from merger.huggingface.lora_export import FOLDER as ADAPTER_FOLDER
from merger.huggingface.outputs import Outputs, main_dtype
from merger.huggingface.side_files import SideFiles, config_bytes, output_config, plan_side_files
from merger.plan import OutputTensor


def plan_beside(
    config_dir: Path | None, target: Path, outputs: Outputs, *, value_class: str | None, has_lora: bool
) -> tuple[SideFiles, dict[str, bytes], tuple[str, ...]]:
    """What lies beside the weights, the new bytes of config.json, and what is to be said of it."""
    if config_dir is None:
        return SideFiles((), (), has_tokenizer=False, problems=()), {}, ()
    side_files = _side_files(config_dir, target, has_lora=has_lora)
    notes = []
    config = read_config(config_dir)
    own = config if value_class is None else value_model_config(config, value_class)
    changed = output_config(own, dtype=main_dtype(outputs.tensors), tied=False if outputs.ties_broken else None)
    replaced = {"config.json": config_bytes((config_dir / "config.json").read_bytes(), changed)}
    if changed != config:
        keys = sorted(key for key in {*config, *changed} if config.get(key) != changed.get(key))
        notes.append("config.json: " + ", ".join(f"{key} set to {_json(changed.get(key))}" for key in keys))
    if "quantization_config" in config and not any(_is_quantised(tensor) for tensor in outputs.tensors):
        notes.append(
            "config.json has a quantization_config, but no tensor is of a quantised type: readers may take the weights "
            "for what they are not; remove the entry if the model was not quantised"
        )
    if side_files.skipped:
        notes.append(f"left beside config.json: {', '.join(side_files.skipped)}")
    if not side_files.has_tokenizer:
        notes.append("beside config.json is no tokenizer, so the output has none; copy it from the base model")
    if (complaint := generation_config_complaint(config_dir)) is not None:
        notes.append(f"generation_config.json was copied as it is, but transformers objects to it: {complaint}")
    return side_files, replaced, tuple(notes)


def _side_files(config_dir: Path, target: Path, *, has_lora: bool) -> SideFiles:
    """What of a folder is copied into `target`; raises `ModelError` where some of it cannot be."""
    side_files = plan_side_files(config_dir)
    if has_lora:
        # The adapter's settings are written where it is. Beside a model that has it in already they would mislead.
        beside = [file for file in side_files.files if not _is_of_adapter(file.relative_path)]
        side_files = replace(side_files, files=tuple(beside))
    # An output inside the folder of the config, or what a killed run left of one, is not part of what is copied.
    inside = {target.resolve(), *(target.resolve().parent / f".{target.name}.{end}" for end in ("merging", "replaced"))}
    beside = [
        file for file in side_files.files if inside.isdisjoint((config_dir / file.relative_path).absolute().parents)
    ]
    side_files = replace(side_files, files=tuple(beside))
    problems = [
        *side_files.problems,
        *(
            Problem(
                "target-is-source",
                str(config_dir / file.relative_path),
                f"is a link into {target}, which is to be replaced; put the file itself there",
            )
            for file in beside
            if file.source.is_relative_to(target.resolve())
        ),
    ]
    if problems:
        raise ModelError(problems)
    return side_files


def _is_of_adapter(place: str) -> bool:
    return place == "adapter_config.json" or place.startswith(f"{ADAPTER_FOLDER}/")


def _is_quantised(tensor: OutputTensor) -> bool:
    return tensor.dtype.itemsize == 1 and tensor.dtype.name != "bool"


def _json(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else "a new value"  # noqa: PLR2004 - fits a line
