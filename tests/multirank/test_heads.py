"""Heads that real ranks saved: value heads beside a model, critics by the name of what they began as, unknown heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import merger
from fixtures.cases import CASES
from fixtures.conformance.running import Ran
from fixtures.conformance.verdicts import judged
from merger.cli import main
from merger.errors import ModelError

V_HEAD = "llama-v_head-fp32-w4"
BESIDE = [V_HEAD, f"{V_HEAD}+prefixed_trl"]
HEAD = ("v_head.summary.bias", "v_head.summary.weight")
CRITICS = ["qwen2-value-fp32-w4+causal_config", "qwen2-value-fp32-w4+critic_without_labels"]


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("unexpected", ["error", "keep", "drop"])
def test_a_value_head_beside_the_model_is_written_to_a_file_of_its_own(
    name: str, unexpected: Any, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """S20: never lost, and never among the weights of a class that has no place for it."""
    from transformers import AutoModelForCausalLM

    made, out = checkpoint(name), tmp_path / "out"
    report = merger.merge(made / "checkpoint", out, unexpected=unexpected, max_shard_size="10KB")
    truth = load_file(made / "truth" / "truth.safetensors")
    head = {fqn: truth.pop(fqn) for fqn in HEAD}
    assert equal(load_file(out / "value_head.safetensors"), head)
    index = read_json(out / "model.safetensors.index.json")
    assert index["weight_map"].keys() == truth.keys()
    assert index["metadata"] == {
        "total_size": sum(tensor.nbytes for tensor in truth.values()),
        "total_parameters": sum(tensor.numel() for tensor in truth.values()),
    }
    model, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values()), loading
    assert equal(model.state_dict(), truth)
    assert report.value_head == HEAD
    assert report.weight_files[-1] == "value_head.safetensors"
    assert (report.num_tensors, report.dropped) == (len(truth) + 2, ())
    [note] = [note for note in report.notes if "value head" in note]
    assert note == (
        "the value head is in value_head.safetensors, as LlamaForCausalLM has no place for it, and from_pretrained "
        "does not read it: v_head.summary.weight, v_head.summary.bias"
    )


@pytest.mark.parametrize("name", BESIDE)
def test_a_value_head_is_cast_with_the_model_and_said(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """S13, S20."""
    made = checkpoint(name)
    report = merger.merge(made / "checkpoint", tmp_path / "out", dtype="bfloat16")
    truth = load_file(made / "truth" / "truth.safetensors")
    written = load_file(tmp_path / "out" / "value_head.safetensors")
    assert equal(written, {fqn: truth[fqn].to(torch.bfloat16) for fqn in HEAD})
    assert report.casts == {"float32 -> bfloat16": len(truth)}
    assert {*report.cast_names["float32 -> bfloat16"]} == truth.keys()


@pytest.mark.parametrize("name", BESIDE)
def test_both_ways_to_verify_compare_a_value_head(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """S20."""
    source, out = checkpoint(name) / "checkpoint", tmp_path / "out"
    merger.merge(source, out)
    for is_stated in (True, False):
        assert merger.verify_merge(out, source).is_equal, is_stated
        assert merger.verify(source, out).is_equal
        assert merger.verify(out, out).is_equal
        (out / "merger_report.json").unlink(missing_ok=True)
    tensors = load_file(out / "value_head.safetensors")
    tensors["v_head.summary.bias"] += 1
    save_file(tensors, out / "value_head.safetensors", {"format": "pt"})
    for report in (merger.verify_merge(out, source), merger.verify(source, out)):
        unlike = [(one.name, one.status) for one in report.comparisons if one.status != "equal"]
        assert unlike == [("v_head.summary.bias", "differs")]
    (out / "value_head.safetensors").unlink()
    for report, status in ((merger.verify_merge(out, source), "missing"), (merger.verify(source, out), "unexpected")):
        unlike = [(one.name, one.status) for one in report.comparisons if one.status != "equal"]
        assert sorted(unlike) == [(fqn, status) for fqn in HEAD]


def test_without_a_config_a_value_head_is_a_tensor_like_others(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Nobody knows then what the model has a place for."""
    made = checkpoint(V_HEAD)
    merger.merge(made / "checkpoint", tmp_path / "out", weights_only=True)
    assert not (tmp_path / "out" / "value_head.safetensors").exists()
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert equal(written, load_file(made / "truth" / "truth.safetensors"))


@pytest.mark.parametrize("unexpected", ["keep", "drop"])
def test_a_head_that_nobody_knows_is_what_unexpected_says(
    unexpected: Any, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """S20: without it, it is refused (the case table shows that)."""
    made = checkpoint(f"{V_HEAD}+unknown_head")
    report = merger.merge(made / "checkpoint", tmp_path / "out", unexpected=unexpected)
    extra = {"q_head.summary.weight", "q_head.summary.bias"}
    written = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert (written & extra, {*report.dropped}) == ((extra, set()) if unexpected == "keep" else (set(), extra))
    assert report.value_head == ()


@pytest.mark.parametrize("name", CRITICS)
def test_a_critic_that_its_config_calls_causal_is_merged_as_one_where_that_is_said(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """S20: its class is the one for token classification, with the one label that critics have."""
    made, out = checkpoint(name), tmp_path / "out"
    assert main(["merge", "--is-value-model", str(made / "checkpoint"), str(out)]) == 0
    judgement = judged(CASES[name], Ran(0, "", 0.0), out, made, "keep")
    assert judgement.verdict == "right", judgement
    told = read_json(made / "checkpoint" / "huggingface" / "config.json")
    config = read_json(out / "config.json")
    changed = {key for key in config if told.get(key) != config[key]}
    assert changed == ({"architectures"} if "id2label" in told else {"architectures", "id2label", "label2id"})
    for _ in range(2):
        assert merger.verify_merge(out, made / "checkpoint").is_equal
        (out / "merger_report.json").unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["qwen2-value-fp32-w4", *BESIDE])
def test_where_the_head_has_its_place_to_say_that_it_is_a_critic_changes_nothing(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """S20: its class is that of a critic already, or the head lies beside the model."""
    source = checkpoint(name) / "checkpoint"
    for folder, value_model in (("told", True), ("untold", False)):
        merger.merge(source, tmp_path / folder, value_model=value_model, report=False)
    files = sorted(path.relative_to(tmp_path / "told") for path in (tmp_path / "told").rglob("*"))
    assert files == sorted(path.relative_to(tmp_path / "untold") for path in (tmp_path / "untold").rglob("*"))
    for file in files:
        assert (tmp_path / "told" / file).read_bytes() == (tmp_path / "untold" / file).read_bytes(), file


def test_a_causal_model_is_no_critic_because_somebody_says_so(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        merger.merge(checkpoint("llama-fp32-w4") / "checkpoint", tmp_path / "out", value_model=True)
    assert [problem.kind for problem in caught.value.problems] == ["missing-tensors", "unexpected-tensors"]
    assert "LlamaForTokenClassification has: score.weight, score.bias" in str(caught.value)
