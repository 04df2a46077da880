"""Holds an output against the checkpoint that it was merged from: plans the merge again, and compares, streaming.

Nothing is written and no model is built from the output. What the merge would write is what `planning.plan_merge` says,
so renames, casts, ties, drops and what is computed are all part of the comparison, which is bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from merger.adapters import LoraMode, writes_model
from merger.checkpoint import Checkpoint
from merger.errors import Faults, MergerError, Problem, TargetError, listed
from merger.flags import ELSEWHERE, flags_of
from merger.huggingface.expected import read_config
from merger.huggingface.hub_names import Names
from merger.huggingface.lora import has_lora
from merger.huggingface.lora_export import WEIGHTS_NAME as ADAPTER_WEIGHTS
from merger.huggingface.outputs import Unexpected, main_dtype
from merger.huggingface.side_files import REPORT_NAME
from merger.plan import VALUE_HEAD_FILE, OutputTensor
from merger.plan_comparing import compare, compare_all
from merger.planning import DTypeChoice, MergeOptions, PlannedMerge, check_source, checked_limit, plan_merge
from merger.reading import SourceReader
from merger.report import read_report, source_summaries
from merger.sharding import DealOrder
from merger.sources import read_checkpoint, read_reference
from merger.verify import VerifyReport

# Files that a note lists.


def verify_merge(
    output: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    lora: LoraMode | None = None,
    lora_alpha: float | None = None,
    lora_adapter: str | None = None,
    world_size: int | None = None,
    shard_order: DealOrder | None = None,
    reduce_partial: bool = False,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Compares the model directory `output` with what a merge of `checkpoint` writes, bit for bit.

    The options of that merge are those in merger_report.json; where there is none, those that give the names and types
    that the output has. `config` is needed where that merge was given one that is not in the checkpoint (else the
    output's own stands in for it), and `base` where adapters alone were folded into that. `lora`, `lora_alpha` and
    `lora_adapter` are those of that merge, for an output without a report: without them `lora` is told from what the
    output holds, and the others are what they are by default. What a report states may be given again, and nothing
    else. `workers` is how many processes read the headers where ranks are many. In the report, the output is the
    `checkpoint` and what the merge writes is the `reference`. Side files that are others are told in its notes and are
    no difference, for they are there to be edited. Raises `MergerError` where the output cannot be read, or the
    checkpoint not be merged.
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
    asked = {"lora": lora, "lora_alpha": lora_alpha, "lora_adapter": lora_adapter}
    if stated is None:
        first, *others = (
            replace(one, base=base_dir, lora=lora or "both", lora_alpha=lora_alpha, lora_adapter=lora_adapter)
            for one in _guesses(
                found, source, given, world_size=world_size, shard_order=shard_order, reduce_partial=reduce_partial
            )
        )
    else:
        first, others = _stated_options(own, found, source, given, base_dir), []
        _check_asked(asked, first, found.path / REPORT_NAME)
    checked_limit(first)
    architecture = check_source(source, first, check_replicas=False, faults=Faults())
    with_lora = has_lora(source.tensors, () if architecture is None else architecture.shapes)
    mode = _told_mode(found, source, base_dir) if stated is None and lora is None and with_lora else first.lora
    options, planned = _nearest(
        [replace(one, lora=mode) for one in (first, *others)],
        found,
        lambda one: plan_merge(source, one, architecture, target=found.path),
    )
    untold: list[str] = []
    if stated is None and with_lora:
        untold = _untold(found, source, base_dir, planned, asked)
        if lora is None and options.lora == "both" and planned.outputs.tensors:
            # Both write the same names and types, so a weight has to tell which.
            as_base = replace(options, lora="base")
            instead = plan_merge(source, as_base, architecture, target=found.path)
            is_base = _is_nearer(instead, planned, found)
            if is_base:
                options, planned = as_base, instead
            elif is_base is None:
                untold.insert(0, "--lora base")
    comparisons = compare_all(planned, found, progress)
    notes = [*source.located, _options_note(options, is_stated=stated is not None)]
    if untold and any(one.status != "equal" for one in comparisons):
        notes.append(f"if that merge was given {' or '.join(untold)}, give it here too: the output does not tell it")
    if stated is not None:
        notes += _source_notes(stated, source, planned.base)
    notes += _side_file_notes(planned, found.path)
    return VerifyReport(
        found.path,
        source.path,
        tuple(comparisons),
        planned.plan.total_size,
        tuple(notes),
        has_model=bool(planned.outputs.tensors),
        options=_told_options(options, planned, given, found, world_size),
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


def _check_asked(asked: dict[str, Any], stated: MergeOptions, report: Path) -> None:
    """Raises `MergerError` with all that is given and is another than the report states."""
    problems = []
    for name, value in asked.items():
        own = getattr(stated, name)
        if value not in (None, own):
            states = f"states {own}" if own is not None else "states that none was given"
            message = f"{value} is given, and {report} {states}; leave it out, or delete that file to go without"
            problems.append(Problem("bad-option", name, message))
    if problems:
        raise MergerError(problems)


def _has_model(output: Path) -> bool:
    return any(path.name != VALUE_HEAD_FILE for path in output.glob("*.safetensors"))


def _told_mode(found: Checkpoint, source: Checkpoint, base: Path | None) -> LoraMode:
    """What was written of a checkpoint with LoRA, by what is there; "both" stands for "base" too."""
    if not writes_model(source, "both", base):
        return "both"
    if not (found.path / ADAPTER_WEIGHTS).is_file():
        return "merge"
    return "both" if _has_model(found.path) else "adapter"


def _untold(
    found: Checkpoint, source: Checkpoint, base: Path | None, planned: PlannedMerge, asked: dict[str, Any]
) -> list[str]:
    """The flags, not given here, that would change the weights and neither names nor types."""
    flags = []
    if not writes_model(source, "both", base) and _has_model(found.path):
        flags.append("--base DIR")
    if asked["lora_alpha"] is None and (planned.outputs.tensors or flags):
        flags.append("--lora-alpha N")
    if asked["lora_adapter"] is None and planned.lora is not None and len(planned.lora.adapters) > 1:
        flags.append("--lora-adapter NAME")
    return flags


def _nearest(
    guesses: list[MergeOptions], found: Checkpoint, plan: Callable[[MergeOptions], PlannedMerge]
) -> tuple[MergeOptions, PlannedMerge]:
    """The first of the options with which the fewest names, types and shapes are others than the output has."""
    plans: list[tuple[int, MergeOptions, PlannedMerge]] = []
    for options in guesses:
        try:
            planned = plan(options)
        except MergerError:
            if options.unexpected == "error" and len(guesses) > 1 and not options.weights_only:
                continue  # what else is wrong is so with the other choices too, and raised there
            raise
        plans.append((_num_unlike(planned, found), options, planned))
        if not plans[-1][0]:
            break
    _, options, planned = min(plans, key=lambda one: one[0])
    return options, planned


def _is_nearer(one: PlannedMerge, other: PlannedMerge, found: Checkpoint) -> bool | None:
    """Whether the output has the weights of `one` and not of `other`, by the smallest that tells; None if none does."""
    others = {tensor.name: tensor for tensor in other.outputs.tensors}
    with SourceReader() as reader:

        def is_equal(tensor: OutputTensor) -> bool:
            return compare(reader, tensor, found.tensors[tensor.name], lambda _: None).status == "equal"

        for tensor in sorted(one.outputs.tensors, key=lambda tensor: math.prod(tensor.source.shape)):
            rival = others.get(tensor.name)
            if rival is None or rival.source == tensor.source or tensor.name not in found.tensors:
                continue
            if (first := is_equal(tensor)) != is_equal(rival):
                return first
    return None


def _told_options(
    options: MergeOptions, planned: PlannedMerge, given: Path | None, found: Checkpoint, world_size: int | None
) -> dict[str, Any]:
    """The options as they are to be given to merge the same again."""
    config: Path | str | None = given
    if given is None and options.config is not None and planned.config_dir is not None:
        own = planned.source.config_dir
        if options.config == found.path:
            config = ELSEWHERE
        elif own is None or options.config.resolve() != own.resolve():
            config = options.config
    # What an adapter alone is made of hangs on no config, but a given one may tell what it is an adapter of.
    weights_only = options.weights_only and bool(planned.outputs.tensors)
    return {
        **dataclasses.asdict(options),
        "config": None if weights_only else config,
        "weights_only": weights_only,
        "world_size": world_size if world_size is not None else options.world_size,
    }


def _guesses(
    found: Checkpoint,
    source: Checkpoint,
    given: Path | None,
    *,
    world_size: int | None,
    shard_order: DealOrder | None,
    reduce_partial: bool,
) -> list[MergeOptions]:
    """The options of the merges that may have given the output, as far as names and types depend on them."""
    config_dir = given or source.config_dir or found.config_dir
    main = main_dtype(OutputTensor(name, tensor.dtype, tensor) for name, tensor in found.tensors.items())
    dtypes: list[DTypeChoice] = ["keep", *(choice for choice in get_args(DTypeChoice) if choice == main)]
    # Without a config nothing is unexpected; with one, "error" is what most merges are, unless it is one here.
    unexpected_choices: tuple[Unexpected, ...] = ("error",) if found.config_dir is None else ("error", "drop", "keep")
    return [
        MergeOptions(
            dtype=dtype,
            max_shard_size="5GB",
            unexpected=unexpected,
            weights_only=found.config_dir is None,
            config=config_dir,
            world_size=world_size,
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
    checked = "weights_only" if options.weights_only else "unexpected"
    shown = ("dtype", checked, "names", "value_model", "lora", "lora_alpha", "lora_adapter")
    flags = flags_of({name: getattr(options, name) for name in shown}, always=("dtype", "unexpected"))
    told = shlex.join(word for words in flags for word in words)
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
    return [f"{REPORT_NAME} tells of other files than lie here: {listed(others)}"]


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
    return [f"not as the merge wrote them: {listed(others)}"] if others else []
