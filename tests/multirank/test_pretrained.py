"""A real pretrained model: sharded on four ranks and merged, it gives the same sentence embeddings, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

import merger
from fixtures import pretrained
from fixtures.ranks import RankPool

SENTENCES = (
    "The merge puts the pieces of every tensor back together.",
    "Somebody glued the broken vase.",
    "A cat sleeps on the warm roof of a car.",
    "",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. " * 12,
)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@pytest.fixture
def merged(pool: RankPool, tmp_path: Path) -> Path:
    pretrained.make(pool, tmp_path / "checkpoint", 4)
    merger.merge(tmp_path / "checkpoint", tmp_path / "merged")
    return tmp_path / "merged"


def embeddings(folder: Path) -> torch.Tensor:
    """One row a sentence: the mean over its tokens, scaled to length 1, as the model's own modules.json asks for."""
    model, loading = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    words = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        states = model.eval()(**words).last_hidden_state
    mask = words["attention_mask"].unsqueeze(-1).to(states.dtype)
    means = (states * mask).sum(1) / mask.sum(1)
    result: torch.Tensor = torch.nn.functional.normalize(means, dim=1)
    return result


def test_a_real_pretrained_model_embeds_sentences_as_before(merged: Path) -> None:
    original = pretrained.directory()
    expected = embeddings(original)
    assert torch.equal(embeddings(merged), expected)
    # It is the trained model, not one of random weights: the two sentences that mean alike are nearer than the others.
    alike = expected @ expected.T
    assert alike[0, 1] > alike[0, 2]
    assert alike[0, 1] > alike[1, 2]


def test_a_real_pretrained_model_keeps_its_weights_and_every_file_beside_them(merged: Path) -> None:
    original = pretrained.directory()
    places = {path.relative_to(original).as_posix() for path in original.rglob("*") if path.is_file()}
    found = {path.relative_to(merged).as_posix() for path in merged.rglob("*") if path.is_file()}
    assert {"tokenizer.json", "vocab.txt", "1_Pooling/config.json", "modules.json"} <= places
    assert found == places | {"merger_report.json"}
    for place in places - {"model.safetensors", "config.json"}:
        assert (merged / place).read_bytes() == (original / place).read_bytes(), place
    # The published config.json is of a time before it told the type of the weights; what was there stays as it was.
    config, told = ((folder / "config.json").read_text() for folder in (original, merged))
    assert told == config.removesuffix("\n}\n") + ',\n  "dtype": "float32"\n}\n'
    before, after = load_file(original / "model.safetensors"), load_file(merged / "model.safetensors")
    # transformers no longer counts it to the model, and so did no rank save it: the numbers from 0 to 511.
    assert torch.equal(before.pop("embeddings.position_ids"), torch.arange(512).unsqueeze(0))
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor.view(torch.int32), after[name].view(torch.int32)), name
    with safe_open(merged / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
