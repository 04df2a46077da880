"""Names of tensors: what wrappers add to them, and how a checkpoint's set of names compares with an architecture's.

Pure: strings and shapes in, strings and problems out. No torch, no transformers, no files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

from merger.errors import CheckpointError, Problem, listed
from merger.huggingface.architecture import Architecture

# Components that FSDP1, torch.compile and activation checkpointing put into names. No module is called so otherwise.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})

# What PEFT, DDP and the wrappers of trl put before names. A model's own submodules may be called so too, so these go
# only where the architecture, or the agreement of all names, shows that they are wrappers.
_PREFIXES = (("base_model", "model"), ("module",), ("pretrained_model",))

# How many such places of one name are tried. Nested wrappers give two or three; the number of tries doubles with each.
_MAX_PLACES = 8

# How many names one message lists. Past that a reader wants the count, and to see the pattern.
_MAX_LISTED = 10

# What peft puts into names, of kinds of adapters that are no LoRA.
_ADAPTER = re.compile(r"(^|\.)(lora_|ia3_l|hada_w|oft_R|vera_lambda|base_layer\.|original_module\.)")


def strip_wrappers(fqns: Iterable[str], expected: Collection[str] | None) -> dict[str, str]:
    """Every saved name, in order, with its name without wrappers (itself, where there is nothing to strip).

    `_fsdp_wrapped_module`, `_orig_mod` and `_checkpoint_wrapped_module` go wherever they stand as a whole component.
    `module`, `base_model.model` and `pretrained_model` go where they lead every name and no expected name; and, with
    `expected` known, anywhere in a name that is not expected as it is and is expected without them. `expected` is None
    where the architecture is not known. Raises CheckpointError where two saved names become one.

    >>> strip_wrappers(["module._orig_mod.norm.weight"], None)
    {'module._orig_mod.norm.weight': 'norm.weight'}
    """
    parts = {fqn: without_wrapper_parts(fqn) for fqn in fqns}
    known = frozenset(expected or ())
    for prefix in _common_prefixes(parts.values(), known):
        parts = {fqn: own[len(prefix) :] for fqn, own in parts.items()}
    stripped = {fqn: _fitted(own, known) for fqn, own in parts.items()}

    sources: dict[str, list[str]] = {}
    for fqn, name in stripped.items():
        sources.setdefault(name, []).append(fqn)
    check_distinct(sources)
    return stripped


def check_distinct(sources: Mapping[str, Sequence[str]]) -> None:
    """Raises CheckpointError where several saved names became one; `sources` has them all by what they became."""
    problems = [
        Problem(
            "colliding-names",
            name,
            f"{' and '.join(same)} become this one name when the names of wrappers are stripped. Save the state dict "
            "of one model only.",
        )
        for name, same in sources.items()
        if len(same) > 1
    ]
    if problems:
        raise CheckpointError(problems)


def without_wrapper_parts(fqn: str) -> tuple[str, ...]:
    """The components of a saved name without those that no module is called otherwise; prefixes stay.

    >>> without_wrapper_parts("module._orig_mod.norm.weight")
    ('module', 'norm', 'weight')
    """
    return tuple(part for part in fqn.split(".") if part not in _WRAPPERS)


def without_prefixes(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The components of a name without the prefixes that lead it, whatever other names have.

    >>> without_prefixes(("module", "pretrained_model", "norm"))
    ('norm',)
    """
    for prefix in _PREFIXES:
        if parts[: len(prefix)] == prefix:
            return without_prefixes(parts[len(prefix) :])
    return parts


def ignored_names(architecture: Architecture, names: Iterable[str]) -> list[str]:
    """Names that are not the architecture's, but that its class says may be there and are not read: to be left out."""
    return [name for name in names if name not in architecture.shapes and _is_ignored(architecture, name)]


def unexpected_names(architecture: Architecture, names: Iterable[str]) -> list[str]:
    """Names that are not the architecture's, and of which its class says nothing either."""
    return [name for name in names if name not in architecture.shapes and not _is_ignored(architecture, name)]


def compare_with(architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> list[Problem]:
    """Problems of a checkpoint's tensors, one per kind: missing, unexpected and wrongly shaped ones.

    Members of ties are never counted as missing here (`ties.plan_ties` judges them), and ignored names never as
    unexpected.
    """
    name = architecture.class_name
    tied = {member for group in architecture.ties for member in group}
    missing = [fqn for fqn in architecture.shapes if fqn not in shapes and fqn not in tied]
    extra = unexpected_names(architecture, shapes)
    wrong = [
        f"{fqn} (saved {_shape(shape)}, expected {_shape(architecture.shapes[fqn])})"
        for fqn, shape in shapes.items()
        if fqn in architecture.shapes and shape != architecture.shapes[fqn]
    ]
    problems = []
    if missing:
        message = (
            f"{_count(missing)} missing that {name} has: {listed(missing, _MAX_LISTED)}. If config.json is not that "
            "of the model that was trained, name the right one by --config DIR."
        )
        problems.append(Problem("missing-tensors", "", message))
    if extra:
        message = f"{_count(extra)} not of {name}: {listed(extra, _MAX_LISTED)}. {_advice_on(extra)}"
        problems.append(Problem("unexpected-tensors", "", message))
    if wrong:
        message = (
            f"{_count(wrong)} not of the shape that {name} has by config.json: {listed(wrong, _MAX_LISTED)}. If "
            "config.json is not that of the model that was trained, name the right one by --config DIR."
        )
        problems.append(Problem("wrong-shapes", "", message))
    return problems


def num_misfits(architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many tensors `compare_with` would find missing, unexpected or wrongly shaped."""
    tied = {member for group in architecture.ties for member in group}
    missing = sum(fqn not in shapes and fqn not in tied for fqn in architecture.shapes)
    wrong = sum(shape != architecture.shapes.get(fqn, shape) for fqn, shape in shapes.items())
    return missing + wrong + len(unexpected_names(architecture, shapes))


def _common_prefixes(names: Collection[tuple[str, ...]], known: frozenset[str]) -> list[tuple[str, ...]]:
    """Prefixes to take off in turn, because every name has them and no known name does."""
    found: list[tuple[str, ...]] = []
    start = 0
    while names:
        for prefix in _PREFIXES:
            end = start + len(prefix)
            leads = ".".join(prefix) + "."
            if all(own[start:end] == prefix and len(own) > end for own in names) and not any(
                name.startswith(leads) for name in known
            ):
                found.append(prefix)
                start = end
                break
        else:
            break
    return found


def _fitted(parts: tuple[str, ...], known: frozenset[str]) -> str:
    """The name itself, or the first known one that it becomes by taking prefixes out.

    Few are tried before many, leading ones before later ones.
    """
    name = ".".join(parts)
    if not known or name in known:
        return name
    places = [
        range(start, start + len(prefix))
        for start in range(len(parts))
        for prefix in _PREFIXES
        if parts[start : start + len(prefix)] == prefix
    ][:_MAX_PLACES]
    for count in range(1, len(places) + 1):
        for chosen in combinations(places, count):
            gone = {index for place in chosen for index in place}
            shorter = ".".join(part for index, part in enumerate(parts) if index not in gone)
            if shorter in known:
                return shorter
    return name


def _is_ignored(architecture: Architecture, name: str) -> bool:
    return any(re.search(regex, name) for regex in architecture.ignore_unexpected)


def _advice_on(extra: list[str]) -> str:
    if any(_ADAPTER.search(name) for name in extra):
        return (
            "This checkpoint carries adapters of a kind that this version does not fold into the weights; to drop them "
            "would give the model without its training. Fold them in where it was trained and save again, or merge "
            "the tensors as they are by --weights-only."
        )
    return (
        "--unexpected keep writes them along, --unexpected drop leaves them out; if config.json is not that of the "
        "model that was trained, name the right one by --config DIR."
    )


def _count(items: list[str]) -> str:
    return "1 tensor is" if len(items) == 1 else f"{len(items)} tensors are"


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
