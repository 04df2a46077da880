"""From a checkpoint's tensors to those of a Hugging Face model: which are written, under which name and type.

Pure but for one thing that only bytes can tell, whether tied tensors still agree: that is asked of a function.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, TypeAlias

from merger.dtypes import BY_NAME, DType
from merger.errors import ModelError, Problem, listed
from merger.huggingface.architecture import Architecture
from merger.huggingface.heads import value_head_names
from merger.huggingface.hub_names import Names, check_known, on_hub, renamed_on_hub, saved_architecture
from merger.huggingface.names import compare_with, ignored_names, strip_wrappers, unexpected_names
from merger.huggingface.ties import plan_ties, settle_ties
from merger.plan import VALUE_HEAD_FILE, Block, OutputTensor
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
    must no longer tie. `converted` maps written names to the saved ones of which the tensor is made, where it is not
    one of them as it was. `num_parameters` counts the elements that are parameters, None where that is not known.
    `value_head` is what has no place in the architecture and is written beside it, where there is a value head.
    """

    tensors: tuple[OutputTensor, ...]
    renamed: Mapping[str, str]
    dropped: tuple[str, ...]
    casts: Mapping[str, int]
    ties_broken: bool
    tied: Mapping[str, str]
    untied: Mapping[str, str]
    notes: tuple[str, ...]
    converted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    num_parameters: int | None = None
    value_head: tuple[OutputTensor, ...] = ()


NO_OUTPUTS = Outputs((), {}, (), {}, ties_broken=False, tied={}, untied={}, notes=())


def choose_outputs(
    stored: Mapping[str, StoredTensor],
    architecture: Architecture | None,
    *,
    dtype: str | None,
    unexpected: Unexpected,
    are_equal: Callable[[StoredTensor, StoredTensor], bool],
    naming: Names = "hub",
) -> Outputs:
    """Decides what is written of the tensors `stored`, by their saved names.

    `architecture` is None where weights alone are merged: then nothing is checked or converted. `dtype` is the type
    that floating tensors are cast to, None to keep theirs. `naming` says whose names and shapes are written. Raises
    `ModelError` with all that does not fit the architecture.
    """
    names = strip_wrappers(stored, None if architecture is None else _known_names(architecture))
    by_name = {names[fqn]: tensor for fqn, tensor in stored.items()}
    saved_as = {name: fqn for fqn, name in names.items()}
    head = {name: by_name.pop(name) for name in value_head_names(architecture, by_name)}
    if architecture is None:
        chosen = _weights_alone(by_name, naming)
    else:
        chosen = _of_architecture(by_name, architecture, unexpected=unexpected, are_equal=are_equal, naming=naming)
    if not chosen.tensors:
        raise ModelError(Problem("no-tensors", "", "no tensor is left to write; is this the folder of the weights?"))
    notes = list(chosen.notes)
    if dtype is not None and dtype not in _CASTABLE:
        notes.append(f"nothing is cast to {dtype}, which is no type to train in; all types are kept as saved")
        dtype = None
    target = chosen.architecture
    kept = target.kept_in_float32(dtype) if target is not None and dtype is not None else frozenset()
    as_they_are = kept.union(chosen.pairs)
    tensors = tuple(
        OutputTensor(name, _target(name, tensor, dtype, as_they_are), tensor, chosen.blocks.get(name))
        for name in _order(chosen.tensors, chosen.order)
        for tensor in [chosen.tensors[name]]
    )
    value_head = tuple(
        OutputTensor(name, _target(name, tensor, dtype, frozenset()), tensor) for name, tensor in sorted(head.items())
    )
    if head and architecture is not None:
        place = f"{architecture.class_name} has no place for it, and from_pretrained does not read it"
        notes.append(f"the value head is in {VALUE_HEAD_FILE}, as {place}: {listed(head)}")
    kept_here = sorted(name for name in kept if name in chosen.tensors)
    if kept_here:
        notes.append(f"kept as saved, as the architecture asks: {listed(kept_here)}")
    casts = Counter(
        f"{tensor.source.dtype} -> {tensor.dtype}"
        for tensor in (*tensors, *value_head)
        if tensor.dtype != tensor.source.dtype
    )
    used = {*chosen.used, *head}
    stripped = [fqn for fqn, name in names.items() if fqn != name and name in used]
    if stripped:
        notes.append(f"names stripped of wrappers: {len(stripped)}, such as {stripped[0]} -> {names[stripped[0]]}")
    now = {fqn: chosen.renamed.get(name, name) for fqn, name in names.items() if name in used}
    written = {tensor.name for tensor in (*tensors, *value_head)}
    return Outputs(
        tensors,
        {fqn: name for fqn, name in now.items() if fqn != name and name in written},
        tuple(saved_as[name] for name in chosen.dropped),
        dict(casts),
        chosen.ties_broken,
        {} if chosen.ties_broken else chosen.tied,
        chosen.tied if chosen.ties_broken else {},
        tuple(notes),
        {name: tuple(saved_as.get(own, own) for own in made_of) for name, made_of in chosen.converted.items()},
        chosen.num_parameters,
        value_head,
    )


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The tensors that are written, by their written names, of which `order` has the first in their order.

    `architecture` is the one that has these names. `used` are the names as saved, without wrappers, of all that is
    written or that something written is made of, `dropped` those of all else. `pairs` are written in place of complex
    tensors.
    """

    tensors: Mapping[str, StoredTensor]
    used: Collection[str]
    notes: tuple[str, ...]
    architecture: Architecture | None = None
    order: Iterable[str] = ()
    blocks: Mapping[str, Block] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    converted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    ties_broken: bool = False
    num_parameters: int | None = None


def _weights_alone(by_name: Mapping[str, StoredTensor], naming: Names) -> _Chosen:
    """All tensors. Where none is loaded by name and shape, complex128 is kept in the nearest type that files have."""
    notes = []
    if naming == "hub":
        notes.append("names and shapes are as saved: those of the hub need a config")
    pairs = [name for name, tensor in by_name.items() if tensor.dtype.name == "complex128"]
    if pairs:
        notes.append(f"complex128 written as pairs of float64 (see torch.view_as_complex): {listed(pairs)}")
    tensors = {name: as_real_pairs(tensor) if name in pairs else tensor for name, tensor in by_name.items()}
    return _Chosen(tensors, by_name.keys(), tuple(notes), pairs=tuple(pairs))


def _of_architecture(
    by_name: Mapping[str, StoredTensor],
    architecture: Architecture,
    *,
    unexpected: Unexpected,
    are_equal: Callable[[StoredTensor, StoredTensor], bool],
    naming: Names,
) -> _Chosen:
    """What the architecture has, in memory or on the hub, each tied tensor once, under the names to be written."""
    if naming == "hub":
        check_known(architecture)
    saved = saved_architecture(architecture, {name: tensor.shape for name, tensor in by_name.items()})
    ignored, notes = _left_out(saved, by_name, unexpected)
    tensors = {name: tensor for name, tensor in by_name.items() if name not in ignored}
    ties = plan_ties(saved, tensors)
    problems = [
        problem
        for problem in compare_with(saved, {name: tensor.shape for name, tensor in tensors.items()})
        if not (problem.kind == "unexpected-tensors" and unexpected == "keep")
    ]
    problems += ties.problems
    if problems:
        raise ModelError(problems)
    diverged = [alias for first, alias in ties.compare if not are_equal(tensors[first], tensors[alias])]
    is_moved = architecture.hub is not None and naming == "hub" and saved is architecture
    written = renamed_on_hub(architecture.hub) if architecture.hub is not None and is_moved else {}
    outcome = settle_ties(ties, diverged, written)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in outcome.drop}
    used = tensors.keys()
    tensors |= {alias: tensors[source] for alias, source in outcome.copies.items()}
    chosen = _Chosen(
        tensors,
        used,
        (*notes, *outcome.notes),
        saved,
        saved.shapes,
        dropped=(*ignored, *sorted(outcome.drop)),
        tied={written.get(alias, alias): written.get(first, first) for first, alias in (*ties.compare, *ties.absent)},
        ties_broken=outcome.broken,
        num_parameters=sum(prod(tensor.shape) for name, tensor in tensors.items() if name not in saved.buffers),
    )
    layout = architecture.hub
    if layout is None:
        return chosen
    if saved is not architecture:
        chosen = replace(chosen, notes=(*chosen.notes, "saved under the names and in the shapes of the hub"))
    if naming == "as-is":
        is_other = saved is architecture
        note = "names and shapes are those in memory, as asked; those of the hub are others"
        return replace(chosen, notes=(*chosen.notes, note)) if is_other else chosen
    order = layout.untied if outcome.broken else layout.tied
    chosen = replace(chosen, architecture=layout.architecture, order=order, blocks=layout.blocks)
    if saved is not architecture:
        return chosen
    result = on_hub(layout, tensors, untied=outcome.broken)
    return replace(
        chosen,
        tensors=result.tensors,
        notes=(*chosen.notes, *result.notes),
        renamed=result.renamed,
        converted=result.converted,
    )


def _left_out(
    architecture: Architecture, names: Iterable[str], unexpected: Unexpected
) -> tuple[dict[str, None], list[str]]:
    """The names that are not written, as they are no tensors of the architecture, and what is to be said of them."""
    names = list(names)
    ignored, extra = ignored_names(architecture, names), unexpected_names(architecture, names)
    notes = []
    if unexpected == "keep":
        extra, ignored = [*extra, *ignored], []
    if ignored:
        notes.append(f"left out, as {architecture.class_name} does not read them: {listed(ignored)}")
    if extra and unexpected != "error":
        done = "kept" if unexpected == "keep" else "dropped"
        notes.append(f"not of {architecture.class_name}, {done} as asked: {listed(extra)}")
    return dict.fromkeys([*ignored, *extra] if unexpected == "drop" else ignored), notes


def _known_names(architecture: Architecture) -> set[str]:
    """The names in memory and those of the hub."""
    return {*architecture.shapes, *(architecture.hub.architecture.shapes if architecture.hub is not None else ())}


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


def _order(names: Iterable[str], expected: Iterable[str]) -> list[str]:
    """The order expected, in which `save_pretrained` writes; other names behind, layer 2 before layer 10.

    It never depends on the order in which a trainer saved.
    """
    place = {name: index for index, name in enumerate(expected)}
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
