"""What a merge did: `MergeReport` for whoever called, merger_report.json beside the weights for whoever comes later.

The file says the same wherever the checkpoint lies and whenever it is merged: it holds neither times nor paths, but for
names relative to the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merger.adapters import LoraSummary
from merger.checkpoint import Checkpoint
from merger.errors import Problem, TargetError
from merger.flags import ELSEWHERE
from merger.huggingface.side_files import REPORT_NAME
from merger.operations import Operation
from merger.plan import Plan
from merger.planning import MergeOptions, PlannedMerge, checked_limit
from merger.tensors import Computation, SourceFile, StoredTensor, distinct_chunks, in_files
from merger.version import __version__

# Changes where a field gets another meaning; new fields may come at any time.
_REPORT_VERSION = 1
# What of a `MergeReport` is true of one run only.
_OF_ONE_RUN = ("checkpoint", "output", "dry_run")
# Packages whose release can change what is written: the arithmetic, the expected architecture, the re-reading.
_PACKAGES = ("torch", "transformers", "safetensors")


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """A file that was merged: `file` relative to the checkpoint, its rank, and its size in bytes.

    `recorded_crc32` stands for all its checksums as they were recorded when it was saved: the CRC-32 of the CRC-32s of
    its records, four little-endian bytes each, in their order in the file. It says which file this is, and costs no
    reading; None where none were recorded. `verified_bytes` is how much of its tensor data was read in full and had the
    recorded checksums: what was copied, and not replicas of it.
    """

    file: str
    rank: int | None
    num_bytes: int
    recorded_crc32: str | None
    verified_bytes: int


@dataclass(frozen=True, slots=True)
class ComputedSummary:
    """What made a tensor, or a part of it: the operation with its settings, and the saved names that it took."""

    operation: str
    settings: dict[str, Any]
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did, or with `dry_run` would do.

    `num_bytes` is that of all tensor data written; `dtypes` counts the tensors written by element type, `casts` those
    cast, by "float32 -> bfloat16", and `cast_names` names them. `renamed` maps saved names to written ones where they
    differ; `dropped` are saved names not written. `tied` maps names that are not written to the one that is written
    for them, `untied` those that are written although the architecture ties them. `value_head` names the tensors of a
    head for which the architecture has no place, in a file of their own. `converted` maps written names to the
    saved ones of which the tensor is made, where the hub has it in another shape. `computed` says of the written
    tensors that are no copies which operation made them of which saved ones; `lora` what adapters were found.
    `left_out` maps saved entries that are no weights to what they are, such as "int". `versions` are those of this
    package and of others on which the output depends, None where one is not installed; `options` what was asked for.
    `notes` are sentences for people: ties, left-out entries, missing tokenizers and the like.
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
    cast_names: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tied: dict[str, str] = dataclasses.field(default_factory=dict)
    untied: dict[str, str] = dataclasses.field(default_factory=dict)
    value_head: tuple[str, ...] = ()
    converted: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    computed: dict[str, tuple[ComputedSummary, ...]] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    lora: LoraSummary | None = None
    sources: tuple[SourceSummary, ...] = ()
    versions: dict[str, str | None] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def has_model(self) -> bool:
        """False where an adapter alone is written, with a value head beside it or without."""
        return self.num_tensors > len(self.value_head)


def merge_report(
    planned: PlannedMerge, options: MergeOptions, *, output: Path, dry_run: bool, checksum: bool
) -> MergeReport:
    """The report of a merge as planned; `checksum` says whether what is copied is verified."""
    source, outputs = planned.source, planned.outputs
    model = (*outputs.tensors, *outputs.value_head)
    cast_names: dict[str, list[str]] = {}
    for tensor in model:
        if tensor.dtype != tensor.source.dtype:
            cast_names.setdefault(f"{tensor.source.dtype} -> {tensor.dtype}", []).append(tensor.name)
    return MergeReport(
        checkpoint=source.path,
        output=output,
        format=source.format,
        world_size=source.world_size,
        dry_run=dry_run,
        num_tensors=len(model),
        num_bytes=planned.plan.total_size,
        lora=planned.lora,
        weight_files=tuple(file.name for file in planned.plan.files),
        side_files=tuple(file.relative_path for file in planned.side_files.files),
        dtypes=dict(sorted(Counter(tensor.dtype.name for tensor in model).items())),
        casts=dict(outputs.casts),
        renamed=dict(outputs.renamed),
        dropped=outputs.dropped,
        notes=planned.notes,
        cast_names={kind: tuple(names) for kind, names in cast_names.items()},
        tied=dict(outputs.tied),
        untied=dict(outputs.untied),
        value_head=tuple(tensor.name for tensor in outputs.value_head),
        converted=dict(outputs.converted),
        computed={tensor.name: made for tensor in model if (made := _computed(tensor.source))},
        left_out=dict(source.others),
        sources=source_summaries(source, planned.base, planned.plan if checksum and not dry_run else None),
        versions={"merger": __version__, **{name: _version(name) for name in _PACKAGES}},
        options={**_stated(options, planned), "checksum": checksum},
    )


def report_bytes(report: MergeReport) -> bytes:
    """The report as a file: JSON, the same bytes for the same checkpoint, options and versions."""
    fields = {name: value for name, value in dataclasses.asdict(report).items() if name not in _OF_ONE_RUN}
    first = {name: fields.pop(name) for name in ("versions", "options", "sources")}
    fields = {"report_version": _REPORT_VERSION, **first, **fields}
    return (json.dumps(fields, indent=2) + "\n").encode()


def read_report(folder: Path) -> dict[str, Any] | None:
    """What merger_report.json in `folder` says, None where there is none.

    Raises `TargetError` where it is no report.
    """
    try:
        fields = json.loads((folder / REPORT_NAME).read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or not isinstance(fields.get("options"), dict):
        message = 'is no JSON object with "options", as a merge writes it; delete it to go without'
        raise TargetError(Problem("bad-report", str(folder / REPORT_NAME), message))
    return fields


def _computed(tensor: StoredTensor) -> tuple[ComputedSummary, ...]:
    computations = {chunk.file: None for chunk in tensor.chunks if isinstance(chunk.file, Computation)}
    return tuple(
        ComputedSummary(
            type(one.operation).__name__.lower(),
            _settings(one.operation),
            tuple(dict.fromkeys(stored.fqn for part in one.inputs for stored in in_files(part))),
        )
        for one in computations
    )


def _settings(operation: Operation) -> dict[str, Any]:
    """What is data of an operation."""
    values = {field.name: getattr(operation, field.name) for field in dataclasses.fields(operation)}
    return {name: value for name, value in values.items() if not callable(value)}


def source_summaries(
    source: Checkpoint, base: Checkpoint | None = None, plan: Plan | None = None
) -> tuple[SourceSummary, ...]:
    """The files of a checkpoint, and of the base of its adapters.

    Of what `plan` copies from them it is told how much that verifies.
    """
    verified: dict[SourceFile, dict[int, int]] = {}
    written = (one.tensor.source for file in (plan.files if plan is not None else ()) for one in file.tensors)
    for chunk in (chunk for tensor in written for stored in in_files(tensor) for chunk in distinct_chunks(stored)):
        if chunk.record.crc32 is not None and isinstance(chunk.file, SourceFile):
            verified.setdefault(chunk.file, {})[chunk.record.byte_offset] = chunk.record.num_bytes
    return tuple(
        SourceSummary(
            file=_relative(file.path, source.path) or file.path.name,
            rank=file.rank,
            num_bytes=file.num_bytes,
            recorded_crc32=None if file.recorded_crc32 is None else f"{file.recorded_crc32:08x}",
            verified_bytes=sum(verified.get(file, {}).values()),
        )
        for file in (*source.files, *(() if base is None else base.files))
    )


def _stated(options: MergeOptions, planned: PlannedMerge) -> dict[str, Any]:
    """The options as JSON. `config` is a place in the checkpoint, "elsewhere", or None where none was read."""
    config_dir = planned.config_dir
    place = None if config_dir is None else _relative(config_dir, planned.source.path) or ELSEWHERE
    base = None if options.base is None else ELSEWHERE
    return {**dataclasses.asdict(options), "max_shard_size": checked_limit(options), "config": place, "base": base}


def _relative(path: Path, folder: Path) -> str | None:
    try:
        # Not resolve(): a link counts as where it lies.
        here, there = os.path.abspath(path), os.path.abspath(folder)  # noqa: PTH100 - see above
        return Path(here).relative_to(there).as_posix()
    except ValueError:
        return None


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
