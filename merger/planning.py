"""Plans a merge: checks all of a checkpoint and says what is written, before a byte is.

One function of a checkpoint and the options that decide the output, so that a merge can be planned again later and its
output held against it. Reads headers, and of the data only what a plan hangs on: whether replicas and ties agree.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from merger.adapters import LoraMode, LoraPlan, LoraSummary, check_options, plan_lora, writes_model
from merger.checkpoint import Checkpoint
from merger.checks import limit_problems, replica_pairs
from merger.comparing import differing_replicas, first_difference, same_records
from merger.errors import CheckpointError, Faults, MergerError, ModelError, Problem
from merger.huggingface.architecture import Architecture
from merger.huggingface.critics import with_hint
from merger.huggingface.expected import expected_architecture
from merger.huggingface.heads import has_value_head
from merger.huggingface.hub_names import Names
from merger.huggingface.lora_export import CONFIG_NAME as ADAPTER_CONFIG
from merger.huggingface.lora_export import WEIGHTS_NAME as ADAPTER_WEIGHTS
from merger.huggingface.outputs import NO_OUTPUTS, Outputs, Unexpected, choose_outputs
from merger.huggingface.side_files import SideFiles
from merger.plan import NOTHING, VALUE_HEAD_FILE, OutputTensor, Plan, parse_size, plan_output, with_file
from merger.reading import SourceReader
from merger.sharding import DealOrder
from merger.side_planning import plan_beside
from merger.sources import read_reference
from merger.tensors import StoredTensor, in_files

DTypeChoice: TypeAlias = Literal["auto", "keep", "float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """What decides the bytes of an output, as `merge` documents it. `config` is None for that of the checkpoint."""

    dtype: DTypeChoice
    max_shard_size: int | str
    unexpected: Unexpected
    weights_only: bool
    config: Path | None
    world_size: int | None
    shard_order: DealOrder | None
    reduce_partial: bool
    lora: LoraMode
    lora_alpha: float | None
    lora_adapter: str | None
    base: Path | None
    names: Names
    value_model: bool


@dataclass(frozen=True, slots=True)
class PlannedMerge:
    """What a merge of `source` writes.

    `config_dir` is where the config and the other side files come from, None where weights alone are merged; `replaced`
    are the new bytes of those side files that change. `notes` say what was decided, without any path, so that they are
    the same wherever the checkpoint lies. `base` has the weights on which the adapters of the source are, where it has
    adapters alone; `adapter` are the tensors of the adapter that is written beside the model, and `lora` says what was
    found. `small_files` are files that are written as they are, by place.
    """

    source: Checkpoint
    base: Checkpoint | None
    config_dir: Path | None
    outputs: Outputs
    plan: Plan
    side_files: SideFiles
    replaced: dict[str, bytes]
    small_files: dict[str, bytes]
    adapter: tuple[OutputTensor, ...]
    lora: LoraSummary | None
    notes: tuple[str, ...]

    @property
    def tensors(self) -> tuple[OutputTensor, ...]:
        """All that is written: the model's, those of a value head beside it, and the adapter's."""
        return (*self.outputs.tensors, *self.outputs.value_head, *self.adapter)

    @property
    def num_bytes(self) -> int:
        """How many bytes the planned files take."""
        weights = sum(file.num_bytes for file in self.plan.files) + len(self.plan.index or b"")
        return weights + self.side_files.num_bytes + sum(map(len, self.small_files.values()))


def checked_limit(options: MergeOptions) -> int:
    """The most bytes per weight file; raises what is wrong with the options that have no meaning of their own."""
    problems = [
        Problem("bad-option", name, f"{value!r} is none of {', '.join(choices)}")
        for name, value, choices in (
            ("dtype", options.dtype, get_args(DTypeChoice)),
            ("unexpected", options.unexpected, get_args(Unexpected)),
            ("lora", options.lora, get_args(LoraMode)),
            ("names", options.names, get_args(Names)),
        )
        if value not in choices
    ]
    if options.lora_alpha is not None and not 0 < options.lora_alpha < inf:
        problems.append(Problem("bad-option", "lora_alpha", f"{options.lora_alpha} is no positive number"))
    limit = 0
    try:
        size = options.max_shard_size
        limit = parse_size(size) if isinstance(size, str) else size
        if limit < 1:
            problems.append(Problem("bad-option", "max_shard_size", f"{limit} is no positive number of bytes"))
    except ValueError as error:
        problems.append(Problem("bad-option", "max_shard_size", str(error)))
    if problems:
        raise MergerError(problems)
    return limit


def check_source(
    source: Checkpoint, options: MergeOptions, *, check_replicas: bool, faults: Faults
) -> Architecture | None:
    """Checks all of `source`, and says what its config expects; None where weights or adapters alone are written.

    What is wrong is raised at once, together with what `faults` hold already. `check_replicas` reads replicas in full.
    """
    architecture = None
    with SourceReader() as reader:
        with faults:
            _check_bytes(reader, source, in_full=check_replicas)
        with faults:
            _check_lora_options(source, options, ())
        with faults:
            config_dir = _config_dir(source, options)
            if config_dir is not None:
                is_value_model = _is_value_model(source, options)
                architecture = expected_architecture(config_dir, is_value_model=is_value_model)
        faults.raise_all()
    if architecture is not None:
        # Once more, since some models have names of their own like those of adapters.
        _check_lora_options(source, options, architecture.shapes)
    return architecture


def _is_value_model(source: Checkpoint, options: MergeOptions) -> bool:
    """Whether the head is to be part of the model; one that lies beside it leaves the model what it was."""
    return options.value_model and not has_value_head(source.tensors)


def _check_lora_options(source: Checkpoint, options: MergeOptions, expected: Collection[str]) -> None:
    check_options(
        source, expected, mode=options.lora, alpha=options.lora_alpha, adapter=options.lora_adapter, base=options.base
    )


def plan_merge(
    source: Checkpoint, options: MergeOptions, architecture: Architecture | None, *, target: Path
) -> PlannedMerge:
    """Plans the merge of a `source` that was checked, and is of `architecture`, into `target`.

    Raises `ModelError` with all that does not fit the architecture.
    """
    config_dir = _config_dir(source, options)
    base = None if options.base is None else read_reference(options.base)
    lora = plan_lora(
        source,
        base,
        architecture,
        config_dir=options.config or source.config_dir,
        mode=options.lora,
        alpha=options.lora_alpha,
        adapter=options.lora_adapter,
    )
    plan, outputs = NOTHING, NO_OUTPUTS
    model = source.tensors if lora is None else lora.tensors
    if model is not None:
        outputs = _chosen_outputs(source, model, options, architecture)
        plan = plan_output(
            outputs.tensors,
            max_shard_size=checked_limit(options),
            num_parameters=outputs.num_parameters,
        )
    elif lora is not None and lora.value_head:
        head = tuple(OutputTensor(name, one.dtype, one) for name, one in sorted(lora.value_head.items()))
        outputs = replace(NO_OUTPUTS, value_head=head)
    if outputs.value_head:
        plan = with_file(plan, VALUE_HEAD_FILE, outputs.value_head)
    value_class = architecture.class_name if architecture is not None and _is_value_model(source, options) else None
    side_files, replaced, notes = plan_beside(
        config_dir, target, outputs, value_class=value_class, has_lora=lora is not None
    )
    notes = (*source.notes, *(() if lora is None else lora.notes), *outputs.notes, *notes)
    adapter = None if lora is None else lora.adapter
    if lora is not None and adapter is not None and options.dtype in ("float32", "float16", "bfloat16"):
        kept = "the adapter is in the types in which it was saved"
        if lora.value_head:
            kept = "the adapter and the value head are in the types in which they were saved"
        notes = (*notes, f"{kept}: --dtype is for the model")
    exported = tuple(
        OutputTensor(n, tensor.dtype, tensor) for n, tensor in (adapter.tensors if adapter else {}).items()
    )
    return PlannedMerge(
        source=source,
        base=base,
        config_dir=config_dir,
        outputs=outputs if lora is None else _by_saved_names(outputs, lora),
        plan=with_file(plan, ADAPTER_WEIGHTS, exported) if exported else plan,
        side_files=side_files,
        replaced=replaced,
        small_files={ADAPTER_CONFIG: adapter.config} if adapter is not None else {},
        adapter=exported,
        lora=None if lora is None else lora.summary,
        notes=notes,
    )


def _chosen_outputs(
    source: Checkpoint,
    stored: Mapping[str, StoredTensor],
    options: MergeOptions,
    architecture: Architecture | None,
) -> Outputs:
    """What is written of the tensors `stored`; raises `ModelError`, with the hint for critics where it helps."""
    try:
        with SourceReader() as reader:
            return choose_outputs(
                stored,
                architecture,
                dtype=_target_dtype(options.dtype, architecture),
                unexpected=options.unexpected,
                are_equal=lambda first, other: _are_equal(reader, first, other),
                naming=options.names,
            )
    except ModelError as error:
        config_dir = _config_dir(source, options)
        # Where a head lies beside the model, or the flag was given, it changes nothing.
        if config_dir is None or options.value_model or has_value_head(source.tensors):
            raise
        raise with_hint(error, stored, config_dir) from None


def _by_saved_names(outputs: Outputs, lora: LoraPlan) -> Outputs:
    """What was chosen of a model's tensors, told by the names under which these were saved."""
    written = {tensor.name for tensor in (*outputs.tensors, *outputs.value_head)}
    renamed = {
        saved: name
        for own, saved in lora.saved_as.items()
        if (name := outputs.renamed.get(own, own)) in written and name != saved
    }
    dropped = (*lora.dropped, *(lora.saved_as.get(name, name) for name in outputs.dropped))
    converted = {name: tuple(lora.saved_as.get(own, own) for own in made) for name, made in outputs.converted.items()}
    return replace(outputs, renamed=renamed, dropped=dropped, converted=converted)


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


def _config_dir(source: Checkpoint, options: MergeOptions) -> Path | None:
    """The folder with config.json and what else lies beside the weights; None where no whole model is written."""
    if options.weights_only or not writes_model(source, options.lora, options.base):
        return None
    config_dir = options.config or source.config_dir or options.base
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


def _are_equal(reader: SourceReader, first: StoredTensor, other: StoredTensor) -> bool:
    if (first.shape, first.dtype) != (other.shape, other.dtype):
        return False
    return same_records(first, other) or first_difference(reader, first, other) is None
