"""What `save_pretrained` makes of the names and shapes in memory, found by letting transformers do it without data.

transformers 5 holds some models otherwise than their files do (experts in one tensor, projections joined, prefixes
renamed) and reverts that when it saves. Its own reversal runs here on tensors of the meta device, under the eyes of
`recording`; no table of models or names is kept. What is no movement of data is left to the reversal itself, which then
runs on the tensors of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from merger.huggingface.architecture import Architecture, HubLayout
from merger.huggingface.movements import Movement, sources, stored, stored_name
from merger.huggingface.recording import Notes, recording, storage_identity
from merger.plan import Block

if TYPE_CHECKING:
    import torch

    Revert: TypeAlias = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]


class NotReversibleError(Exception):
    """The reversal failed, or does what cannot be done again on the tensors of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Reversal:
    """The tensors that `save_pretrained` writes, in its order, and those of them that it keeps in one file."""

    movements: dict[str, Movement]
    blocks: dict[str, Block]


def hub_layout(model: Any, architecture: Architecture, state: Mapping[str, torch.Tensor]) -> HubLayout | None:  # noqa: ANN401 - untyped upstream
    """What `save_pretrained` makes of `model`, whose state on the meta device is `state`; None if it changes nothing.

    Raises `NotReversibleError`.
    """
    aliases = {alias for _, *others in architecture.ties for alias in others}
    tied = record_reversal(model, {name: tensor for name, tensor in state.items() if name not in aliases})
    untied = record_reversal(model, state) if aliases else tied
    if _is_unchanged(tied, [name for name in state if name not in aliases]) and _is_unchanged(untied, state):
        return None
    movements = {**untied.movements, **tied.movements}
    renamed = {own: name for name, movement in movements.items() if (own := stored_name(movement)) is not None}

    def carried(own: Iterable[str]) -> frozenset[str]:
        return frozenset(name for name, movement in movements.items() if set(sources(movement)) <= set(own))

    ties = [tuple(renamed[name] for name in group if name in renamed) for group in architecture.ties]
    on_hub = replace(
        architecture,
        shapes={name: movement.shape for name, movement in movements.items()},
        ties=tuple(tie for tie, group in zip(ties, architecture.ties, strict=True) if len({*tie}) == len(group)),
        keep_fp32=carried(architecture.keep_fp32),
        keep_fp32_in_float16=carried(architecture.keep_fp32_in_float16),
        buffers=carried(architecture.buffers),
    )
    return HubLayout(on_hub, tied.movements, untied.movements, {**untied.blocks, **tied.blocks})


def _is_unchanged(reversal: Reversal, names: Iterable[str]) -> bool:
    saved = [(name, stored_name(movement)) for name, movement in reversal.movements.items()]
    return saved == [(name, name) for name in names]


def record_reversal(model: Any, state: Mapping[str, torch.Tensor]) -> Reversal:  # noqa: ANN401 - untyped upstream
    """How the tensors that `save_pretrained` writes are made of those of `state`, a state dict on the meta device.

    With a transformers that knows no conversions they are the same. Raises `NotReversibleError`.
    """
    import torch

    revert = _reversal(model)
    # A new tensor for each name, since those of a tie are one.
    given = {name: torch.empty_like(tensor, device="meta", requires_grad=False) for name, tensor in state.items()}
    notes = Notes(given)
    try:
        with recording(notes):
            results = revert(given)
    except Exception as error:
        raise NotReversibleError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    movements = {name: notes.movement(tensor) for name, tensor in results.items()}
    made_of = {name: notes.sources(tensor) for name, tensor in results.items()}
    known = {
        name: _converted(name, revert, given, results, made_of) if movement is None else movement
        for name, movement in movements.items()
    }
    return Reversal(known, _blocks(results))


def _reversal(model: Any) -> Revert:  # noqa: ANN401 - untyped upstream
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5
        return dict

    def revert(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(revert_weight_conversion(model, dict(tensors)))

    return revert


def _converted(
    name: str,
    revert: Revert,
    given: Mapping[str, torch.Tensor],
    results: Mapping[str, torch.Tensor],
    made_of: Mapping[str, frozenset[str]],
) -> Movement:
    """A result that is no movement: the reversal, done on the tensors that belong together with those it is made of."""
    group = made_of[name]
    while more := frozenset().union(*(own for own in made_of.values() if own & group)) - group:
        group |= more
    inputs = [source for source in given if source in group]
    outputs = [result for result, own in made_of.items() if own & group]

    def convert(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return revert(dict(zip(inputs, tensors, strict=True)))[name]

    types = {tensor.dtype for tensor in (results[name], *(given[source] for source in inputs))}
    alone = revert({source: given[source] for source in inputs}) if inputs else {}
    if list(alone) != outputs or alone[name].shape != results[name].shape or len(types) > 1:
        reason = f"{name} cannot be told from {', '.join(inputs) or 'any tensor'} alone"
        raise NotReversibleError(reason)
    parts = tuple(stored(source, tuple(given[source].shape)) for source in inputs)
    return Movement("converted", tuple(results[name].shape), parts, (convert,))


def _blocks(results: Mapping[str, torch.Tensor]) -> dict[str, Block]:
    """`huggingface_hub.split_torch_state_dict_into_shards` keeps tensors over one storage together."""
    sharing: dict[int, list[str]] = {}
    for name, tensor in results.items():
        sharing.setdefault(storage_identity(tensor), []).append(name)
    blocks: dict[str, Block] = {}
    for names in sharing.values():
        if len(names) > 1:
            tensor = results[names[0]]
            block = Block(names[0], tensor.untyped_storage().nbytes() // tensor.element_size())
            blocks |= dict.fromkeys(names, block)
    return blocks
