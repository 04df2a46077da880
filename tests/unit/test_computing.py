"""Tensors that are computed as they are read: by any piece, in any order, by any thread, and written like others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from merger import computing, reading, writer
from merger.dtypes import BY_NAME
from merger.errors import ChecksumError
from merger.operations import Reduce
from merger.reading import SourceReader, read_bands, read_rectangle
from merger.tensors import Computation, StoredTensor, computed, in_files
from merger.writer import write_plan
from tests.unit.stored import dtype_name, elements, plan_for, rows, store, whole


def summands(folder: Path, parts: Sequence[torch.Tensor], num_ranks: int = 1) -> tuple[StoredTensor, ...]:
    """Tensors in files, each cut by rows over as many ranks."""
    pieces = {
        f"part.{n}": (part, rows(part, num_ranks) if num_ranks > 1 else [whole(part)]) for n, part in enumerate(parts)
    }
    return tuple(store(folder, pieces).values())


def total_of(inputs: Sequence[StoredTensor]) -> StoredTensor:
    """Their sum, as a tensor to be computed."""
    return computed(Computation("total", inputs[0].dtype, inputs[0].shape, tuple(inputs), Reduce("sum")))


@pytest.fixture
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids of several bands, of which few are kept."""
    monkeypatch.setattr(computing, "_BAND_ELEMENTS", 8)
    monkeypatch.setattr(reading, "_MAX_KEPT_BYTES", 100)


@pytest.mark.usefixtures("small_bands")
@given(data=st.data(), shape=st.lists(st.integers(1, 6), max_size=3))
def test_any_rectangle_is_read_as_if_it_lay_in_a_file(
    data: st.DataObject, shape: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    expected = elements((parts[0].double() + parts[1].double() + parts[2].double()).float())
    total = total_of(summands(tmp_path_factory.mktemp("parts"), parts))
    with SourceReader() as reader:
        for _ in range(3):
            offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
            sizes = [data.draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
            place = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            found = read_rectangle(reader, total, offsets, sizes)
            assert found.tobytes() == np.ascontiguousarray(expected[place]).tobytes()


@pytest.mark.usefixtures("small_bands")
def test_what_is_kept_is_bounded_and_what_was_dropped_is_computed_again(tmp_path: Path) -> None:
    part = torch.arange(60.0).reshape(20, 3)
    total = total_of(summands(tmp_path, [part, part]))
    with SourceReader() as reader:
        for _ in range(2):
            found = b"".join(band.tobytes() for _, band in read_bands(reader, total, 12))
            assert found == elements(part * 2).tobytes()
            assert reader._kept_bytes == sum(kept.nbytes for kept in reader._kept.values()) <= 100


def test_a_tensor_without_elements_has_nothing_to_compute(tmp_path: Path) -> None:
    (part,) = summands(tmp_path, [torch.empty(0, 3)])
    assert total_of([part]) == StoredTensor("total", BY_NAME["float32"], (0, 3), ())


def test_what_a_tensor_is_made_of_in_files_is_found_through_all_computations(tmp_path: Path) -> None:
    first, second, third = summands(tmp_path, [torch.ones(2, 3)] * 3)
    assert list(in_files(first)) == [first]
    assert list(in_files(total_of([total_of([first, second]), third]))) == [first, second, third]


@pytest.mark.parametrize("target", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_computed_is_written_and_cast_like_what_is_copied(
    dtype: torch.dtype, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BLOCK_BYTES", 64)
    monkeypatch.setattr(computing, "_BAND_ELEMENTS", 50)
    parts = [torch.randn(12, 9, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(2)]
    plan = plan_for({"w": total_of(summands(tmp_path / "in", parts, 3))}, {"w": target})
    steps: list[int] = []
    (tmp_path / "out").mkdir()
    write_plan(plan, tmp_path / "out", check_sums=True, workers=2, progress=steps.append)
    (found,) = load_file(tmp_path / "out" / "model.safetensors").values()
    expected = (parts[0].double() + parts[1].double()).to(dtype).to(getattr(torch, target))
    assert dtype_name(found) == target
    assert elements(found).tobytes() == elements(expected).tobytes()
    assert sum(steps) == plan.total_size


def test_damage_to_what_is_computed_from_is_noticed(tmp_path: Path) -> None:
    """S21: the file and the record are those of the input."""
    inputs = summands(tmp_path / "in", [torch.ones(6, 4), torch.ones(6, 4)], 3)
    chunk = inputs[1].chunks[2]
    path = tmp_path / "in" / "rank_2.bin"
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset + 5] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    (tmp_path / "out").mkdir()
    plan = plan_for({"w": total_of(inputs)})
    with pytest.raises(ChecksumError) as caught:
        write_plan(plan, tmp_path / "out", check_sums=True, workers=1, progress=lambda _: None)
    assert [problem.where for problem in caught.value.problems] == ["rank_2.bin: part.1"]
