"""The device mesh that a DTensor was saved with, in each of the three forms that torch pickles it.

* up to 2.9: `mesh` is a tensor of ranks; for a sub-mesh a strided view of the root's storage;
* 2.10 to 2.12: `_rank_map` is a flat tensor of all ranks and `_layout` a (possibly nested) shape and stride over it;
* from 2.13: the same with `_layout.axes`, one flat layout per mesh axis, whose shape is () for an axis of one.

In the later two a sub-mesh says which ranks lie along its axes, but not in which of its copies the saving rank is: that
follows from the rank, which is recorded too, or from the coordinate in the root mesh.

Source: torch/distributed/device_mesh.py and _mesh_layout.py (`remap_to_tensor`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import prod

from merger.sharding import Mesh
from merger.sources import fields
from merger.sources.fields import MalformedError
from merger.sources.inert import Inert

_MESH = frozenset({"torch.distributed.device_mesh.DeviceMesh"})
_LAYOUT = frozenset({"torch.distributed._mesh_layout._MeshLayout"})
_FLAT_LAYOUT = frozenset({"torch.distributed._mesh_layout._FlatLayout"})

# More ranks than any training run has; keeps a lie about a shape from taking memory.
_MAX_RANKS = 1 << 20
# Axes, and how deep their layouts are nested (flattening two axes of a flattened mesh gives two levels). Together they
# keep shared tuples from unfolding without end.
_MAX_AXES = 8
_MAX_NESTING = 3

# The integers of a small pickled tensor in row-major order, and its shape.
ReadInts = Callable[[Inert], tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class SavedMesh:
    """A mesh as one rank saw it: `rank` saved it, by its own word or by its coordinate; None where neither is there."""

    mesh: Mesh
    rank: int | None


def decode_mesh(value: Inert, read_ints: ReadInts, file_rank: int | None) -> SavedMesh:
    """The mesh of an inert DeviceMesh record. `file_rank`, of the file's name, is used only where no rank is recorded.

    Raises:
        MalformedError: it is no mesh, or its rank, coordinate and ranks contradict one another.
    """
    state = fields.state(fields.instance(value, _MESH, "mesh"))
    names = _axis_names(state.get("mesh_dim_names", state.get("_mesh_dim_names")))
    coordinate = _coordinate(state)
    if "_layout" in state:
        rank = _recorded_rank(state, read_ints)
        shape, ranks = _remapped(state, read_ints, file_rank if rank is None else rank)
    else:
        rank = None
        shape, ranks = read_ints(state.get("mesh"))
    if len(set(ranks)) != len(ranks):
        raise MalformedError("its mesh holds a rank twice")
    if names is not None and len(names) != len(shape):
        raise MalformedError(f"its mesh has {len(shape)} axes and {len(names)} names")
    mesh = Mesh(shape, ranks, names)
    if coordinate is None:
        return SavedMesh(mesh, rank)
    found = _rank_at(mesh, coordinate)
    if rank is not None and rank != found:
        raise MalformedError(f"its mesh was saved by rank {rank}, but at its coordinate {coordinate} is rank {found}")
    return SavedMesh(mesh, found)


def _axis_names(value: Inert) -> tuple[str, ...] | None:
    if value is None:
        return None
    if value.__class__ is not tuple and value.__class__ is not list:
        raise MalformedError("its mesh has axis names that are no tuple")
    return tuple(fields.text(name, "mesh axis name") for name in value)


def _coordinate(state: dict[str, Inert]) -> tuple[int, ...] | None:
    value = state.get("_coordinate_on_dim")
    # A rank outside of the mesh has None; up to 2.9 some have an empty list.
    return None if value is None or value == [] else fields.naturals(value, "mesh coordinate")


def _rank_at(mesh: Mesh, coordinate: tuple[int, ...]) -> int:
    if len(coordinate) != len(mesh.shape) or any(i >= n for i, n in zip(coordinate, mesh.shape, strict=True)):
        raise MalformedError(f"its mesh coordinate {coordinate} is not in a mesh of shape {mesh.shape}")
    index = 0
    for i, n in zip(coordinate, mesh.shape, strict=True):
        index = index * n + i
    return mesh.ranks[index]


def _recorded_rank(state: dict[str, Inert], read_ints: ReadInts) -> int | None:
    """The rank that saved a mesh with a layout; torch 2.10.0 records none, but a coordinate in the root mesh."""
    if state.get("_rank") is not None:
        return fields.natural(state["_rank"], "mesh rank")
    root = state.get("_root_mesh")
    if root is None:
        return None
    root_state = fields.state(fields.instance(root, _MESH, "root mesh"))
    if root_state.get("_rank") is not None:
        return fields.natural(root_state["_rank"], "root mesh rank")
    coordinate = _coordinate(root_state)
    if coordinate is None:
        return None
    return _rank_at(Mesh(*_remapped(root_state, read_ints, None)), coordinate)


def _remapped(
    state: dict[str, Inert], read_ints: ReadInts, rank: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and ranks of a mesh given as a layout over a rank map, in the copy of it in which `rank` is."""
    _, rank_map = read_ints(state.get("_rank_map"))
    axes = _layout_axes(state["_layout"])
    shape = tuple(prod(size for size, _ in axis) for axis in axes)
    digits = [digit for axis in axes for digit in axis]
    if prod(shape) > _MAX_RANKS or sum((size - 1) * stride for size, stride in digits) >= len(rank_map):
        raise MalformedError(f"its mesh of shape {shape} is larger than its rank map of {len(rank_map)}")
    start = 0
    if prod(shape) != len(rank_map):
        if rank is None:
            raise MalformedError("its mesh is a part of a larger one, and the file does not say which rank saved it")
        if rank not in rank_map:
            raise MalformedError(f"its mesh was saved by rank {rank}, which its rank map does not hold")
        # The layout is a mixed-radix number system over the rank map: what is left of the rank's index when the digits
        # of this mesh's axes are set to zero is where its copy begins.
        index = rank_map.index(rank)
        start = index - sum(index // stride % size * stride for size, stride in digits if stride)
    steps = [range(0, size * stride, stride) if stride else (0,) * size for size, stride in digits]
    indices = [start + sum(offsets) for offsets in product(*steps)]
    if indices and max(indices) >= len(rank_map):
        raise MalformedError(f"its mesh of shape {shape} leaves its rank map of {len(rank_map)}")
    return shape, tuple(rank_map[i] for i in indices)


def _layout_axes(layout: Inert) -> list[list[tuple[int, int]]]:
    """Per mesh axis the (size, stride) pairs, most significant first, whose product is the axis."""
    state = fields.state(fields.instance(layout, _LAYOUT, "mesh layout"))
    if "axes" not in state:
        shape, stride = state.get("shape"), state.get("stride")
        if shape.__class__ is int:
            shape, stride = (shape,), (stride,)
        return [_pairs(s, d, _MAX_NESTING) for s, d in _zipped(shape, stride)]
    axes = []
    for axis in _sequence(state["axes"]):
        flat = fields.state(fields.instance(axis, _FLAT_LAYOUT, "mesh axis"))
        axes.append(_pairs(flat.get("shape"), flat.get("stride"), _MAX_NESTING))
    return axes


def _pairs(shape: Inert, stride: Inert, nesting: int) -> list[tuple[int, int]]:
    if shape.__class__ is tuple and nesting:
        return [pair for s, d in _zipped(shape, stride) for pair in _pairs(s, d, nesting - 1)]
    size = fields.natural(shape, "mesh axis size")
    if not 0 < size <= _MAX_RANKS:
        raise MalformedError(f"its mesh has an axis of size {size}")
    return [(size, fields.natural(stride, "mesh axis stride"))]


def _zipped(shape: Inert, stride: Inert) -> list[tuple[Inert, Inert]]:
    sizes, strides = _sequence(shape), _sequence(stride)
    if len(sizes) != len(strides):
        raise MalformedError("its mesh layout has more sizes than strides, or fewer")
    return list(zip(sizes, strides, strict=True))


def _sequence(value: Inert) -> tuple[Inert, ...]:
    if value.__class__ is not tuple or len(value) > _MAX_AXES:
        raise MalformedError("its mesh layout is not a tuple of at most 8 parts")
    found: tuple[Inert, ...] = value
    return found
