"""Checkpoints of real ranks under peft: the model with the adapters in it, the adapters by themselves, and refusals.

The truth is peft's `merge_and_unload` on the unsharded model, and what peft itself saves. S12, S15, S23.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import merger
from fixtures.cases import CASES
from fixtures.conformance.adapters import adapter_faults
from fixtures.conformance.loading import own_dtype
from fixtures.conformance.weights import read_truth, read_weights
from fixtures.models import CONVERTED
from merger.errors import ModelError

LORAS = {
    name: case.lora
    for name, case in CASES.items()
    if case.lora is not None and case.fault is None and "large" not in case.marks
}
FOLDED = [name for name, lora in LORAS.items() if lora.saved == "all" and lora.told != "nothing"]
CONFIGURED = [name for name in FOLDED if LORAS[name].told == "config"]
ALONE = [name for name, lora in LORAS.items() if lora.saved == "adapters"]
# No bits are those of peft where lengths of columns are taken, or where it rounds the product first.
CLOSE = frozenset({"qwen2-bf16-w4-lora", "qwen2-bf16-w4-lora-dora", "glm4_moe-bf16-w4-lora-experts"})

Checkpoints = Callable[[str], Path]


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **own_dtype())


def logits(model: Any, made: Path) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(
            input_ids=load_file(made / "truth" / "truth_logits.safetensors")["input_ids"]
        ).logits
    return found


def truth(made: Path, stem: str) -> dict[str, torch.Tensor]:
    """The tensors "folded" or "base" of a case, under the names of the hub where those in memory are others."""
    is_fused = CASES[made.name].model in CONVERTED
    return read_truth(made / "truth", {"folded": "saved", "base": "base_saved"}[stem] if is_fused else stem)


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of the tensors that differ by how much, in units in the last place of the largest element."""
    return {
        key: float((tensor.double() - expected[key].double()).abs().max())
        / (float(expected[key].abs().max()) * torch.finfo(tensor.dtype).eps)
        for key, tensor in found.items()
        if not torch.equal(tensor, expected[key])
    }


def base_model(made: Path, folder: Path, *, in_memory: bool = False) -> Path:
    """A model directory with the weights that the adapters are on, in several files, as one from the hub is.

    With `in_memory` they have the names and shapes that transformers holds them in.
    """
    shutil.copytree(made / "checkpoint" / "huggingface", folder)
    tensors = read_truth(made / "truth", "base") if in_memory else truth(made, "base")
    if CASES[made.name].model == "qwen2":  # which ties its head
        del tensors["lm_head.weight"]
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("name", FOLDED)
def test_the_model_is_the_one_that_peft_folds(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    made = checkpoint(name)
    report = merger.merge(made / "checkpoint", tmp_path / "out", lora="merge")
    found, wrong = read_weights(tmp_path / "out")
    expected = truth(made, "folded")
    assert wrong == []
    assert not (tmp_path / "out" / "lora_adapter").exists()
    different = differing(found, expected)
    assert different == {} or (name in CLOSE and max(different.values()) <= 1)
    assert expected.keys() - found.keys() <= {"lm_head.weight"}
    assert report.lora is not None
    folds = {one.inputs for made in report.computed.values() for one in made if one.operation == "fold"}
    assert report.lora.num_modules == len(folds)
    assert set(report.dropped) <= {"base_model.model.lm_head.weight", "base_model.model.lm_head.original_module.weight"}


@pytest.mark.parametrize("name", CONFIGURED)
def test_the_adapter_is_the_one_that_peft_saves(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    made = checkpoint(name)
    merger.merge(made / "checkpoint", tmp_path / "out", lora="adapter")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["lora_adapter", "merger_report.json"]
    folder = tmp_path / "out" / "lora_adapter"
    found = load_file(folder / "adapter_model.safetensors")
    expected = read_truth(made / "truth", "adapter")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert (folder / "adapter_config.json").read_bytes() == (
        made / "checkpoint" / "lora_adapter" / "adapter_config.json"
    ).read_bytes()


@pytest.mark.parametrize("name", FOLDED)
def test_the_adapter_on_the_base_gives_what_the_model_gives(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Both from one merge, and from another the base weights: three ways to the same logits."""
    made = checkpoint(name)
    merger.merge(made / "checkpoint", tmp_path / "both")
    merger.merge(made / "checkpoint", tmp_path / "base", lora="base")
    assert adapter_faults(tmp_path / "both", made / "truth", "keep") == []
    found, _ = read_weights(tmp_path / "base")
    base = truth(made, "base")
    assert all(torch.equal(found[key], base[key]) for key in found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Others than of keys that are missing: how peft asks transformers, and the tie that some cases are about.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message=r"Model has `tie_word_embeddings=True`")
        adapted = PeftModel.from_pretrained(loaded(tmp_path / "base"), str(tmp_path / "both" / "lora_adapter"))
    limit = 1e-4 if CASES[name].dtype == "float32" else 0.02
    torch.testing.assert_close(logits(adapted, made), logits(loaded(tmp_path / "both"), made), rtol=0, atol=limit)


@pytest.mark.parametrize(("name", "in_memory"), [(name, is_so) for name in ALONE for is_so in (False, True)])
def test_adapters_alone_are_exported_or_folded_into_a_base(
    name: str,
    in_memory: bool,  # noqa: FBT001 - a parameter of the test
    checkpoint: Checkpoints,
    tmp_path: Path,
) -> None:
    """Into one from the hub too, where experts that are one tensor in memory are many."""
    made = checkpoint(name)
    report = merger.merge(made / "checkpoint", tmp_path / "alone")
    assert (report.num_tensors, report.weight_files) == (0, ("lora_adapter/adapter_model.safetensors",))
    assert adapter_faults(tmp_path / "alone", made / "truth", "keep") == []
    base = base_model(made, tmp_path / "base", in_memory=in_memory)
    merger.merge(made / "checkpoint", tmp_path / "out", base=base)
    assert adapter_faults(tmp_path / "out", made / "truth", "keep") == []
    found, _ = read_weights(tmp_path / "out")
    expected = truth(made, "folded")
    assert differing(found, expected) == {}
    assert expected.keys() - found.keys() <= {"lm_head.weight"}
    torch.testing.assert_close(
        logits(loaded(tmp_path / "out"), made),
        load_file(made / "truth" / "truth_logits.safetensors")["logits"],
        rtol=0,
        atol=1e-4,
    )


def test_without_alpha_nothing_is_written(checkpoint: Checkpoints, tmp_path: Path) -> None:
    made = checkpoint("qwen2-fp32-w4-lora-no-alpha")
    with pytest.raises(ModelError) as caught:
        merger.merge(made / "checkpoint", tmp_path / "out")
    assert str(caught.value) == (
        "the checkpoint holds LoRA adapters, but how strongly they count is not known: no adapter_config.json or "
        "lora_train_meta.json lies beside the checkpoint. Give alpha as it was set in training by --lora-alpha N."
    )
    assert not (tmp_path / "out").exists()
    merger.merge(made / "checkpoint", tmp_path / "out", lora_alpha=12)
    found, _ = read_weights(tmp_path / "out")
    expected = read_truth(made / "truth", "folded")
    assert all(torch.equal(found[key], expected[key]) for key in found)
    assert json.loads((tmp_path / "out" / "lora_adapter" / "adapter_config.json").read_text())["lora_alpha"] == 12


def test_a_head_that_was_trained_apart_is_written_and_no_longer_tied(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """S12."""
    made = checkpoint("qwen2-fp32-w4-lora-diverged-tie")
    report = merger.merge(made / "checkpoint", tmp_path / "out")
    found, _ = read_weights(tmp_path / "out")
    state = read_truth(made / "truth", "truth")
    assert torch.equal(found["lm_head.weight"], state["base_model.model.lm_head.modules_to_save.default.weight"])
    assert torch.equal(found["model.embed_tokens.weight"], state["base_model.model.model.embed_tokens.weight"])
    assert not torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert report.untied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert report.dropped == ("base_model.model.lm_head.original_module.weight",)
