"""What torch does to tensors of the meta device, done again to stored ones, against torch on real tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from merger.errors import ModelError, Problem
from merger.huggingface.movements import Movement, moved, sources, stored_name
from merger.huggingface.recording import Notes, recording, storage_identity
from merger.reading import SourceReader, read_rectangle
from merger.tensors import StoredTensor
from tests.unit.stored import Piece, elements, grid, random_tensor, store

Operation = Callable[[dict[str, torch.Tensor]], torch.Tensor]

A, B = random_tensor(torch.bfloat16, (6, 4, 2), seed=1), random_tensor(torch.bfloat16, (6, 4, 2), seed=2)


def in_two_files(tensor: torch.Tensor) -> list[Piece]:
    cuts = [[0, *([size // 3] if size > 2 else []), size] for size in tensor.shape]
    return [Piece(offsets, sizes, file=number % 2) for number, (offsets, sizes) in enumerate(grid(cuts))]


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, StoredTensor]:
    return store(tmp_path, {"a": (A, in_two_files(A)), "b": (B, in_two_files(B))})


def record(operation: Operation) -> tuple[Notes, torch.Tensor]:
    given = {name: torch.empty(6, 4, 2, dtype=torch.bfloat16, device="meta") for name in ("a", "b")}
    notes = Notes(given)
    with recording(notes):
        result = operation(given)
    return notes, result


def movement(operation: Operation) -> Movement | None:
    notes, result = record(operation)
    return notes.movement(result)


MOVEMENTS: dict[str, Operation] = {
    "as it is": lambda t: t["a"],
    "view": lambda t: t["a"].view(3, 8, 2),
    "reshape of a transposed one": lambda t: t["a"].transpose(0, 2).reshape(2, 24),
    "flatten": lambda t: t["a"].flatten(0, 1),
    "unflatten": lambda t: torch.unflatten(t["a"], 0, (-1, 2)),
    "permute": lambda t: t["a"].permute(-1, 0, 1),
    "movedim": lambda t: t["a"].movedim(0, -1),
    "transpose": lambda t: t["a"].transpose(0, -1).contiguous(),
    "t": lambda t: t["a"].flatten(1).t(),
    "slice": lambda t: t["a"][1:-1, 2:],
    "slice to behind the end": lambda t: t["a"][4:99],
    "empty slice": lambda t: t["a"][4:2],
    "narrow": lambda t: t["a"].narrow(1, 1, 2),
    "select": lambda t: t["a"][-1],
    "select of the last dim": lambda t: t["a"][..., 1],
    "split": lambda t: torch.split(t["a"], 4)[1],
    "split with sizes": lambda t: torch.split(t["a"], [1, 3], dim=-2)[1],
    "chunk": lambda t: torch.chunk(t["a"], 4, dim=0)[2],
    "unbind": lambda t: t["a"].unbind(-1)[1],
    "squeeze": lambda t: t["a"].narrow(0, 2, 1).squeeze(0),
    "unsqueeze": lambda t: t["a"].unsqueeze(-1),
    "cat": lambda t: torch.cat([t["a"], t["b"][:2]]),
    "cat along another dim": lambda t: torch.cat([t["a"], t["b"]], dim=-1),
    "cat with nothing": lambda t: torch.cat([t["a"].flatten()[:0], t["b"]]),
    "stack": lambda t: torch.stack([t["a"], t["b"], t["a"]], dim=-1),
    "clone and detach": lambda t: t["a"].detach().clone().contiguous(),
    "to its own type": lambda t: t["a"].to(torch.bfloat16, copy=True),
    "expanded to its own shape": lambda t: t["a"].expand(6, -1, 2),
    "zeros behind": lambda t: torch.cat([t["a"], t["a"].new_zeros(2, 4, 2)]),
    "zeros alike": lambda t: torch.cat([torch.zeros_like(t["b"]), t["a"]], dim=1),
    "halves dealt out in turn": lambda t: t["a"].view(2, 3, 4, 2).transpose(0, 1).reshape(6, 4, 2),
    "experts": lambda t: t["a"].chunk(2, dim=1)[1].contiguous().chunk(6)[3].squeeze(0),
}


@pytest.mark.parametrize("name", MOVEMENTS)
def test_a_movement_of_data_is_done_again_to_stored_tensors(name: str, saved: dict[str, StoredTensor]) -> None:
    made = movement(MOVEMENTS[name])
    assert made is not None
    expected = MOVEMENTS[name]({"a": A, "b": B})
    tensor = moved({"w": made}, saved)["w"]
    assert tensor.shape == tuple(expected.shape)
    with SourceReader() as reader:
        found = read_rectangle(reader, tensor, (0,) * len(tensor.shape), tensor.shape)
    assert found.tobytes() == elements(expected).tobytes()


def written_into(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    tensors["a"][:2].copy_(tensors["b"][:2])
    return tensors["a"].flatten()


def zeros_written_into(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    zeros = tensors["a"].new_zeros(6, 4, 2)
    zeros[1:3] = tensors["b"][1:3]
    return zeros


OTHERS: dict[str, Operation] = {
    "arithmetic": lambda t: t["a"] + t["b"],
    "made of arithmetic": lambda t: (t["a"] * 2).flatten(),
    "joined with arithmetic": lambda t: torch.cat([t["a"], -t["b"]]),
    "cast": lambda t: t["a"].to(torch.float32),
    "bits": lambda t: t["a"].view(torch.int16),
    "another type joined": lambda t: torch.cat([t["a"], t["b"].float()]),
    "repeated": lambda t: t["a"].narrow(0, 0, 1).expand(6, 4, 2),
    "every other": lambda t: t["a"][::2],
    "turned round": lambda t: t["a"].flip(0),
    "picked": lambda t: t["a"][:, [0, 3]],
    "written into": written_into,
    "zeros written into": zeros_written_into,
    "of nothing": lambda _: torch.zeros(3),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_movement_is_known_to_be_none(name: str) -> None:
    assert movement(OTHERS[name]) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("arithmetic", {"a", "b"}),
        ("made of arithmetic", {"a"}),
        ("picked", {"a"}),
        ("written into", {"a", "b"}),
        ("zeros written into", {"a", "b"}),
        ("of nothing", set()),
    ],
)
def test_of_what_a_tensor_is_made_is_known_even_then(name: str, expected: set[str]) -> None:
    notes, result = record(OTHERS[name])
    assert notes.sources(result) == expected


def test_a_tensor_that_is_as_it_was_is_known_by_its_name() -> None:
    same = movement(lambda t: t["b"].clone())
    other = movement(lambda t: torch.cat([t["b"][:, 2:], t["a"]], dim=1))
    assert same is not None
    assert other is not None
    assert (stored_name(same), sources(same)) == ("b", ("b",))
    assert (stored_name(other), sources(other)) == (None, ("b", "a"))


def test_views_share_a_memory_and_copies_do_not() -> None:
    tensor = torch.empty(4, 3, device="meta")
    assert storage_identity(tensor[1]) == storage_identity(tensor.view(12)) == storage_identity(tensor)
    assert storage_identity(tensor.clone()) != storage_identity(tensor)


def test_tensors_that_were_saved_in_several_types_do_not_become_one(tmp_path: Path) -> None:
    tensors = {"a": A, "b": B.float()}
    mixed = store(tmp_path, {name: (tensor, in_two_files(tensor)) for name, tensor in tensors.items()})
    made = movement(lambda t: torch.cat([t["a"], t["b"]]))
    assert made is not None
    with pytest.raises(ModelError) as caught:
        moved({"w": made}, mixed)
    assert caught.value.problems == (
        Problem(
            "mixed-dtypes",
            "w",
            "on the hub this is one tensor, made of ones that were saved in several types: a (bfloat16), b (float32). "
            "Save all in one type, or keep the names and shapes in memory by --names as-is.",
        ),
    )
