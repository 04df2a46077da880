"""The merge: reads a checkpoint, checks all of it, plans the output, writes it and makes it appear at once."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from merger.checkpoint import Checkpoint
from merger.checks import limit_problems, replica_pairs
from merger.comparing import differing_replicas, first_difference, same_records
from merger.errors import CheckpointError, Faults, MergerError, ModelError, Problem
from merger.huggingface.expected import Architecture, expected_architecture, generation_config_complaint, read_config
from merger.huggingface.outputs import Outputs, Unexpected, choose_outputs, main_dtype
from merger.huggingface.side_files import SideFiles, config_bytes, copy_side_files, output_config, plan_side_files
from merger.plan import OutputTensor, Plan, parse_size, plan_output
from merger.publish import check_room, check_target, published
from merger.reading import SourceReader
from merger.sharding import DealOrder
from merger.sources import read_checkpoint
from merger.tensors import StoredTensor, in_files
from merger.writer import check_written, write_plan

DTypeChoice: TypeAlias = Literal["auto", "keep", "float32", "float16", "bfloat16"]
Progress: TypeAlias = Callable[[int, int], None]

# Copying is bound by the disk well before the processors; past four workers nothing was gained.
_MAX_DEFAULT_WORKERS = 4


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did, or with `dry_run` would do.

    `num_bytes` is that of all tensor data written; `dtypes` counts the tensors written by element type, `casts` those
    cast, by "float32 -> bfloat16". `renamed` maps saved names to written ones where they differ; `dropped` are saved
    names not written. `notes` are sentences for people: ties, left-out entries, missing tokenizers and the like.
    """

    checkpoint: Path
    output: Path
    format: str
    world_size: int
    dry_run: bool
    num_tensors: int
    num_bytes: int
    weight_files: tuple[str, ...]
    side_files: tuple[str, ...]
    dtypes: dict[str, int]
    casts: dict[str, int]
    renamed: dict[str, str]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]


def merge(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: DTypeChoice = "auto",
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    dry_run: bool = False,
    world_size: int | None = None,
    config: str | os.PathLike[str] | None = None,
    weights_only: bool = False,
    unexpected: Unexpected = "error",
    checksum: bool = True,
    check_replicas: bool = False,
    shard_order: DealOrder | None = None,
    reduce_partial: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> MergeReport:
    """Merges a sharded checkpoint into a Hugging Face model directory.

    Args:
        checkpoint: The folder with the per-rank files, or one near it.
        output: The directory to make. It must not exist, or be empty, unless `overwrite`.
        dtype: What floating tensors are cast to. "auto" is what config.json states, else "keep": nothing is cast.
            Integers and bools never are, nor what the architecture keeps in float32.
        max_shard_size: The most bytes of tensor data per output file, as a number or as "5GB".
        overwrite: Whether a model that is at `output` is replaced, as a whole.
        dry_run: Check all that headers tell, the target and its room, and plan; read and write no weights.
        world_size: Which set of rank files is meant, where the folder holds several.
        config: The folder with config.json and the tokenizer, where it is not `huggingface/` in the checkpoint.
        weights_only: Merge without a config, and without checking names and shapes against an architecture.
        unexpected: What to do with tensors that the architecture does not have.
        checksum: Whether the CRC-32 of all that is copied is verified.
        check_replicas: Whether replicas are read and compared in full, not only by their recorded CRC-32.
        shard_order: How pieces were dealt along mesh axes whose ranks do not ascend.
        reduce_partial: Whether a tensor that was saved before its reduction over the ranks (a `Partial` placement) is
            reduced now, as the placement says.
        workers: How many threads copy.
        progress: Called with (bytes written so far, bytes in all), from any thread, one call at a time.

    Raises:
        MergerError: With all that is wrong with the checkpoint, the model, the target or the options. Nothing is left
            at the target then that was not there before.
    """
    limit = _checked_options(dtype, unexpected, max_shard_size, workers)
    source = read_checkpoint(
        Path(checkpoint), world_size=world_size, shard_order=shard_order, reduce_partial=reduce_partial
    )
    config_dir = None if weights_only else Path(config) if config is not None else source.config_dir
    target = Path(output)
    # The folder of the config is the checkpoint's, and not to be replaced, whether or not this merge reads it.
    read_from = tuple(path for path in (source.path, source.config_dir, config_dir) if path is not None)
    with SourceReader() as reader:
        faults = Faults()
        with faults:
            check_target(target, overwrite=overwrite, sources=read_from)
        with faults:
            _check_bytes(reader, source, in_full=check_replicas)
        architecture = None
        with faults:
            architecture = None if weights_only else expected_architecture(_required(config_dir, source))
        faults.raise_all()
        outputs = choose_outputs(
            source.tensors,
            architecture,
            dtype=_target_dtype(dtype, architecture),
            unexpected=unexpected,
            are_equal=lambda first, other: _are_equal(reader, first, other),
        )
    plan = plan_output(
        outputs.tensors, max_shard_size=limit, num_parameters=_num_parameters(outputs.tensors, architecture)
    )
    side_files, replaced, notes = _plan_side_files(config_dir, target, outputs)
    notes = (*source.notes, *outputs.notes, *notes)
    if dry_run:
        check_room(target, plan_bytes(plan) + side_files.num_bytes)
    else:
        with published(target, plan_bytes(plan) + side_files.num_bytes, overwrite=overwrite) as staging:
            written = write_plan(
                plan,
                staging,
                check_sums=checksum,
                workers=workers or min(_MAX_DEFAULT_WORKERS, os.cpu_count() or 1),
                progress=_counter(plan, progress),
            )
            copy_side_files(side_files, staging, replaced=replaced)
            check_written(plan, staging)
        notes += tuple(
            f"{name}: {count} values are beyond the range of the type they were cast to and became infinite"
            for name, count in sorted(written.overflows.items())
        )
    return MergeReport(
        checkpoint=source.path,
        output=target,
        format=source.format,
        world_size=source.world_size,
        dry_run=dry_run,
        num_tensors=len(outputs.tensors),
        num_bytes=plan.total_size,
        weight_files=tuple(file.name for file in plan.files),
        side_files=tuple(file.relative_path for file in side_files.files),
        dtypes=dict(sorted(Counter(tensor.dtype.name for tensor in outputs.tensors).items())),
        casts=dict(outputs.casts),
        renamed=dict(outputs.renamed),
        dropped=outputs.dropped,
        notes=notes,
    )


def _checked_options(dtype: str, unexpected: str, max_shard_size: int | str, workers: int | None) -> int:
    """The size limit in bytes; raises what is wrong with the options that have no meaning of their own."""
    problems = [
        Problem("bad-option", name, f"{value!r} is none of {', '.join(choices)}")
        for name, value, choices in (
            ("dtype", dtype, get_args(DTypeChoice)),
            ("unexpected", unexpected, get_args(Unexpected)),
        )
        if value not in choices
    ]
    if workers is not None and workers < 1:
        problems.append(Problem("bad-option", "workers", f"{workers} is no positive number"))
    limit = 0
    try:
        limit = parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
        if limit < 1:
            problems.append(Problem("bad-option", "max_shard_size", f"{limit} is no positive number of bytes"))
    except ValueError as error:
        problems.append(Problem("bad-option", "max_shard_size", str(error)))
    if problems:
        raise MergerError(problems)
    return limit


def plan_bytes(plan: Plan) -> int:
    """How many bytes all files of a plan take."""
    return sum(file.num_bytes for file in plan.files) + len(plan.index or b"")


def _check_bytes(reader: SourceReader, source: Checkpoint, *, in_full: bool) -> None:
    """Raises all that is wrong with the checkpoint, and what only its bytes can tell: where replicas differ."""
    problems = [problem for problem in source.problems if problem.kind != "replicas-differ"]
    at_fault = {problem.where.rpartition(": ")[2] for problem in problems}
    for tensor in source.tensors.values():
        if tensor.fqn in at_fault:
            continue
        for stored in in_files(tensor):
            problems += differing_replicas(reader, stored, replica_pairs(stored, in_full=in_full))
    if problems:
        raise CheckpointError(limit_problems(problems))


def _required(config_dir: Path | None, source: Checkpoint) -> Path:
    if config_dir is None:
        raise ModelError(
            Problem(
                "no-config",
                str(source.path),
                "has no huggingface/ folder with config.json; give the folder of the base model with --config DIR, "
                "or merge the weights alone with --weights-only",
            )
        )
    return config_dir


def _target_dtype(choice: DTypeChoice, architecture: Architecture | None) -> str | None:
    if choice == "keep":
        return None
    if choice == "auto":
        return None if architecture is None else architecture.dtype
    return choice


def _num_parameters(tensors: Sequence[OutputTensor], architecture: Architecture | None) -> int | None:
    """How many elements are parameters, as the index of a model states it; None where the architecture is not known."""
    if architecture is None:
        return None
    return sum(prod(tensor.source.shape) for tensor in tensors if tensor.name not in architecture.buffers)


def _are_equal(reader: SourceReader, first: StoredTensor, other: StoredTensor) -> bool:
    if (first.shape, first.dtype) != (other.shape, other.dtype):
        return False
    return same_records(first, other) or first_difference(reader, first, other) is None


def _plan_side_files(
    config_dir: Path | None, target: Path, outputs: Outputs
) -> tuple[SideFiles, dict[str, bytes], tuple[str, ...]]:
    """What lies beside the weights, the new bytes of config.json, and what is to be said of it."""
    if config_dir is None:
        return SideFiles((), (), has_tokenizer=False, problems=()), {}, ()
    side_files = plan_side_files(config_dir)
    # An output inside the folder of the config, or what a killed run left of one, is not part of what is copied.
    inside = {target.resolve(), *(target.resolve().parent / f".{target.name}.{end}" for end in ("merging", "replaced"))}
    beside = [
        file for file in side_files.files if inside.isdisjoint((config_dir / file.relative_path).absolute().parents)
    ]
    side_files = replace(side_files, files=tuple(beside))
    problems = [
        *side_files.problems,
        *(
            Problem(
                "target-is-source",
                str(config_dir / file.relative_path),
                f"is a link into {target}, which is to be replaced; put the file itself there",
            )
            for file in beside
            if file.source.is_relative_to(target.resolve())
        ),
    ]
    if problems:
        raise ModelError(problems)
    notes = []
    config = read_config(config_dir)
    changed = output_config(config, dtype=main_dtype(outputs.tensors), tied=False if outputs.ties_broken else None)
    replaced = {"config.json": config_bytes((config_dir / "config.json").read_bytes(), changed)}
    if changed != config:
        keys = sorted(key for key in {*config, *changed} if config.get(key) != changed.get(key))
        notes.append("config.json: " + ", ".join(f"{key} set to {_json(changed.get(key))}" for key in keys))
    if "quantization_config" in config and not any(_is_quantised(tensor) for tensor in outputs.tensors):
        notes.append(
            "config.json has a quantization_config, but no tensor is of a quantised type: readers may take the weights "
            "for what they are not; remove the entry if the model was not quantised"
        )
    if side_files.skipped:
        notes.append(f"left in {config_dir}: {', '.join(side_files.skipped)}")
    if not side_files.has_tokenizer:
        notes.append(f"{config_dir} holds no tokenizer, so the output has none; copy it from the base model")
    if (complaint := generation_config_complaint(config_dir)) is not None:
        notes.append(f"generation_config.json was copied as it is, but transformers objects to it: {complaint}")
    return side_files, replaced, tuple(notes)


def _is_quantised(tensor: OutputTensor) -> bool:
    return tensor.dtype.itemsize == 1 and tensor.dtype.name != "bool"


def _json(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else "a new value"  # noqa: PLR2004 - fits a line


def _counter(plan: Plan, progress: Progress | None) -> Callable[[int], None]:
    """Turns bytes just written, reported by any worker, into calls of `progress` with the sum."""
    done = 0
    lock = threading.Lock()

    def count(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            if progress is not None:
                progress(done, plan.total_size)

    return count
