"""What is planned of a whole model, as transformers loads it again: heads, and ties that came apart. S12, S20."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import transformers
from safetensors.torch import load_file

import merger

Tensors: TypeAlias = dict[str, torch.Tensor]

SETTINGS: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def saved(folder: Path, state: Tensors, config: transformers.PretrainedConfig, **told: Any) -> Path:
    """The rank file of a run on one rank, and beside it a config that states `told` too, or not what is None there."""
    (folder / "huggingface").mkdir(parents=True)
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    fields = {name: value for name, value in {**config.to_dict(), **told}.items() if value is not None}
    (folder / "huggingface" / "config.json").write_text(json.dumps(fields))
    return folder


def loaded(auto_class: Any, folder: Path) -> Tensors:
    """The state of the model that is in `folder`, which has all of its tensors and no others."""
    model, loading = auto_class.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def equal(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_model_whose_tie_came_apart_loads_with_both_tensors(tmp_path: Path) -> None:
    """S12: by its config too, since not every reader looks at the tensors before it ties them."""
    config = transformers.Qwen2Config(**SETTINGS, tie_word_embeddings=True)
    state = transformers.Qwen2ForCausalLM(config).state_dict()
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    made = saved(tmp_path / "made", state, config, architectures=["Qwen2ForCausalLM"])
    merger.merge(made, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert equal(loaded(transformers.AutoModelForCausalLM, tmp_path / "out"), state)


def test_a_critic_that_its_config_calls_causal_loads_as_one(tmp_path: Path) -> None:
    """S20."""
    config = transformers.Qwen2Config(**SETTINGS, num_labels=1)
    state = transformers.Qwen2ForTokenClassification(config).state_dict()
    told = {"architectures": ["Qwen2ForCausalLM"], "num_labels": None, "id2label": None, "label2id": None}
    made = saved(tmp_path / "made", state, config, **told)
    merger.merge(made, tmp_path / "out", value_model=True)
    assert equal(loaded(transformers.AutoModelForTokenClassification, tmp_path / "out"), state)


def test_a_value_head_beside_the_model_is_in_a_file_beside_it(tmp_path: Path) -> None:
    """S20: and whatever is done with unexpected tensors, the model loads without it."""
    config = transformers.Qwen2Config(**SETTINGS, tie_word_embeddings=False)
    state = transformers.Qwen2ForCausalLM(config).state_dict()
    head = {"v_head.summary.weight": torch.randn(1, 8), "v_head.summary.bias": torch.randn(1)}
    made = saved(tmp_path / "made", {**head, **state}, config, architectures=["Qwen2ForCausalLM"])
    merger.merge(made, tmp_path / "out", unexpected="drop")
    assert equal(load_file(tmp_path / "out" / "value_head.safetensors"), head)
    assert equal(loaded(transformers.AutoModelForCausalLM, tmp_path / "out"), state)
