"""Folds LoRA into the base weights: stored tensors in, stored tensors out, of which some are computed when read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from merger.checks import shape_text
from merger.errors import ModelError, Problem
from merger.huggingface.lora import Lora
from merger.huggingface.lora_settings import LoraSettings
from merger.huggingface.lora_targets import Target, find_targets, ranks_of, setting_name, wrong_ranks
from merger.operations import AddScaled, Fold
from merger.tensors import Computation, StoredTensor, computed

# Types that a weight is trained in. Others are quantised storage, which cannot be added to.
_TRAINED_IN = frozenset({"float64", "float32", "float16", "bfloat16"})

# What to do with factors that fit no weight, or several.
_NOT_FITTING = (
    "the base may be quantised, or that of another model: name the one that was trained with by --base DIR where the "
    "checkpoint itself has none, or export the adapter alone with --lora adapter, and fold with peft"
)


@dataclass(frozen=True, slots=True)
class Folded:
    """The tensors of the model with the training in them, by their names in the model, and what was done.

    `ranks` counts the layers by rank. `trained` are names that the copies that were trained took.
    """

    tensors: Mapping[str, StoredTensor]
    ranks: Mapping[int, int]
    trained: tuple[str, ...]
    filled: Mapping[str, str]


def fold(
    lora: Lora,
    settings: LoraSettings,
    *,
    base: Mapping[str, StoredTensor],
    ties: Sequence[Sequence[str]],
    conv1d: Collection[str] | None,
) -> Folded:
    """The model that was trained: base weights with the adapters folded in, and trained copies in their places.

    `base` are all base weights by their names in the model, `ties` the groups of names for one tensor, `conv1d` the
    names of weights that lie as (inputs, outputs), None where the architecture is not known. A name that is missing
    because it is tied to one that was trained gets what the base had there: training did not change it.

    Raises `ModelError` for factors that fit no weight, and for weights that cannot be added to.
    """
    base = _with_tied(base, lora, ties)
    targets, problems = find_targets(lora, base, settings, conv1d)
    problems = [replace(one, message=f"{one.message}; {_NOT_FITTING}") for one in problems]
    problems += [_square(target) for target in targets if target.layout is None]
    problems += wrong_ranks(ranks_of(targets), settings) + _not_addable(targets) + _no_biases(targets, base)
    if problems:
        raise ModelError(problems)
    changed: dict[str, StoredTensor] = dict(lora.trained)
    for target in targets:
        changed |= _changed(target, settings, base)
    tensors = {**base, **changed}
    filled: dict[str, str] = {}
    for group in ties:
        was_changed = next((name for name in group if name in changed), None)
        if was_changed is None or settings.stated("ensure_weight_tying"):
            continue
        for name in group:
            if name not in tensors and was_changed in base:
                tensors[name] = base[was_changed]
                filled[name] = was_changed
    ranks = Counter(target.rank for target in targets)
    return Folded(tensors, dict(sorted(ranks.items())), tuple(sorted(lora.trained)), filled)


def _with_tied(
    base: Mapping[str, StoredTensor], lora: Lora, ties: Sequence[Sequence[str]]
) -> Mapping[str, StoredTensor]:
    """The base with the weights of wrapped layers that only their ties name."""
    found = dict(base)
    wanted = {f"{module.name}.weight" for module in lora.modules} | set(lora.trained)
    for group in ties:
        held = next((name for name in group if name in found), None)
        for name in group:
            if held is not None and name in wanted and name not in found:
                found[name] = found[held]
    return found


def _changed(target: Target, settings: LoraSettings, base: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The weight of a target with its factors folded in, and its bias where the second factor has one."""
    module, weight = target.module, target.weight
    assert target.layout is not None, "or it would have been refused"
    scaling = settings.scaling_of(setting_name(target), target.rank)
    inputs = [weight, module.first, module.second]
    if module.magnitude is not None:
        inputs.append(module.magnitude)
    operation = Fold(target.layout, scaling, is_dora=module.magnitude is not None)
    changed = {target.name: computed(Computation(weight.fqn, weight.dtype, weight.shape, tuple(inputs), operation))}
    if module.bias is not None:
        name = f"{module.name}.bias"
        inputs = [base[name], module.bias]
        computation = Computation(base[name].fqn, base[name].dtype, base[name].shape, tuple(inputs), AddScaled(scaling))
        changed[name] = computed(computation)
    return changed


def _no_biases(targets: Sequence[Target], base: Mapping[str, StoredTensor]) -> list[Problem]:
    return [
        Problem(
            "no-base-bias",
            f"{module.name}.bias",
            f"the adapter has a bias of shape {shape_text(module.bias.shape)} (lora_bias), but the layer has none of "
            "that shape to add it to, so it cannot be folded; export the adapter alone with --lora adapter",
        )
        for module in (target.module for target in targets)
        if module.bias is not None
        if (held := base.get(f"{module.name}.bias")) is None or held.shape != module.bias.shape
    ]


def _not_addable(targets: Sequence[Target]) -> list[Problem]:
    return [
        Problem(
            "quantised-base",
            target.name,
            f"is {target.weight.dtype}, to which LoRA cannot be added: the base is quantised. Export the adapter alone "
            "with --lora adapter, and use it on the base model.",
        )
        for target in targets
        if target.weight.dtype.name not in _TRAINED_IN
    ][:1]


def _square(target: Target) -> Problem:
    if len(target.weight.shape) == 2:  # noqa: PLR2004 - a matrix
        message = (
            f"has the shape {shape_text(target.weight.shape)}, from which it cannot be told whether it lies as "
            "(outputs, inputs) or as (inputs, outputs), and fan_in_fan_out does not fit other layers; merge without "
            "--weights-only, with the model's config.json, or export the adapter alone with --lora adapter"
        )
        return Problem("lora-layout", target.name, message)
    return Problem(
        "lora-layout",
        target.name,
        f"has experts of shape {shape_text(target.weight.shape[1:])}, from which it cannot be told whether they lie as "
        "(outputs, inputs) or as (inputs, outputs); export the adapter alone with --lora adapter, and fold with peft",
    )
