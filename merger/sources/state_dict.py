"""From the unpickled value of a rank file to the typed entries of its state dict, whatever the file's own format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from sys import intern

from merger.errors import ArchiveError, Problem
from merger.sources.dtensor import Decoder
from merger.sources.fields import MalformedError, shown
from merger.sources.inert import TENSOR_CALLS, Call, Inert
from merger.sources.plain import EXTRA_STATE, extra_state
from merger.tensors import Record


def decode_state_dict(
    value: Inert,
    records: Mapping[str, Record],
    *,
    read_record: Callable[[Record], bytes],
    where: str,
    file_rank: int | None,
) -> dict[str, object]:
    """The entries of the state dict `value` by name: tensors of the classes that `Decoder` knows, and plain values.

    Raises:
        ArchiveError: it is no state dict, or an entry is not as torch writes it.
    """
    state_dict = _state_dict(value, where)
    decoder = Decoder(records, read_record=read_record, file_rank=file_rank)
    entries: dict[str, object] = {}
    for fqn, item in state_dict.items():
        try:
            is_extra = fqn.rpartition(".")[2] == EXTRA_STATE
            entries[intern(fqn)] = extra_state(item) if is_extra else decoder.entry(item)
        except MalformedError as error:
            name = fqn if fqn.isprintable() else ascii(fqn)
            raise ArchiveError(Problem("bad-tensor", where, f"{name}: {error}.")) from None
    return entries


def _state_dict(value: Inert, where: str) -> dict[str, Inert]:
    """`value`, if it is a dict of names to tensors and such."""
    if value.__class__ is not dict:
        found = "a tensor" if _is_tensor(value) else shown(value)
        raise ArchiveError(Problem("not-a-state-dict", where, f"The file holds {found}, not a state dict."))
    state_dict: dict[Inert, Inert] = value
    for key, item in state_dict.items():
        if key.__class__ is not str:
            message = f"The file holds a dict with {shown(key)} as a key, not a state dict."
            raise ArchiveError(Problem("not-a-state-dict", where, message))
        if (
            item.__class__ is dict
            and key.rpartition(".")[2] != EXTRA_STATE
            and any(_is_tensor(part) for part in item.values())
        ):
            message = (
                f"The file holds a dict with a nested state dict under {key!a}, not a state dict. "
                f"Save that part by itself: torch.save(checkpoint[{key!a}], path)."
            )
            raise ArchiveError(Problem("not-a-state-dict", where, message))
    return state_dict


def _is_tensor(value: Inert) -> bool:
    return value.__class__ is Call and value.func in TENSOR_CALLS
