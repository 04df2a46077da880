"""Holds an output against the checkpoint that it was merged from: plans the merge again, and compares, streaming.

Nothing is written and no model is built from the output. What the merge would write is what `planning.plan_merge` says,
so renames, casts, ties, drops and what is computed are all part of the comparison, which is bit for bit.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from merger.casting import cast_block
from merger.checkpoint import Checkpoint
from merger.checks import shape_text
from merger.comparing import element_texts, position_in
from merger.errors import Faults, Problem, TargetError
from merger.huggingface.expected import read_config
from merger.huggingface.hub_names import Names
from merger.huggingface.lora_export import WEIGHTS_NAME as ADAPTER_WEIGHTS
from merger.huggingface.outputs import Unexpected, main_dtype
from merger.huggingface.side_files import REPORT_NAME
from merger.plan import OutputTensor
from merger.planning import DTypeChoice, MergeOptions, PlannedMerge, check_source, plan_merge
from merger.reading import SourceReader, element_type, read_bands
from merger.report import ELSEWHERE, read_report, source_summaries
from merger.sharding import DealOrder
from merger.sources import read_checkpoint, read_reference
from merger.tensors import StoredTensor, bands
from merger.verify import TensorComparison, VerifyReport

# Elements compared at a time: at most 8 MB on either side, and as much again where they are cast.
_BAND_ELEMENTS = 1 << 20
# Files that a note lists.
_MAX_LISTED = 5


def verify_merge(
    output: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    world_size: int | None = None,
    shard_order: DealOrder | None = None,
    reduce_partial: bool = False,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Compares the model directory `output` with what a merge of `checkpoint` writes, bit for bit.

    The options of that merge are those in merger_report.json; where there is none, those that give the names and types
    that the output has. `config` is needed where that merge was given one that is not in the checkpoint (else the
    output's own stands in for it), and `base` where adapters alone were folded into that; `workers` is how many
    processes read the headers where ranks are many. In the report, the output is the `checkpoint` and what the merge
    writes is the `reference`. Side files that are others are told in its notes and are no difference, for they are
    there to be edited. Raises `MergerError` where the output cannot be read, or the checkpoint not be merged.
    """
    found = _read_output(Path(output))
    stated = read_report(found.path)
    own = {} if stated is None else stated["options"]
    source = read_checkpoint(
        Path(checkpoint),
        world_size=world_size if world_size is not None else own.get("world_size"),
        shard_order=shard_order or own.get("shard_order"),
        reduce_partial=reduce_partial or bool(own.get("reduce_partial")),
        workers=workers,
    )
    given = None if config is None else Path(config)
    base_dir = None if base is None else Path(base)
    if stated is None:
        guesses = _guesses(found, source, given, shard_order=shard_order, reduce_partial=reduce_partial)
        options = [replace(one, base=base_dir) for one in guesses]
    else:
        options = [_stated_options(own, found, source, given, base_dir)]
    architecture = check_source(source, options[0], check_replicas=False, faults=Faults())
    plans = [plan_merge(source, one, architecture, target=found.path) for one in options]
    distances = [_num_unlike(planned, found) for planned in plans]
    best = distances.index(min(distances))
    planned = plans[best]
    notes = [*source.located, _options_note(options[best], is_stated=stated is not None)]
    if stated is not None:
        notes += _source_notes(stated, source, planned.base)
    notes += _side_file_notes(planned, found.path)
    comparisons = _comparisons(planned, found, progress)
    return VerifyReport(
        found.path,
        source.path,
        tuple(comparisons),
        planned.plan.total_size,
        tuple(notes),
        has_model=bool(planned.outputs.tensors),
    )


def _read_output(output: Path) -> Checkpoint:
    """An output with its adapter: the tensors of both, whose names differ."""
    weights = output / ADAPTER_WEIGHTS
    if not weights.is_file():
        return read_reference(output)
    adapter = read_reference(weights.parent)
    if not any(output.glob("*.safetensors")):
        return replace(adapter, path=output)
    model = read_reference(output)
    return replace(model, tensors={**model.tensors, **adapter.tensors})


def _stated_options(
    own: dict[str, Any], found: Checkpoint, source: Checkpoint, given: Path | None, base: Path | None
) -> MergeOptions:
    names = [field.name for field in dataclasses.fields(MergeOptions)]
    if absent := [name for name in names if name not in own]:
        message = f"lacks the options {', '.join(absent)}, as of another version; delete it to go without"
        raise TargetError(Problem("bad-report", str(found.path / REPORT_NAME), message))
    place = own["config"]
    config = given
    if config is None and isinstance(place, str):
        config = found.path if place == ELSEWHERE else source.path / place
    if base is None and own["base"] is not None:
        message = "was folded into the weights of a base model; name the folder of that one by --base DIR"
        raise TargetError(Problem("no-base", str(found.path), message))
    return MergeOptions(**{**{name: own[name] for name in names}, "config": config, "base": base})


def _guesses(
    found: Checkpoint, source: Checkpoint, given: Path | None, *, shard_order: DealOrder | None, reduce_partial: bool
) -> list[MergeOptions]:
    """The options of the merges that may have given the output, as far as names and types depend on them."""
    config_dir = given or source.config_dir or found.config_dir
    main = main_dtype(OutputTensor(name, tensor.dtype, tensor) for name, tensor in found.tensors.items())
    dtypes: list[DTypeChoice] = ["keep", *(choice for choice in get_args(DTypeChoice) if choice == main)]
    unexpected_choices: tuple[Unexpected, ...] = ("drop", "keep")
    return [
        MergeOptions(
            dtype=dtype,
            max_shard_size="5GB",
            unexpected=unexpected,
            weights_only=found.config_dir is None,
            config=config_dir,
            world_size=source.world_size,
            shard_order=shard_order,
            reduce_partial=reduce_partial,
            lora="both",
            lora_alpha=None,
            lora_adapter=None,
            base=None,
            names=names,
            value_model=_is_value_model(found.config_dir) and not _is_value_model(config_dir),
        )
        for dtype, unexpected, names in product(dtypes, unexpected_choices, get_args(Names))
    ]


def _is_value_model(config_dir: Path | None) -> bool:
    classes = [] if config_dir is None else read_config(config_dir).get("architectures") or []
    return str(classes[:1]).endswith("ForTokenClassification']")


def _num_unlike(planned: PlannedMerge, found: Checkpoint) -> int:
    """How many tensors are on one side only, or of another type or shape."""
    expected = {(tensor.name, tensor.dtype, tensor.source.shape) for tensor in planned.tensors}
    return len(expected ^ {(name, tensor.dtype, tensor.shape) for name, tensor in found.tensors.items()})


def _options_note(options: MergeOptions, *, is_stated: bool) -> str:
    told = f"dtype {options.dtype}, " + ("weights only" if options.weights_only else f"unexpected {options.unexpected}")
    told += "" if options.names == "hub" else f", names {options.names}"
    if is_stated:
        return f"merged again as {REPORT_NAME} says: {told}"
    return f"there is no {REPORT_NAME}; by its names and types the output is of a merge with {told}"


def _source_notes(stated: dict[str, Any], source: Checkpoint, base: Checkpoint | None) -> list[str]:
    """What the report says of files that are not those that lie here."""
    told = stated.get("sources")
    if not isinstance(told, list):
        return []
    here = {one.file: (one.num_bytes, one.recorded_crc32) for one in source_summaries(source, base)}
    there = {
        str(one.get("file")): (one.get("num_bytes"), one.get("recorded_crc32")) for one in told if isinstance(one, dict)
    }
    others = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    if not others:
        return []
    return [f"{REPORT_NAME} tells of other files than lie here: {_listed(others)}"]


def _side_file_notes(planned: PlannedMerge, output: Path) -> list[str]:
    others = [
        name
        for name, content in planned.small_files.items()
        if not (output / name).is_file() or (output / name).read_bytes() != content
    ]
    for file in planned.side_files.files:
        if file.source.is_relative_to(output.resolve()):
            continue  # the output's own config stands in for one that is not here
        expected = planned.replaced.get(file.relative_path)
        path = output / file.relative_path
        if not path.is_file():
            others.append(f"{file.relative_path} (missing)")
        elif path.read_bytes() != (file.source.read_bytes() if expected is None else expected):
            others.append(file.relative_path)
    return [f"not as the merge wrote them: {_listed(others)}"] if others else []


def _comparisons(
    planned: PlannedMerge, found: Checkpoint, progress: Callable[[int, int], None] | None
) -> list[TensorComparison]:
    comparisons = []
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, planned.plan.total_size)

    with SourceReader() as reader:
        for expected in planned.tensors:
            there = found.tensors.get(expected.name)
            if there is None:
                detail = f"{shape_text(expected.source.shape)}, not in the output"
                comparisons.append(TensorComparison(expected.name, "missing", None, expected.dtype.name, None, detail))
            else:
                comparisons.append(_compare(reader, expected, there, count))
    names = {tensor.name for tensor in planned.tensors}
    for name, tensor in found.tensors.items():
        if name not in names:
            detail = f"{shape_text(tensor.shape)}, which the merge does not write"
            comparisons.append(TensorComparison(name, "unexpected", tensor.dtype.name, None, None, detail))
    return comparisons


def _compare(
    reader: SourceReader, expected: OutputTensor, found: StoredTensor, count: Callable[[int], None]
) -> TensorComparison:
    dtypes = found.dtype.name, expected.dtype.name
    shape = expected.source.shape
    if found.shape != shape:
        detail = f"shape {shape_text(found.shape)}, the merge gives {shape_text(shape)}"
        return TensorComparison(expected.name, "shape", *dtypes, None, detail)
    if found.dtype != expected.dtype:
        detail = f"is {dtypes[0]}, the merge gives {dtypes[1]}"
        return TensorComparison(expected.name, "differs", *dtypes, None, detail)
    unequal, total, first = _unequal_elements(reader, expected, found, count)
    if not unequal:
        return TensorComparison(expected.name, "equal", *dtypes, 0.0, "equal")
    detail = f"{unequal:,} of {total:,} elements differ, the first at {first}"
    return TensorComparison(expected.name, "differs", *dtypes, None, detail)


def _unequal_elements(
    reader: SourceReader, expected: OutputTensor, found: StoredTensor, count: Callable[[int], None]
) -> tuple[int, int, str]:
    """How many elements differ, of how many, and the first of them for people."""
    import numpy as np

    source, target = expected.source.dtype, expected.dtype
    elements = element_type(target.itemsize)
    unequal, total, first = 0, 0, ""
    for (offsets, sizes), (_, saved), (_, written) in zip(
        bands(found.shape, _BAND_ELEMENTS),
        read_bands(reader, expected.source, _BAND_ELEMENTS * source.itemsize),
        read_bands(reader, found, _BAND_ELEMENTS * target.itemsize),
        strict=True,
    ):
        ours = memoryview(bytearray(saved.tobytes()))
        if source != target:
            ours, _ = cast_block(ours, source, target)
        theirs = written.tobytes()
        total += written.size
        if ours != theirs:
            places = np.flatnonzero(np.frombuffer(ours, elements) != np.frombuffer(theirs, elements))
            if not unequal:
                place = int(places[0])
                span = slice(place * target.itemsize, (place + 1) * target.itemsize)
                values = element_texts(theirs[span], bytes(ours[span]), target)
                index = ", ".join(map(str, position_in(place, offsets, sizes)))
                first = f"[{index}]: {values[0]}, the merge gives {values[1]}"
            unequal += len(places)
        count(len(theirs))
    return unequal, total, first


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
