"""Every sound case: sharded on real ranks, merged, equal to what the ranks held, loaded and computing the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import merger
from fixtures.cases import CASES
from fixtures.conformance.loading import own_dtype
from tests.multirank.saved_files import IS_4, content
from tests.unit.archives import bits

# The plain way: what else the table holds is judged in test_cases.py.
SOUND = [
    name
    for name, case in CASES.items()
    if case.model in {"qwen2", "llama", "gpt2", "plain"}
    and case.fault is None
    and case.sharding == "fully_shard"
    and case.lora is None
    and not case.mesh_ranks
]
MODELS = [name for name in SOUND if CASES[name].model != "plain"]
PLAIN = [name for name in SOUND if CASES[name].model == "plain"]

# What the heads of models with ties are tied to.
EMBEDDINGS = {"qwen2": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}


def as_bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: bits(tensor) for name, tensor in tensors.items()}


def expected_weights(made: Path, dtype: str) -> dict[str, torch.Tensor]:
    """What the ranks held, without the alias of a tie, in the type that config.json states."""
    truth = load_file(made / "truth" / "truth.safetensors")
    if embedding := EMBEDDINGS.get(CASES[made.name].model):
        assert torch.equal(truth.pop("lm_head.weight"), truth[embedding])
    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in truth.items()}


@pytest.mark.parametrize("name", SOUND)
def test_weights_are_those_of_the_ranks_bit_for_bit(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """S1-S4, S6, S7, S10, S13: nothing but the bytes of the ranks, whatever the mesh, the dtype or the buffers."""
    made = checkpoint(name)
    merger.merge(made / "checkpoint", tmp_path / "out", weights_only=True)
    assert as_bits(load_file(tmp_path / "out" / "model.safetensors")) == as_bits(
        load_file(made / "truth" / "truth.safetensors")
    )
    assert merger.verify(made / "checkpoint", tmp_path / "out").is_equal


@pytest.mark.parametrize("name", MODELS)
def test_a_model_loads_and_computes_the_same(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """S12, S18, L8: no missing or unexpected key, the same logits, side files byte for byte."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    case, made, out = CASES[name], checkpoint(name), tmp_path / "out"
    report = merger.merge(made / "checkpoint", out)
    assert as_bits(load_file(out / "model.safetensors")) == as_bits(expected_weights(made, case.config_dtype))
    model, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, **own_dtype())
    assert not any(loading.values())
    truth = load_file(made / "truth" / "truth_logits.safetensors")
    with torch.no_grad():
        logits = model(input_ids=truth["input_ids"]).logits
    if case.dtype == case.config_dtype:
        # transformers 4 computes on tensors where a file lies in memory, and other alignments give other last digits.
        limit = 4 * torch.finfo(logits.dtype).eps if IS_4 else 0.0
        torch.testing.assert_close(logits, truth["logits"], rtol=limit, atol=limit)
    else:
        assert torch.allclose(logits.float(), truth["logits"], atol=0.05)
    assert str(model.dtype) == f"torch.{case.config_dtype}"
    assert AutoTokenizer.from_pretrained(out)("a b")["input_ids"]
    side_files = made / "checkpoint" / "huggingface"
    assert merger.verify_merge(out, made / "checkpoint").is_equal
    assert set(report.side_files) == {path.name for path in side_files.iterdir()}
    assert all((out / name).read_bytes() == (side_files / name).read_bytes() for name in report.side_files)


@pytest.mark.parametrize("dtype", ["keep", "float32", "bfloat16", "float16"])
def test_config_json_states_what_the_file_holds(dtype: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers import AutoConfig

    made = checkpoint("qwen2-fp32-w4-config-bf16")
    report = merger.merge(made / "checkpoint", tmp_path / "out", dtype=dtype)  # type: ignore[arg-type]
    held = "float32" if dtype == "keep" else dtype
    assert report.dtypes == {held: 26}
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.torch_dtype if IS_4 else config.dtype) == getattr(torch, held)
    assert as_bits(load_file(tmp_path / "out" / "model.safetensors")) == as_bits(expected_weights(made, held))


def test_a_merge_equals_what_save_pretrained_writes(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """S18: the same files with the same bytes as transformers writes for the unsharded model, index included."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = checkpoint("llama-fp32-w4")
    merger.merge(made / "checkpoint", tmp_path / "merged", max_shard_size="20KB")
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(made / "checkpoint" / "huggingface"))
    model.load_state_dict(load_file(made / "truth" / "truth.safetensors"))
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    weights = sorted(path.name for path in (tmp_path / "saved").glob("model*.safetensors*"))
    assert len(weights) > 2
    assert sorted(path.name for path in (tmp_path / "merged").glob("model*.safetensors*")) == weights
    for name in weights:
        assert content(tmp_path / "merged" / name) == content(tmp_path / "saved" / name), name
