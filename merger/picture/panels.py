"""What a picture shows, before anything has a place on paper: meshes, and a panel for each tensor or family of them.

Pure: from a `Checkpoint` to frozen data. Tensors that differ only in the numbers in their names share a panel.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from merger.checkpoint import Checkpoint
from merger.checks import limit_problems, range_text, ranks_text, whole_on_text
from merger.picture.looks import Look, by_tensor, everything_in, looks_of, lost_ranks
from merger.picture.names import Pattern, joint_name, pattern_of
from merger.picture.regions import BROKEN, Division, coarsen, dims_drawn, divide
from merger.sharding import Mesh

# What a browser still scrolls with ease. A region takes some 150 bytes and a panel a few kilobytes beside them, so that
# the file stays under 10 MB whatever the checkpoint; a model of like layers has some 20 panels.
MAX_PANELS = 160
MAX_REGIONS = 256
# Problems listed under one panel, and holes named in one problem; the report lists more.
_MAX_LISTED = 3


@dataclass(frozen=True, slots=True)
class Panel:
    """A tensor, or `num_tensors` of them that are alike in all but the numbers in their names.

    `division` is None where the tensor is cut too finely to be drawn. `meshes` are indices into the picture's.
    """

    name: str
    num_tensors: int
    dtype: str
    shape: tuple[int, ...]
    placements: str
    meshes: tuple[int, ...]
    division: Division | None
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def is_broken(self) -> bool:
        """Whether something in it is red."""
        regions = self.division.regions if self.division else ()
        return bool(self.problems) or any(region.status in BROKEN for region in regions)


@dataclass(frozen=True, slots=True)
class MeshPanel:
    """A device mesh and how many tensors lie on it."""

    mesh: Mesh
    num_tensors: int


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is drawn.

    `owner_kind` is "rank" or "file", `owners` the numbers of all of them and `owner_names` the names of files; `lost`
    are the ranks without a file of their own. Tensors are left out that match no pattern (`num_unmatched`), or for
    which there is no room (`num_left_out`). `problems` are those of no one tensor.
    """

    title: str
    facts: tuple[str, ...]
    owner_kind: str
    owners: range
    owner_names: tuple[str, ...]
    lost: frozenset[int]
    meshes: tuple[MeshPanel, ...]
    panels: tuple[Panel, ...]
    num_unmatched: int
    num_left_out: int
    problems: tuple[str, ...]


def picture_of(source: Checkpoint, *, tensors: str | None = None) -> Picture:
    """What there is to draw of a checkpoint: what is broken first, then the rest in the order of its saving.

    `tensors` is a shell pattern of the names to draw.
    """
    everything = everything_in(source)
    wanted = {fqn: one for fqn, one in everything.items() if tensors is None or fnmatchcase(fqn, tensors)}
    about, general = by_tensor(source.problems, everything)
    counts: Counter[Mesh] = Counter(mesh for one in everything.values() if one.layout for mesh in one.layout.meshes)
    meshes = {mesh: index for index, (mesh, _) in enumerate(counts.most_common())}
    # A folder of which no file could be read is one of rank files: a model directory would have been refused.
    has_ranks = all(file.rank is not None for file in source.files)
    groups = _groups(looks_of(source, wanted, meshes, about))
    if not source.problems:
        # Nothing is broken, and so nothing comes before what was saved first.
        groups = groups[:MAX_PANELS]
    num_ranks = source.world_size if has_ranks else 0
    panels = [_panel(pattern, numbers, look, num_ranks) for pattern, numbers, look in groups]
    drawn = tuple(sorted(panels, key=lambda panel: not panel.is_broken)[:MAX_PANELS])
    return Picture(
        title="/".join(source.path.absolute().parts[1:][-2:]),
        facts=_facts(source, len(everything), has_ranks=has_ranks),
        owner_kind="rank" if has_ranks else "file",
        owners=range(source.world_size) if has_ranks else range(1, len(source.files) + 1),
        owner_names=() if has_ranks else tuple(file.path.name for file in source.files),
        lost=lost_ranks(source) if has_ranks else frozenset(),
        meshes=tuple(MeshPanel(mesh, count) for mesh, count in counts.most_common()),
        panels=drawn,
        num_unmatched=len(everything) - len(wanted),
        num_left_out=len(wanted) - sum(panel.num_tensors for panel in drawn),
        problems=tuple(map(str, limit_problems(general))),
    )


def _facts(source: Checkpoint, num_tensors: int, *, has_ranks: bool) -> tuple[str, ...]:
    num_owners, kind = (source.world_size, "rank") if has_ranks else (len(source.files), "file")
    return (
        source.format,
        _counted(num_owners, kind),
        _counted(num_tensors, "tensor"),
        _counted(len(source.problems), "fault") if source.problems else "no fault found",
    )


def _groups(looks: Mapping[str, Look]) -> list[tuple[Pattern, list[tuple[int, ...]], Look]]:
    """The tensors of one pattern and one look, by the numbers in their names; in the order of their saving."""
    groups: dict[tuple[Pattern, Look], list[tuple[int, ...]]] = defaultdict(list)
    for fqn, look in looks.items():
        pattern, numbers = pattern_of(fqn)
        groups[pattern, look].append(numbers)
    return [(pattern, numbers, look) for (pattern, look), numbers in groups.items()]


def _panel(pattern: Pattern, numbers: Sequence[tuple[int, ...]], look: Look, num_ranks: int) -> Panel:
    """`num_ranks` is 0 where tensors lie in files of no rank."""
    exact = divide(
        look.shape,
        look.pieces,
        owed=look.owed,
        differing=look.differing,
        is_told=look.is_told,
        is_computed=look.is_computed,
    )
    division = None if exact is None else coarsen(exact, MAX_REGIONS)
    name, num_names = joint_name(pattern, numbers)
    notes = [] if num_names == len(numbers) else [f"{len(numbers):,} of the {num_names:,} that the name may stand for"]
    notes += _shape_notes(look.shape, division)
    problems = list(look.problems[:_MAX_LISTED])
    if len(look.problems) > _MAX_LISTED:
        problems.append(f"and {len(look.problems) - _MAX_LISTED} more")
    if exact is not None and division is not None:
        if len(exact.regions) > len(division.regions):
            notes.append(f"{len(exact.regions):,} pieces, of which neighbours are joined")
        if not problems:
            problems += _holes(exact)
        without = {rank for region in exact.regions if region.status == "lacking" for rank in region.owed_by}
        if without:
            notes.append(f"{ranks_text(without)} should hold a replica too")
    if look.empty_owners:
        notes.append(f"{ranks_text(look.empty_owners)}: an empty piece")
    holders = {*(owner for owner, _ in look.pieces), *(one.rank for one in look.owed)}
    return Panel(
        name=name,
        num_tensors=len(numbers),
        dtype=look.dtype,
        shape=look.shape,
        placements=look.placements or (whole_on_text(holders, num_ranks) if num_ranks else ""),
        meshes=look.meshes,
        division=division,
        notes=tuple(notes),
        problems=tuple(problems),
    )


def _shape_notes(shape: tuple[int, ...], division: Division | None) -> list[str]:
    if division is None:
        return ["cut too finely to be drawn"]
    if not shape:
        return ["no dims: one element"]
    if 0 in shape:
        return ["no elements"]
    if len(shape) <= 2:  # noqa: PLR2004 - as many as paper has
        return []
    rows, columns = dims_drawn(shape, division)
    return [f"drawn flat: rows are dim {rows[0]}, columns dims {' x '.join(map(str, columns))}"]


def _holes(division: Division) -> list[str]:
    """What no rank holds, of a tensor of which no problem speaks: the files of the ranks that held it are gone."""
    holes = [region for region in division.regions if region.status == "hole"]
    lines = [
        f"no rank holds {range_text(hole.offsets, hole.sizes)}"
        + (f", the piece of {ranks_text(hole.owed_by)}" if hole.owed_by else "")
        for hole in holes[:_MAX_LISTED]
    ]
    return lines + ([f"and {len(holes) - _MAX_LISTED} more such pieces"] if len(holes) > _MAX_LISTED else [])


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
