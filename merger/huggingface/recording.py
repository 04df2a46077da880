"""Notes what torch does with tensors of the meta device as movements of data, so that it can be done to stored ones.

Every operation that torch is asked for, down in `aten`, passes by here once. The ones listed below are movements of
the algebra; the result of any other is of unknown contents, and so is what is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from merger.huggingface.movements import Movement, stored

if TYPE_CHECKING:
    import torch

# The result has the elements of the input in their row-major order. Names and overloads are those of torch's schemas.
_SAME_ORDER = frozenset({
    "alias.default", "clone.default", "contiguous.default", "detach.default", "lift_fresh.default", "_to_copy.default",
    "view.default", "_unsafe_view.default", "reshape.default", "_reshape_alias.default", "flatten.using_ints",
    "unflatten.int", "squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default", "expand.default",
})  # fmt: skip
# The results are cut from the input along a dim, one behind the other and as long as their shapes say.
_CUTS = frozenset({
    "split.Tensor", "split_with_sizes.default", "unsafe_split.Tensor", "unsafe_split_with_sizes.default",
    "chunk.default", "unsafe_chunk.default", "unbind.int",
})  # fmt: skip
_ZEROS = frozenset({"new_zeros.default", "zeros_like.default"})


class Notes:
    """What is known of the tensors that came by: of which given ones they are made, and by which movement.

    `given` are the tensors to begin with, by their names; no two names may have one tensor.
    """

    def __init__(self, given: Mapping[str, torch.Tensor]) -> None:
        # By identity. The tensors are held as well, so that no other one can come to have the same.
        self._movements: dict[int, Movement] = {}
        self._sources: dict[int, frozenset[str]] = {}
        self._held: list[torch.Tensor] = []
        # Storages that were written into after they were made, and of what: no tensor over them is known any more.
        self._written: dict[int, frozenset[str]] = {}
        for name, tensor in given.items():
            self._enter(tensor, stored(name, tuple(tensor.shape)), frozenset({name}))

    def movement(self, tensor: torch.Tensor) -> Movement | None:
        """By which movement a tensor is made; None where it is not by movements alone."""
        return None if storage_identity(tensor) in self._written else self._movements.get(id(tensor))

    def sources(self, tensor: torch.Tensor) -> frozenset[str]:
        """The names of all given tensors that a tensor may be made of."""
        return self._sources.get(id(tensor), frozenset()) | self._written.get(storage_identity(tensor), frozenset())

    def note(self, func: Any, arguments: Mapping[str, Any], results: Sequence[torch.Tensor]) -> None:  # noqa: ANN401 - torch._ops.OpOverload
        """Notes that `func` gave `results`; `arguments` are all of its, by the names in its schema."""
        from torch.utils._pytree import tree_leaves

        inputs = [value for value in tree_leaves(list(arguments.values())) if hasattr(value, "untyped_storage")]
        names = frozenset[str]().union(*map(self.sources, inputs))
        if func._schema.is_mutable:  # noqa: SLF001 - what torch offers to dispatch modes
            self._written |= {storage_identity(tensor): names | self.sources(tensor) for tensor in inputs}
            return
        made = self._made(str(func).removeprefix("aten."), arguments, results)
        for place, tensor in enumerate(results):
            self._enter(tensor, made[place] if made else None, names)

    def _enter(self, tensor: torch.Tensor, movement: Movement | None, names: frozenset[str]) -> None:
        self._held.append(tensor)
        self._sources[id(tensor)] = names
        if movement is not None:
            self._movements[id(tensor)] = movement

    def _made(self, name: str, arguments: Mapping[str, Any], results: Sequence[torch.Tensor]) -> list[Movement]:
        """A movement for each result; none where they are not all movements of known tensors of the same type."""
        first = arguments.get("self", arguments.get("tensors"))
        inputs = first if isinstance(first, (list, tuple)) else [] if first is None else [first]
        if not inputs:
            return []
        parts = [part for tensor in inputs if (part := self.movement(tensor)) is not None]
        if len(parts) < len(inputs) or {tensor.dtype for tensor in (*inputs, *results)} != {inputs[0].dtype}:
            return []
        shapes = [tuple(tensor.shape) for tensor in results]
        if name in ("cat.default", "stack.default"):
            return [_joined(parts, arguments["dim"], shapes[0], is_new_dim=name == "stack.default")]
        [part] = parts
        if name in _SAME_ORDER:
            count = results[0].numel() == inputs[0].numel()  # else it was expanded
            return [_reshaped(part, shapes[0])] if count else []
        if name in _CUTS:
            return _cut(part, arguments["dim"], shapes)
        if name in _ZEROS:
            return [Movement("zeros", shapes[0], (part,))]
        dims = _dims(name, arguments, len(part.shape))
        if dims is not None:
            return [Movement("permute", shapes[0], (part,), (dims,))]
        place = _place(name, arguments, part.shape)
        return [] if place is None else [_narrowed(part, *place, shapes[0])]


@contextmanager
def recording(notes: Notes) -> Iterator[None]:
    """Notes all that torch is asked for in this thread until the block ends."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its base has no annotations
        def __torch_dispatch__(
            self,
            func: Any,  # noqa: ANN401 - torch._ops.OpOverload
            types: object,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> object:
            result: object = func(*args, **(kwargs or {}))
            results = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
            notes.note(func, _bound(func, args, kwargs or {}), results)
            return result

    with Recorder():  # type: ignore[no-untyped-call]  # as above
        yield


def _bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - torch._ops.OpOverload
    """All arguments by their names, those that were left out by their defaults."""
    declared = func._schema.arguments  # noqa: SLF001 - as above
    bound = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    bound |= {argument.name: value for argument, value in zip(declared, args, strict=False)}
    return {**bound, **kwargs}


def storage_identity(tensor: torch.Tensor) -> int:
    """A number that all tensors over one memory share, as long as one of them lives."""
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - tensors of the meta device have no address
    return identity


def _reshaped(part: Movement, shape: tuple[int, ...]) -> Movement:
    return part if part.shape == shape else Movement("reshape", shape, (part,), (shape,))


def _joined(parts: Sequence[Movement], dim: int, shape: tuple[int, ...], *, is_new_dim: bool) -> Movement:
    dim %= len(shape)
    if is_new_dim:
        one = (*shape[:dim], 1, *shape[dim + 1 :])
        parts = [_reshaped(part, one) for part in parts]
    # torch lets a tensor of shape (0,) be joined to any; it adds nothing.
    parts = [part for part in parts if len(part.shape) == len(shape)]
    return Movement("concat", shape, tuple(parts), (dim,))


def _cut(part: Movement, dim: int, shapes: Sequence[tuple[int, ...]]) -> list[Movement]:
    dim %= len(part.shape)
    cuts = []
    start = 0
    for shape in shapes:
        # `unbind` takes the dim away, and cuts pieces of one.
        size = shape[dim] if len(shape) == len(part.shape) else 1
        cuts.append(_narrowed(part, dim, start, size, shape))
        start += size
    return cuts


def _narrowed(part: Movement, dim: int, start: int, size: int, shape: tuple[int, ...]) -> Movement:
    narrow = (*part.shape[:dim], size, *part.shape[dim + 1 :])
    kept = part if narrow == part.shape else Movement("narrow", narrow, (part,), (dim, start, size))
    return _reshaped(kept, shape)


def _dims(name: str, arguments: Mapping[str, Any], count: int) -> tuple[int, ...] | None:
    """The order into which an operation brings `count` dims; None where it brings them into none."""
    dims = list(range(count))
    if name == "permute.default":
        return tuple(dim % count for dim in arguments["dims"])
    if name == "t.default":
        return tuple(reversed(dims))
    if name == "transpose.int" and count:
        first, other = arguments["dim0"] % count, arguments["dim1"] % count
        dims[first], dims[other] = other, first
        return tuple(dims)
    return None


def _place(name: str, arguments: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Dim, start and size of what an operation keeps of one dim; None where it keeps no such part."""
    if name == "select.int":
        dim = arguments["dim"] % len(shape)
        return dim, arguments["index"] % shape[dim], 1
    if name == "slice.Tensor" and arguments["step"] == 1:
        dim = arguments["dim"] % len(shape)
        start, stop, _ = slice(arguments["start"], arguments["end"]).indices(shape[dim])
        return dim, start, max(0, stop - start)
    return None
