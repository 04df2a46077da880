"""`merger.inspect` on genuine files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import merger
from merger.errors import MergerError, NotACheckpointError, Problem, TargetError
from merger.inspect import MeshSummary, TensorSummary
from tests.unit.archives import ARCHIVES, CASES, IDS, truth


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_counts_are_those_of_the_truth(case: Path) -> None:
    report = merger.inspect(case, tensors="*")
    expected = truth(case)
    assert report.problems == ()
    assert report.num_tensors == len(expected)
    assert report.num_elements == sum(value.numel() for value in expected.values())
    assert report.num_bytes == sum(value.nbytes for value in expected.values())
    assert {(tensor.name, tensor.dtype, tensor.shape) for tensor in report.tensors} == {
        (name, str(value.dtype).removeprefix("torch."), tuple(value.shape)) for name, value in expected.items()
    }


def test_each_mesh_is_shown_with_its_axes_and_its_tensors() -> None:
    """S10: tensors of one checkpoint lie on meshes of their own."""
    report = merger.inspect(ARCHIVES / "2.14.1" / "fsdp2_tp_w4")
    assert report.meshes == (
        MeshSummary((2, 2), ("fsdp", "tp"), (0, 1, 2, 3), 8),
        MeshSummary((2,), ("fsdp",), (0, 2), 6, copies=((1, 3),)),
    )
    assert report.num_replicated == 3
    assert report.placements == {
        "(Shard(0))": 6,
        "(_StridedShard(0, split_factor=2), Shard(0))": 4,
        "on every rank": 3,
        "(Shard(0), Shard(1))": 2,
        "(Shard(0), Replicate())": 2,
    }


def test_tensors_are_listed_by_a_pattern() -> None:
    report = merger.inspect(ARCHIVES / "2.14.1" / "fsdp2_hsdp_w4", tensors="layers.1.n*")
    assert report.tensors == (
        TensorSummary("layers.1.norm.weight", "float32", (8,), "(Replicate(), Shard(0))", 4),
        TensorSummary("layers.1.norm.bias", "float32", (8,), "(Replicate(), Shard(0))", 4),
    )


def test_faults_are_part_of_the_report(tmp_path: Path) -> None:
    """L1: an inspection does not fail for them."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(ARCHIVES / "2.14.1" / "fsdp2_1d_w4", folder)
    (folder / "model_world_size_4_rank_2.pt").unlink()
    report = merger.inspect(folder)
    assert report.problems == (
        Problem(
            "missing-ranks",
            str(folder),
            "rank 2 of 4 is missing (found ranks 0, 1 and 3); each node of a run writes the files of its own ranks to "
            "its own disk: copy model_world_size_4_rank_*.pt from the other nodes into this folder",
        ),
    )


def test_replicas_proven_to_differ_by_their_checksums_are_a_fault(tmp_path: Path) -> None:
    """S5: without reading data."""
    for rank in range(3):
        state = {"same": torch.arange(4.0), "buffer": torch.tensor([1.0, 2.0, float(rank == 1)])}
        torch.save(state, tmp_path / f"model_world_size_3_rank_{rank}.pt")
    assert merger.inspect(tmp_path).problems == (
        Problem(
            "replicas-differ",
            "buffer",
            "should be the same on all ranks that hold it, but rank 1 has other bytes than rank 0 (by the checksums in "
            "the files)",
        ),
    )


def test_a_model_directory_is_inspected_too(tmp_path: Path) -> None:
    merger.merge(ARCHIVES / "2.14.1" / "fsdp2_1d_w4", tmp_path / "out", weights_only=True)
    report = merger.inspect(tmp_path / "out")
    assert (report.format, report.world_size, report.num_tensors) == ("Hugging Face model directory", 1, 17)


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError) as caught:
        merger.inspect(tmp_path / "nowhere")
    assert str(caught.value) == f"{tmp_path / 'nowhere'}: does not exist"


@pytest.mark.parametrize("name", ["picture.png", "picture", "svg", "picture.svg.gz"])
def test_a_picture_of_an_unknown_kind_is_refused_before_anything_is_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(MergerError) as caught:
        merger.inspect(tmp_path / "nowhere", picture=tmp_path / name)
    assert str(caught.value) == (
        f"picture: '{name}' ends neither in .svg nor in .html, which says what kind of picture is to be drawn"
    )


def test_a_picture_that_exists_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    target = tmp_path / "picture.svg"
    target.write_text("mine")
    with pytest.raises(TargetError) as caught:
        merger.inspect(tmp_path / "nowhere", picture=target)
    assert str(caught.value) == f"{target}: exists; choose another name, or replace it with --overwrite"
    assert target.read_text() == "mine"


def test_the_report_names_the_picture(tmp_path: Path) -> None:
    case = ARCHIVES / "2.14.1" / "fsdp2_1d_w4"
    assert merger.inspect(case).picture is None
    (tmp_path / "picture.SVG").write_text("old")
    report = merger.inspect(case, picture=str(tmp_path / "picture.SVG"), overwrite=True)
    assert report.picture == tmp_path / "picture.SVG"
    assert (tmp_path / "picture.SVG").read_text().startswith("<?xml")


def test_no_picture_is_left_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError):
        merger.inspect(tmp_path / "nowhere", picture=tmp_path / "picture.html")
    assert list(tmp_path.iterdir()) == []
