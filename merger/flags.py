"""Options of a merge as the flags that ask for them: for notes, and for commands that are to be pasted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from merger.plan import parse_size

# Where a config.json came from that is at hand no longer: a folder that is neither the checkpoint's nor was given.
ELSEWHERE = "elsewhere"
# By the name of the option: its flag, and the values with which it is left out.
_FLAGS: dict[str, tuple[str, tuple[object, ...]]] = {
    "world_size": ("--world-size", (None,)),
    "shard_order": ("--shard-order", (None,)),
    "reduce_partial": ("--reduce-partial", (False,)),
    "dtype": ("--dtype", ("auto",)),
    "max_shard_size": ("--max-shard-size", ("5GB", parse_size("5GB"))),
    "config": ("--config", (None,)),
    "weights_only": ("--weights-only", (False,)),
    "unexpected": ("--unexpected", ("error",)),
    "names": ("--names", ("hub",)),
    "value_model": ("--is-value-model", (False,)),
    "lora": ("--lora", (None, "both")),
    "lora_alpha": ("--lora-alpha", (None,)),
    "lora_adapter": ("--lora-adapter", (None,)),
    "base": ("--base", (None,)),
}


def flags_of(options: Mapping[str, Any], *, always: tuple[str, ...] = ()) -> list[list[str]]:
    """The words of each option that is not what it is by default, or is to be said `always`."""
    words = []
    for name, (flag, defaults) in _FLAGS.items():
        value = options.get(name)
        if name not in options or (value in defaults and name not in always):
            continue
        shown = "DIR" if name in ("config", "base") and value == ELSEWHERE else str(value)
        words.append([flag] if isinstance(value, bool) else [flag, shown])
    return words
