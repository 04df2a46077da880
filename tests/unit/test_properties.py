"""Whatever was saved comes back bit for bit, and the same bytes come out whatever the order in which it was saved.

The rank files are real archives: torch saves real DTensors, made without a process group on a mesh that is told which
rank it is on. The pieces in them are cut by numpy, by the rule that is written out in `pieces.indices`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

import merger
from fixtures.layouts import Strided, TensorSpec, full_value, to_torch
from tests.pieces import indices
from tests.strategies import Layout, ShardOrder, coordinate, fresh_folder, layouts
from tests.unit.archives import bits

LAYOUTS = layouts(world_sizes=st.integers(1, 8), orders=(None, "coordinate", "group"), max_tensors=6)

# How a piece can lie in its storage. FSDP2 pads storages, and some trainers pad the piece itself (FAULTS S1); views and
# transposed weights are saved as they are.
FORMS = ("exact", "padded storage", "padded piece", "view", "transposed")


def piece(spec: TensorSpec, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The piece of the full value, in a storage of its own."""
    full = full_value(spec)
    raw = full.reshape(-1).view(torch.uint8).numpy().reshape(*spec.shape, full.dtype.itemsize)
    found = indices(spec, coordinate)
    return from_bytes(raw[np.ix_(*found)] if found else raw, full.dtype)


def from_bytes(raw: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a storage of its own, from an array with the bytes of each element along its last dim."""
    data = bytearray(raw.tobytes())
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(raw.shape[:-1])


def stored(spec: TensorSpec, value: torch.Tensor, form: str) -> torch.Tensor:
    """The same piece, lying in its storage in another way; what is not of the piece is filled with ones."""
    if form == "padded piece":
        sizes = [len(dim) for dim in indices(spec, (0,) * len(spec.mesh_shape))]
        return placed(value, sizes, [slice(0, size) for size in value.shape])
    if form == "padded storage":
        buffer = placed(value.reshape(-1), [value.numel() + 5], [slice(0, value.numel())])
        return buffer[: value.numel()].reshape(value.shape)
    if form == "view":
        # torch cannot save a DTensor whose piece does not begin where its storage does.
        begin = 1 if spec.kind == "plain" else 0
        within = [slice(begin, begin + size) for size in value.shape]
        return placed(value, [size + 2 for size in value.shape], within)[tuple(within)]
    if form == "transposed":
        dims = list(range(value.ndim))[::-1]
        return value.permute(dims).contiguous().permute(dims)
    return value


def placed(value: torch.Tensor, sizes: list[int], within: list[slice]) -> torch.Tensor:
    """A tensor of `sizes` with `value` in it; placed as bytes, since torch copies few of the small types."""
    itemsize = value.dtype.itemsize
    buffer = np.ones((*sizes, itemsize), np.uint8)
    buffer[tuple(within)] = value.reshape(-1).view(torch.uint8).numpy().reshape(*value.shape, itemsize)
    return from_bytes(buffer, value.dtype)


def entry(spec: TensorSpec, rank: int, order: ShardOrder | None) -> torch.Tensor | None:
    """What `rank` saves of a tensor; None where it saves nothing."""
    form = FORMS[spec.seed % len(FORMS)]
    if form == "padded piece" and (spec.kind == "plain" or any(isinstance(p, Strided) for p in spec.placements)):
        form = "exact"  # nobody pads what is not cut, nor is it known how they would pad pieces of pieces
    if spec.kind == "plain":
        return stored(spec, full_value(spec), form)
    event(form)
    is_outside = rank not in spec.mesh_ranks
    if is_outside and spec.seed % 2:
        return None
    if is_outside:
        # torch keeps an empty stand-in on ranks that are not of the mesh.
        local = torch.empty(0, dtype=getattr(torch, spec.dtype))
    else:
        local = stored(spec, piece(spec, coordinate(spec, rank, order)), form)
    ranks = torch.tensor(spec.mesh_ranks).reshape(spec.mesh_shape)
    if "_rank" not in inspect.signature(DeviceMesh.__init__).parameters:
        pytest.skip("this torch cannot make the mesh of another rank")
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=spec.axis_names, _init_backend=False, _rank=rank)
    strides = tuple(prod(spec.shape[dim + 1 :]) for dim in range(len(spec.shape)))
    meta = TensorMeta(torch.Size(spec.shape), strides, local.dtype)
    result: torch.Tensor = DTensor(  # type: ignore[no-untyped-call]
        local, DTensorSpec(mesh, placements(spec), tensor_meta=meta), requires_grad=False
    )
    return result


def placements(spec: TensorSpec) -> tuple[Placement, ...]:
    return tuple(map(to_torch, spec.placements))


def save(
    layout: Layout,
    checkpoint: Path,
    *,
    ranks: list[int] | None = None,
    order_of_keys: Callable[[list[TensorSpec]], list[TensorSpec]] = list,
) -> None:
    """Saves the rank files one by one, by default in the order of ranks, with keys in the order of the layout."""
    checkpoint.mkdir()
    for rank in range(layout.world_size) if ranks is None else ranks:
        entries = {spec.name: entry(spec, rank, layout.shard_order) for spec in order_of_keys(list(layout.specs))}
        state = {name: value for name, value in entries.items() if value is not None}
        torch.save(state, checkpoint / f"model_world_size_{layout.world_size}_rank_{rank}.pt")


@given(LAYOUTS)
def test_what_was_split_over_any_mesh_comes_back_bit_for_bit(layout: Layout) -> None:
    """S1, S2, S3, S4, S6, S10, S13, S22."""
    with fresh_folder() as path:
        save(layout, path / "checkpoint")
        merger.merge(path / "checkpoint", path / "out", weights_only=True, shard_order=layout.shard_order)
        merged = load_file(path / "out" / "model.safetensors")
    assert {name: bits(value) for name, value in merged.items()} == {
        spec.name: bits(full_value(spec)) for spec in layout.specs
    }


@settings(max_examples=20)
@given(LAYOUTS)
def test_torch_reads_the_files_of_these_properties_as_the_dtensors_they_were_drawn_as(layout: Layout) -> None:
    """The properties would prove nothing if their files were not such as ranks save."""
    with fresh_folder() as path:
        save(layout, path / "checkpoint")
        for rank in range(layout.world_size):
            name = f"model_world_size_{layout.world_size}_rank_{rank}.pt"
            state = torch.load(path / "checkpoint" / name, weights_only=False)
            for spec in layout.specs:
                if spec.kind == "plain":
                    assert bits(state[spec.name]) == bits(full_value(spec))
                elif rank in spec.mesh_ranks:
                    value = state[spec.name]
                    assert isinstance(value, DTensor)
                    assert value.placements == placements(spec)
                    assert value.device_mesh.mesh.tolist() == np.reshape(spec.mesh_ranks, spec.mesh_shape).tolist()
                    assert value.device_mesh.mesh_dim_names == spec.axis_names
                    assert (tuple(value.shape), value.dtype) == (spec.shape, getattr(torch, spec.dtype))


@settings(max_examples=30)
@given(LAYOUTS, st.data())
def test_the_same_bytes_come_out_whatever_the_order_of_keys_and_files_and_the_number_of_workers(
    layout: Layout, data: st.DataObject
) -> None:
    max_shard_size = data.draw(st.integers(1, 300) | st.just(10**9), label="max_shard_size")
    ranks = data.draw(st.permutations(range(layout.world_size)), label="ranks")

    def shuffled(specs: list[TensorSpec]) -> list[TensorSpec]:
        return data.draw(st.permutations(specs), label="keys of a rank")

    with fresh_folder() as path:
        save(layout, path / "checkpoint")
        save(layout, path / "shuffled", ranks=list(ranks), order_of_keys=shuffled)
        for name, workers in (("checkpoint", 1), ("shuffled", 1), ("shuffled", 3)):
            merger.merge(
                path / name,
                path / f"{name}-{workers}",
                weights_only=True,
                shard_order=layout.shard_order,
                max_shard_size=max_shard_size,
                workers=workers,
                report=False,  # it says which files were merged, and these are others
            )
        expected = contents(path / "checkpoint-1")
        event("several files" if len(expected) > 1 else "one file")
        assert contents(path / "shuffled-1") == expected
        assert contents(path / "shuffled-3") == expected


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same_piece(form: str) -> None:
    spec = TensorSpec("w", (5, 3), "bfloat16", 7, (2,), (0, 1), (0,))
    first, last = (stored(spec, piece(spec, (index,)), form) for index in range(2))
    assert bits(torch.cat([first, last])[:5]) == bits(full_value(spec))
    assert tuple(last.shape) == ((3, 3) if form == "padded piece" else (2, 3))
    assert first.is_contiguous() is (form not in ("view", "transposed"))
    assert (first.untyped_storage().nbytes() > first.nbytes) is (form in ("padded storage", "view"))
