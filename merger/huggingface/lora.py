"""LoRA as peft keeps it in a state dict: which tensors are adapters, which trained copies, which the base.

Pure: names and stored tensors in, the same in order out. What the adapters change is for `lora_targets.py` to say, what
they amount to for `lora_fold.py`, and `lora_export.py` writes them as peft does. Source: peft/tuners/lora/layer.py and
peft/utils/other.py (0.7 to 0.21).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from merger.errors import ModelError, Problem, listed
from merger.huggingface.heads import heads_beside
from merger.huggingface.names import check_distinct, strip_wrappers, without_wrapper_parts
from merger.tensors import StoredTensor

# What peft wraps a layer in, as components of names.
BASE_LAYER, _TRAINED, _ORIGINAL = "base_layer", "modules_to_save", "original_module"
# A wrapper's own tensors: two factors, those of an embedding, and what DoRA scales rows by.
_FACTORS = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"})
# What else peft may put there, and this program cannot use.
_FOREIGN = frozenset({"token_adapter", "ranknum", "lora_E", "lora_diag", "lora_monteclora_sampler"})
# What begins every name that peft writes.
PREFIX = "base_model.model."
# The adapter of a file that peft wrote itself: it leaves the name out.
UNNAMED = "default"


@dataclass(frozen=True, slots=True)
class LoraModule:
    """A wrapped layer: its name in the model, and its tensors.

    `wrapper` is the name of the wrapper itself, which differs where several parameters of one layer are wrapped one
    around another (`mlp.experts.base_layer`). `factors` by what peft calls them; `bias` is that of the second factor.
    """

    name: str
    wrapper: str
    factors: Mapping[str, StoredTensor]
    bias: StoredTensor | None

    @property
    def is_embedding(self) -> bool:
        """Whether the factors are those of an embedding, whose result is transposed."""
        return "lora_embedding_A" in self.factors

    @property
    def first(self) -> StoredTensor:
        """The factor of shape (rank, inputs)."""
        return self.factors["lora_embedding_A" if self.is_embedding else "lora_A"]

    @property
    def second(self) -> StoredTensor:
        """The factor of shape (outputs, rank)."""
        return self.factors["lora_embedding_B" if self.is_embedding else "lora_B"]

    @property
    def magnitude(self) -> StoredTensor | None:
        """The vector of DoRA."""
        return self.factors.get("lora_magnitude_vector")


@dataclass(frozen=True, slots=True)
class Lora:
    """A state dict under peft, sorted.

    All keys are names of the model as it was before peft came. `base` has the tensors of then, what was copied to be
    trained excepted: of that `originals` has what it was and `trained` what it became. `value_head` are those of a head
    beside the model, which peft knows nothing of. `saved_as` has for the names in `base`, `originals`, `trained` and
    `value_head` the names under which they were saved. `adapters` are all names of adapters that were found; the
    modules and trained copies are those of the first.
    """

    modules: tuple[LoraModule, ...]
    base: Mapping[str, StoredTensor]
    originals: Mapping[str, StoredTensor]
    trained: Mapping[str, StoredTensor]
    value_head: Mapping[str, StoredTensor]
    saved_as: Mapping[str, str]
    adapters: tuple[str, ...]

    @property
    def is_adapter_only(self) -> bool:
        """Whether the base weights are elsewhere."""
        return not self.base and not self.originals


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A saved name. `name` is that of the tensor in the model, for a factor that of the wrapped layer."""

    role: Literal["base", "original", "trained", "factor", "foreign"]
    name: str
    wrapper: str = ""
    factor: str = ""
    adapter: str = UNNAMED
    is_bias: bool = False


@dataclass(slots=True)
class _Gathered:
    """What is found of one wrapper, while names are gone through."""

    name: str
    factors: dict[str, StoredTensor] = field(default_factory=dict)
    bias: StoredTensor | None = None


def has_lora(names: Iterable[str], expected: Collection[str]) -> bool:
    """Whether a state dict is one under peft with LoRA; names that the model itself has (`expected`) do not count."""
    return any(_parse(name).role in ("factor", "trained", "foreign") and not _is_of(name, expected) for name in names)


def holds_base(names: Iterable[str]) -> bool:
    """Whether some of the tensors of a state dict under peft are base weights, not of adapters or a value head."""
    found = [name for name in names if _parse(name).role in ("base", "original")]
    return len(found) > len(heads_beside(found, ()))


def adapter_names(stored: Iterable[str]) -> tuple[str, ...]:
    """The names of all adapters in a state dict of a model of which nothing else is known, in their order."""
    return _adapters(map(_parse, stored))


def find_lora(
    stored: Mapping[str, StoredTensor], expected: Collection[str] | None, *, adapter: str | None = None
) -> Lora | None:
    """Sorts the tensors of a state dict; None where there is no LoRA in it.

    `expected` are the names of the model, None where it is not known: what is called like an adapter and is part of the
    model is none. `adapter` says which one is meant where there are several.

    Raises `ModelError` where none or several could be meant, where an adapter lacks a factor, and for adapters of
    kinds that are not understood; `CheckpointError` where two saved names become one.
    """
    if not has_lora(stored, expected or ()):
        return None
    parsed = {fqn: _Parsed("base", fqn) if _is_of(fqn, expected or ()) else _parse(fqn) for fqn in stored}
    foreign = sorted({one.name for one in parsed.values() if one.role == "foreign"})
    if foreign:
        message = (
            f"{listed(foreign)}: adapters of a kind that this version does not fold. Fold them in where they were "
            "trained and save again."
        )
        raise ModelError(Problem("unknown-adapter", "", message))
    adapters = _adapters(parsed.values())
    chosen = _chosen(adapters, adapter)
    # What lies beside the model has none of the prefixes by which those of the model are known.
    heads = heads_beside((fqn for fqn, one in parsed.items() if one.role == "base"), expected or ())
    # Layers have no tensor of their own name: a weight stands for each.
    in_model = strip_wrappers(dict.fromkeys(_pseudo(one) for fqn, one in parsed.items() if fqn not in heads), expected)
    wrappers: dict[str, _Gathered] = {}
    kinds: dict[str, dict[str, StoredTensor]] = {"base": {}, "original": {}, "trained": {}}
    saved_as: dict[str, str] = {}
    # Of each name, for the model before peft came, for the trained copies and for the adapter.
    same: dict[str, dict[str, list[str]]] = {"model": {}, "trained": {}, "adapter": {}}
    for fqn, name in heads.items():
        saved_as[name] = fqn
        same["model"].setdefault(name, []).append(fqn)
    for fqn, one in parsed.items():
        if fqn in heads:
            continue
        name = in_model[_pseudo(one)]
        if one.role in ("factor", "trained") and one.adapter != chosen:
            continue
        if one.role != "factor":
            kinds[one.role][name] = stored[fqn]
            saved_as[name] = fqn
            same["trained" if one.role == "trained" else "model"].setdefault(name, []).append(fqn)
            continue
        layer = name.removesuffix(".weight")
        wrapper = peft_name(one.wrapper, layer)
        own = f"{wrapper}.{one.factor}" + (".bias" if one.is_bias else "")
        same["adapter"].setdefault(own, []).append(fqn)
        gathered = wrappers.setdefault(wrapper, _Gathered(layer))
        if one.is_bias:
            gathered.bias = stored[fqn]
        else:
            gathered.factors[one.factor] = stored[fqn]
    for names in same.values():
        check_distinct(names)
    modules = tuple(
        LoraModule(found.name, wrapper, found.factors, found.bias) for wrapper, found in sorted(wrappers.items())
    )
    _check_modules(modules, adapters)
    others = tuple(name for name in adapters if name != chosen)
    return Lora(
        modules,
        kinds["base"],
        kinds["original"],
        kinds["trained"],
        {name: stored[fqn] for fqn, name in heads.items()},
        saved_as,
        (chosen, *others),
    )


def peft_name(saved: str, name: str) -> str:
    """The name under which peft knows what is called `name` in the model: with each `base_layer` that `saved` has.

    >>> peft_name("module.base_model.model.mlp.experts.base_layer", "mlp.experts")
    'mlp.experts.base_layer'
    """
    rest = name.split(".")
    kept: list[str] = []
    for part in reversed(without_wrapper_parts(saved)):
        if part == BASE_LAYER:
            kept.append(part)
        elif rest and part == rest[-1]:
            kept.append(rest.pop())
    return ".".join(reversed(kept))


def _adapters(parsed: Iterable[_Parsed]) -> tuple[str, ...]:
    return tuple(sorted({one.adapter for one in parsed if one.role in ("factor", "trained")}))


def _chosen(adapters: tuple[str, ...], asked: str | None) -> str:
    if asked is not None and asked not in adapters:
        message = f"the checkpoint has no adapter {asked}, only {', '.join(adapters)}"
        raise ModelError(Problem("no-such-adapter", "", message))
    if asked is None and len(adapters) > 1:
        message = (
            f"the checkpoint holds {len(adapters)} adapters: {', '.join(adapters)}. Say which one is meant by "
            "--lora-adapter NAME."
        )
        raise ModelError(Problem("several-adapters", "", message))
    return asked or adapters[0]


def _check_modules(modules: tuple[LoraModule, ...], adapters: tuple[str, ...]) -> None:
    """Raises where there is nothing to fold, or half of it."""
    if not modules:
        message = (
            f"the checkpoint was saved under peft (adapters: {', '.join(adapters)}) but holds no LoRA factors; the "
            "training would be lost"
        )
        raise ModelError(Problem("no-lora-factors", "", message))
    pairs = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
    problems = [
        Problem(
            "incomplete-adapter",
            module.wrapper,
            f"has {', '.join(sorted(module.factors)) or 'a bias'} and not one pair of lora_A and lora_B; the "
            "checkpoint is incomplete: save it again",
        )
        for module in modules
        if not any(set(pair) == module.factors.keys() - {"lora_magnitude_vector"} for pair in pairs)
    ]
    if problems:
        raise ModelError(problems)


def _pseudo(one: _Parsed) -> str:
    return f"{one.name}.weight" if one.role == "factor" else one.name


def _is_of(name: str, expected: Collection[str]) -> bool:
    """Whether the model itself has a tensor of this name, under whatever wrappers."""
    plain = ".".join(without_wrapper_parts(name))
    return plain in expected or plain.removeprefix(PREFIX) in expected


def _parse(fqn: str) -> _Parsed:
    parts = without_wrapper_parts(fqn)
    for at in range(len(parts) - 1, 0, -1):
        if parts[at] in _FACTORS and len(parts) - at <= 3:  # noqa: PLR2004 - factor, adapter, weight or bias
            return _factor(parts[:at], parts[at], parts[at + 1 :])
        if parts[at] in _FOREIGN:
            return _Parsed("foreign", ".".join(parts))
        if parts[at] == _TRAINED and at + 2 < len(parts):
            return _Parsed("trained", _free((*parts[:at], *parts[at + 2 :])), adapter=parts[at + 1])
        if parts[at] == _ORIGINAL and at + 1 < len(parts):
            return _Parsed("original", _free((*parts[:at], *parts[at + 1 :])))
    return _Parsed("base", _free(parts))


def _factor(layer: tuple[str, ...], factor: str, rest: tuple[str, ...]) -> _Parsed:
    """`rest` is what follows the factor's name: the adapter's and "weight" or "bias", or either, or nothing."""
    is_leaf = bool(rest) and rest[-1] in ("weight", "bias")
    named = rest[:-1] if is_leaf else rest
    return _Parsed(
        "factor",
        _free(layer),
        wrapper=".".join(layer),
        factor=factor,
        adapter=named[0] if named else UNNAMED,
        is_bias=is_leaf and rest[-1] == "bias",
    )


def _free(parts: Iterable[str]) -> str:
    return ".".join(part for part in parts if part != BASE_LAYER)
