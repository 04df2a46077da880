"""What is written of a checkpoint with LoRA: the model with its adapters folded in, the adapters, or both.

Between the source and the outputs of a merge: stored tensors in, stored tensors out. Reads headers and settings only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from merger.checkpoint import Checkpoint
from merger.errors import Faults, MergerError, ModelError, Problem, listed
from merger.huggingface.architecture import Architecture
from merger.huggingface.expected import expected_architecture
from merger.huggingface.in_memory import fitting
from merger.huggingface.lora import Lora, adapter_names, find_lora, has_lora, holds_base
from merger.huggingface.lora_export import Adapter, export
from merger.huggingface.lora_fold import fold
from merger.huggingface.lora_notes import export_notes, fold_notes, settings_notes
from merger.huggingface.lora_settings import LoraSettings, read_settings
from merger.huggingface.lora_targets import (
    Target,
    find_targets,
    maybe_experts,
    ranks_of,
    unknown_experts,
    without_data,
    wrong_ranks,
)
from merger.plan import VALUE_HEAD_FILE
from merger.tensors import StoredTensor, in_files

# What to write of a checkpoint with LoRA: the model with it folded in, the adapter, both, or the base weights as they
# are and the adapter beside them.
LoraMode: TypeAlias = Literal["merge", "adapter", "both", "base"]


@dataclass(frozen=True, slots=True)
class LoraSummary:
    """What adapters a checkpoint has.

    `ranks` counts the wrapped layers by rank; `alpha` is None where it is not known. `modules_to_save` are the names of
    tensors of which copies were trained. `adapters` are the names of all adapters, the one that is meant first.
    """

    num_modules: int
    ranks: Mapping[int, int]
    alpha: float | None
    use_rslora: bool
    use_dora: bool
    modules_to_save: tuple[str, ...]
    adapters: tuple[str, ...]
    has_base: bool


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """What is written of a checkpoint with LoRA.

    `tensors` are those of the model by their names in it, with those of a value head beside it, None where no model is
    written: then `value_head` has the latter. `adapter` is None where that is not written.
    `saved_as` has the names under which tensors of the model were saved. `dropped` are saved names that are written
    nowhere.
    """

    tensors: Mapping[str, StoredTensor] | None
    value_head: Mapping[str, StoredTensor]
    adapter: Adapter | None
    saved_as: Mapping[str, str]
    dropped: tuple[str, ...]
    summary: LoraSummary
    notes: tuple[str, ...]


def writes_model(source: Checkpoint, mode: LoraMode, base: Path | None) -> bool:
    """Whether there will be a model in the output, or adapters alone."""
    if not has_lora(source.tensors, ()):
        return True
    return mode != "adapter" and (base is not None or holds_base(source.tensors))


def check_options(
    source: Checkpoint,
    expected: Collection[str],
    *,
    mode: LoraMode,
    alpha: float | None,
    adapter: str | None,
    base: Path | None,
) -> None:
    """Raises `ModelError` with all that is asked of adapters and cannot be given, from names alone.

    `expected` are names that the model itself has, and that are of no adapter. `base` is not looked into.
    """
    problems: list[Problem] = []
    if not has_lora(source.tensors, expected):
        # Nothing is left out unnoticed. "both" is the default, and asks for nothing.
        asked = {"lora_alpha": alpha, "lora_adapter": adapter, "base": base, "lora": None if mode == "both" else mode}
        message = "is for checkpoints with LoRA adapters, and this one has none; leave it out"
        problems += [Problem("no-lora", name, message) for name, value in asked.items() if value is not None]
    elif base is not None and holds_base(source.tensors):
        message = (
            f"is not needed: {source.path} holds the base weights that were trained with, and others would give "
            "another model; leave --base out"
        )
        problems.append(Problem("base-not-needed", str(base), message))
    elif mode in ("merge", "base") and not writes_model(source, mode, base):
        message = (
            f"{source.path} holds adapters alone, so there is no model to write: name the base model by --base DIR, or "
            "write the adapter by --lora adapter"
        )
        problems.append(Problem("no-base", "", message))
    if problems:
        raise ModelError(problems)


def plan_lora(
    source: Checkpoint,
    base: Checkpoint | None,
    architecture: Architecture | None,
    *,
    config_dir: Path | None,
    mode: LoraMode,
    alpha: float | None,
    adapter: str | None,
) -> LoraPlan | None:
    """Plans what is written of a checkpoint with LoRA; None where it has none.

    `base` has the base weights, where the checkpoint itself does not. `config_dir` is where the model's config lies, if
    it does: it is read where `architecture` is not given and adapters cannot be told without it. `alpha` goes before
    what settings state, and `adapter` says which of several is meant.

    Raises `ModelError` with all that keeps the adapters from being folded or exported.
    """
    expected = None if architecture is None else architecture.shapes
    lora = find_lora(source.tensors, expected, adapter=adapter)
    if lora is None:
        return None
    folders = [source.path, *([source.config_dir] if source.config_dir is not None else [])]
    settings = read_settings(folders, alpha=alpha, adapters=lora.adapters)
    layers = frozenset(module.name for module in lora.modules)
    weights = lora.base if base is None else fitting(architecture, base.tensors, layers)
    known = {**weights, **lora.originals}
    conv1d = None if architecture is None else architecture.conv1d
    targets = (
        _told_by_base(lora, settings, known, conv1d, mode) if known else _told_by_config(lora, settings, config_dir)
    )
    notes = settings_notes(lora, settings, alpha)
    tensors: Mapping[str, StoredTensor] | None = None
    if known and mode in ("merge", "both"):
        done = fold(
            lora,
            settings,
            base=known,
            ties=() if architecture is None else architecture.ties,
            conv1d=conv1d,
        )
        tensors = done.tensors
        notes += fold_notes(lora, settings, done)
    elif known and mode == "base":
        tensors = known
        notes.append("the base weights are written without the adapter, as asked")
    elif not known:
        notes.append(
            "the checkpoint holds adapters alone, so there is no model; --base DIR folds them into the weights of a "
            "base model"
        )
    if tensors is not None:
        tensors = {**tensors, **lora.value_head}
    exported = None
    if mode != "merge" or tensors is None:
        exported = export(lora, settings, targets)
        notes += export_notes(settings, is_folded=mode == "both" and tensors is not None)
    head = lora.value_head if tensors is None else {}
    if head:
        notes.append(f"the value head is in {VALUE_HEAD_FILE}, beside the adapter: {listed(sorted(head))}")
    return LoraPlan(
        tensors,
        head,
        exported,
        {name: fqn for name, fqn in lora.saved_as.items() if base is None or name in lora.value_head},
        _dropped(source, (tensors, head, {} if exported is None else exported.tensors)),
        _summary(lora, targets, settings),
        tuple(notes),
    )


def summarise(source: Checkpoint) -> LoraSummary | None:
    """What adapters a checkpoint has, as far as it can be told; None where it has none."""
    if not has_lora(source.tensors, ()):
        return None
    try:
        # Where it is not told which of several is meant, the first stands for them.
        lora = find_lora(source.tensors, None, adapter=next(iter(adapter_names(source.tensors)), None))
    except MergerError:
        return None
    if lora is None:
        return None
    settings = None
    with Faults():
        folders = [source.path, *([source.config_dir] if source.config_dir is not None else [])]
        settings = read_settings(folders, alpha=None, adapters=lora.adapters)
    known = {**lora.base, **lora.originals}
    return _summary(lora, find_targets(lora, known)[0] if known else None, settings)


def _summary(lora: Lora, targets: list[Target] | None, settings: LoraSettings | None) -> LoraSummary:
    ranks = Counter(target.rank for target in targets) if targets else _ranks(lora, settings)
    return LoraSummary(
        num_modules=len(lora.modules),
        ranks=dict(sorted(ranks.items())),
        alpha=None if settings is None else settings.alpha,
        use_rslora=settings is not None and settings.use_rslora,
        use_dora=any(module.magnitude is not None for module in lora.modules),
        modules_to_save=tuple(sorted(lora.trained)),
        adapters=lora.adapters,
        has_base=not lora.is_adapter_only,
    )


def _ranks(lora: Lora, settings: LoraSettings | None) -> Counter[int]:
    """The ranks of layers of which the weights are not known: for experts those that are stated."""
    experts = set() if settings is None else {module.wrapper for module in maybe_experts(lora, settings)}
    stated = {
        module.wrapper: settings.rank_of(module.name)
        for module in lora.modules
        if settings is not None and module.wrapper in experts
    }
    return Counter(stated.get(module.wrapper) or module.first.shape[0] for module in lora.modules)


def _told_by_config(lora: Lora, settings: LoraSettings, config_dir: Path | None) -> list[Target] | None:
    """What adapters without base weights change, where their settings have to be told; None where names tell enough."""
    experts = maybe_experts(lora, settings)
    wrappers = {module.wrapper for module in experts}
    others = [module for module in lora.modules if module.wrapper not in wrappers]
    if wrong := wrong_ranks([(one, one.name, one.first.shape[0]) for one in others], settings):
        raise ModelError(wrong)
    if settings.config is not None or not experts:
        return None
    if config_dir is None:
        raise ModelError(unknown_experts(experts))
    expected = expected_architecture(config_dir)
    targets, problems = find_targets(lora, without_data(expected.shapes), settings, expected.conv1d)
    if problems:
        ask = "name the folder of the config that was trained with by --config DIR, or the base model by --base DIR"
        raise ModelError([replace(one, message=f"{one.message}; {ask}") for one in problems])
    return targets


def _told_by_base(
    lora: Lora, settings: LoraSettings, base: Mapping[str, StoredTensor], conv1d: Collection[str] | None, mode: LoraMode
) -> list[Target]:
    """What adapters change in base weights, as far as it can be told; for folding all of it has to be."""
    targets, problems = find_targets(lora, base, settings, conv1d)
    if mode in ("merge", "both"):
        return targets
    found = {target.module.wrapper for target in targets}
    untold = [module for module in maybe_experts(lora, settings) if module.wrapper not in found]
    if settings.config is None and untold:
        ask = "put adapter_config.json beside the checkpoint, which says what it is"
        raise ModelError([replace(one, message=f"{one.message}; {ask}") for one in problems])
    if wrong := wrong_ranks(ranks_of(targets), settings):
        raise ModelError(wrong)
    return targets


def _dropped(source: Checkpoint, written: Iterable[Mapping[str, StoredTensor] | None]) -> tuple[str, ...]:
    """Saved names of which nothing is written, not even as part of what is computed."""
    tensors = (tensor for some in written if some is not None for tensor in some.values())
    reached = {stored.fqn for tensor in tensors for stored in in_files(tensor)}
    return tuple(fqn for fqn in source.tensors if fqn not in reached)
