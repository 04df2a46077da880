"""The entries of a state dict that are no weights: step counts, strings, small configurations, states of modules.

They become ordinary Python values, copied within bounds, since a pickle of a few bytes can hold a tuple that unfolds
without end, or a list that holds itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from merger.sources import fields
from merger.sources.fields import MalformedError
from merger.sources.inert import TENSOR_CALLS, Call, Global, Inert, Instance, StorageRef

# The key under which a module's `get_extra_state` is saved, behind the module's name: never a parameter or buffer.
# Source: torch/nn/modules/module.py (`_EXTRA_STATE_KEY_SUFFIX`).
EXTRA_STATE = "_extra_state"
_BYTES_IO = "_io.BytesIO"
_BYTES_CALLS = frozenset({"_codecs.encode", "__builtin__.bytes", "builtins.bytes"})

# How many parts the plain values of one file may have together, and how deep they may be nested.
_MAX_PARTS = 100_000
_MAX_NESTING = 20


@dataclass(frozen=True, slots=True)
class Opaque:
    """An entry whose content is of no interest; `kind` says what it is."""

    kind: str


def extra_state(value: Inert) -> Opaque:
    """What stands for the extra state of a module, which may be anything, a tensor too; it is not looked into."""
    if value.__class__ is Call:
        if value.func in TENSOR_CALLS:
            return Opaque("tensor")
        return Opaque("bytes" if value.func in _BYTES_CALLS else value.func.rpartition(".")[2])
    if value.__class__ is Instance:
        return Opaque(value.cls.rpartition(".")[2])
    return Opaque(kind_text(value))


def kind_text(value: object) -> str:
    """What a decoded entry is, for people: "int", "None", "BytesIO"."""
    if isinstance(value, Opaque):
        return value.kind
    return "None" if value is None else type(value).__name__


class PlainValues:
    """Decodes the plain values of one file, and counts their parts."""

    __slots__ = ("_parts_left", "_texts")

    def __init__(self) -> None:
        self._parts_left = _MAX_PARTS
        # By the id of inert strings, which live as long as the pickle's value does.
        self._texts: dict[int, bytes] = {}

    def decode(self, value: Inert) -> object:
        """`value` without inert records in it.

        Raises:
            MalformedError: there is a record in it that is no plain value (a tensor, say), or too much of it.
        """
        return self._part(value, _MAX_NESTING)

    def _part(self, value: Inert, nesting: int) -> object:
        """`value` without inert records in it, copied within bounds: what a pickle shares can unfold without end."""
        self._parts_left -= 1
        if nesting == 0 or self._parts_left < 0:
            raise MalformedError("is a nest of containers too large for a state dict")
        kind = value.__class__
        if kind is tuple:
            return tuple(self._part(item, nesting - 1) for item in value)
        if kind is list:
            return [self._part(item, nesting - 1) for item in value]
        if kind is dict:
            return {key: self._part(item, nesting - 1) for key, item in value.items()}
        if kind is Global:
            return value.name
        if kind is Call:
            return self._call(value)
        if kind is Instance and value.cls == _BYTES_IO:
            return Opaque("BytesIO")
        if kind is Instance or kind is StorageRef:
            raise MalformedError(f"holds {fields.shown(value)}, which is no tensor and no plain value")
        scalar: object = value
        return scalar

    def _call(self, call: Call) -> object:
        """The bytes or device that a call stands for. Equal texts are encoded once: a call takes but a few bytes."""
        args = call.args
        if call.func == "_codecs.encode" and len(args) == 2 and args[0].__class__ is str and args[1] == "latin1":  # noqa: PLR2004
            found = self._texts.get(id(args[0]))
            if found is None:
                try:
                    found = self._texts[id(args[0])] = args[0].encode("latin1")
                except UnicodeEncodeError:
                    raise MalformedError("holds bytes that are not written as torch writes them") from None
            return found
        if call.func.endswith(".bytes") and not args:
            return b""
        if call.func == "torch.device" and args and args[0].__class__ is str:
            return args[0]
        if call.func in TENSOR_CALLS:
            raise MalformedError("is a container with tensors in it; a state dict maps names to tensors")
        raise MalformedError(f"holds a call of {call.func}")
