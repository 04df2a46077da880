"""Under which names and shapes a checkpoint was saved, those in memory or those of the hub, and from one to the other.

Pure: it holds what `hub_layout.py` found against the tensors of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from merger.errors import ModelError, Problem
from merger.huggingface.architecture import Architecture, HubLayout
from merger.huggingface.movements import moved, sources, stored_name
from merger.huggingface.names import num_misfits
from merger.tensors import StoredTensor

# Which names and shapes to write: those that `save_pretrained` writes, or those that were saved.
Names: TypeAlias = Literal["hub", "as-is"]


@dataclass(frozen=True, slots=True)
class OnHub:
    """Tensors under the names of the hub, in the order of writing.

    `renamed` maps names before to names now where only they changed; `converted` names of tensors that were made of
    others to the names of those. `notes` are for the report.
    """

    tensors: dict[str, StoredTensor]
    renamed: dict[str, str]
    converted: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]


def saved_architecture(architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> Architecture:
    """The architecture under the names and shapes that those of a checkpoint fit best, in memory or on the hub.

    They may fit both equally, where conversions change neither: then they are those in memory, as trainers save them.
    """
    if architecture.hub is None:
        return architecture
    on_hub = architecture.hub.architecture
    return on_hub if num_misfits(on_hub, shapes) < num_misfits(architecture, shapes) else architecture


def check_known(architecture: Architecture) -> None:
    """Raises `ModelError` where the names of the hub are not known."""
    if architecture.no_hub is None:
        return
    message = (
        f"transformers cannot tell under which names and shapes {architecture.class_name} is saved "
        f"({architecture.no_hub}); keep those of the checkpoint by --names as-is"
    )
    raise ModelError(Problem("no-hub-names", "", message))


def renamed_on_hub(layout: HubLayout) -> dict[str, str]:
    """Names in memory, those of aliases too, to names on the hub, of all tensors of which only the name changes."""
    return {
        own: name
        for name, movement in {**layout.untied, **layout.tied}.items()
        if (own := stored_name(movement)) is not None and own != name
    }


def on_hub(layout: HubLayout, tensors: Mapping[str, StoredTensor], *, untied: bool) -> OnHub:
    """The tensors of a model in memory, as `save_pretrained` writes them; all others stay as they are, at the end.

    `untied` says that aliases of ties are there too. What is made of tensors that are not all there is left out. Raises
    `ModelError` where an additional tensor has the name of one on the hub, or one on the hub would be made of several
    types.
    """
    movements = {
        name: movement
        for name, movement in (layout.untied if untied else layout.tied).items()
        if tensors.keys() >= set(sources(movement))
    }
    known = {source for movement in movements.values() for source in sources(movement)}
    others = {name: tensor for name, tensor in tensors.items() if name not in known}
    problems = [
        Problem(
            "colliding-names",
            name,
            "is a tensor of its own in the checkpoint, and what another one is called on the hub; keep the names and "
            "shapes of the checkpoint by --names as-is, or leave additional tensors out by --unexpected drop",
        )
        for name in others
        if name in movements
    ]
    if problems:
        raise ModelError(problems)
    renamed = {
        own: name for name, movement in movements.items() if (own := stored_name(movement)) is not None and own != name
    }
    converted = {name: sources(movement) for name, movement in movements.items() if stored_name(movement) is None}
    return OnHub({**moved(movements, tensors), **others}, renamed, converted, _notes(renamed, converted))


def _notes(renamed: Mapping[str, str], converted: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    notes = []
    if renamed:
        own, name = next(iter(renamed.items()))
        notes.append(f"renamed as on the hub: {len(renamed)}, such as {own} -> {name}")
    if converted:
        name, (own, *_) = next(iter(converted.items()))
        count = len({source for names in converted.values() for source in names})
        tensors = "1 tensor" if count == 1 else f"{count} tensors"
        notes.append(f"in the shapes of the hub: {tensors} became {len(converted)}, such as {own} -> {name}")
    return tuple(notes)
