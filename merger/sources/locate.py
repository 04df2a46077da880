"""Finds the folder that holds rank files from a path that is near it, and names other formats by their files."""

from __future__ import annotations

import os
from pathlib import Path

from merger.errors import NotACheckpointError, Problem
from merger.sources.rank_set import world_sizes

# Folders that trainers put beside the policy; where one run saved several models, the policy is what is asked for.
_POLICY_FOLDER = "actor"
# How many folders a message lists.
_MAX_LISTED = 8


def locate(path: Path) -> tuple[Path, tuple[str, ...]]:
    """The folder with rank files at, above or up to two levels below `path` (FAULTS L4), and notes on how it was found.

    Raises `NotACheckpointError` where there is none, where several could be meant, or where it is another format.
    """
    if not path.exists():
        raise _not_found("no-such-path", path, "does not exist")
    folder = path if path.is_dir() else path.parent
    if world_sizes(folder):
        return folder, ()
    if (other := _other_format(folder)) is not None and not _below(folder):
        raise _not_found("other-format", path, other)
    if folder.name == "huggingface" and world_sizes(folder.absolute().parent):
        return folder.absolute().parent, (f"read from {folder.absolute().parent}, the folder above {folder.name}/",)
    below = _below(folder)
    if not below:
        raise _not_found(
            "no-checkpoint",
            path,
            "holds no checkpoint: no model_world_size_*_rank_*.pt here, nor up to two levels below",
        )
    if len(below) > 1:
        policies = [found for found in below if found.name == _POLICY_FOLDER]
        same_step = len({found.parent for found in below}) == 1
        if not (len(policies) == 1 and same_step):
            listed = ", ".join(str(found) for found in below[-_MAX_LISTED:])
            raise _not_found(
                "several-checkpoints",
                path,
                f"holds {len(below)} checkpoints; give one of them: {listed}",
            )
        rest = ", ".join(found.name + "/" for found in below if found not in policies)
        return policies[0], (f"read from {policies[0]} ({rest} beside it left alone)",)
    return below[0], (f"read from {below[0]}",)


def is_model_directory(folder: Path) -> bool:
    """Whether `folder` holds safetensors files, and no rank files beside them."""
    return any(folder.glob("*.safetensors")) and not world_sizes(folder)


def _below(folder: Path) -> list[Path]:
    """Folders with rank files up to two levels below; steps in the order of their numbers."""
    children = _folders_in(folder)
    grandchildren = [grand for child in children for grand in _folders_in(child)]
    return sorted(
        (found for found in (*children, *grandchildren) if os.access(found, os.R_OK | os.X_OK) and world_sizes(found)),
        key=_natural,
    )


def _folders_in(folder: Path) -> list[Path]:
    """The folders in a folder, without links; none where it may not be read, as `lost+found` may not."""
    try:
        return [child for child in folder.iterdir() if child.is_dir() and not child.is_symlink()]
    except PermissionError:
        return []


def _natural(path: Path) -> tuple[tuple[str, int], ...]:
    return tuple((part.rstrip("0123456789"), _trailing_number(part)) for part in path.parts)


def _trailing_number(text: str) -> int:
    digits = text[len(text.rstrip("0123456789")) :]
    return int(digits) if digits else -1


def _other_format(folder: Path) -> str | None:
    """What another format's checkpoint in `folder` is called, with what to do; None where nothing is recognised."""
    names = {entry.name for entry in folder.iterdir()}

    def has(*patterns: str) -> bool:
        return any(next(folder.glob(pattern), None) is not None for pattern in patterns)

    megatron = has("mp_rank_*/model*.pt", "iter_*/mp_rank_*", "dist_ckpt")
    if megatron or ("metadata.json" in names and "common.pt" in names):
        return "is a Megatron-Core checkpoint, which this version does not read; convert it with Megatron's own tools"
    if ".metadata" in names or has("*.distcp"):
        return (
            "is a torch.distributed.checkpoint (DCP) checkpoint, which this version does not read; turn it into one "
            "file with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch`"
        )
    if (
        has("*zero_pp_rank_*", "global_step*/*zero_pp_rank_*", "mp_rank_*_model_states.pt")
        or "zero_to_fp32.py" in names
    ):
        return "is a DeepSpeed ZeRO checkpoint, which this version does not read; run the zero_to_fp32.py beside it"
    if has("*.safetensors", "pytorch_model*.bin"):
        return "is a Hugging Face model directory already: there is nothing to merge"
    if has("optim_world_size_*_rank_*.pt", "extra_state_world_size_*_rank_*.pt"):
        return (
            "holds optimizer or extra state of ranks but no model_world_size_*_rank_*.pt; the model was not saved "
            "here, or not copied: look on the other nodes, and in the trainer's setting of what to save"
        )
    return None


def _not_found(kind: str, path: Path, message: str) -> NotACheckpointError:
    return NotACheckpointError(Problem(kind, str(path), message))
