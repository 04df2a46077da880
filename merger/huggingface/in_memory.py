"""From the names and shapes of the hub back to those in memory: the movements of `hub_layout.py`, turned around.

Pure. The movements are done to tensors that stand for those in memory, of which each chunk says where its elements
come from; where they come from there the tensors of the hub go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

from merger import algebra
from merger.checks import shape_text
from merger.dtypes import BY_NAME
from merger.errors import ModelError, Problem, listed
from merger.huggingface.architecture import Architecture, HubLayout
from merger.huggingface.hub_names import saved_architecture
from merger.huggingface.movements import Movement, moved, sources
from merger.tensors import Chunk, Record, SourceFile, StoredTensor, row_major_strides

# A place in memory: the index of the first element, and the sizes of the rectangle.
_Box = tuple[tuple[int, ...], tuple[int, ...]]


def fitting(
    architecture: Architecture | None, tensors: Mapping[str, StoredTensor], layers: frozenset[str]
) -> Mapping[str, StoredTensor]:
    """The tensors of a base model under the names and in the shapes in which it has all of `layers`.

    They stay as they are where it has these layers so, or has them neither in memory nor on the hub. Raises
    `ModelError` where it would have them in memory, but cannot be brought there, and where it would have them on the
    hub, but is as in memory.
    """
    layout = None if architecture is None else architecture.hub
    if architecture is None or layout is None or layers <= _layers(tensors):
        return tensors
    on_hub = saved_architecture(architecture, {name: tensor.shape for name, tensor in tensors.items()})
    if on_hub is not architecture and layers <= _layers(architecture.shapes):
        return in_memory(layout, architecture.shapes, tensors)
    on_hub_only = sorted(layers & _layers(layout.architecture.shapes) - _layers(architecture.shapes))
    if on_hub is architecture and on_hub_only:
        message = (
            "is a layer that the adapters are on, and the base model has it under the names and in the shapes in which "
            f"{architecture.class_name} is in memory, where it is part of another; name as base a model directory as "
            "save_pretrained writes it, or leave --base out to write the adapter alone"
        )
        raise ModelError(Problem("base-in-memory", on_hub_only[0], message))
    return tensors


def in_memory(
    layout: HubLayout, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors of a model on the hub as it has them in memory, where `shapes` are; all others stay as they are.

    What is made of tensors that are not there is left out. Raises `ModelError` for tensors in memory that are not made
    of those on the hub by movements, of which a part is not there or of another shape, or of ones of several types.
    """
    movements = {name: one for name, one in {**layout.untied, **layout.tied}.items() if name in tensors}
    pieces: dict[str, dict[_Box, StoredTensor]] = {}
    for name, movement in movements.items():
        for source, box, piece in _pieces(movement, shapes, tensors[name]):
            pieces.setdefault(source, {}).setdefault(box, piece)
    others = {name: tensor for name, tensor in tensors.items() if name not in movements}
    problems = _not_there(layout, pieces, tensors)
    if problems:
        raise ModelError(problems)
    return {**{name: _joined(name, shapes[name], found) for name, found in pieces.items()}, **others}


def _not_there(
    layout: HubLayout, pieces: Mapping[str, Mapping[_Box, StoredTensor]], tensors: Mapping[str, StoredTensor]
) -> list[Problem]:
    """What a base lacks of the tensors of which it has a part."""
    absent: dict[str, list[str]] = {}
    for name, movement in layout.tied.items():
        held = tensors.get(name)
        for source in sources(movement):
            if source in pieces and (held is None or held.shape != movement.shape):
                absent.setdefault(source, []).append(
                    name if held is None else f"{name} (has {shape_text(held.shape)}, not {shape_text(movement.shape)})"
                )
    return [
        Problem(
            "incomplete-base",
            source,
            f"is made of {sum(source in sources(movement) for movement in layout.tied.values())} tensors of the base "
            f"model, of which {len(names)} are not there or not of the shape that config.json asks for: "
            f"{listed(sorted(names))}. Name the whole base model by --base DIR.",
        )
        for source, names in absent.items()
    ]


def _layers(names: Mapping[str, object]) -> set[str]:
    return {name.rpartition(".")[0] for name in names}


def _pieces(
    movement: Movement, shapes: Mapping[str, tuple[int, ...]], tensor: StoredTensor
) -> Iterator[tuple[str, _Box, StoredTensor]]:
    """The parts of a tensor on the hub: of which one in memory, where in it, and the part as it lies there."""
    names = sources(movement)
    stand_ins = {name: _stand_in(index, shapes[name]) for index, name in enumerate(names)}
    made = moved({tensor.fqn: movement}, stand_ins)[tensor.fqn]
    if made.shape != tensor.shape:
        return  # told by the checks of shapes
    for chunk in made.chunks:
        if not isinstance(chunk.file, SourceFile):
            continue  # zeros, or what is no movement
        assert chunk.file.rank is not None, "a stand-in has a number"
        name = names[chunk.file.rank]
        for placed, part in _steps(chunk, tensor, shapes[name]):
            box = _box(placed, shapes[name])
            order = sorted(range(len(placed.sizes)), key=lambda dim: (-placed.strides[dim], placed.sizes[dim]))
            yield name, box, algebra.reshape(algebra.permute(part, order), box[1])


def _stand_in(number: int, shape: tuple[int, ...]) -> StoredTensor:
    """A tensor of that shape whose chunks say after any movement, by `byte_offset` and `strides`, what they were."""
    file = SourceFile(Path(), prod(shape), 0, number)
    zeros = tuple(0 for _ in shape)
    chunk = Chunk(zeros, shape, file, 0, row_major_strides(shape), Record("", 0, prod(shape), None))
    return StoredTensor("", BY_NAME["uint8"], shape, (chunk,))


def _steps(chunk: Chunk, tensor: StoredTensor, shape: tuple[int, ...]) -> Iterator[tuple[Chunk, StoredTensor]]:
    """The rectangle of a chunk, cut index by index along each dim whose elements are no neighbours in memory."""
    part = tensor
    for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        part = algebra.narrow(part, dim, start, size)
    known = {stride for stride, size in zip(row_major_strides(shape), shape, strict=True) if size > 1}
    found = [(chunk, part)]
    for dim, (size, stride) in enumerate(zip(chunk.sizes, chunk.strides, strict=True)):
        if size > 1 and stride not in known:
            found = [
                (
                    replace(
                        one,
                        sizes=(*one.sizes[:dim], 1, *one.sizes[dim + 1 :]),
                        byte_offset=one.byte_offset + index * stride,
                    ),
                    algebra.narrow(its, dim, index, 1),
                )
                for one, its in found
                for index in range(size)
            ]
    yield from found


def _box(chunk: Chunk, shape: tuple[int, ...]) -> _Box:
    """Where the elements of a chunk of a stand-in lie in the tensor of `shape` for which it stands."""
    strides = row_major_strides(shape)
    offsets, rest = [], chunk.byte_offset
    for stride, size in zip(strides, shape, strict=True):
        offsets.append(rest // stride % size)
        rest -= offsets[-1] * stride
    sizes = [1 for _ in shape]
    for size, stride in zip(chunk.sizes, chunk.strides, strict=True):
        if size == 1:
            continue
        dim = next(dim for dim in reversed(range(len(shape))) if strides[dim] == stride and shape[dim] > 1)
        # A dim may go over the rows of several: then it has all of the inner ones.
        rest = size
        while rest > shape[dim] and rest % shape[dim] == 0:
            sizes[dim] = shape[dim]
            rest //= shape[dim]
            dim -= 1
        sizes[dim] = rest
    return tuple(offsets), tuple(sizes)


def _joined(name: str, shape: tuple[int, ...], pieces: Mapping[_Box, StoredTensor]) -> StoredTensor:
    types = {piece.dtype.name for piece in pieces.values()}
    if len(types) > 1:
        message = (
            f"is one tensor in memory, and of several types on the hub ({', '.join(sorted(types))}); give as base a "
            "model directory with one type for all of it"
        )
        raise ModelError(Problem("mixed-dtypes", name, message))
    if sum(prod(sizes) for _, sizes in pieces) != prod(shape):
        message = (
            "is made on the hub of other tensors, and cannot be made of these again; give as base a model directory "
            "with the names and shapes in memory"
        )
        raise ModelError(Problem("no-way-back", name, message))
    chunks = tuple(
        replace(chunk, offsets=tuple(own + start for own, start in zip(chunk.offsets, offsets, strict=True)))
        for (offsets, _), piece in pieces.items()
        for chunk in piece.chunks
    )
    first = next(iter(pieces.values()))
    more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
    return StoredTensor(f"{first.fqn}{more}", first.dtype, shape, chunks)
