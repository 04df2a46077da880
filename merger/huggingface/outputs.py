"""From a checkpoint's tensors to those of a Hugging Face model: which are written, under which name and type.

Pure but for one thing that only bytes can tell, whether tied tensors still agree: that is asked of a function.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from merger.dtypes import BY_NAME, DType
from merger.errors import ModelError
from merger.huggingface.expected import Architecture
from merger.huggingface.names import compare_with, ignored_names, strip_wrappers, unexpected_names
from merger.huggingface.ties import plan_ties, settle_ties
from merger.plan import OutputTensor
from merger.tensors import StoredTensor, as_real_pairs

Unexpected: TypeAlias = Literal["error", "keep", "drop"]

# Types that a model is trained in. Others (float8) are quantised storage: a cast without their scales would be wrong.
_CASTABLE = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class Outputs:
    """What is to be written, in order, and what was decided on the way.

    `renamed` has the names that changed, from saved to written; `dropped` the saved names that are not written;
    `casts` counts tensors by "float32 -> bfloat16". `tied` maps names that are not written to the one that is written
    for them; `untied` those that are written although the architecture ties them. `ties_broken` says that config.json
    must no longer tie.
    """

    tensors: tuple[OutputTensor, ...]
    renamed: Mapping[str, str]
    dropped: tuple[str, ...]
    casts: Mapping[str, int]
    ties_broken: bool
    tied: Mapping[str, str]
    untied: Mapping[str, str]
    notes: tuple[str, ...]


NO_OUTPUTS = Outputs((), {}, (), {}, ties_broken=False, tied={}, untied={}, notes=())


def choose_outputs(
    stored: Mapping[str, StoredTensor],
    architecture: Architecture | None,
    *,
    dtype: str | None,
    unexpected: Unexpected,
    are_equal: Callable[[StoredTensor, StoredTensor], bool],
) -> Outputs:
    """Decides what is written of the tensors `stored`, by their saved names.

    `architecture` is None where weights alone are merged: then nothing is checked. `dtype` is the type that floating
    tensors are cast to, None to keep theirs. Raises `ModelError` with all that does not fit the architecture.
    """
    names = strip_wrappers(stored, None if architecture is None else architecture.shapes)
    by_name = {names[fqn]: tensor for fqn, tensor in stored.items()}
    saved_as = {name: fqn for fqn, name in names.items()}
    notes: list[str] = []
    dropped: list[str] = []
    copies: dict[str, str] = {}
    ties_broken = False
    tied: dict[str, str] = {}
    if architecture is not None:
        ignored = ignored_names(architecture, by_name)
        extra = unexpected_names(architecture, by_name)
        if unexpected == "keep":
            extra, ignored = [*extra, *ignored], []
        if ignored:
            notes.append(f"left out, as {architecture.class_name} does not read them: {_listed(ignored)}")
        if extra and unexpected != "error":
            done = "kept" if unexpected == "keep" else "dropped"
            notes.append(f"not of {architecture.class_name}, {done} as asked: {_listed(extra)}")
        if unexpected == "drop":
            ignored += extra
        dropped += [saved_as[name] for name in ignored]
        left_out = set(ignored)
        by_name = {name: tensor for name, tensor in by_name.items() if name not in left_out}
        ties = plan_ties(architecture, by_name)
        problems = [
            problem
            for problem in compare_with(architecture, {name: tensor.shape for name, tensor in by_name.items()})
            if not (problem.kind == "unexpected-tensors" and unexpected == "keep")
        ]
        problems += ties.problems
        if problems:
            raise ModelError(problems)
        diverged = [alias for first, alias in ties.compare if not are_equal(by_name[first], by_name[alias])]
        outcome = settle_ties(ties, diverged)
        notes += outcome.notes
        dropped += [saved_as[name] for name in sorted(outcome.drop)]
        by_name = {name: tensor for name, tensor in by_name.items() if name not in outcome.drop}
        copies, ties_broken = outcome.copies, outcome.broken
        tied = {alias: first for first, alias in (*ties.compare, *ties.absent)}
    # Where no architecture is to load it by name and shape, complex128 is kept in the nearest type that files have.
    pairs = [name for name, tensor in by_name.items() if architecture is None and tensor.dtype.name == "complex128"]
    if pairs:
        by_name |= {name: as_real_pairs(by_name[name]) for name in pairs}
        notes.append(f"complex128 written as pairs of float64 (see torch.view_as_complex): {_listed(pairs)}")
    by_name |= {alias: by_name[source] for alias, source in copies.items()}
    if dtype is not None and dtype not in _CASTABLE:
        notes.append(f"nothing is cast to {dtype}, which is no type to train in; all types are kept as saved")
        dtype = None
    order = _order(by_name, architecture)
    kept = architecture.kept_in_float32(dtype) if architecture is not None and dtype is not None else frozenset()
    as_they_are = kept.union(pairs)
    tensors = tuple(
        OutputTensor(name, _target(name, by_name[name], dtype, as_they_are), by_name[name]) for name in order
    )
    kept_here = sorted(name for name in kept if name in by_name)
    if kept_here:
        notes.append(f"kept as saved, as the architecture asks: {_listed(kept_here)}")
    casts = Counter(
        f"{tensor.source.dtype} -> {tensor.dtype}" for tensor in tensors if tensor.dtype != tensor.source.dtype
    )
    renamed = {fqn: name for fqn, name in names.items() if fqn != name and name in by_name}
    if renamed:
        fqn, name = next(iter(renamed.items()))
        notes.append(f"names stripped of wrappers: {len(renamed)}, such as {fqn} -> {name}")
    return Outputs(
        tensors,
        renamed,
        tuple(dropped),
        dict(casts),
        ties_broken,
        {} if ties_broken else tied,
        tied if ties_broken else {},
        tuple(notes),
    )


def main_dtype(tensors: Iterable[OutputTensor]) -> str | None:
    """The type to compute in in which most of the bytes are written; None where there is no such tensor.

    Float8 is none: it is how weights are stored, and config.json states beside it what they are computed in.
    """
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype.name in _CASTABLE:
            sizes[tensor.dtype.name] += prod(tensor.source.shape) * tensor.dtype.itemsize
    return max(sizes, key=lambda name: (sizes[name], name)) if sizes else None


def _target(name: str, tensor: StoredTensor, dtype: str | None, kept: frozenset[str]) -> DType:
    if dtype is None or tensor.dtype.name not in _CASTABLE or name in kept:
        return tensor.dtype
    return BY_NAME[dtype]


def _order(names: Iterable[str], architecture: Architecture | None) -> list[str]:
    """The architecture's order, as `save_pretrained` writes it; other names behind, layer 2 before layer 10.

    It never depends on the order in which a trainer saved.
    """
    place = {name: index for index, name in enumerate(architecture.shapes)} if architecture is not None else {}
    return sorted(names, key=lambda name: (place.get(name, len(place)), _natural(name)))


def _natural(name: str) -> tuple[tuple[int, str, str], ...]:
    """Text as it is, numbers by their value; they are compared as digits, for a name may hold any number of them.

    `re.split` gives text and digits in turn. The part itself is last, so that "01" and "1" differ too.
    """
    parts = re.split(r"([0-9]+)", name)
    return tuple(
        (len(digits := part.lstrip("0")), digits, part) if index % 2 else (0, "", part)
        for index, part in enumerate(parts)
    )


def _listed(names: list[str]) -> str:
    shown = 5
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
