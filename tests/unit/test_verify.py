"""`merger.verify`: expected distances are computed with torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import merger
from merger.errors import MergerError, NotACheckpointError
from merger.verify import TensorComparison
from tests.unit.archives import ARCHIVES, CASES, IDS, truth

CHECKPOINT = ARCHIVES / "2.14.1" / "fsdp2_hsdp_w4"


def write_model(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def not_equal(report: merger.VerifyReport) -> list[TensorComparison]:
    return [comparison for comparison in report.comparisons if comparison.status != "equal"]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_merge_is_the_same_as_its_checkpoint(case: Path, tmp_path: Path) -> None:
    merger.merge(case, tmp_path / "out", weights_only=True)
    report = merger.verify(case, tmp_path / "out")
    assert report.is_equal
    assert len(report.comparisons) == len(truth(case))
    assert not_equal(report) == []


def test_both_sides_may_be_merged(tmp_path: Path) -> None:
    write_model(tmp_path / "a", truth(CHECKPOINT))
    write_model(tmp_path / "b", truth(CHECKPOINT))
    assert merger.verify(tmp_path / "a", tmp_path / "b").is_equal


def test_the_largest_difference_is_told(tmp_path: Path) -> None:
    tensors = truth(CHECKPOINT)
    changed = tensors["emb.weight"].clone()
    changed[31, 7] += 0.25
    changed[0, 0] -= 0.125
    largest = float((changed.double() - tensors["emb.weight"].double()).abs().max())
    reference = write_model(tmp_path / "reference", tensors | {"emb.weight": changed})
    report = merger.verify(CHECKPOINT, reference)
    assert not report.is_equal
    assert not_equal(report) == [
        TensorComparison("emb.weight", "differs", "float32", "float32", largest, f"largest difference {largest:.6g}")
    ]
    within = merger.verify(CHECKPOINT, reference, atol=largest)
    assert within.is_equal
    assert [comparison.status for comparison in not_equal(within)] == ["close"]
    assert not merger.verify(CHECKPOINT, reference, atol=largest * 0.99).is_equal


def test_a_relative_tolerance_scales_with_the_reference(tmp_path: Path) -> None:
    write_model(tmp_path / "a", {"w": torch.tensor([1.0, 1000.0])})
    write_model(tmp_path / "b", {"w": torch.tensor([1.0, 1001.0])})
    assert merger.verify(tmp_path / "a", tmp_path / "b", rtol=1e-3).is_equal
    assert not merger.verify(tmp_path / "a", tmp_path / "b", rtol=0.9e-3).is_equal


def test_missing_unexpected_and_wrongly_shaped_tensors_are_differences(tmp_path: Path) -> None:
    tensors = truth(CHECKPOINT)
    tensors["extra"] = torch.zeros(2, 2)
    del tensors["head.weight"]
    tensors["inv_freq"] = torch.zeros(5)
    report = merger.verify(CHECKPOINT, write_model(tmp_path / "reference", tensors))
    assert not_equal(report) == [
        TensorComparison("inv_freq", "shape", "float32", "float32", None, "shape (4), the reference has (5)"),
        TensorComparison("head.weight", "unexpected", "float32", None, None, "(32, 8), not in the reference"),
        TensorComparison("extra", "missing", None, "float32", None, "(2, 2), not in the checkpoint"),
    ]


def test_another_floating_type_is_compared_after_rounding_to_it(tmp_path: Path) -> None:
    tensors = {
        name: value.bfloat16() if value.is_floating_point() else value for name, value in truth(CHECKPOINT).items()
    }
    report = merger.verify(CHECKPOINT, write_model(tmp_path / "reference", tensors))
    assert report.is_equal
    details = {comparison.detail for comparison in report.comparisons}
    assert details == {"equal", "float32 here, bfloat16 in the reference; equal after rounding"}


def test_another_kind_of_type_is_a_difference(tmp_path: Path) -> None:
    tensors = truth(CHECKPOINT)
    tensors["step"] = tensors["step"].to(torch.int32)
    report = merger.verify(CHECKPOINT, write_model(tmp_path / "reference", tensors))
    assert not_equal(report) == [
        TensorComparison("step", "differs", "int64", "int32", None, "is int64, the reference is int32")
    ]


@pytest.mark.parametrize(
    ("left", "right", "status"),
    [
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), "equal"),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0]), "differs"),
        (torch.tensor([float("inf")]), torch.tensor([float("-inf")]), "differs"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "close"),
        (torch.tensor([2**53], dtype=torch.int64), torch.tensor([2**53 + 1], dtype=torch.int64), "differs"),
        (torch.tensor([-(2**63)], dtype=torch.int64), torch.tensor([0], dtype=torch.int64), "differs"),
        (torch.tensor([2**63 + 1], dtype=torch.uint64), torch.tensor([2**63], dtype=torch.uint64), "differs"),
        (torch.tensor([True, False]), torch.tensor([True, True]), "differs"),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), "differs"),
        (torch.zeros(0, 3), torch.zeros(0, 3), "equal"),
        (torch.tensor(2.5), torch.tensor(2.5), "equal"),
    ],
)
def test_values_of_every_kind_are_told_apart(
    left: torch.Tensor, right: torch.Tensor, status: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "a", {"w": left})
    write_model(tmp_path / "b", {"w": right})
    (comparison,) = merger.verify(tmp_path / "a", tmp_path / "b").comparisons
    assert comparison.status == status


def test_a_reference_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError) as caught:
        merger.verify(CHECKPOINT, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: is neither a Hugging Face model directory nor a sharded checkpoint: it holds no *.safetensors "
        "file and no model_world_size_*_rank_*.pt"
    )


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_reference_may_be_sharded_too(case: Path, tmp_path: Path) -> None:
    merger.merge(case, tmp_path / "out", weights_only=True)
    report = merger.verify(tmp_path / "out", case, shard_order="group")
    assert report.is_equal
    assert len(report.comparisons) == len(truth(case))
    assert merger.verify(case, case).is_equal


def test_options_of_sharded_checkpoints_are_refused_where_neither_side_is_one(tmp_path: Path) -> None:
    write_model(tmp_path / "a", {"w": torch.zeros(2)})
    with pytest.raises(MergerError) as caught:
        merger.verify(tmp_path / "a", tmp_path / "a", world_size=2)
    assert str(caught.value) == (
        f"{tmp_path / 'a'}: is a model directory, for which world_size, shard_order and reduce_partial mean nothing; "
        "leave them out"
    )


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    write_model(tmp_path / "a", truth(CHECKPOINT))
    merger.verify(CHECKPOINT, tmp_path / "a", progress=lambda *call: calls.append(call))
    total = sum(tensor.nbytes for tensor in truth(CHECKPOINT).values())
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
