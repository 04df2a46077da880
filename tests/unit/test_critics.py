"""When a checkpoint is told to be that of a critic, and when not. S20."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import merger
from fixtures import models, side_files
from merger.errors import ModelError
from tests.unit.peft_models import Tensors, saved

ASK = (
    "--unexpected keep writes them along, --unexpected drop leaves them out; if config.json is not that of the model "
    "that was trained, name the right one by --config DIR."
)
CRITIC = " If this is a critic, give --is-value-model: Qwen2ForTokenClassification has all tensors of the checkpoint."


def state_of(model: str, **more: torch.Tensor) -> Tensors:
    module = models.build(model, torch.float32)
    models.Materialiser(module).fill(module)
    return {**module.state_dict(), **{name.replace("__", "."): tensor for name, tensor in more.items()}}


def message(state: Tensors, folder: Path, **options: bool) -> str:
    """The one error of a merge under the config of a causal model with a tied head."""
    checkpoint = saved(state, folder / "checkpoint")
    side_files.write("qwen2", torch.float32, checkpoint / "huggingface")
    with pytest.raises(ModelError) as caught:
        merger.merge(checkpoint, folder / "out", **options)  # type: ignore[arg-type]
    assert [problem.kind for problem in caught.value.problems if problem.kind != "wrong-shapes"][-1:] == [
        "unexpected-tensors"
    ]
    return str(caught.value)


@pytest.mark.parametrize("prefix", ["", "module.", "_fsdp_wrapped_module."])
def test_a_critic_under_the_config_of_a_causal_model_is_told_what_to_say(prefix: str, tmp_path: Path) -> None:
    state = {prefix + name: tensor for name, tensor in state_of("qwen2-value").items()}
    assert message(state, tmp_path) == (
        f"2 tensors are not of Qwen2ForCausalLM: score.weight, score.bias. {ASK}{CRITIC}"
    )
    report = merger.merge(tmp_path / "checkpoint", tmp_path / "out", value_model=True)
    assert report.num_tensors == len(state)


@pytest.mark.parametrize(
    ("state", "extra"),
    [
        # A reward model has no bias.
        (state_of("qwen2-reward"), "1 tensor is not of Qwen2ForCausalLM: score.weight"),
        # The config says nothing of three labels, and critics have one.
        (state_of("qwen2-tokens"), "2 tensors are not of Qwen2ForCausalLM: score.weight, score.bias"),
        # Both heads: neither class has them.
        (
            {**state_of("qwen2-value"), "lm_head.weight": state_of("qwen2")["lm_head.weight"]},
            "2 tensors are not of Qwen2ForCausalLM: score.weight, score.bias",
        ),
        (
            state_of("qwen2", q_head__weight=torch.ones(1, 24)),
            "1 tensor is not of Qwen2ForCausalLM: q_head.weight",
        ),
        # Beside the model lies the head that it has already.
        (
            state_of("qwen2-value", v_head__weight=torch.ones(1, 24)),
            "2 tensors are not of Qwen2ForCausalLM: score.weight, score.bias",
        ),
    ],
    ids=["reward model", "three labels", "two heads", "unknown head", "value head"],
)
def test_what_that_flag_does_not_help_is_not_told_of_it(state: Tensors, extra: str, tmp_path: Path) -> None:
    assert message(state, tmp_path) == f"{extra}. {ASK}"
    with pytest.raises(ModelError):
        merger.merge(tmp_path / "checkpoint", tmp_path / "out", value_model=True)


def test_where_it_was_said_already_it_is_not_told_again(tmp_path: Path) -> None:
    assert "--is-value-model" not in message(state_of("qwen2"), tmp_path, value_model=True)
