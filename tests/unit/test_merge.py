"""The merge from end to end, on genuine files; the oracle is the truth that lies beside them, and safetensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import merger
from merger.errors import CheckpointError, ChecksumError, MergerError, ModelError, TargetError
from tests.unit.archives import ARCHIVES, CASES, IDS, bits, truth

AS_SAVED = "names and shapes are as saved: those of the hub need a config"
NEWEST = ARCHIVES / "2.14.1"


def load(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A writable copy of a genuine checkpoint with buffers."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(NEWEST / "fsdp2_hsdp_w4", folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_genuine_checkpoint_merges_to_its_truth_bit_for_bit(case: Path, tmp_path: Path) -> None:
    """S2, S4, S10, S13, L12: torch 2.4 to 2.14, every layout of DTensors, every dtype."""
    merger.merge(case, tmp_path / "out", weights_only=True)
    merged = load(tmp_path / "out")
    expected = truth(case)
    # safetensors has no complex128: it is written as pairs.
    pairs = {name for name, tensor in expected.items() if tensor.dtype == torch.complex128}
    merged = {name: torch.view_as_complex(tensor) if name in pairs else tensor for name, tensor in merged.items()}
    assert {name: bits(tensor) for name, tensor in merged.items()} == {
        name: bits(tensor) for name, tensor in expected.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_cast_rounds_as_torch_does_and_leaves_integers_alone(dtype: str, tmp_path: Path) -> None:
    """S13."""
    case = NEWEST / "fsdp2_dtypes_buf_w2"
    report = merger.merge(case, tmp_path / "out", weights_only=True, dtype=dtype)  # type: ignore[arg-type]
    target = getattr(torch, dtype)
    cast = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    expected = {
        name: tensor.to(target) if tensor.dtype in cast else tensor
        for name, tensor in truth(case).items()
        if tensor.dtype != torch.complex128
    }
    merged = load(tmp_path / "out")
    assert {name: bits(merged[name]) for name in expected} == {name: bits(value) for name, value in expected.items()}
    assert report.casts == {
        f"{source} -> {dtype}": count
        for source, count in {"float64": 2, "float32": 3, "float16": 2, "bfloat16": 2}.items()
        if source != dtype
    }


def test_the_report_says_what_was_done(checkpoint: Path, tmp_path: Path) -> None:
    report = merger.merge(checkpoint, tmp_path / "out", weights_only=True)
    assert report.checkpoint == checkpoint
    assert report.output == tmp_path / "out"
    assert (report.format, report.world_size, report.dry_run) == ("per-rank FSDP files", 4, False)
    assert (report.num_tensors, report.num_bytes) == (17, 3944)
    assert report.weight_files == ("model.safetensors",)
    assert report.side_files == ()
    assert report.dtypes == {"float32": 16, "int64": 1}
    assert (report.casts, report.renamed, report.dropped, report.notes) == ({}, {}, (), (AS_SAVED,))


def test_small_files_are_indexed_as_hugging_face_does(checkpoint: Path, tmp_path: Path) -> None:
    """S18: total_size in bytes, every key once, every file there, format pt."""
    report = merger.merge(checkpoint, tmp_path / "out", weights_only=True, max_shard_size="1KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    count = len(report.weight_files)
    assert list(report.weight_files) == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert count > 1
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in truth(checkpoint).values())
    found: dict[str, str] = {}
    for name in report.weight_files:
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= dict.fromkeys(file.keys(), name)
    assert found == index["weight_map"]
    assert {name: bits(value) for name, value in load(tmp_path / "out").items()} == {
        name: bits(value) for name, value in truth(checkpoint).items()
    }


def test_the_same_checkpoint_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    for number, workers in enumerate((1, 4)):
        merger.merge(checkpoint, tmp_path / str(number), weights_only=True, max_shard_size=1000, workers=workers)
    assert all_bytes(tmp_path / "0") == all_bytes(tmp_path / "1")


def test_a_dry_run_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    report = merger.merge(checkpoint, tmp_path / "out", weights_only=True, dry_run=True)
    assert (report.dry_run, report.num_tensors) == (True, 17)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_progress_counts_every_byte_once(checkpoint: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    merger.merge(
        checkpoint, tmp_path / "out", weights_only=True, dtype="bfloat16", progress=lambda *call: calls.append(call)
    )
    total = 2 * sum(value.numel() for value in truth(checkpoint).values() if value.is_floating_point()) + 8
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_without_a_config_the_way_on_is_said(checkpoint: Path, tmp_path: Path) -> None:
    """L6."""
    with pytest.raises(ModelError) as caught:
        merger.merge(checkpoint, tmp_path / "out")
    assert str(caught.value) == (
        f"{checkpoint}: has no huggingface/ folder with config.json; give the folder of the base model with "
        "--config DIR, or merge the weights alone with --weights-only"
    )
    assert not (tmp_path / "out").exists()


def test_a_buffer_that_differs_names_key_ranks_and_first_index(checkpoint: Path, tmp_path: Path) -> None:
    """S5: the oracle for what was saved is torch itself."""
    path = checkpoint / "model_world_size_4_rank_2.pt"
    _overwrite(path, truth(checkpoint)["tbl"].T, index=6, value=123.5)  # it is not contiguous: saved transposed
    with pytest.raises(CheckpointError) as caught:
        merger.merge(checkpoint, tmp_path / "out", weights_only=True, check_replicas=True)
    was = f"{float(truth(checkpoint)['tbl'][2, 1]):.9g}"
    assert str(caught.value) == (
        f"tbl: should be the same on all ranks that hold it, but at [2, 1] rank 0 has {was} and rank 2 has 123.5; "
        "the files are not of one run and one step, or the ranks went apart in training"
    )


def test_a_flipped_bit_is_a_checksum_error(checkpoint: Path, tmp_path: Path) -> None:
    """S21: and nothing is left at the target."""
    path = checkpoint / "model_world_size_4_rank_1.pt"
    shard = truth(checkpoint)["layers.0.up.weight"][6:]
    _overwrite(path, shard, index=0, value=123.5)
    with pytest.raises(ChecksumError) as caught:
        merger.merge(checkpoint, tmp_path / "out", weights_only=True)
    message = str(caught.value)
    assert message.startswith("model_world_size_4_rank_1.pt: layers.0.up.weight: the bytes on disk (rank 1) are not")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]
    report = merger.merge(checkpoint, tmp_path / "out", weights_only=True, checksum=False)
    assert report.num_tensors == 17
    assert float(load(tmp_path / "out")["layers.0.up.weight"][6, 0]) == 123.5


def test_a_target_that_is_not_empty_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """S16."""
    merger.merge(checkpoint, tmp_path / "out", weights_only=True)
    (tmp_path / "out" / "stale.safetensors").write_bytes(b"stale")
    with pytest.raises(TargetError) as caught:
        merger.merge(checkpoint, tmp_path / "out", weights_only=True)
    assert str(caught.value) == (
        f"{tmp_path / 'out'}: is not empty (it holds merger_report.json, model.safetensors, stale.safetensors); choose "
        "another directory, or replace the whole of it with --overwrite"
    )
    merger.merge(checkpoint, tmp_path / "out", weights_only=True, overwrite=True)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["merger_report.json", "model.safetensors"]


@pytest.mark.parametrize("place", [".", "..", "../checkpoint"])
def test_the_checkpoint_itself_is_never_the_target(checkpoint: Path, place: str) -> None:
    before = all_bytes(checkpoint)
    target = checkpoint / place
    with pytest.raises(TargetError) as caught:
        merger.merge(checkpoint, target, weights_only=True, overwrite=True)
    assert str(caught.value) == f"{target}: is, or contains, what is to be read; choose another directory"
    assert all_bytes(checkpoint) == before


def test_what_overflows_float16_is_said(checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / "model_world_size_4_rank_0.pt"
    _overwrite(path, truth(checkpoint)["layers.0.up.weight"][:6], index=1, value=1e30)
    report = merger.merge(checkpoint, tmp_path / "out", weights_only=True, dtype="float16", checksum=False)
    assert report.notes == (
        AS_SAVED,
        "layers.0.up.weight: 1 values are beyond the range of the type they were cast to and became infinite",
    )


def test_the_order_of_keys_never_changes_the_output(tmp_path: Path) -> None:
    for number, order in enumerate((1, -1)):
        folder = tmp_path / f"checkpoint{number}"
        folder.mkdir()
        state = {f"layers.{n}.w": torch.full((2, 3), float(n)) for n in range(12)}
        torch.save(dict(list(state.items())[::order]), folder / "model_world_size_1_rank_0.pt")
        merger.merge(folder, tmp_path / f"out{number}", weights_only=True, max_shard_size=60, report=False)
    assert all_bytes(tmp_path / "out0") == all_bytes(tmp_path / "out1")
    index = json.loads((tmp_path / "out0" / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"]["layers.2.w"] == "model-00002-of-00006.safetensors"
    assert index["weight_map"]["layers.10.w"] == "model-00006-of-00006.safetensors"


def _overwrite(path: Path, shard: torch.Tensor, *, index: int, value: float) -> None:
    """Puts a value into the only place of a file where the bytes of a float32 shard stand."""
    data = bytearray(path.read_bytes())
    content = shard.contiguous().numpy().tobytes()
    assert data.count(content) == 1
    start = data.index(content) + 4 * index
    data[start : start + 4] = torch.tensor([value], dtype=torch.float32).numpy().tobytes()
    path.write_bytes(bytes(data))


def test_faults_of_target_checkpoint_and_model_are_told_at_once(checkpoint: Path, tmp_path: Path) -> None:
    """L1, L6, S16: one run shows all that stands in the way."""
    (checkpoint / "model_world_size_4_rank_2.pt").unlink()
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_bytes(b"")
    with pytest.raises(MergerError) as caught:
        merger.merge(checkpoint, out)
    assert [problem.kind for problem in caught.value.problems] == ["target-not-empty", "missing-ranks", "no-config"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bf16"}, "dtype: 'bf16' is none of auto, keep, float32, float16, bfloat16"),
        ({"unexpected": "foo"}, "unexpected: 'foo' is none of error, keep, drop"),
        ({"workers": 0}, "workers: 0 is no positive number"),
        ({"max_shard_size": -5}, "max_shard_size: -5 is no positive number of bytes"),
        (
            {"max_shard_size": "x"},
            "max_shard_size: 'x' is no size; write a number of bytes, or one with a unit such as 5GB or 500MB",
        ),
        ({"shard_order": "foo"}, "shard_order: 'foo' is none of group, coordinate"),
    ],
)
def test_an_option_without_meaning_is_refused(
    options: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(MergerError) as caught:
        merger.merge(checkpoint, tmp_path / "out", weights_only=True, **options)
    assert str(caught.value) == message


def test_the_folder_of_the_config_is_never_replaced_even_unread(checkpoint: Path) -> None:
    side = checkpoint / "huggingface"
    side.mkdir()
    (side / "config.json").write_text("{}")
    with pytest.raises(TargetError) as caught:
        merger.merge(checkpoint, side, weights_only=True, overwrite=True)
    assert str(caught.value) == f"{side}: is, or contains, what is to be read; choose another directory"
    assert (side / "config.json").exists()


@pytest.mark.parametrize(
    "kept", ["global_step_200/actor/x", "checkpoint-5/x", "optim_world_size_2_rank_0.pt", ".git/x"]
)
def test_training_state_is_never_overwritten(kept: str, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / kept).parent.mkdir(parents=True)
    (out / kept).write_bytes(b"x")
    (out / "config.json").write_text("{}")
    with pytest.raises(TargetError) as caught:
        merger.merge(checkpoint, out, weights_only=True, overwrite=True)
    assert str(caught.value) == (
        f"{out}: holds more than a model ({kept.split('/', maxsplit=1)[0]}), which --overwrite would delete; choose "
        "another directory"
    )
    assert (out / kept).exists()


def test_an_empty_state_dict_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError) as caught:
        merger.merge(tmp_path, tmp_path / "out", weights_only=True)
    assert str(caught.value) == f"{tmp_path}: the rank files hold no tensor; the model was not saved"


def test_a_dry_run_checks_the_room_too(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L9."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(TargetError) as caught:
        merger.merge(checkpoint, tmp_path / "a" / "out", weights_only=True, dry_run=True)
    assert str(caught.value).endswith("but only 1,000 are free there; make room, or choose another disk")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
