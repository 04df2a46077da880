"""How a tensor on the hub is made of those in memory: operations of the algebra, as data, to be done on any tensors.

They are recorded once, on a model without weights, and done again on the tensors of a checkpoint. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from merger import algebra
from merger.errors import ModelError, Problem
from merger.operations import Convert, Zeros
from merger.tensors import Computation, StoredTensor, computed

# `stored` is the tensor of that name, `zeros` as many as the shape says and of the type of the input, `converted` what
# a function gives of whole tensors; all others are functions of `algebra`.
Kind: TypeAlias = Literal["stored", "narrow", "permute", "reshape", "concat", "zeros", "converted"]


@dataclass(frozen=True, slots=True, eq=False)
class Movement:
    """One operation on the results of others; `shape` is that of its result."""

    kind: Kind
    shape: tuple[int, ...]
    inputs: tuple[Movement, ...] = ()
    arguments: tuple[Any, ...] = ()


def stored(name: str, shape: tuple[int, ...]) -> Movement:
    """The tensor of that name, as it is."""
    return Movement("stored", shape, (), (name,))


def stored_name(movement: Movement) -> str | None:
    """The name of the tensor that a movement leaves as it is; None where it changes one."""
    return movement.arguments[0] if movement.kind == "stored" else None


def sources(movement: Movement) -> tuple[str, ...]:
    """The names of all tensors that the result is made of."""
    return tuple(dict.fromkeys(_sources(movement)))


def _sources(movement: Movement) -> Iterator[str]:
    if movement.kind == "stored":
        yield movement.arguments[0]
    for part in movement.inputs:
        yield from _sources(part)


def moved(movements: Mapping[str, Movement], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The results of movements by their names, in their order, over the bytes of `tensors`.

    Raises `ModelError` where tensors of several element types would become one.
    """
    done: dict[Movement, StoredTensor] = {}
    return {name: _moved(name, movement, tensors, done) for name, movement in movements.items()}


def _moved(
    name: str, movement: Movement, tensors: Mapping[str, StoredTensor], done: dict[Movement, StoredTensor]
) -> StoredTensor:
    if movement in done:
        return done[movement]
    inputs = [_moved(name, part, tensors, done) for part in movement.inputs]
    if len({tensor.dtype.name for tensor in inputs}) > 1:
        found = ", ".join(f"{tensor.fqn} ({tensor.dtype})" for tensor in inputs)
        message = (
            f"on the hub this is one tensor, made of ones that were saved in several types: {found}. Save all in one "
            "type, or keep the names and shapes in memory by --names as-is."
        )
        raise ModelError(Problem("mixed-dtypes", name, message))
    result = _result(name, movement, inputs, tensors)
    assert result.shape == movement.shape, (name, movement.kind, result.shape, movement.shape)
    done[movement] = result
    return result


def _result(
    name: str, movement: Movement, inputs: list[StoredTensor], tensors: Mapping[str, StoredTensor]
) -> StoredTensor:
    shape, arguments = movement.shape, movement.arguments
    if movement.kind == "stored":
        return tensors[arguments[0]]
    if movement.kind == "concat":
        return algebra.concat(inputs, *arguments)
    if movement.kind == "zeros":
        return computed(Computation(name, inputs[0].dtype, shape, (), Zeros()))
    if movement.kind == "converted":
        return computed(Computation(name, inputs[0].dtype, shape, tuple(inputs), Convert(*arguments)))
    if movement.kind == "narrow":
        return algebra.narrow(inputs[0], *arguments)
    if movement.kind == "permute":
        return algebra.permute(inputs[0], *arguments)
    assert movement.kind == "reshape", movement.kind
    return algebra.reshape(inputs[0], *arguments)
