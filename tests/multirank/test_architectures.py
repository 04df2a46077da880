"""Every architecture of the list: sharded on real ranks, merged, and the same files as transformers writes itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

import merger
from fixtures import architectures
from tests.multirank.saved_files import IS_4, content

# Small enough that every model has an index.
SHARD_SIZE = "30KB"


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def loaded(model_class: Any, folder: Path) -> Any:
    """The model, of which `from_pretrained` must find every tensor and no other."""
    model, loading = model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on how to run a model, which is not what is asked here
        result: torch.Tensor = model(**architectures.inputs(model))[0]
        return result


def _names(folder: Path) -> set[str]:
    """The names of the tensors in the files of weights."""
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {*file.keys()}
    return found


@pytest.mark.parametrize("name", architectures.available())
def test_a_merge_writes_the_files_that_save_pretrained_of_the_whole_model_writes(
    name: str, architecture_shards: Path, tmp_path: Path
) -> None:
    """S4, S12, S18, S19: names, shapes, bytes, ties, which tensor is in which file, and the index."""
    model, merged, saved = architectures.build(name), tmp_path / "merged", tmp_path / "saved"
    report = merger.merge(architecture_shards / name, merged, max_shard_size=SHARD_SIZE)
    model.save_pretrained(saved, max_shard_size=SHARD_SIZE)
    weights = sorted(path.name for path in saved.glob("model*.safetensors*"))
    assert len(weights) > 2
    assert sorted(path.name for path in merged.glob("model*.safetensors*")) == weights
    for file in weights:
        assert content(merged / file) == content(saved / file), file
    # Of a model whose ties are broken it writes the aliases too.
    untied = {fqn: tensor.clone() for fqn, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "untied", state_dict=untied)
    names = [_names(folder) for folder in (saved, tmp_path / "untied")]
    assert ({*report.tied.values()} <= names[0], {*report.tied}) == (True, names[1] - names[0])
    # transformers 4 computes on tensors where a file lies in memory, and other alignments give other last digits.
    limit = 1e-5 if IS_4 else 0.0
    torch.testing.assert_close(logits(loaded(type(model), merged)), logits(model), rtol=limit, atol=limit)
