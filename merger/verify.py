"""Compares a sharded or merged checkpoint with a Hugging Face model directory, tensor by tensor, streaming."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from merger.adapters import plan_lora
from merger.checkpoint import Checkpoint
from merger.checks import check_cover, limit_problems, shape_text
from merger.errors import CheckpointError, MergerError, Problem
from merger.huggingface.architecture import Architecture, HubLayout
from merger.huggingface.expected import expected_architecture
from merger.huggingface.hub_names import on_hub, saved_architecture
from merger.huggingface.logits import LogitsComparison, compare_logits
from merger.huggingface.names import ignored_names, strip_wrappers
from merger.reading import SourceReader, read_bands
from merger.sharding import DealOrder
from merger.sources import read_pair
from merger.sources.safetensors_files import FORMAT
from merger.tensors import StoredTensor, as_real_pairs, bands, num_bytes

if TYPE_CHECKING:
    import torch

# How far logits may be apart. Those of the same weights in float32 are the same, or differ by 1e-5 where threads add in
# another order; those of weights that were rounded to 16 bits differ by 1e-2.
LOGITS_ATOL = 1e-3
# Elements compared at a time: in float64 on both sides this is some 50 MB.
_BAND_ELEMENTS = 1 << 20

Status: TypeAlias = Literal["equal", "close", "differs", "shape", "missing", "unexpected"]


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """How one tensor compares.

    "equal" is equal bit for bit, after rounding to the reference's element type where that is another one; "close" is
    within the tolerances; "missing" and "unexpected" are in the reference only and in the checkpoint only.
    `max_difference` is the largest absolute difference, None where there is none to be told; `detail` is for people.
    """

    name: str
    status: Status
    dtype: str | None
    reference_dtype: str | None
    max_difference: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All comparisons, in the order of the checkpoint, what only the reference has at the end.

    `has_model` is false for the output of a merge that writes an adapter alone. `options` are those of the merge that
    an output was held against: `config` is None where it is the checkpoint's own, and "elsewhere" where the output's
    stood in for one that was not given.
    """

    checkpoint: Path
    reference: Path
    comparisons: tuple[TensorComparison, ...]
    num_bytes: int
    notes: tuple[str, ...]
    logits: LogitsComparison | None = None
    has_model: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        """Whether every tensor is there on both sides, and it and what was computed are equal or close enough."""
        same = all(comparison.status in ("equal", "close") for comparison in self.comparisons)
        return same and (self.logits is None or self.logits.is_close)


def verify(
    checkpoint: str | os.PathLike[str],
    reference: str | os.PathLike[str],
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    world_size: int | None = None,
    shard_order: DealOrder | None = None,
    reduce_partial: bool = False,
    lora_alpha: float | None = None,
    workers: int | None = None,
    logits: bool = False,
    logits_atol: float = LOGITS_ATOL,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Compares `checkpoint` with `reference`; either is a sharded checkpoint or a Hugging Face model directory.

    A tensor is within the tolerances where |checkpoint - reference| <= atol + rtol * |reference| for every element. The
    checkpoint's values are first rounded to the reference's element type, where that is another floating one. Names are
    compared as a merge would write them, and tied names count as one. `world_size`, `shard_order` and `reduce_partial`
    are for whichever side is sharded, and `lora_alpha` for one with LoRA adapters of which no file states it: these are
    compared with the adapters folded in. `workers` is how many processes read the headers where ranks are many.
    With `logits`, both have to be model directories: both are run on a few tokens, in float32, and may differ by
    `logits_atol`. `progress` is called with (bytes compared so far, bytes in all). Raises `MergerError` where either
    side cannot be read or run.
    """
    source, target = read_pair(
        Path(checkpoint),
        Path(reference),
        world_size=world_size,
        shard_order=shard_order,
        reduce_partial=reduce_partial,
        workers=workers,
    )
    if problems := (*source.problems, *target.problems):
        raise CheckpointError(limit_problems(problems))
    if logits and (sides := [side.path for side in (source, target) if side.format != FORMAT]):
        message = f"{sides[0]} is no model directory, and nothing else can be run; merge it first"
        raise MergerError(Problem("bad-option", "logits", message))
    architecture, notes = _architecture(target.config_dir)
    theirs = _with_lora(target, architecture, lora_alpha)
    if target.layouts:
        reference_names = strip_wrappers(theirs, None if architecture is None else architecture.shapes)
        theirs = {reference_names[fqn]: tensor for fqn, tensor in theirs.items()}
    ours = _with_lora(source, architecture, lora_alpha)
    names = strip_wrappers(ours, {*theirs, *(architecture.shapes if architecture is not None else ())})
    ours = {names[fqn]: tensor for fqn, tensor in ours.items()}
    if architecture is not None and architecture.hub is not None:
        ours, theirs = _on_hub(architecture, architecture.hub, ours, theirs)
        architecture = architecture.hub.architecture
    ignored = set() if architecture is None else set(ignored_names(architecture, ours))
    canonical = _canonical_names(architecture)
    held_by_ties = {canonical[name]: name for name in ours if name in canonical}
    pairs: list[tuple[str, StoredTensor | None, StoredTensor | None]] = []
    for name, tensor in ours.items():
        in_reference = name if name in theirs else canonical.get(name, name)
        if in_reference in theirs or name not in ignored:
            pairs.append((name, tensor, theirs.get(in_reference)))
    seen = {name if name in theirs else canonical.get(name, name) for name in ours}
    for name, tensor in theirs.items():
        if name not in seen:
            # A name that is tied to one of ours has to hold what that holds.
            pairs.append((name, ours.get(held_by_ties.get(canonical.get(name, ""), "")), tensor))
    total, done = sum(num_bytes(tensor) for _, tensor, _ in pairs if tensor is not None), 0
    comparisons = []

    def count(at: int) -> None:
        if progress is not None:
            progress(done + at, total)

    with SourceReader() as reader:
        for name, own, other in pairs:
            comparisons.append(_compare(reader, name, own, other, atol=atol, rtol=rtol, count=count))
            done += num_bytes(own) if own is not None else 0
            count(0)
    size = sum(num_bytes(tensor) for tensor in ours.values())
    computed = compare_logits(source.path, target.path, tolerance=logits_atol) if logits else None
    return VerifyReport(source.path, target.path, tuple(comparisons), size, (*source.located, *notes), computed)


def _with_lora(side: Checkpoint, architecture: Architecture | None, alpha: float | None) -> Mapping[str, StoredTensor]:
    """The tensors of a side, of one with adapters on base weights those of the model with the adapters folded in."""
    lora = plan_lora(side, None, architecture, config_dir=None, mode="merge", alpha=alpha, adapter=None)
    return side.tensors if lora is None or lora.tensors is None else lora.tensors


def _architecture(config_dir: Path | None) -> tuple[Architecture | None, tuple[str, ...]]:
    """What the reference's config.json expects, for its ties; without it, names are compared as they are."""
    if config_dir is None:
        return None, ("the reference has no config.json, so ties are not known",)
    try:
        return expected_architecture(config_dir), ()
    except MergerError as error:
        return None, (f"the reference's architecture cannot be built, so ties are not known: {error}",)


def _on_hub(
    architecture: Architecture,
    layout: HubLayout,
    ours: dict[str, StoredTensor],
    theirs: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], Mapping[str, StoredTensor]]:
    """Both sides under the names and in the shapes of the hub, where only one of them has those, as a merge writes."""
    shapes = [{name: tensor.shape for name, tensor in side.items()} for side in (ours, theirs)]
    is_in_memory, is_other_in_memory = (saved_architecture(architecture, side) is architecture for side in shapes)
    if is_in_memory:
        ours = on_hub(layout, ours, untied=True).tensors
    if is_other_in_memory:
        theirs = on_hub(layout, theirs, untied=True).tensors
    return ours, theirs


def _canonical_names(architecture: Architecture | None) -> dict[str, str]:
    """Every tied name with the one under which a file holds the tensor."""
    ties = () if architecture is None else architecture.ties
    return {name: group[0] for group in ties for name in group}


def _compare(
    reader: SourceReader,
    name: str,
    ours: StoredTensor | None,
    theirs: StoredTensor | None,
    *,
    atol: float,
    rtol: float,
    count: Callable[[int], None],
) -> TensorComparison:
    """`count` is called with the number of bytes of `ours` compared so far."""
    import torch

    if theirs is None:
        assert ours is not None, "one of the two sides has it"
        detail = f"{shape_text(ours.shape)}, not in the reference"
        return TensorComparison(name, "unexpected", ours.dtype.name, None, None, detail)
    if ours is None:
        detail = f"{shape_text(theirs.shape)}, not in the checkpoint"
        return TensorComparison(name, "missing", None, theirs.dtype.name, None, detail)
    # As pairs of float64 is how a merge of weights alone writes complex128.
    if (ours.dtype.name, theirs.dtype.name) == ("complex128", "float64"):
        ours = as_real_pairs(ours)
    if (ours.dtype.name, theirs.dtype.name) == ("float64", "complex128"):
        theirs = as_real_pairs(theirs)
    dtypes = ours.dtype.name, theirs.dtype.name
    if ours.shape != theirs.shape:
        detail = f"shape {shape_text(ours.shape)}, the reference has {shape_text(theirs.shape)}"
        return TensorComparison(name, "shape", *dtypes, None, detail)
    castable = ours.dtype.is_floating and theirs.dtype.is_floating
    if ours.dtype != theirs.dtype and not castable:
        detail = f"is {dtypes[0]}, the reference is {dtypes[1]}"
        return TensorComparison(name, "differs", *dtypes, None, detail)
    equal, close, largest, compared = True, True, 0.0, 0
    for left, right in _paired_bands(reader, ours, theirs):
        compared += left.nbytes
        count(compared)
        rounded = left.to(right.dtype)
        if torch.equal(rounded.view(torch.uint8), right.view(torch.uint8)):
            continue
        equal = False
        band_close, band_largest = _distance(rounded, right, atol, rtol)
        close = close and band_close
        largest = max(largest, band_largest)
    rounding = "" if ours.dtype == theirs.dtype else f"{dtypes[0]} here, {dtypes[1]} in the reference; "
    if equal:
        return TensorComparison(name, "equal", *dtypes, 0.0, f"{rounding}equal after rounding" if rounding else "equal")
    detail = f"{rounding}largest difference {largest:.6g}"
    return TensorComparison(name, "close" if close else "differs", *dtypes, largest, detail)


def _distance(left: torch.Tensor, right: torch.Tensor, atol: float, rtol: float) -> tuple[bool, float]:
    """Whether all elements are within the tolerances (a NaN only to a NaN), and the largest difference."""
    import torch

    same = left == right
    if left.dtype.is_floating_point or left.dtype.is_complex:
        wide = torch.complex128 if left.dtype.is_complex else torch.float64
        first, second = left.to(wide), right.to(wide)
        same = (first == second) | (torch.isnan(first) & torch.isnan(second))
    else:
        # float64 does not hold every int64: elements are the same by their own type, and only then far or near.
        first, second = left.to(torch.float64), right.to(torch.float64)
    difference = torch.where(same, torch.zeros((), dtype=torch.float64), (first - second).abs().to(torch.float64))
    tolerated = atol + rtol * second.abs()
    within = same | ((difference <= tolerated) & (tolerated > 0))
    return bool(within.all()), float(difference.nan_to_num(nan=float("inf")).max())


def _paired_bands(
    reader: SourceReader, ours: StoredTensor, theirs: StoredTensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors in the same bands, flat, each in its own element type."""
    import torch

    assert not check_cover(ours), "checked on reading"
    elements = (_BAND_ELEMENTS * tensor.dtype.itemsize for tensor in (ours, theirs))
    ours_bytes, theirs_bytes = elements
    for _, (_, left), (_, right) in zip(
        bands(ours.shape, _BAND_ELEMENTS),
        read_bands(reader, ours, ours_bytes),
        read_bands(reader, theirs, theirs_bytes),
        strict=True,
    ):
        yield (
            torch.frombuffer(bytearray(left.tobytes()), dtype=getattr(torch, ours.dtype.name)),
            torch.frombuffer(bytearray(right.tobytes()), dtype=getattr(torch, theirs.dtype.name)),
        )
