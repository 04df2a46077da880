from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from merger.dtypes import BY_NAME
from merger.errors import ArchiveError, MergerError, NotACheckpointError
from merger.reading import SourceReader, read_rectangle
from merger.sources.safetensors_files import read_model_directory
from tests.unit.stored import elements, random_tensor

WRITABLE = sorted(name for name, dtype in BY_NAME.items() if dtype.safetensors is not None)
INDEX = "model.safetensors.index.json"


def data_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    checkpoint = read_model_directory(folder)
    with SourceReader() as reader:
        return {
            name: (
                tensor.dtype.name,
                tensor.shape,
                read_rectangle(reader, tensor, [0] * len(tensor.shape), tensor.shape).tobytes(),
            )
            for name, tensor in checkpoint.tensors.items()
        }


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (str(tensor.dtype)[6:], tuple(tensor.shape), elements(tensor).tobytes())
        for name, tensor in tensors.items()
    }


def container(entries: object, data: bytes = b"", header_bytes: int | None = None) -> bytes:
    """A safetensors file of any header, valid or not."""
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(header) if header_bytes is None else header_bytes).to_bytes(8, "little") + header + data


def entry(dtype: Any = "F32", shape: Any = (2,), data_offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map}))


def error_of(folder: Path) -> MergerError:
    with pytest.raises(MergerError) as caught:
        read_model_directory(folder)
    return caught.value


def test_what_safetensors_writes_is_read_for_every_type(tmp_path: Path) -> None:
    tensors = {name: random_tensor(getattr(torch, name), (3, 5)) for name in WRITABLE}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert data_of(tmp_path) == expected(tensors)


def test_scalars_and_empty_tensors_are_read(tmp_path: Path) -> None:
    tensors = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "none": torch.empty(0), "one": torch.ones(1, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert data_of(tmp_path) == expected(tensors)
    assert read_model_directory(tmp_path).tensors["empty"].chunks == ()


def test_a_file_without_tensors_is_read(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    assert data_of(tmp_path) == {}


def test_names_beyond_ascii_are_read(tmp_path: Path) -> None:
    tensors = {"gewicht.\u00fc\U0001f600": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert data_of(tmp_path) == expected(tensors)


def two_shards(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.ones(2), "b": torch.arange(3)}
    save_file({"a": tensors["a"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": tensors["b"]}, folder / "model-00002-of-00002.safetensors")
    write_index(folder, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    return tensors


def test_the_files_that_the_index_names_are_read_and_no_others(tmp_path: Path) -> None:
    tensors = two_shards(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    assert data_of(tmp_path) == expected(tensors)


def test_without_an_index_all_files_are_read(tmp_path: Path) -> None:
    tensors = two_shards(tmp_path)
    (tmp_path / INDEX).unlink()
    assert data_of(tmp_path) == expected(tensors)


def test_model_safetensors_counts_before_everything_else_as_in_transformers(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file({"c": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert data_of(tmp_path) == expected({"c": torch.zeros(1)})


@pytest.mark.parametrize("with_config", [True, False])
def test_the_checkpoint_tells_what_it_is(with_config: bool, tmp_path: Path) -> None:  # noqa: FBT001 - a parameter
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    if with_config:
        (tmp_path / "config.json").write_text("{}")
    checkpoint = read_model_directory(tmp_path)
    assert (checkpoint.format, checkpoint.world_size) == ("Hugging Face model directory", 1)
    assert checkpoint.config_dir == (tmp_path if with_config else None)
    assert [file.path for file in checkpoint.files] == [tmp_path / "model.safetensors"]


EIGHT = bytes(8)
NO_JSON = "its header is no JSON"
NO_FIELDS = "the header entry of w does not have a dtype, a shape and data_offsets"
UTF_16 = "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"
INFINITE = b'{"w":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,8]}}'
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it has 0 bytes, too few for any header"),
    "short": (bytes(7), "it has 7 bytes, too few for any header"),
    "html": (b"<!DOCTYPE html>", "it has 15 bytes, its header alone claims 5,789,751,444,030,890,300"),
    "header-too-long": (container({}, b"", 100), "it has 10 bytes, its header alone claims 100"),
    "header-one-too-long": (container({}, b"", 3), "it has 10 bytes, its header alone claims 3"),
    "not-json": (container(b"weights"), f"{NO_JSON} (Expecting value: line 1 column 1 (char 0))"),
    "deep": (container(b"[" * 100_000), NO_JSON),
    "utf-16": (container("{}".encode("utf-16")), f"{NO_JSON} ({UTF_16})"),
    "list": (container([1]), "its header is a JSON list, not an object"),
    "key-twice": (container(b'{"a": 1, "a": 1}'), f"{NO_JSON} (it has a key twice)"),
    "entry-no-object": (container({"w": 3}), NO_FIELDS),
    "no-dtype": (container({"w": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT), NO_FIELDS),
    "shape-text": (container({"w": entry(shape="2")}, EIGHT), NO_FIELDS),
    "shape-float": (container({"w": entry(shape=[2.0])}, EIGHT), NO_FIELDS),
    "shape-negative": (container({"w": entry(shape=[-2, -1])}, EIGHT), NO_FIELDS),
    "shape-infinite": (container(INFINITE, EIGHT), NO_FIELDS),
    "three-offsets": (container({"w": entry(data_offsets=[0, 4, 8])}, EIGHT), NO_FIELDS),
    "unknown-type": (container({"w": entry(dtype="F33")}, EIGHT), "w is of the unknown type F33"),
    "size": (container({"w": entry(shape=[3])}, EIGHT), "w has 8 bytes, its shape [3] of F32 needs 12"),
    "reversed": (container({"w": entry(data_offsets=[8, 0])}, EIGHT), "w has -8 bytes, its shape [2] of F32 needs 8"),
    "outside": (container({"w": entry()}, bytes(7)), "it has 76 bytes, its header tells of 77"),
    "beyond": (container({"w": entry()}, bytes(9)), "it has 78 bytes, its header tells of 77"),
    "gap": (
        container({"w": entry(data_offsets=[8, 16])}, bytes(16)),
        "w begins at byte 78, not at 70 as it should",
    ),
    "overlap": (
        container({"v": entry(), "w": entry(data_offsets=[4, 12])}, bytes(12)),
        "w begins at byte 135, not at 139 as it should",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_not_whole_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    """L2."""
    content, reason = BROKEN[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    error = error_of(tmp_path)
    assert type(error) is ArchiveError
    text = str(error)
    if case == "deep":
        text = text[: text.index(" (")]
    assert text == f"model.safetensors: is no whole safetensors file: {reason}"


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    """L2."""
    content = save({"a": torch.ones(2), "b": torch.arange(3)})
    for length in range(len(content)):
        (tmp_path / "model.safetensors").write_bytes(content[:length])
        assert type(error_of(tmp_path)) is ArchiveError


def test_no_flipped_byte_of_a_header_ends_in_an_unforeseen_error(tmp_path: Path) -> None:
    content = save({"a.weight": torch.ones(2, 3), "b": torch.arange(2)}, metadata={"format": "pt"})
    header_end = 8 + int.from_bytes(content[:8], "little")
    path = tmp_path / "model.safetensors"
    refused = 0
    for position in range(header_end):
        for flip in (0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xFF):
            path.write_bytes(content[:position] + bytes([content[position] ^ flip]) + content[position + 1 :])
            try:
                read_model_directory(tmp_path)
            except ArchiveError:
                refused += 1
    # The rest are changes of a name, of the metadata, or of a type or shape into another of the same size.
    assert refused > 0.75 * 9 * header_end


def test_all_broken_files_and_duplicates_are_told_at_once(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "x.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "y.safetensors")
    (tmp_path / "z.safetensors").write_bytes(b"")
    assert str(error_of(tmp_path)) == (
        "2 problems:\n"
        "  - y.safetensors: holds b, and so does x.safetensors\n"
        "  - z.safetensors: is no whole safetensors file: it has 0 bytes, too few for any header"
    )


def test_an_index_that_names_missing_files_is_refused(tmp_path: Path) -> None:
    """S18."""
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "../one.safetensors", "d": "three.safetensors"}
    write_index(tmp_path, weight_map)
    error = error_of(tmp_path)
    assert type(error) is NotACheckpointError
    assert str(error) == (
        "model.safetensors.index.json: names files that are not there (3): "
        "../one.safetensors, three.safetensors, two.safetensors"
    )


def test_an_index_that_names_many_missing_files_lists_a_few(tmp_path: Path) -> None:
    write_index(tmp_path, {str(number): f"{number}.safetensors" for number in range(7)})
    assert str(error_of(tmp_path)) == (
        "model.safetensors.index.json: names files that are not there (7): "
        "0.safetensors, 1.safetensors, 2.safetensors, 3.safetensors, 4.safetensors and 2 more"
    )


def test_an_index_that_names_tensors_that_no_file_holds_is_refused(tmp_path: Path) -> None:
    """S18."""
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "ghost": "one.safetensors"})
    error = error_of(tmp_path)
    assert type(error) is NotACheckpointError
    assert str(error) == "model.safetensors.index.json: names tensors that no file holds (1): ghost"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b"3", b'{"weight_map": []}', b'{"weight_map": {"a": 5}}', b'{"weight_map": {"a": []}}',
     b'{"weight_map": null}', b"\xff\xfe", b"[" * 100_000],
    ids=range(11),
)  # fmt: skip
def test_an_index_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(content)
    error = error_of(tmp_path)
    assert type(error) is NotACheckpointError
    assert str(error) == ('model.safetensors.index.json: is no JSON with a "weight_map" of tensor names to file names')
