"""What the adapters of a checkpoint were trained with: alpha above all, without which nobody knows how to use them.

Read from adapter_config.json as peft writes it, or from lora_train_meta.json as RL trainers leave it beside the rank
files. Reads these small files and nothing else. Source: peft/tuners/lora/config.py (0.7 to 0.21).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from merger.errors import Faults, ModelError, Problem
from merger.huggingface.lora import UNNAMED

Number = TypeVar("Number", int, float)

CONFIG_NAME, _META_NAME = "adapter_config.json", "lora_train_meta.json"
# Where either lies, under the folder of the rank files.
_FOLDERS = (".", "lora_adapter", "huggingface", "huggingface/lora_adapter")

# Settings under which the weights are not base + scale * B A, or not those of the same layers.
_NOT_FOLDED = (
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"),
    *("velora_config", "layer_replication", "trainable_token_indices", "megatron_config"),
)
# Starting values for which peft changes the base too, so that the adapter fits that base only.
_CHANGES_BASE = re.compile(r"pissa.*|olora|corda|loftq|lora_ga", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Settings of one adapter.

    `path` is the file they were read from, None where nothing but alpha is known. `config` is the content of
    adapter_config.json, None where there is none. `stated_in` has of each setting that is stated the file that counts.
    Patterns map regular expressions for the end of a layer's name. `rank` is None where it is not stated: it can be
    told from the tensors.
    """

    path: Path | None
    config: Mapping[str, Any] | None
    stated_in: Mapping[str, Path]
    alpha: float
    rank: int | None
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    task_type: str | None

    def alpha_of(self, layer: str) -> float:
        """Alpha of a layer, by its name in the model."""
        return next(_matching(self.alpha_pattern, layer), self.alpha)

    def rank_of(self, layer: str) -> int | None:
        """The rank that a layer should have, None where it is not stated."""
        return next(_matching(self.rank_pattern, layer), self.rank)

    def file_of_rank(self, layer: str) -> Path | None:
        """The file that states the rank of a layer."""
        return self.stated_in.get("rank_pattern" if any(_matching(self.rank_pattern, layer)) else "r")

    def scaling_of(self, layer: str, rank: int) -> float:
        """By what the product of a layer's factors of `rank` is multiplied."""
        return self.alpha_of(layer) / (math.sqrt(rank) if self.use_rslora else rank)

    def stated(self, key: str) -> Any:  # noqa: ANN401 - as JSON has it
        """An entry of adapter_config.json; None where there is none."""
        return None if self.config is None else self.config.get(key)

    @property
    def changes_base(self) -> bool:
        """Whether training began with other base weights than those of the base model."""
        return bool(_CHANGES_BASE.fullmatch(str(self.stated("init_lora_weights"))))


def read_settings(
    folders: Iterable[Path], *, alpha: float | None, adapters: Sequence[str] = (UNNAMED,)
) -> LoraSettings:
    """The settings that lie in one of `folders` or near it; `alpha` goes before what they state.

    `adapters` are the names of all that the checkpoint has, the one that is meant first. peft saves those of an adapter
    in a folder of its name, and of the one that it calls "default" above these.

    Raises `ModelError` where alpha is not known, where two files disagree, and for settings that are not understood.
    """
    places = list(dict.fromkeys((folder / below).resolve() for folder in folders for below in _FOLDERS))
    paths = _paths(places, adapters)
    faults = Faults()
    found: list[tuple[Path, dict[str, Any]]] = []
    for path in paths:
        with faults:
            found.append((path, _read(path)))
    faults.raise_all()
    config = found[0] if found and found[0][0].name == CONFIG_NAME else None
    # Of each setting the file that counts: the first that states it.
    stated_in = {key: path for path, content in reversed(found) for key in content if content[key] is not None}
    stated = {key: dict(found)[path][key] for key, path in stated_in.items()}
    problems = [
        Problem(
            "lora-settings",
            str(path),
            f"states {key} {_shown(content[key])}, but {stated_in[key]} states {_shown(stated[key])}; remove the one "
            "that is not of this run",
        )
        for path, content in found
        for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
        if content.get(key) is not None and path != stated_in[key] and content[key] != stated[key]
        if not (key == "lora_alpha" and alpha is not None)
    ]
    if config is not None:
        problems += _not_folded(*config)
    for key in ("rank_pattern", "alpha_pattern"):
        if key in stated:
            problems += _wrong_pattern(stated_in[key], key, stated[key])
    known = alpha if alpha is not None else stated.get("lora_alpha")
    if not _is_positive(known):
        where = stated_in.get("lora_alpha", found[0][0] if found else None)
        problems.append(_no_alpha(where, stated.get("lora_alpha"), adapters))
    if problems:
        raise ModelError(problems)
    assert known is not None
    return LoraSettings(
        path=found[0][0] if found else None,
        config=None if config is None else config[1],
        stated_in=stated_in,
        alpha=known,
        rank=stated["r"] if _is_positive(stated.get("r")) else None,
        rank_pattern=stated.get("rank_pattern", {}),
        alpha_pattern=stated.get("alpha_pattern", {}),
        # As peft takes it, which does not ask for a bool.
        use_rslora=bool(stated.get("use_rslora")),
        task_type=stated["task_type"] if isinstance(stated.get("task_type"), str) else None,
    )


def _paths(places: Sequence[Path], adapters: Sequence[str]) -> list[Path]:
    """The files of settings of the first of `adapters`, those that count most first."""
    meant, *others = adapters
    if meant != UNNAMED and "/" not in meant:
        own = [path for place in places if (path := place / meant / CONFIG_NAME).is_file()]
        if own:
            return own
    if UNNAMED in others:
        return []  # what lies there is of that one
    return [path for name in (CONFIG_NAME, _META_NAME) for place in places if (path := place / name).is_file()]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        message = f"it cannot be read as JSON ({error}). Restore it, or remove it and give --lora-alpha N."
        raise ModelError(Problem("lora-settings", str(path), message)) from error
    if not isinstance(content, dict):
        message = f"it holds no JSON object but {type(content).__name__}. Remove it and give --lora-alpha N."
        raise ModelError(Problem("lora-settings", str(path), message))
    return content


def _not_folded(path: Path, config: Mapping[str, Any]) -> Sequence[Problem]:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        message = (
            f"states peft_type {_shown(kind)}: this version folds LORA alone. Fold them in where they were trained and "
            "save again."
        )
        return [Problem("unknown-adapter", str(path), message)]
    return [
        Problem(
            "unknown-adapter",
            str(path),
            f"states {key} {_shown(config[key])}: such adapters this version does not fold. Fold them in where they "
            "were trained and save again.",
        )
        for key in _NOT_FOLDED
        if config.get(key)
    ]


def _no_alpha(path: Path | None, stated: object, adapters: Sequence[str]) -> Problem:
    if path is not None:
        found = f"{path} states lora_alpha {_shown(stated)}"
    elif UNNAMED in adapters[1:]:
        found = f"no {adapters[0]}/{CONFIG_NAME} lies beside the checkpoint, and others are of the adapter {UNNAMED}"
    else:
        found = f"no {CONFIG_NAME} or {_META_NAME} lies beside the checkpoint"
    return Problem(
        "no-lora-alpha",
        "",
        f"the checkpoint holds LoRA adapters, but how strongly they count is not known: {found}. Give alpha as it was "
        "set in training by --lora-alpha N.",
    )


def _matching(pattern: Mapping[str, Number], layer: str) -> Iterator[Number]:
    """The values of a pattern whose keys match the end of a layer's name."""
    return (value for key, value in pattern.items() if re.fullmatch(_at_the_end(key), layer))


def _wrong_pattern(path: Path, key: str, pattern: object) -> list[Problem]:
    """What of a pattern cannot be used. Left out, its layers would count as all others do."""
    is_rank = key == "rank_pattern"
    number = "whole number" if is_rank else "number"
    wrong = []
    if not isinstance(pattern, dict):
        wrong.append(f"{key} is {_shown(pattern)}, not an object of patterns and numbers")
        pattern = {}
    wrong += [
        f"{key} holds {_shown(regex)}, which is no regular expression for the end of a layer's name"
        for regex in pattern
        if not _is_regex(regex)
    ]
    wrong += [
        f"{key} states for {regex} {_shown(value)}, which is no {number} above 0"
        for regex, value in pattern.items()
        if not _is_positive(value) or (is_rank and not isinstance(value, int))
    ]
    ask = "put the settings there that it was trained with"
    return [Problem("lora-settings", str(path), f"{one}; {ask}") for one in wrong]


def _is_regex(text: str) -> bool:
    try:
        re.compile(_at_the_end(text))
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _at_the_end(regex: str) -> str:
    """The regular expression of names that end in one. Source: `peft.utils.other.get_pattern_key`."""
    return rf"(.*\.)?({regex})"


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - fits a line
