"""Per-rank files of a training run: `model_world_size_{W}_rank_{R}.pt`, one `torch.save(model.state_dict())` each.

FSDP2, and FSDP1 with a device mesh, leave DTensors for what is sharded and plain tensors for the rest; FSDP1 without a
mesh leaves ShardedTensors. Reads headers and pickles only. Whatever is wrong with the set is gathered in the
checkpoint's problems, not raised.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from merger.checkpoint import Checkpoint, Fragments, Layout
from merger.checks import (
    MAX_LISTED,
    Held,
    check_agreement,
    check_census,
    check_cover,
    rank_of,
    ranks_text,
    replica_pairs,
)
from merger.errors import Problem, listed
from merger.sharding import (
    Cut,
    DealOrder,
    Mesh,
)
from merger.sources.fragments import gather_fragments
from merger.sources.partial import partial_axes, reduced, unreduced
from merger.sources.rank_part import Part, RankPart
from merger.sources.rank_reading import read_rank_parts
from merger.sources.rank_set import RankSet, beside_siblings, find_rank_set
from merger.sources.stages import find_stages
from merger.sources.unpickler import gc_paused
from merger.tensors import StoredTensor, in_files

FORMAT = "per-rank FSDP files"
# As torch's FSDP1 names them, and FairScale's before it.
_FLAT_PARAMETER = re.compile(r"_?flat_param(_[0-9]+)?")


def read_rank_files(
    folder: Path,
    *,
    world_size: int | None,
    shard_order: DealOrder | None,
    reduce_partial: bool,
    keep_fragments: bool,
    workers: int,
) -> Checkpoint:
    """Reads the headers of the set of rank files in `folder`, in at most `workers` processes.

    `world_size` picks a set where there are several; `shard_order` says how pieces were dealt where ranks do not ascend
    along a mesh axis (FAULTS S22); `reduce_partial` whether what was saved as summands is to be reduced (FAULTS L10).
    `keep_fragments` keeps what was found of each tensor even where there are problems.
    """
    # Of the many records that are made here hardly one is dropped: looking for cycles among them would only take time.
    with gc_paused():
        return _read_rank_set(
            folder,
            find_rank_set(folder, world_size),
            shard_order,
            reduce_partial=reduce_partial,
            keep_fragments=keep_fragments,
            workers=workers,
        )


def _read_rank_set(
    folder: Path,
    rank_set: RankSet,
    shard_order: DealOrder | None,
    *,
    reduce_partial: bool,
    keep_fragments: bool,
    workers: int,
) -> Checkpoint:
    problems = list(rank_set.problems)
    files: list[RankPart] = []
    for answer in read_rank_parts(rank_set.paths, shard_order, workers=workers):
        if isinstance(answer, RankPart):
            files.append(answer)
        else:
            problems += beside_siblings(answer, rank_set.paths)
    tensors: dict[str, StoredTensor] = {}
    layouts: dict[str, Layout] = {}
    others: dict[str, str] = {}
    if not problems:
        problems += [problem for file in files for problem in file.problems]
        problems += _check_flat_parameters(folder, files)
    if not problems:
        tensors, layouts, others, problems = _assemble(files, rank_set.world_size, reduce_partial=reduce_partial)
    if not problems and not tensors:
        problems.append(Problem("no-tensors", str(folder), "the rank files hold no tensor; the model was not saved"))
    fragments: dict[str, Fragments] = {}
    if problems and keep_fragments:
        # A file that another rank saved says nothing of what the rank in its name holds.
        own = [file for file in files if not file.problems]
        fragments = gather_fragments(own, rank_set.world_size, shard_order, reduce_partial=reduce_partial)
    config_dir = folder / "huggingface"
    return Checkpoint(
        path=folder,
        format=FORMAT,
        world_size=rank_set.world_size,
        files=tuple(part.file for part in files),
        tensors=tensors,
        layouts=layouts,
        others=others,
        config_dir=config_dir if config_dir.is_dir() else None,
        notes=_notes(files, others),
        problems=tuple(problems),
        fragments=fragments,
    )


def _check_flat_parameters(folder: Path, files: Sequence[RankPart]) -> list[Problem]:
    """Whether FSDP1 saved its own joined parameters (FAULTS L13): the files do not say which parameter lies where."""
    names = dict.fromkeys(
        fqn
        for file in files
        for fqn, part in file.parts.items()
        if part.held is not None and _FLAT_PARAMETER.fullmatch(fqn.rpartition(".")[2])
    )
    if not names:
        return []
    return [
        Problem(
            "flat-parameters",
            str(folder),
            f"holds flat parameters of FSDP1 ({listed(names, MAX_LISTED)}): under LOCAL_STATE_DICT every rank saves "
            "its slice of many parameters joined into one, and the files do not say where each of them lies; save "
            "again under FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT), or "
            "FULL_STATE_DICT",
        )
    ]


def _assemble(
    files: Sequence[RankPart], world_size: int, *, reduce_partial: bool
) -> tuple[dict[str, StoredTensor], dict[str, Layout], dict[str, str], list[Problem]]:
    """Joins what the ranks hold under each name into one tensor, or says why that cannot be."""
    by_name: dict[str, list[Part]] = defaultdict(list)
    for file in files:
        for fqn, part in file.parts.items():
            by_name[fqn].append(part)
    tensors: dict[str, StoredTensor] = {}
    layouts: dict[str, Layout] = {}
    others: dict[str, str] = {}
    problems: list[Problem] = []
    one_of_each = _OneOfEach()
    stages = find_stages((_held(parts) for parts in by_name.values()), world_size)
    for fqn, parts in by_name.items():
        held = [one_of_each(entry) for entry in _held(parts)]
        # Ranks that find the same fault say the same.
        unreadable = list(dict.fromkeys(part.problem for part in parts if part.problem and part.held is None))
        if unreadable:
            problems += unreadable
        elif not held:
            others[fqn] = parts[0].other
        elif faults := check_agreement(fqn, held) or check_census(fqn, held, world_size, stages):
            problems += faults
        else:
            tensors[fqn], faults = _joined(fqn, parts, held, reduce_partial=reduce_partial)
            if held[0].cut is not None:
                layouts[fqn] = Layout((), (), held[0].cut)
            elif held[0].mesh is not None:
                on = {id(one.mesh): one.mesh for one in held if one.mesh is not None}
                layouts[fqn] = Layout(tuple(on.values()), held[0].placements)
            problems += faults
    return tensors, layouts, others, problems


def _held(parts: Sequence[Part]) -> list[Held]:
    return [part.held for part in parts if part.held is not None]


def _joined(
    fqn: str, parts: Sequence[Part], held: Sequence[Held], *, reduce_partial: bool
) -> tuple[StoredTensor, list[Problem]]:
    """What the ranks hold under a name as one tensor, and what is wrong with it."""
    # A rank that has no tensor under the name is not of its mesh: the census would have missed it.
    chunks = tuple([chunk for part in parts for chunk in part.chunks])
    tensor = StoredTensor(fqn, held[0].dtype, held[0].shape, chunks)
    axes = partial_axes(held[0].placements)
    if axes and not reduce_partial:
        return tensor, [unreduced(tensor, held[0])]
    if faults := list(dict.fromkeys(part.problem for part in parts if part.problem)):
        return tensor, faults
    if axes:
        chunks_of = [part.chunks for part in parts if part.held is not None]
        tensor, faults = reduced(tensor, list(zip(held, chunks_of, strict=True)))
    for stored in in_files(tensor):
        faults += check_cover(stored) or _proven_differences(stored)
    return tensor, faults


class _OneOfEach:
    """What ranks say of tensors, with equal meshes and cuts as one object: what asks by identity is quick.

    Every file brings meshes and cuts of its own, and its tensors share what they say.
    """

    def __init__(self) -> None:
        self._by_mesh: dict[Mesh | None, Mesh | None] = {}
        self._by_cut: dict[Cut | None, Cut | None] = {}
        self._by_id: dict[int, Held] = {}

    def __call__(self, held: Held) -> Held:
        found = self._by_id.get(id(held))
        if found is None:
            mesh = self._by_mesh.setdefault(held.mesh, held.mesh)
            cut = self._by_cut.setdefault(held.cut, held.cut)
            found = self._by_id[id(held)] = replace(held, mesh=mesh, cut=cut)
        return found


def _proven_differences(tensor: StoredTensor) -> list[Problem]:
    """Replicas whose recorded checksums differ, found without reading data; the merge itself says where they do."""
    differ = [pair for pair in replica_pairs(tensor) if pair.verdict == "differ"]
    if not differ:
        return []
    first, ranks = rank_of(differ[0].first), [rank_of(pair.other) for pair in differ]
    return [
        Problem(
            "replicas-differ",
            tensor.fqn,
            f"should be the same on all ranks that hold it, but {ranks_text(ranks)} "
            f"{'has' if len(ranks) == 1 else 'have'} other bytes than rank {first} (by the checksums in the files)",
        )
    ]


def _notes(files: Sequence[RankPart], others: dict[str, str]) -> tuple[str, ...]:
    notes = []
    for is_legacy, how in ((False, "with checksums off"), (True, "in the old format of torch.save, without checksums")):
        unchecked = [part.file.rank for part in files if not part.checksums and part.is_legacy == is_legacy]
        if unchecked:
            ranks = ranks_text(rank for rank in unchecked if rank is not None)
            notes.append(f"{ranks}: saved {how}, so damage to the files cannot be noticed")
    if others:
        left_out = listed(f"{fqn} ({kind})" for fqn, kind in others.items())
        notes.append(f"entries that are no weights, left out: {left_out}")
    return tuple(notes)
