"""Tied tensors: one tensor under several names, of which a Hugging Face file holds one.

Which names are tied is the model's to say (`Architecture.ties`), never a list of literal names. Two steps, because only
bytes can tell whether a tie still holds: `plan_ties` says what to compare, `settle_ties` what follows from it. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from merger.errors import Problem
from merger.huggingface.architecture import Architecture


@dataclass(frozen=True, slots=True)
class TiePlan:
    """What the names alone say about ties.

    `compare`: (canonical, alias) pairs that were both saved, whose bytes are to be compared. `absent`: pairs whose
    alias was not saved; the tie fills it on loading. `problems`: canonical tensors that are missing.
    """

    compare: tuple[tuple[str, str], ...]
    absent: tuple[tuple[str, str], ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class TieOutcome:
    """What to write.

    `drop`: aliases that are not written, being equal to the canonical tensor. `copies`: alias -> the tensor whose
    bytes are written under it too, though it was not saved. `broken`: `tie_word_embeddings` has to become false.
    `notes`: one sentence each, for the report.
    """

    drop: frozenset[str]
    copies: dict[str, str]
    broken: bool
    notes: tuple[str, ...]


def plan_ties(architecture: Architecture, names: Collection[str]) -> TiePlan:
    """Compares the names that are there with the ties of the architecture."""
    compare: list[tuple[str, str]] = []
    absent: list[tuple[str, str]] = []
    problems: list[Problem] = []
    for canonical, *aliases in architecture.ties:
        there = [alias for alias in aliases if alias in names]
        if canonical in names:
            compare.extend((canonical, alias) for alias in there)
            absent.extend((canonical, alias) for alias in aliases if alias not in there)
        else:
            found = f", and has only {', '.join(there)}, which by config.json is tied to it" if there else ""
            message = (
                f"the checkpoint lacks this tensor of {architecture.class_name}{found}. If config.json is not that of "
                "the model that was trained, name the right one by --config DIR."
            )
            problems.append(Problem("missing-tied-tensor", canonical, message))
    return TiePlan(tuple(compare), tuple(absent), tuple(problems))


def settle_ties(plan: TiePlan, diverged: Collection[str], written: Mapping[str, str]) -> TieOutcome:
    """Says what to write, given the aliases whose bytes differ from those of their canonical tensor.

    `written` has the names that notes are to use for those of tensors that are written under another one.

    One switch, `tie_word_embeddings`, turns off all ties of a model. So one diverged alias has all names written: those
    that were saved as they are, and those that were not as copies of what the tie would have given them.
    """

    def said(name: str) -> str:
        return written.get(name, name)

    if not diverged:
        notes = [f"{said(alias)} equals {said(own)}, to which it is tied; written once" for own, alias in plan.compare]
        notes += [f"{said(alias)} was not saved; it is tied to {said(own)}" for own, alias in plan.absent]
        return TieOutcome(frozenset(alias for _, alias in plan.compare), {}, broken=False, notes=tuple(notes))
    notes = [
        f"{said(alias)} differs from {said(own)}, to which it was tied; both are written and tie_word_embeddings is "
        "set to false"
        for own, alias in plan.compare
        if alias in diverged
    ]
    notes += [f"{said(alias)} was not saved; it is written as a copy of {said(own)}" for own, alias in plan.absent]
    copies = {alias: canonical for canonical, alias in plan.absent}
    return TieOutcome(frozenset(), copies, broken=True, notes=tuple(notes))
