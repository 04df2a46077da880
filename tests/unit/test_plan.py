"""Plans against what safetensors, huggingface_hub and transformers write for the same tensors, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import event, given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from merger.dtypes import BY_NAME, DType
from merger.errors import ModelError, Problem
from merger.plan import Copy, OutputFile, OutputTensor, Plan, parse_size, plan_output
from merger.tensors import Chunk, Record, SourceFile, StoredTensor, row_major_strides

WRITABLE = [dtype for dtype in BY_NAME.values() if dtype.safetensors is not None]


class Disk:
    """Source files made in memory, one per chunk."""

    def __init__(self) -> None:
        self.files: dict[SourceFile, bytes] = {}

    def chunk(self, piece: torch.Tensor, offsets: tuple[int, ...]) -> Chunk:
        """A contiguous copy of a piece, behind a few other bytes as in an archive."""
        data = piece.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if piece.numel() else b""
        path = Path(f"rank_{len(self.files)}.pt")
        file = SourceFile(path, len(data) + 3, 1, len(self.files))
        self.files[file] = b"\xff\xff\xff" + data
        return Chunk(
            offsets, tuple(piece.shape), file, 3, row_major_strides(piece.shape), Record("data/0", 3, len(data), None)
        )

    def output(self, name: str, tensor: torch.Tensor, *, parts: int = 1, dim: int = 0) -> OutputTensor:
        dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
        start = 0
        chunks = []
        for piece in tensor.chunk(parts, dim) if tensor.dim() else [tensor]:
            offsets = tuple(start if other == dim else 0 for other in range(tensor.dim()))
            chunks.append(self.chunk(piece, offsets))
            start += piece.shape[dim] if tensor.dim() else 0
        return OutputTensor(name, dtype, StoredTensor(f"saved.{name}", dtype, tuple(tensor.shape), tuple(chunks)))

    def written(self, file: OutputFile) -> bytes:
        """What a file is when all its copies are made."""
        data = bytearray(file.num_bytes)
        data[: len(file.header)] = file.header
        for planned in file.tensors:
            assert planned.copies is not None
            for copy in planned.copies:
                size, source = copy.chunk.record.num_bytes, copy.chunk.file
                assert isinstance(source, SourceFile)
                data[copy.target_offset : copy.target_offset + size] = self.files[source][copy.chunk.byte_offset :]
        return bytes(data)


def seeded(shape: tuple[int, ...], dtype: DType) -> torch.Tensor:
    """Bytes that differ from place to place; bools are 0 and 1."""
    count = dtype.itemsize
    for size in shape:
        count *= size
    raw = torch.arange(count, dtype=torch.int64) * 37 + len(dtype.name)
    data = (raw % (2 if dtype.name == "bool" else 251)).to(torch.uint8)
    return data.view(getattr(torch, dtype.name)).view(shape)


def outputs(*tensors: tuple[str, int]) -> list[OutputTensor]:
    """float32 tensors of so many elements, without chunks: enough to be split into files."""
    float32 = BY_NAME["float32"]
    return [OutputTensor(name, float32, StoredTensor(name, float32, (count,), ())) for name, count in tensors]


def only(plan: Plan) -> OutputFile:
    [file] = plan.files
    assert plan.index is None
    assert file.name == "model.safetensors"
    return file


def test_a_file_of_all_types_is_byte_for_byte_the_one_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {f"{order}.{dtype.name}": seeded((3,), dtype) for order in "ba" for dtype in WRITABLE}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    disk = Disk()
    plan = plan_output([disk.output(*item) for item in tensors.items()], max_shard_size=10**9)
    assert disk.written(only(plan)) == (tmp_path / "x.safetensors").read_bytes()
    assert plan.total_size == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    "name",
    [
        "café.weight",
        "層.0",
        "\U0001f999",
        'a"quoted"b',
        "back\\slash",
        "\b\f\n\r\t",
        "".join(map(chr, range(32))) + "\x7f\x80",
        "/slash",
        "\u2028\u2029\ufeff",
        "",
        " ",
    ],
    ids=ascii,
)
def test_names_are_escaped_as_safetensors_escapes_them(name: str) -> None:
    tensors = {"z": torch.ones(2), name: torch.zeros(1), "a": torch.ones(3)}
    disk = Disk()
    plan = plan_output([disk.output(*item) for item in tensors.items()], max_shard_size=10**9)
    assert disk.written(only(plan)) == save(tensors, metadata={"format": "pt"})


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), st.integers(0, 3), max_size=5))
def test_files_of_any_names_are_those_that_safetensors_writes(sizes: dict[str, int]) -> None:
    tensors = {name: torch.ones(size) for name, size in sizes.items() if name != "__metadata__"}
    disk = Disk()
    plan = plan_output([disk.output(*item) for item in tensors.items()], max_shard_size=10**9)
    assert disk.written(only(plan)) == save(tensors, metadata={"format": "pt"})


@pytest.mark.parametrize("length", range(8))
def test_the_data_begin_at_a_multiple_of_eight_whatever_the_length_of_the_names(length: int) -> None:
    tensors = {"n" * length: torch.ones(3)}
    disk = Disk()
    file = only(plan_output([disk.output(*item) for item in tensors.items()], max_shard_size=10**9))
    assert len(file.header) % 8 == 0
    assert disk.written(file) == save(tensors, metadata={"format": "pt"})


def test_empty_tensors_and_those_without_dims_have_their_place() -> None:
    """S2, S4."""
    tensors = {
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(2.5),
        "count": torch.tensor(7),
        "none": torch.ones(0, dtype=torch.int64),
        "weight": torch.arange(6.0).view(2, 3),
    }
    disk = Disk()
    plan = plan_output([disk.output(*item) for item in tensors.items()], max_shard_size=10**9)
    assert disk.written(only(plan)) == save(tensors, metadata={"format": "pt"})


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.integers(1, 4), st.data())
def test_copies_of_pieces_give_the_file_of_the_whole(shape: tuple[int, ...], parts: int, data: st.DataObject) -> None:
    """Cut along any dim; where a piece is not one run of the output there are no copies."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole = seeded(shape, BY_NAME["int32"])
    disk = Disk()
    file = only(plan_output([disk.output("w", whole, parts=parts, dim=dim)], max_shard_size=10**9))
    pieces = torch.arange(whole.numel()).view(shape).chunk(parts, dim)
    are_runs = all((piece.flatten().diff() == 1).all() for piece in pieces)
    event(f"runs: {are_runs}")
    assert (file.tensors[0].copies is not None) == are_runs
    if are_runs:
        assert disk.written(file) == save({"w": whole}, metadata={"format": "pt"})


def test_copies_go_to_their_offset_in_the_type_that_is_written() -> None:
    """Rows 2 and 3 of float32 cast to bfloat16 begin twelve bytes into the tensor, not twenty-four."""
    disk = Disk()
    source = disk.output("w", torch.ones(4, 3), parts=2).source
    file = only(plan_output([OutputTensor("w", BY_NAME["bfloat16"], source)], max_shard_size=10**9))
    [planned] = file.tensors
    low, high = source.chunks
    assert planned.copies == (Copy(low, planned.byte_offset), Copy(high, planned.byte_offset + 12))
    assert planned.num_bytes == 24
    assert file.num_bytes == planned.byte_offset + 24 == len(file.header) + 24


def test_replicas_are_copied_once_from_the_first() -> None:
    disk = Disk()
    first, other = disk.chunk(torch.ones(3), (0,)), disk.chunk(torch.ones(3), (0,))
    tensor = OutputTensor("w", BY_NAME["float32"], StoredTensor("w", BY_NAME["float32"], (3,), (first, other)))
    [planned] = only(plan_output([tensor], max_shard_size=10**9)).tensors
    assert planned.copies == (Copy(first, planned.byte_offset),)


def test_a_piece_with_padding_between_its_rows_is_not_copied_in_one() -> None:
    """S1: dim 1 padded to the ceiling."""
    file = SourceFile(Path("rank_0.pt"), 999, 1, 0)
    padded = Chunk((0, 0), (2, 3), file, 0, (4, 1), Record("data/0", 0, 32, None))
    tensor = OutputTensor("w", BY_NAME["float32"], StoredTensor("w", BY_NAME["float32"], (2, 3), (padded,)))
    assert only(plan_output([tensor], max_shard_size=10**9)).tensors[0].copies is None


def test_the_order_of_tensors_does_not_change_the_bytes_of_a_file() -> None:
    tensors = {f"layers.{number}": torch.full((2,), float(number)) for number in range(12)}
    found = []
    for items in (list(tensors.items()), list(reversed(tensors.items()))):
        disk = Disk()
        found.append(disk.written(only(plan_output([disk.output(*item) for item in items], max_shard_size=10**9))))
    assert found[0] == found[1]


def test_a_type_that_safetensors_lacks_is_refused_for_every_tensor_that_has_it() -> None:
    complex128 = BY_NAME["complex128"]
    tensors = [OutputTensor(name, complex128, StoredTensor(name, complex128, (1,), ())) for name in ("b", "a")]
    message = (
        "is complex128, which a safetensors file cannot hold; merge with --weights-only, which writes it as pairs of "
        "float64, or store it in another type when training"
    )
    with pytest.raises(ModelError) as caught:
        plan_output([*tensors, *outputs(("c", 1))], max_shard_size=10**9)
    assert caught.value.problems == (
        Problem("unwritable-dtype", "b", message),
        Problem("unwritable-dtype", "a", message),
    )


def test_a_tensor_of_the_name_that_safetensors_keeps_for_itself_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        plan_output(outputs(("__metadata__", 1), ("a", 1)), max_shard_size=10**9)
    message = "a safetensors file keeps the name __metadata__ for itself; rename the tensor before saving"
    assert caught.value.problems == (Problem("unwritable-name", "__metadata__", message),)


# split and index


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12),
    st.integers(1, 200),
)
def test_tensors_go_into_the_files_that_hugging_face_would_put_them_in(counts: list[int], limit: int) -> None:
    """S18."""
    state = {f"t{number}": torch.empty(count, device="meta") for number, count in enumerate(counts)}
    expected = split_torch_state_dict_into_shards(state, max_shard_size=limit)
    plan = plan_output(outputs(*((name, tensor.numel()) for name, tensor in state.items())), max_shard_size=limit)
    event(f"files: {min(len(plan.files), 3)}")
    event(f"larger than the limit: {max(counts) * 4 > limit}")
    found = {file.name: sorted(planned.tensor.name for planned in file.tensors) for file in plan.files}
    assert found == {name: sorted(tensors) for name, tensors in expected.filename_to_tensors.items()}
    assert list(found) == list(expected.filename_to_tensors)
    assert plan.total_size == expected.metadata["total_size"]
    assert (plan.index is not None) == expected.is_sharded
    if plan.index is not None:
        index = json.loads(plan.index)
        assert index == {"metadata": expected.metadata, "weight_map": expected.tensor_to_filename}


def test_a_tensor_larger_than_the_limit_goes_alone_and_the_file_being_filled_goes_on() -> None:
    plan = plan_output(outputs(("a", 1), ("big", 10), ("b", 1)), max_shard_size=8)
    assert [(file.name, [planned.tensor.name for planned in file.tensors]) for file in plan.files] == [
        ("model-00001-of-00002.safetensors", ["big"]),
        ("model-00002-of-00002.safetensors", ["a", "b"]),
    ]


def test_what_fits_exactly_goes_into_one_file_without_an_index() -> None:
    only(plan_output(outputs(("a", 1), ("b", 1)), max_shard_size=8))


def test_no_tensor_at_all_is_one_file_without_data() -> None:
    file = only(plan_output([], max_shard_size=8))
    assert file.header == b'\x20\0\0\0\0\0\0\0{"__metadata__":{"format":"pt"}}'
    assert file.header == save({}, metadata={"format": "pt"})
    assert (file.tensors, file.num_bytes) == ((), 40)


def test_the_index_states_bytes_and_every_name_once_in_order() -> None:
    """S18."""
    plan = plan_output(outputs(("b.weight", 2), ("a.weight", 2)), max_shard_size=8)
    assert plan.index == (
        b"{\n"
        b'  "metadata": {\n'
        b'    "total_size": 16\n'
        b"  },\n"
        b'  "weight_map": {\n'
        b'    "a.weight": "model-00002-of-00002.safetensors",\n'
        b'    "b.weight": "model-00001-of-00002.safetensors"\n'
        b"  }\n"
        b"}\n"
    )


def test_the_number_of_parameters_is_stated_where_it_is_known() -> None:
    plan = plan_output(outputs(("b", 2), ("a", 2)), max_shard_size=8, num_parameters=3)
    assert plan.index is not None
    assert json.loads(plan.index)["metadata"] == {"total_parameters": 3, "total_size": 16}


def test_headers_data_and_index_are_those_of_save_pretrained(tmp_path: Path) -> None:
    """S12, S18: a tied model in several files."""
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model: Any = transformers.Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    disk = Disk()
    plan = plan_output(
        [disk.output(name, tensor.detach()) for name, tensor in state.items()],
        max_shard_size=8000,
        num_parameters=model.num_parameters(),
    )
    expected = {path.name: path.read_bytes() for path in tmp_path.glob("model*.safetensors*")}
    index = expected.pop("model.safetensors.index.json")
    assert len(expected) > 2
    assert {file.name: disk.written(file) for file in plan.files} == expected
    assert plan.index is not None
    stated = json.loads(index)
    if "total_parameters" not in stated["metadata"]:  # older versions of transformers
        stated["metadata"]["total_parameters"] = model.num_parameters()
    assert plan.index == (json.dumps(stated, indent=2, sort_keys=True) + "\n").encode()


# sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("5000000", 5_000_000),
        ("1KB", 1_000),
        ("500MB", 500_000_000),
        ("5GB", 5_000_000_000),
        ("1TB", 10**12),
        ("2KiB", 2048),
        ("3MiB", 3 << 20),
        ("2GiB", 2 << 30),
        ("1TiB", 1 << 40),
        ("0.5GB", 500_000_000),
        ("1.5KiB", 1536),
        ("5gb", 5_000_000_000),
        (" 5 GB ", 5_000_000_000),
    ],
)
def test_a_size_is_a_number_with_or_without_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "0",
        "0GB",
        "-1",
        "-5GB",
        "5XB",
        "5B",
        "1.5",
        "nan",
        "nanGB",
        "infGB",
        "1e400GB",
        "five",
        "5GB6",
        "0.0001KB",
    ],
)
def test_what_is_no_positive_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message follows
        parse_size(text)
    assert str(caught.value) == f"{text!r} is no size; write a number of bytes, or one with a unit such as 5GB or 500MB"
