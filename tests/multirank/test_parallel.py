"""Models on meshes of several axes, and on several meshes at once: loaded by transformers, and computing the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import merger
from fixtures import models
from fixtures.cases import CASES
from fixtures.conformance.loading import own_dtype
from fixtures.conformance.weights import read_truth
from fixtures.trainers import Training, trained
from tests.unit.archives import bits

# Of these the optimizer's step is one that each rank takes alone.
PARALLEL = [
    name
    for name, case in CASES.items()
    if case.model in models.TRANSFORMERS
    and case.fault is None
    and case.sharding not in {"fully_shard", "none", "fsdp1_local"}
]


def as_bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: bits(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", PARALLEL)
def test_the_truth_is_what_the_same_step_makes_of_a_model_that_was_never_sharded(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    """`full_tensor()` is not believed alone: it goes wrong where torch loses track of a layout.

    Rows in another place would be other random numbers. Only the last bit may differ: how a product and a sum are
    rounded depends on where in a vector register they come to lie.
    """
    alone = replace(Training.of(CASES[name]).unsharded(), is_fake=True)  # with the step that needs no loss
    module, _ = trained(0, alone)
    truth = read_truth(checkpoint(name) / "truth", "truth")
    own = module.state_dict()
    assert list(own) == list(truth)
    for key, value in own.items():
        rounding = 2 * torch.finfo(value.dtype).eps
        torch.testing.assert_close(truth[key], value, rtol=rounding, atol=0.0)


def test_inspect_says_on_which_ranks_a_tensor_of_one_pipeline_stage_is_whole(checkpoint: Callable[[str], Path]) -> None:
    """S9."""
    report = merger.inspect(checkpoint("llama-fp32-pp2xfsdp2-pipeline") / "checkpoint")
    assert report.problems == ()
    assert [(mesh.ranks, mesh.num_tensors) for mesh in report.meshes] == [((0, 1), 10), ((2, 3), 10)]
    assert report.placements == {"(Shard(0))": 20, "on ranks 2 and 3": 1}


@pytest.mark.parametrize("name", PARALLEL)
def test_a_model_loads_and_computes_as_it_did_unsharded(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """S3, S10, S19: no missing or unexpected key, every parameter and the logits bit for bit.

    Parameters are compared in memory, where experts are one tensor, however the files hold them.
    """
    from transformers import AutoModelForCausalLM

    made, out = checkpoint(name), tmp_path / "out"
    merger.merge(made / "checkpoint", out)
    model, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, **own_dtype())
    assert not any(loading.values())
    assert as_bits(model.state_dict()) == as_bits(read_truth(made / "truth", "truth"))
    truth = load_file(made / "truth" / "truth_logits.safetensors")
    with torch.no_grad():
        logits = model(input_ids=truth["input_ids"]).logits
    assert torch.equal(logits, truth["logits"])
