"""Value heads: what trainers put beside a model for which its architecture has no place.

Wrappers such as AutoModelForCausalLMWithValueHead of trl hold the model and, as `v_head`, a head of their own. Neither
transformers nor any server knows of it, so it goes into a file of its own. A critic of transformers' own class for
token classification needs none of this: its head is part of the architecture. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from merger.huggingface.architecture import Architecture
from merger.huggingface.names import without_prefixes, without_wrapper_parts

# What trl calls the head, and what reads it beside a model too.
_MODULE = "v_head"


def value_head_names(architecture: Architecture | None, names: Iterable[str]) -> list[str]:
    """Those of names without wrappers that are of a value head for which the architecture has no place."""
    if architecture is None or any(_is_of_head(name) for name in architecture.shapes):
        return []
    return [name for name in names if _is_of_head(name)]


def has_value_head(fqns: Iterable[str]) -> bool:
    """Whether there is a value head beside the model among saved names, whatever wrappers are in them."""
    return any(_MODULE in without_wrapper_parts(fqn) for fqn in fqns)


def heads_beside(fqns: Iterable[str], expected: Iterable[str]) -> dict[str, str]:
    """The saved names of a value head beside a model with the `expected` names, each with its name without wrappers.

    >>> heads_beside(["module.v_head.bias", "module.model.v_head"], ())
    {'module.v_head.bias': 'v_head.bias'}
    """
    if any(_is_of_head(name) for name in expected):
        return {}
    names = {fqn: ".".join(without_prefixes(without_wrapper_parts(fqn))) for fqn in fqns}
    return {fqn: name for fqn, name in names.items() if _is_of_head(name)}


def states_labels(config: Mapping[str, Any]) -> bool:
    """Whether a config says how many labels there are. Otherwise transformers takes two."""
    return not {"id2label", "num_labels"}.isdisjoint(config)


def value_model_config(config: Mapping[str, Any], class_name: str) -> dict[str, Any]:
    """The config of a model as one that gives each token a value; one that says how many labels it has keeps those.

    >>> value_model_config({"architectures": ["LlamaForCausalLM"], "num_labels": 1}, "LlamaForTokenClassification")
    {'architectures': ['LlamaForTokenClassification'], 'num_labels': 1}
    """
    one = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**config, "architectures": [class_name], **({} if states_labels(config) else one)}


def _is_of_head(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] == _MODULE
