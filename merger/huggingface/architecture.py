"""What one model class expects of its weights, as data. Pure: `expected.py` asks transformers for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from merger.huggingface.movements import Movement
from merger.plan import Block


@dataclass(frozen=True, slots=True)
class Architecture:
    """What one model class expects of its weights under one config.json.

    `shapes` holds every persistent parameter and buffer in the order of the model's state dict, aliases of ties
    included. `ties` are groups of names for one tensor; the first of each is the one that `save_pretrained` writes.
    `keep_fp32` are the names that stay float32 in a bfloat16 or float16 model, `keep_fp32_in_float16` those that do in
    a float16 model only; `kept_in_float32` puts them together. `ignore_unexpected` are regular expressions, to be
    searched, of names that files may hold and the model does not read. `dtype` is what config.json states. `buffers`
    are those names of `shapes` that are no parameters; `conv1d` those of weights that lie as (inputs, outputs), as the
    Conv1D of GPT-2 has them. `hub` says what `save_pretrained` makes of them, None where it
    writes them as they are, or where `no_hub` says why that is not known.
    """

    class_name: str
    shapes: dict[str, tuple[int, ...]]
    ties: tuple[tuple[str, ...], ...]
    keep_fp32: frozenset[str]
    keep_fp32_in_float16: frozenset[str]
    ignore_unexpected: tuple[str, ...]
    dtype: str | None
    buffers: frozenset[str] = frozenset()
    conv1d: frozenset[str] = frozenset()
    hub: HubLayout | None = None
    no_hub: str | None = None

    def kept_in_float32(self, dtype: str) -> frozenset[str]:
        """Names that are not to be cast when the model is cast to `dtype`, a torch name such as "bfloat16"."""
        if dtype == "float16":
            return self.keep_fp32 | self.keep_fp32_in_float16
        return self.keep_fp32 if dtype == "bfloat16" else frozenset()


@dataclass(frozen=True, slots=True)
class HubLayout:
    """The names and shapes under which `save_pretrained` writes a model, where they are not those in memory.

    `architecture` is the same model under them. `tied` are its tensors in the order of writing, each with how it is
    made of the tensors in memory; `untied` are those of a model whose ties are broken, aliases included. `blocks` are
    the tensors that `save_pretrained` keeps together in one file.
    """

    architecture: Architecture
    tied: Mapping[str, Movement]
    untied: Mapping[str, Movement]
    blocks: Mapping[str, Block] = field(default_factory=dict)
