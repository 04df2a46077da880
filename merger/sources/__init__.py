"""The formats on disk, one module each; every one returns a `Checkpoint`. `read_checkpoint` picks the right one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

from merger.checkpoint import Checkpoint
from merger.errors import MergerError, NotACheckpointError, Problem
from merger.sharding import DealOrder
from merger.sources.locate import is_model_directory, locate
from merger.sources.rank_files import read_rank_files
from merger.sources.safetensors_files import read_model_directory
from merger.workers import check_workers, num_workers


def read_checkpoint(
    path: Path,
    *,
    world_size: int | None = None,
    shard_order: DealOrder | None = None,
    reduce_partial: bool = False,
    workers: int | None = None,
    keep_fragments: bool = False,
) -> Checkpoint:
    """Reads the headers of the sharded checkpoint at `path`, or in the folder above or below it that holds it.

    Where ranks are many, `workers` processes share the reading. `keep_fragments` keeps what was found of each tensor of
    a checkpoint with problems, for people to look at.
    Raises `NotACheckpointError` where there is none, or one of another format.
    """
    problems = check_workers(workers)
    if shard_order is not None and shard_order not in get_args(DealOrder):
        choices = ", ".join(get_args(DealOrder))
        problems.append(Problem("bad-option", "shard_order", f"{shard_order!r} is none of {choices}"))
    if problems:
        raise MergerError(problems)
    folder, located = locate(path)
    checkpoint = read_rank_files(
        folder,
        world_size=world_size,
        shard_order=shard_order,
        reduce_partial=reduce_partial,
        workers=num_workers(workers),
        keep_fragments=keep_fragments,
    )
    return replace(checkpoint, located=located)


def read_any(
    path: Path,
    *,
    world_size: int | None = None,
    shard_order: DealOrder | None = None,
    reduce_partial: bool = False,
    workers: int | None = None,
    keep_fragments: bool = False,
) -> Checkpoint:
    """Reads a sharded checkpoint or a Hugging Face model directory, whichever `path` is."""
    if path.is_dir() and is_model_directory(path):
        if world_size is not None or shard_order is not None or reduce_partial:
            options = "world_size, shard_order and reduce_partial"
            message = f"is a model directory, for which {options} mean nothing; leave them out"
            raise MergerError(Problem("bad-option", str(path), message))
        return read_model_directory(path)
    return read_checkpoint(
        path,
        world_size=world_size,
        shard_order=shard_order,
        reduce_partial=reduce_partial,
        keep_fragments=keep_fragments,
        workers=workers,
    )


def read_pair(
    path: Path,
    reference: Path,
    *,
    world_size: int | None,
    shard_order: DealOrder | None,
    reduce_partial: bool,
    workers: int | None,
) -> tuple[Checkpoint, Checkpoint]:
    """Reads two sides to be compared, each a sharded checkpoint or a model directory; the options are for the sharded.

    Where neither is sharded, options are refused as `read_any` does.
    """
    sharded = [side for side in (path, reference) if not (side.is_dir() and is_model_directory(side))]

    def read(side: Path) -> Checkpoint:
        if side in sharded or not sharded:
            return read_any(
                side, world_size=world_size, shard_order=shard_order, reduce_partial=reduce_partial, workers=workers
            )
        return read_any(side)

    first = read(path)
    try:
        return first, read(reference)
    except NotACheckpointError as error:
        if error.problems[0].kind != "no-checkpoint":
            raise
        message = (
            "is neither a Hugging Face model directory nor a sharded checkpoint: it holds no *.safetensors file and no "
            "model_world_size_*_rank_*.pt"
        )
        raise NotACheckpointError(Problem("not-a-model", str(reference), message)) from None


def read_reference(path: Path) -> Checkpoint:
    """Reads a Hugging Face model directory; anything else raises `NotACheckpointError`."""
    if not (path.is_dir() and is_model_directory(path)):
        raise NotACheckpointError(
            Problem("not-a-model", str(path), "is no Hugging Face model directory: it holds no *.safetensors file")
        )
    return read_model_directory(path)
