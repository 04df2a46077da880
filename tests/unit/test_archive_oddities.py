"""What genuine rank files may look like besides the usual: each is written by torch.save or a zip tool, and merged."""

from __future__ import annotations

import io
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import merger
from merger.errors import ArchiveError, Problem
from merger.reading import SourceReader, read_rectangle
from merger.sources import read_checkpoint
from merger.sources.dtensor import PlainTensor
from merger.sources.torch_zip import read_archive
from tests.unit.archives import ARCHIVES, bits

NAME = "model_world_size_1_rank_0.pt"
SMALL = ARCHIVES / "2.14.1" / "fsdp2_uneven_w4"


def merged(folder: Path) -> dict[str, torch.Tensor]:
    merger.merge(folder, folder / "out", weights_only=True)
    tensors: dict[str, torch.Tensor] = load_file(folder / "out" / "model.safetensors")
    return tensors


def as_bits(tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    return {name: bits(tensor) for name, tensor in tensors.items()}


# How the archive was written.


@pytest.mark.parametrize("alignment", [1, 8, 4096, 16384])
def test_storages_may_be_aligned_to_anything(tmp_path: Path, alignment: int) -> None:
    from torch.utils.serialization import config

    state = {"a": torch.randn(3, 5), "b": torch.tensor([1, 2], dtype=torch.int8), "c": torch.randn(7)}
    with config.patch({"save.storage_alignment": alignment}):  # type: ignore[attr-defined]  # installed at run time
        torch.save(state, tmp_path / NAME)
    archive = read_archive(tmp_path / NAME)
    assert [archive.records[f"data/{n}"].byte_offset % alignment for n in range(3)] == [0, 0, 0]
    assert as_bits(merged(tmp_path)) == as_bits(state)


def test_a_merge_of_files_without_checksums_is_exact_and_says_so(tmp_path: Path) -> None:
    """L14."""
    state = {"a": torch.randn(3, 5)}
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        torch.save(state, tmp_path / NAME)
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    assert as_bits(merged(tmp_path)) == as_bits(state)
    assert merger.inspect(tmp_path).notes == (
        "rank 0: saved with checksums off, so damage to the files cannot be noticed",
    )


def test_an_archive_that_was_saved_to_memory_has_another_stem(tmp_path: Path) -> None:
    state = {"a": torch.randn(3, 5)}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    (tmp_path / NAME).write_bytes(buffer.getvalue())
    assert zipfile.ZipFile(tmp_path / NAME).namelist()[0] == "archive/data.pkl"
    assert as_bits(merged(tmp_path)) == as_bits(state)


@pytest.mark.skipif(shutil.which("zip") is None, reason="Info-ZIP is not installed")
def test_an_archive_packed_by_info_zip_is_read(tmp_path: Path) -> None:
    """Its headers have extra fields for times and owners, of other lengths in the directory."""
    state = {"a": torch.randn(3, 5), "b": torch.randn(4)}
    torch.save(state, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        archive.extractall(tmp_path / "unpacked")
    subprocess.run(["zip", "-0", "-q", "-r", str(tmp_path / "x.zip"), "x", "-D"], cwd=tmp_path / "unpacked", check=True)
    (tmp_path / "x.pt").unlink()
    (tmp_path / "x.zip").rename(tmp_path / NAME)
    assert as_bits(merged(tmp_path)) == as_bits(state)


def test_more_records_than_a_plain_zip_can_count_are_read(tmp_path: Path) -> None:
    """A zip64 end of the central directory, as torch writes it. Storages alone are saved quicker than as tensors."""
    number = 65_536
    storages = [torch.zeros(1).untyped_storage() for _ in range(number)]
    state: dict[str, Any] = {"first": torch.randn(3), "_extra_state": storages, "last": torch.randn(3)}
    torch.save(state, tmp_path / NAME)
    assert len(read_archive(tmp_path / NAME).records) > number + 2
    assert as_bits(merged(tmp_path)) == as_bits({name: state[name] for name in ("first", "last")})


def bytes_read() -> int:
    """How many bytes this process has asked the kernel for so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts the bytes that a process reads")
def test_a_file_of_more_than_4_gib_is_read_without_its_data(tmp_path: Path) -> None:
    """Zip64 sizes and offsets, as torch writes them. It reserves the space of storages, so the file is a hole."""
    rows = (1 << 20) + 1
    state = {
        "before": torch.arange(3.0),
        "big": torch.empty(rows, 1024, dtype=torch.int32),
        "after": torch.arange(7),
    }
    with torch.serialization.skip_data():
        torch.save(state, tmp_path / NAME)
    path = tmp_path / NAME
    assert path.stat().st_size > 1 << 32
    assert path.stat().st_blocks * 512 < 1 << 20
    start = bytes_read()
    source = read_checkpoint(tmp_path)
    assert bytes_read() - start < 1 << 20
    assert source.problems == ()
    assert {name: tensor.shape for name, tensor in source.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
    (after,) = source.tensors["after"].chunks
    assert after.byte_offset > 1 << 32
    with path.open("r+b") as file:
        file.seek(after.byte_offset)
        file.write(state["after"].numpy().tobytes())
        file.seek(source.tensors["big"].chunks[0].byte_offset + 4 * (1024 * (rows - 1) + 7))
        file.write((12345).to_bytes(4, "little"))
    source = read_checkpoint(tmp_path)
    with SourceReader() as reader:
        assert read_rectangle(reader, source.tensors["after"], (0,), (7,)).view("i8").tolist() == list(range(7))
        assert read_rectangle(reader, source.tensors["big"], (rows - 1, 6), (1, 3)).view("i4").tolist() == [
            [0, 12345, 0]
        ]


def test_space_that_was_reserved_and_never_filled_is_noticed(tmp_path: Path) -> None:
    """S21: under skip_data torch leaves the place of each storage for the caller to fill, and records no checksum."""
    with torch.serialization.skip_data():
        torch.save({"w": torch.ones(3)}, tmp_path / NAME)
    with pytest.raises(merger.ChecksumError) as caught:
        merged(tmp_path)
    assert str(caught.value).startswith(f"{NAME}: w: the bytes on disk (rank 0) are not those that were saved: ")


def test_a_big_endian_file_is_refused_where_torch_swaps_its_bytes(tmp_path: Path) -> None:
    """Bytes go from file to file as they are. torch.load turns them around, so saving again helps."""
    value = torch.arange(6, dtype=torch.float32)
    torch.save({"w": value}, tmp_path / "little.pt")
    with zipfile.ZipFile(tmp_path / "little.pt") as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    records["little/byteorder"] = b"big"
    records["little/data/0"] = value.numpy().byteswap().tobytes()
    with zipfile.ZipFile(tmp_path / NAME, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    loaded = torch.load(tmp_path / NAME, weights_only=True)
    assert torch.equal(loaded["w"], value)
    with pytest.raises(ArchiveError) as caught:
        read_archive(tmp_path / NAME)
    assert caught.value.problems == (
        Problem(
            "byte-order",
            NAME,
            "Its byte order is 'big'; only little-endian files can be read. Load it with torch.load and save it again "
            "on a little-endian machine.",
        ),
    )
    torch.save(loaded, tmp_path / NAME)
    assert as_bits(merged(tmp_path)) == as_bits({"w": value})


# How tensors lie in their storages.


def test_tensors_may_lie_in_their_storages_in_any_way(tmp_path: Path) -> None:
    """S4: views of one flat storage, as FSDP1 has them, transposed, sliced, with holes, reversed roles of dims."""
    flat = torch.randn(100)
    state: dict[str, torch.Tensor] = {
        "flat.first": flat[:12].view(3, 4),
        "flat.second": flat[12:20],
        "flat.last": flat[99:],
        "transposed": torch.randn(4, 6).t(),
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "every other row": torch.randn(9, 2)[::2],
        "columns": torch.randn(5, 9)[:, 2:7:2],
        "one column": torch.randn(5, 9)[:, 3],
        "overlapping": torch.arange(10).unfold(0, 4, 2),
        "channels last": torch.randn(1, 3, 4, 5).to(memory_format=torch.channels_last),
        "other type": torch.arange(8, dtype=torch.int32).view(torch.float32)[3:],
        "empty": flat[50:50],
        "empty with strides": torch.randn(4, 6)[:, 6:],
        "empty behind its storage": torch.empty(0).as_strided((0, 3), (3, 1), 2),
        "scalar of many": torch.randn(1000)[577],
    }
    torch.save(state, tmp_path / NAME)
    assert as_bits(merged(tmp_path)) == as_bits(state)


@pytest.mark.parametrize("legacy", [False, True])
def test_expanded_tensors_are_written_out(tmp_path: Path, *, legacy: bool) -> None:
    state = {
        "rows": torch.randn(1, 6).expand(5, 6),
        "columns": torch.randn(5, 1).expand(5, 6),
        "both": torch.randn(1).expand(3, 4),
        "scalar": torch.tensor(2.5).expand(2, 2, 2),
    }
    torch.save(state, tmp_path / NAME, _use_new_zipfile_serialization=not legacy)
    assert (tmp_path / NAME).stat().st_size < 5000
    assert as_bits(merged(tmp_path)) == as_bits(state)


def test_names_may_share_one_storage(tmp_path: Path) -> None:
    """S12: both names are written where no architecture says that they are tied."""
    tied = torch.randn(5, 3)
    state = {"head": tied, "embedding": tied, "view": tied[1:3]}
    torch.save(state, tmp_path / NAME)
    entries = read_archive(tmp_path / NAME).entries.values()
    assert len({entry.local.record for entry in entries if isinstance(entry, PlainTensor)}) == 1
    assert as_bits(merged(tmp_path)) == as_bits(state)


def test_replicas_may_lie_differently_on_each_rank(tmp_path: Path) -> None:
    """S4, S5: their records have other checksums, so their elements are compared."""
    value = torch.randn(4, 6)
    forms: list[torch.Tensor] = [value, value.t().contiguous().t(), torch.cat([torch.ones(3, 6), value])[3:]]
    for rank, form in enumerate(forms):
        torch.save({"w": form}, tmp_path / f"model_world_size_3_rank_{rank}.pt")
    assert as_bits(merged(tmp_path)) == as_bits({"w": value})


def test_padding_behind_a_shard_is_never_read(tmp_path: Path) -> None:
    """S1: FSDP2 saves storages that are padded to the size of the first rank's."""
    for path in SMALL.glob("*.pt"):
        shutil.copyfile(path, tmp_path / path.name)
    truth: dict[str, Any] = torch.load(tmp_path / "truth.pt", weights_only=True)
    (tmp_path / "truth.pt").unlink()
    found = merged(tmp_path)
    assert found["five"].shape == (5, 3)
    assert bits(found["five"]) == bits(truth["five"])
