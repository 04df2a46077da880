"""Whether a checkpoint that does not fit its config is that of a critic, and the flag for these would help.

Asked only once a merge is refused, since it builds another architecture. Reads config.json, and no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from merger.errors import MergerError, ModelError
from merger.huggingface.expected import expected_architecture
from merger.huggingface.outputs import choose_outputs
from merger.tensors import StoredTensor


def with_hint(error: ModelError, stored: Mapping[str, StoredTensor], config_dir: Path) -> ModelError:
    """The error with the flag for critics named where tensors are unexpected, if a merge with it would go through."""
    if not any(problem.kind == "unexpected-tensors" for problem in error.problems):
        return error
    try:
        critic = expected_architecture(config_dir, is_value_model=True)
        # Whether ties agree takes reading; a critic has no head that is tied.
        choose_outputs(stored, critic, dtype=None, unexpected="error", are_equal=lambda _first, _other: True)
    except MergerError:
        return error
    hint = f"If this is a critic, give --is-value-model: {critic.class_name} has all tensors of the checkpoint."
    return ModelError(
        [
            replace(problem, message=f"{problem.message} {hint}") if problem.kind == "unexpected-tensors" else problem
            for problem in error.problems
        ]
    )
