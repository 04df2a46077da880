"""The merge: reads a checkpoint, checks all of it, plans the output, writes it and makes it appear at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from merger.adapters import LoraMode
from merger.errors import Faults, MergerError
from merger.huggingface.hub_names import Names
from merger.huggingface.outputs import Unexpected
from merger.huggingface.side_files import REPORT_NAME, copy_side_files
from merger.plan import Plan
from merger.planning import DTypeChoice, MergeOptions, check_source, checked_limit, plan_merge
from merger.publish import check_room, check_target, published
from merger.report import MergeReport, merge_report, report_bytes
from merger.sharding import DealOrder
from merger.sources import read_checkpoint
from merger.workers import check_workers, num_workers
from merger.writer import WriteResult, check_written, write_bytes, write_plan

Progress: TypeAlias = Callable[[int, int], None]


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
    names: Names = "hub",
    value_model: bool = False,
    checksum: bool = True,
    check_replicas: bool = False,
    shard_order: DealOrder | None = None,
    reduce_partial: bool = False,
    lora: LoraMode = "both",
    lora_alpha: float | None = None,
    lora_adapter: str | None = None,
    base: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    report: bool = True,
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
        names: Whose names and shapes are written: "hub" for those that `save_pretrained` would write, which are not
            those in memory for all models; "as-is" for those of the checkpoint.
        value_model: Whether this is a critic, whatever config.json says: its class is then the one for token
            classification, with one label where no number is stated. A head that lies beside the model, as `v_head`,
            stays beside it.
        checksum: Whether the CRC-32 of all that is copied is verified.
        check_replicas: Whether replicas are read and compared in full, not only by their recorded CRC-32.
        shard_order: How pieces were dealt along mesh axes whose ranks do not ascend.
        reduce_partial: Whether a tensor that was saved before its reduction over the ranks (a `Partial` placement) is
            reduced now, as the placement says.
        lora: What to write of a checkpoint with LoRA adapters: the model with them folded in ("merge"), the adapter in
            lora_adapter/ ("adapter"), both, or the base weights as they are and the adapter ("base").
        lora_alpha: Alpha, where no adapter_config.json or lora_train_meta.json states it, or not the right one.
        lora_adapter: Which adapter is meant, where a checkpoint holds several.
        base: The model directory with the weights that a checkpoint of adapters alone is folded into.
        workers: How many threads copy, and how many processes read the headers where ranks are many.
        report: Whether merger_report.json is written beside the weights: what was merged, from what and how.
        progress: Called with (bytes written so far, bytes in all), from any thread, one call at a time.

    Raises:
        MergerError: With all that is wrong with the checkpoint, the model, the target or the options. Nothing is left
            at the target then that was not there before.
    """
    options = MergeOptions(
        dtype=dtype,
        max_shard_size=max_shard_size,
        unexpected=unexpected,
        weights_only=weights_only,
        config=None if config is None else Path(config),
        world_size=world_size,
        shard_order=shard_order,
        reduce_partial=reduce_partial,
        lora=lora,
        lora_alpha=lora_alpha,
        lora_adapter=lora_adapter,
        base=None if base is None else Path(base),
        names=names,
        value_model=value_model,
    )
    _check_options(options, workers)
    source = read_checkpoint(
        Path(checkpoint),
        world_size=world_size,
        shard_order=shard_order,
        reduce_partial=reduce_partial,
        workers=workers,
    )
    target = Path(output)
    # The folder of the config is the checkpoint's, and not to be replaced, whether or not this merge reads it.
    read_from = tuple(
        path for path in (source.path, source.config_dir, options.config, options.base) if path is not None
    )
    faults = Faults()
    with faults:
        check_target(target, overwrite=overwrite, sources=read_from)
    architecture = check_source(source, options, check_replicas=check_replicas, faults=faults)
    planned = plan_merge(source, options, architecture, target=target)
    done = merge_report(planned, options, output=target, dry_run=dry_run, checksum=checksum)
    num_bytes = planned.num_bytes + (len(report_bytes(done)) if report else 0)
    if dry_run:
        check_room(target, num_bytes)
    else:
        with published(target, num_bytes, overwrite=overwrite) as staging:
            written = write_plan(
                planned.plan,
                staging,
                check_sums=checksum,
                workers=num_workers(workers),
                progress=_counter(planned.plan, progress),
            )
            copy_side_files(planned.side_files, staging, replaced=planned.replaced)
            for name, content in planned.small_files.items():
                write_bytes(staging / name, content)
            check_written(planned.plan, staging)
            done = replace(done, notes=(*done.notes, *_overflow_notes(written)))
            if report:
                write_bytes(staging / REPORT_NAME, report_bytes(done))
    # How the folder was found is for whoever asked: it depends on the path given, and the report does not.
    return replace(done, notes=(*source.located, *done.notes))


def _check_options(options: MergeOptions, workers: int | None) -> None:
    faults = Faults()
    with faults:
        checked_limit(options)
    with faults:
        if problems := check_workers(workers):
            raise MergerError(problems)
    faults.raise_all()


def _overflow_notes(written: WriteResult) -> tuple[str, ...]:
    return tuple(
        f"{name}: {count} values are beyond the range of the type they were cast to and became infinite"
        for name, count in sorted(written.overflows.items())
    )


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
