"""merger_report.json: what it says, held against zipfile, importlib.metadata and the sizes of files."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import merger
from merger.errors import TargetError
from merger.report import read_report
from tests.unit.archives import ARCHIVES, truth

AS_SAVED = "names and shapes are as saved: those of the hub need a config"
CASE = ARCHIVES / "2.14.1" / "fsdp2_hsdp_w4"


def report_of(folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((folder / "merger_report.json").read_bytes())
    return fields


def recorded(path: Path) -> tuple[str, dict[str, int]]:
    """The checksum of the checksums as the documentation defines it, and the size of each tensor's record."""
    with zipfile.ZipFile(path) as archive:
        infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    crc32 = zlib.crc32(b"".join(struct.pack("<I", info.CRC) for info in infos))
    sizes = {info.filename: info.file_size for info in infos if "/data/" in info.filename}
    return f"{crc32:08x}", sizes


def test_the_whole_report_of_a_cast_of_wrapped_names(tmp_path: Path) -> None:
    folder, out = tmp_path / "checkpoint", tmp_path / "out"
    folder.mkdir()
    state = {"module.a.weight": torch.ones(2, 3), "module.steps": torch.tensor(7)}
    path = folder / "model_world_size_1_rank_0.pt"
    torch.save(state, path)
    merger.merge(folder, out, weights_only=True, dtype="bfloat16", max_shard_size="1MB")
    crc32, sizes = recorded(path)
    assert report_of(out) == {
        "report_version": 1,
        "versions": {
            "merger": merger.__version__,
            "torch": version("torch"),
            "transformers": version("transformers"),
            "safetensors": version("safetensors"),
        },
        "options": {
            "dtype": "bfloat16",
            "max_shard_size": 1_000_000,
            "unexpected": "error",
            "weights_only": True,
            "config": None,
            "world_size": None,
            "shard_order": None,
            "reduce_partial": False,
            "lora": "both",
            "lora_alpha": None,
            "lora_adapter": None,
            "base": None,
            "names": "hub",
            "value_model": False,
            "checksum": True,
        },
        "sources": [
            {
                "file": "model_world_size_1_rank_0.pt",
                "rank": 0,
                "num_bytes": path.stat().st_size,
                "recorded_crc32": crc32,
                "verified_bytes": sum(sizes.values()),
            }
        ],
        "format": "per-rank FSDP files",
        "world_size": 1,
        "num_tensors": 2,
        "num_bytes": 6 * 2 + 8,
        "weight_files": ["model.safetensors"],
        "side_files": [],
        "dtypes": {"bfloat16": 1, "int64": 1},
        "casts": {"float32 -> bfloat16": 1},
        "renamed": {"module.a.weight": "a.weight", "module.steps": "steps"},
        "dropped": [],
        "left_out": {},
        "notes": [AS_SAVED, "names stripped of wrappers: 2, such as module.a.weight -> a.weight"],
        "cast_names": {"float32 -> bfloat16": ["a.weight"]},
        "tied": {},
        "untied": {},
        "value_head": [],
        "converted": {},
        "computed": {},
        "lora": None,
    }


def test_what_was_verified_is_what_was_copied_and_replicas_were_not(tmp_path: Path) -> None:
    """Ranks 2 and 3 hold replicas of what 0 and 1 hold; buffers, on every rank, are read from rank 0."""
    merger.merge(CASE, tmp_path / "out", weights_only=True)
    on_every_rank = sum(truth(CASE)[name].nbytes for name in ("inv_freq", "step", "tbl"))
    mesh = 4 * 4  # the ranks of the mesh lie in a record too, and are no tensor of the model
    expected = []
    for rank in range(4):
        crc32, sizes = recorded(CASE / f"model_world_size_4_rank_{rank}.pt")
        read = sum(sizes.values()) - mesh - (0 if rank == 0 else on_every_rank) if rank < 2 else 0
        expected.append((rank, crc32, read))
    sources = report_of(tmp_path / "out")["sources"]
    assert [(one["rank"], one["recorded_crc32"], one["verified_bytes"]) for one in sources] == expected


def test_without_checks_nothing_is_called_verified(tmp_path: Path) -> None:
    merger.merge(CASE, tmp_path / "out", weights_only=True, checksum=False)
    sources = report_of(tmp_path / "out")["sources"]
    assert {one["verified_bytes"] for one in sources} == {0}
    assert report_of(tmp_path / "out")["options"]["checksum"] is False


def test_a_file_without_checksums_has_none_in_the_report(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        torch.save({"w": torch.ones(6)}, tmp_path / "model_world_size_1_rank_0.pt")
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    merger.merge(tmp_path, tmp_path / "out", weights_only=True)
    (source,) = report_of(tmp_path / "out")["sources"]
    assert (source["recorded_crc32"], source["verified_bytes"]) == (None, 0)


def test_the_report_is_the_same_wherever_the_checkpoint_lies_and_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(CASE, tmp_path / "a" / "global_step_1" / "actor")
    shutil.copytree(CASE, tmp_path / "b")
    merger.merge(tmp_path / "a" / "global_step_1", tmp_path / "first", weights_only=True, max_shard_size="5GB")
    monkeypatch.chdir(tmp_path)
    merger.merge("b", "second", weights_only=True, max_shard_size=5 * 10**9, workers=1)
    first, second = ((tmp_path / name / "merger_report.json").read_bytes() for name in ("first", "second"))
    assert first == second


def test_whoever_merged_is_told_how_the_folder_was_found(tmp_path: Path) -> None:
    shutil.copytree(CASE, tmp_path / "step" / "actor")
    report = merger.merge(tmp_path / "step", tmp_path / "out", weights_only=True)
    assert report.notes == (f"read from {tmp_path / 'step' / 'actor'}", AS_SAVED)
    assert report_of(tmp_path / "out")["notes"] == [AS_SAVED]


def test_a_value_that_overflows_is_in_the_report(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1e30, 1.0])}, tmp_path / "model_world_size_1_rank_0.pt")
    report = merger.merge(tmp_path, tmp_path / "out", weights_only=True, dtype="float16")
    note = "w: 1 values are beyond the range of the type they were cast to and became infinite"
    assert report.notes == (AS_SAVED, note)
    assert report_of(tmp_path / "out")["notes"] == [AS_SAVED, note]


def test_no_report_is_written_where_none_is_wanted(tmp_path: Path) -> None:
    merger.merge(CASE, tmp_path / "out", weights_only=True, report=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert read_report(tmp_path / "out") is None


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"options": 3}', b"[" * 100_000])
def test_what_is_no_report_is_said_to_be_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "merger_report.json").write_bytes(content)
    with pytest.raises(TargetError) as caught:
        read_report(tmp_path)
    assert str(caught.value) == (
        f'{tmp_path}/merger_report.json: is no JSON object with "options", as a merge writes it; delete it to go '
        "without"
    )
