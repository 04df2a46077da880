"""Runs two model directories on the same tokens and says how far apart what they compute is.

The one room that loads models with their weights: one after the other, in float32, on the processor, and without remote
code.
`torch` is imported inside the functions only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merger.errors import ModelError, Problem, listed
from merger.huggingface.expected import model_class, quiet

if TYPE_CHECKING:
    import torch

# Enough for every layer to attend to others than itself, and few enough for a large model on a processor.
NUM_TOKENS = 16
# The tokens are drawn, since a tokenizer may be missing; the same ones every time.
SEED = 0
# Names that a message lists.


@dataclass(frozen=True, slots=True)
class LogitsComparison:
    """How far apart two models are on `num_tokens` tokens drawn with `seed`, both computed in float32.

    `max_difference` is the largest absolute difference, infinite where only one of two values is a number, and None
    where the shapes differ; `is_close` says whether it is at most `tolerance`.
    """

    is_close: bool
    max_difference: float | None
    tolerance: float
    num_tokens: int
    seed: int
    detail: str


def compare_logits(first: Path, other: Path, *, tolerance: float) -> LogitsComparison:
    """Loads both models by the class that their config.json names, and runs them.

    What is compared are the logits, or the last hidden state of a model without a head. Raises `ModelError` where a
    model cannot be loaded, lacks weights, or cannot be run on tokens alone.
    """
    import torch

    with quiet():
        sizes = [_vocabulary(folder) for folder in (first, other)]
        generator = torch.Generator().manual_seed(SEED)
        tokens = torch.randint(min(sizes), (1, NUM_TOKENS), generator=generator)
        left, right = (_computed(folder, tokens) for folder in (first, other))
    told = f"{NUM_TOKENS} tokens (seed {SEED}), in float32"
    if left.shape != right.shape:
        shapes = f"shape {tuple(left.shape)}, the reference has {tuple(right.shape)}"
        return LogitsComparison(False, None, tolerance, NUM_TOKENS, SEED, f"{shapes}; {told}")  # noqa: FBT003 - is_close
    same = (left == right) | (left.isnan() & right.isnan())
    difference = torch.where(same, torch.zeros(()), (left - right).abs()).nan_to_num(nan=float("inf"))
    largest = float(difference.max())
    detail = f"largest difference {largest:.6g}, tolerance {tolerance:g}; {told}"
    return LogitsComparison(largest <= tolerance, largest, tolerance, NUM_TOKENS, SEED, detail)


def _vocabulary(folder: Path) -> int:
    """How many tokens a model knows; those of its text part where it has several."""
    config = model_class(folder).config_class.from_pretrained(str(folder), local_files_only=True)
    size = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int) or size < 1:
        raise _cannot_run(folder, 'config.json tells no "vocab_size"')
    return size


def _computed(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    import torch

    model = _loaded(folder)
    inputs = {"input_ids": tokens}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens
    try:
        with torch.no_grad():
            outputs = model.eval()(**inputs)
    except Exception as error:
        raise _cannot_run(folder, f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    logits = getattr(outputs, "logits", None)
    result: torch.Tensor = outputs[0] if logits is None else logits
    return result.float()


def _loaded(folder: Path) -> Any:  # noqa: ANN401 - untyped upstream
    import torch

    cls = model_class(folder)
    key = "dtype" if hasattr(cls.config_class(), "dtype") else "torch_dtype"  # the name changed in transformers 4.56
    try:
        model, told = cls.from_pretrained(
            str(folder), local_files_only=True, output_loading_info=True, **{key: torch.float32}
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ModelError(Problem("unloadable", str(folder), f"transformers cannot load it ({reason})")) from error
    absent = sorted(map(str, (*told["missing_keys"], *told["mismatched_keys"])))
    if absent:
        message = (
            f"lacks weights of {cls.__name__}, which transformers would draw at random: "
            f"{listed(absent)}; there are no logits to compare"
        )
        raise ModelError(Problem("missing-tensors", str(folder), message))
    return model


def _cannot_run(folder: Path, reason: str) -> ModelError:
    return ModelError(
        Problem("cannot-run", str(folder), f"cannot be run on tokens alone ({reason}); leave out the logits")
    )
