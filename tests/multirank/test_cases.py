"""Every case of the table, made on real ranks, merged by this project's merger and judged like anybody else's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch

import merger
from fixtures import models
from fixtures.case import Exact, Refused, Sharding
from fixtures.cases import CASES
from fixtures.catalogue import NO_CASE, ROWS
from fixtures.conformance.running import Ran
from fixtures.conformance.suite import matching
from fixtures.conformance.verdicts import judged
from fixtures.conformance.weights import read_truth
from merger.errors import MergerError

JUDGED = matching(["*"])


def test_every_row_of_the_catalogue_has_a_case_or_a_reason_to_have_none() -> None:
    shown = {row for case in CASES.values() for row in case.ids}
    assert shown | set(NO_CASE) == set(ROWS)
    assert shown & set(NO_CASE) == set()


def test_the_table_holds_worlds_of_all_sizes_and_of_each_kind() -> None:
    assert len(JUDGED) > 160
    assert {case.world_size for case in CASES.values()} == {1, 2, 3, 4, 6, 8, 12, 24}
    assert {case.sharding for case in CASES.values()} == {*get_args(Sharding)} - {"none"}
    assert {len(case.mesh_shape) for case in CASES.values()} == {0, 1, 2, 3}
    dtypes = {spec.dtype for case in CASES.values() for spec in case.tensors}
    assert dtypes >= {"float16", "float8_e4m3fn", "float8_e5m2", "int64", "int8", "uint8", "bool", "complex64"}


def test_what_is_too_wide_for_ranks_has_a_twin_on_real_ones() -> None:
    fakes = [case for case in CASES.values() if "fake" in case.marks]
    assert fakes
    for fake in fakes:
        assert any(
            (case.fault, case.sharding, len(case.mesh_shape)) == (fake.fault, fake.sharding, len(fake.mesh_shape))
            and "wide" in case.marks
            and "fake" not in case.marks
            for case in CASES.values()
        )


def test_what_a_refusal_must_mention_is_not_in_what_every_run_prints() -> None:
    """A message that says only that merging failed mentions nothing."""
    usual = "merger: error: failed to merge the checkpoint\nTraceback (most recent call last):\nValueError: shapes\n"
    verdicts = {
        name: judged(case, Ran(1, usual, 0.0), Path("/nowhere"), Path("/nowhere"), "any").verdict
        for name, case in CASES.items()
        if any(isinstance(outcome, Refused) for outcome in case.expected)
    }
    assert set(verdicts.values()) == {"refused wrongly"}


@pytest.mark.parametrize("name", JUDGED)
def test_is_merged_exactly_or_refused_with_reason(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """All rows of the catalogue that rank files can show."""
    case, made, out = CASES[name], checkpoint(name), tmp_path / "out"
    try:
        merger.merge(made / "checkpoint", out, weights_only="weights-only" in case.marks)
        ran = Ran(0, "", 0.0)
    except MergerError as error:
        # Its path says which case it is, which is not the merger's merit.
        ran = Ran(2, str(error).replace(str(made), "@"), 0.0)
    judgement = judged(case, ran, out, made, "any")
    assert judgement.is_right, str(judgement)


@pytest.mark.parametrize(
    "name", ["qwen2-fp32-w4-permuted", "qwen2-fp32-ddp2xfsdp2-crossed", "llama-fp32-ddp2xfsdp2-swapped"]
)
def test_the_truth_of_a_mesh_in_another_order_has_its_rows_in_theirs(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    """S10, S22: the optimizer moves no element by more than its rate, 0.01; other rows would lie further away."""
    fqn = "model.layers.0.mlp.gate_proj.weight"
    trained = read_truth(checkpoint(name) / "truth", "truth")[fqn]
    start = models.initial(fqn, trained.shape, torch.float32)
    assert (trained - start).abs().max() < 0.011
    assert (trained.roll(10, 0) - start).abs().max() > 0.05


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.lora is not None and "large" not in case.marks]
)
def test_the_truths_of_adapters_differ_from_the_base(name: str, checkpoint: Callable[[str], Path]) -> None:
    """S15, S23: what peft folds is not the base, and the base alone would be noticed."""
    case, made = CASES[name], checkpoint(name)
    folded, base = read_truth(made / "truth", "folded"), read_truth(made / "truth", "base")
    changed = {key for key in folded if key not in base or not folded[key].equal(base[key])}
    assert {key.split(".")[-2] for key in changed} & {"q_proj", "c_attn"}
    for outcome in case.expected:
        if isinstance(outcome, Exact) and outcome.truth is not None:
            assert read_truth(made / "truth", outcome.truth)
