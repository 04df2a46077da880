"""Tiny typed readers for the fields of inert records: each returns a checked value or says what is wrong with it.

They raise `MalformedError` with a clause; whoever knows the tensor and the file puts these in front of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from merger.sources.inert import Call, Global, Inert, Instance

# torch counts elements in signed 64-bit integers.
_LIMIT = 1 << 63


class MalformedError(Exception):
    """Something is not as torch writes it; the text is a clause such as "sizes are no tuple of counts"."""


def natural(value: Inert, what: str) -> int:
    """`value`, a count or an index."""
    if value.__class__ is not int or not 0 <= value < _LIMIT:
        raise MalformedError(f"its {what} is {shown(value)}, not a count")
    return int(value)


def naturals(value: Inert, what: str) -> tuple[int, ...]:
    """`value`, a tuple or list of counts, as a tuple; equal ones are the same object, to save memory."""
    if value.__class__ is not tuple and value.__class__ is not list:
        raise MalformedError(f"its {what} is {shown(value)}, not a tuple of counts")
    for item in value:
        if item.__class__ is not int or not 0 <= item < _LIMIT:
            raise MalformedError(f"its {what} holds {shown(item)}, not a count")
    return _shared(tuple(value))


def text(value: Inert, what: str) -> str:
    """`value`, a string."""
    if value.__class__ is not str:
        raise MalformedError(f"its {what} is {shown(value)}, not text")
    return str(value)


def instance(value: Inert, names: frozenset[str], what: str) -> Instance:
    """`value`, an object of one of the classes `names`."""
    if value.__class__ is not Instance or value.cls not in names:
        raise MalformedError(f"its {what} is {shown(value)}")
    found: Instance = value
    return found


def state(found: Instance) -> dict[str, Inert]:
    """The attributes of an object: a dict, or the pair (dict or None, dict of slots) that classes with slots pickle."""
    value = found.state
    if value.__class__ is dict:
        attributes: dict[str, Inert] = value
        return attributes
    parts = value if value.__class__ is tuple and len(value) == 2 else (value,)  # noqa: PLR2004  a pair
    merged: dict[str, Inert] = {}
    for part in parts:
        if part is not None:
            if part.__class__ is not dict:
                raise MalformedError(f"the state of its {found.cls.rpartition('.')[2]} is {shown(part)}")
            merged.update(part)
    return merged


def shown(value: Inert) -> str:
    """A short description for messages; never walks into a container, which may be endless."""
    if value.__class__ is bool or value.__class__ is int or value is None:
        return str(value)
    if value.__class__ is Instance:
        return f"a {value.cls.rpartition('.')[2]}"
    if value.__class__ is Call:
        return f"a {value.func.rpartition('.')[2]}"
    if value.__class__ is Global:
        return f"a {value.name.rpartition('.')[2]}"
    return f"a {value.__class__.__name__}"


def _same(value: tuple[int, ...]) -> tuple[int, ...]:
    return value


# Models have few distinct shapes and many tensors; the bound is far above any real model's number of shapes.
_shared: Callable[[tuple[int, ...]], tuple[int, ...]] = lru_cache(maxsize=1 << 14)(_same)
