from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merger import comparing
from merger.checks import ReplicaPair
from merger.comparing import Difference, differing_replicas, element_text, first_difference, same_records
from merger.dtypes import BY_NAME
from merger.reading import SourceReader
from merger.tensors import Chunk, Record, SourceFile, StoredTensor
from tests.unit.stored import Piece, columns, elements, random_tensor, rows, store, whole


def difference(folder: Path, first: torch.Tensor, other: torch.Tensor) -> Difference | None:
    """The first lies in rows, the other transposed, so that layouts cannot hide a difference."""
    order = tuple(reversed(range(first.dim())))
    stored = store(folder, {"a": (first, [whole(first)]), "b": (other, [whole(other, file=1, order=order, gap=1)])})
    with SourceReader() as reader:
        return first_difference(reader, stored["a"], stored["b"])


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    max_bytes=st.integers(1, 200),
    data=st.data(),
)
def test_the_first_difference_in_row_major_order_is_found(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], max_bytes: int, data: st.DataObject
) -> None:
    first = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    other = first.clone()
    changed = data.draw(st.sets(st.integers(0, first.numel() - 1), max_size=3))
    for position in changed:
        other.view(-1)[position] = -1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "_BAND_BYTES", max_bytes)
        found = difference(tmp_path_factory.mktemp("pair"), first, other)
    if not changed:
        assert found is None
    else:
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(min(changed)), torch.Size(shape)))
        assert found == Difference(index, str(min(changed)), "-1")


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"bool"}))
def test_equal_bits_are_equal_for_every_type_nans_included(name: str, tmp_path: Path) -> None:
    """S4."""
    tensor = random_tensor(getattr(torch, name), (40, 9))
    assert difference(tmp_path, tensor, tensor.clone()) is None


def test_a_nan_equals_itself(tmp_path: Path) -> None:
    """S4."""
    nan = torch.tensor([1.0, float("nan")])
    assert difference(tmp_path, nan, nan.clone()) is None


def test_nans_of_other_bits_differ_and_show_their_bytes(tmp_path: Path) -> None:
    first = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert difference(tmp_path, first, other) == Difference((0,), "nan (bytes 0000c07f)", "nan (bytes 0100c07f)")


def test_minus_zero_differs_from_zero(tmp_path: Path) -> None:
    assert difference(tmp_path, torch.tensor([0.0]), torch.tensor([-0.0])) == Difference((0,), "0", "-0")


def test_scalars_differ_at_an_index_without_dims(tmp_path: Path) -> None:
    assert difference(tmp_path, torch.tensor(3), torch.tensor(4)) == Difference((), "3", "4")


def test_empty_tensors_are_equal(tmp_path: Path) -> None:
    stored = store(tmp_path, {"a": (torch.empty(0, 3), []), "b": (torch.empty(0, 3), [])})
    with SourceReader() as reader:
        assert first_difference(reader, stored["a"], stored["b"]) is None


def replicas(folder: Path, *tensors: torch.Tensor) -> tuple[StoredTensor, list[ReplicaPair]]:
    """A tensor of rows 2 and 3 of some larger one, one replica per file."""
    chunks = []
    for rank, tensor in enumerate(tensors):
        stored = store(folder / str(rank), {"w": (tensor, [Piece((0, 0), (2, 3), file=rank)])})["w"]
        [chunk] = stored.chunks
        chunks.append(type(chunk)((2, 0), chunk.sizes, chunk.file, chunk.byte_offset, chunk.strides, chunk.record))
    whole_tensor = StoredTensor("model.norm.weight", BY_NAME[str(tensors[0].dtype)[6:]], (4, 3), tuple(chunks))
    return whole_tensor, [ReplicaPair(chunks[0], other, "unknown") for other in chunks[1:]]


def test_each_replica_that_differs_is_told_with_ranks_index_and_values(tmp_path: Path) -> None:
    """S5: the index is that in the whole tensor."""
    first = torch.tensor([[0.1, 2, 3], [4, 5, 6]])
    other, third = first.clone(), first.clone()
    other[1, 2] = 7
    third[0, 0] = -0.5
    tensor, pairs = replicas(tmp_path, first, first.clone(), other, third)
    with SourceReader() as reader:
        problems = differing_replicas(reader, tensor, pairs)
    beginning = "model.norm.weight: should be the same on all ranks that hold it, but at"
    ending = "the files are not of one run and one step, or the ranks went apart in training"
    assert [str(problem) for problem in problems] == [
        f"{beginning} [3, 2] rank 0 has 6 and rank 2 has 7; {ending}",
        f"{beginning} [2, 0] rank 0 has 0.100000001 and rank 3 has -0.5; {ending}",
    ]
    assert {problem.kind for problem in problems} == {"replicas-differ"}


def test_replicas_that_hold_nans_agree(tmp_path: Path) -> None:
    """S4."""
    nan = torch.full((2, 3), float("nan"))
    tensor, pairs = replicas(tmp_path, nan, nan.clone())
    with SourceReader() as reader:
        assert differing_replicas(reader, tensor, pairs) == []


@pytest.mark.parametrize(
    ("dtype", "value", "text"),
    [
        (torch.float64, 0.1, "0.10000000000000001"),
        (torch.float32, 0.1, "0.100000001"),
        (torch.float32, 1e30, "1.00000002e+30"),
        (torch.float16, 0.1, "0.0999755859"),
        (torch.bfloat16, 0.1, "0.100097656"),
        (torch.bfloat16, float("-inf"), "-inf"),
        (torch.float32, float("nan"), "nan"),
        (torch.int64, -(2**63), "-9223372036854775808"),
        (torch.int32, -5, "-5"),
        (torch.int16, -300, "-300"),
        (torch.int8, -128, "-128"),
        (torch.uint8, 255, "255"),
        (torch.uint16, 65535, "65535"),
        (torch.uint32, 2**32 - 1, "4294967295"),
        (torch.uint64, 2**63, "9223372036854775808"),
        (torch.bool, True, "True"),
        (torch.complex64, 1 + 2j, "bytes 0000803f00000040"),
        (torch.complex128, 1 + 0j, "bytes 000000000000f03f0000000000000000"),
        (torch.float8_e4m3fn, 1.0, "bytes 38"),
        (torch.float8_e5m2, 1.0, "bytes 3c"),
        (torch.float8_e4m3fnuz, 1.0, "bytes 40"),
        (torch.float8_e5m2fnuz, 1.0, "bytes 40"),
    ],
    ids=str,
)
def test_an_element_is_shown_so_that_people_can_tell_it(dtype: torch.dtype, value: complex, text: str) -> None:
    data = elements(torch.tensor(value, dtype=dtype)).tobytes()
    assert element_text(data, BY_NAME[str(dtype).removeprefix("torch.")]) == text


def test_no_type_is_without_a_text() -> None:
    for dtype in BY_NAME.values():
        assert element_text(bytes(dtype.itemsize), dtype)


def test_the_text_of_a_float32_tells_it_from_its_neighbours() -> None:
    one, next_up = struct.pack("<f", 1.0), struct.pack("<I", struct.unpack("<I", struct.pack("<f", 1.0))[0] + 1)
    assert element_text(one, BY_NAME["float32"]) != element_text(next_up, BY_NAME["float32"])


WEIGHT = torch.arange(24, dtype=torch.float32).reshape(4, 6)


def test_records_with_the_same_checksum_are_the_same_whatever_the_file(tmp_path: Path) -> None:
    stored = store(tmp_path, {"a": (WEIGHT, rows(WEIGHT, 2)), "b": (WEIGHT.clone(), rows(WEIGHT, 2))})
    assert same_records(stored["a"], stored["b"])


def test_records_without_checksum_are_the_same_only_where_the_bytes_are_the_same_bytes(tmp_path: Path) -> None:
    stored = store(tmp_path, {"a": (WEIGHT, [whole(WEIGHT)]), "b": (WEIGHT.clone(), [whole(WEIGHT)])}, checked=False)
    assert same_records(stored["a"], stored["a"])
    assert not same_records(stored["a"], stored["b"])


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": (2, 0)},
        {"sizes": (6, 4)},
        {"strides": (1, 4)},
        {"byte_offset": 20},
        {"record": Record("data/0", 16, 100, 7)},
        {"record": Record("data/0", 16, 96, 8)},
    ],
    ids=str,
)
def test_the_same_checksum_proves_nothing_where_anything_else_differs(change: dict[str, Any]) -> None:
    files = [SourceFile(Path(name), 500, 0, None) for name in ("a", "b")]
    chunk = Chunk((0, 0), (4, 6), files[0], 16, (6, 1), Record("data/0", 16, 96, 7))
    tensor = StoredTensor("w", BY_NAME["float32"], (4, 6), (chunk,))
    assert same_records(tensor, replace(tensor, chunks=(replace(chunk, file=files[1]),)))
    assert not same_records(tensor, replace(tensor, chunks=(replace(chunk, file=files[1], **change),)))


@pytest.mark.parametrize(
    ("other", "pieces"),
    [
        (WEIGHT + 1, rows(WEIGHT, 2)),
        (WEIGHT, columns(WEIGHT, 2)),
        (WEIGHT, [whole(WEIGHT)]),
        (WEIGHT, rows(WEIGHT, 2, lead=1)),
        (WEIGHT, rows(WEIGHT, 2, tail=1)),
        (WEIGHT, rows(WEIGHT, 2, order=(1, 0))),
        (WEIGHT.view(torch.int32), rows(WEIGHT, 2)),
        (WEIGHT.reshape(4, 3, 2), rows(WEIGHT.reshape(4, 3, 2), 2)),
    ],
    ids=["values", "columns", "one-chunk", "lead", "tail", "transposed", "dtype", "shape"],
)
def test_headers_do_not_prove_tensors_equal_that_lie_or_are_otherwise(
    other: torch.Tensor, pieces: list[Piece], tmp_path: Path
) -> None:
    stored = store(tmp_path, {"a": (WEIGHT, rows(WEIGHT, 2)), "b": (other, pieces)})
    assert not same_records(stored["a"], stored["b"])
