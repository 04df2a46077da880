"""Who holds which elements of a tensor: its rectangle cut into regions, each of them held in one way.

Pure: integers in, integers out. A region is what is drawn in one colour; every element lies in exactly one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Literal, TypeAlias

from merger.checkpoint import Owed

# Ranges of the dims of a tensor, [offsets, offsets + sizes), in elements.
Rectangle: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

# "held" by one owner; "replicated" on several; "computed" from what its owners hold; "lacking": held, but not by all
# that should; and what is broken: "hole" (no owner), "overlap" (owners hold rectangles that overlap in part), "differ"
# (replicas of different bytes), "odd" (an owner contradicts the others), "misfit" (the local tensor of an owner has the
# wrong size), "untold" (what each has).
Status: TypeAlias = Literal[
    "held", "replicated", "computed", "lacking", "hole", "overlap", "differ", "odd", "misfit", "untold"
]

BROKEN: frozenset[Status] = frozenset({"hole", "overlap", "differ", "odd", "misfit", "untold"})

# The worst first: what a region is that stands for several.
_SEVERITY: tuple[Status, ...] = (
    *("untold", "hole", "misfit", "odd", "overlap", "differ", "lacking", "computed", "replicated", "held"),
)
# No layout of 4,096 ranks cuts a tensor into more; what does is damaged, and is not worth minutes of work.
_MAX_REGIONS = 65_536
_MAX_COVERED = 250_000


@dataclass(frozen=True, slots=True)
class Region:
    """The elements [offsets, offsets + sizes): who holds them (`owners`, ascending), and who should but does not.

    `num_pieces` regions of the exact division are joined in it.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    status: Status
    owners: tuple[int, ...]
    owed_by: tuple[int, ...] = ()
    num_pieces: int = 1


@dataclass(frozen=True, slots=True)
class Division:
    """A tensor cut along `edges` of each dim (ascending, from 0 to the size) into `regions`, in row-major order.

    A tensor without dims has one region and no edges; one without elements has none.
    """

    edges: tuple[tuple[int, ...], ...]
    regions: tuple[Region, ...]


def divide(
    shape: tuple[int, ...],
    pieces: Sequence[tuple[int, Rectangle]],
    *,
    owed: Sequence[Owed] = (),
    differing: Collection[Rectangle] = (),
    is_told: bool = True,
    is_computed: bool = False,
) -> Division | None:
    """Cuts a tensor of `shape` at every border of the `pieces` (owner, rectangle) and of what is `owed`.

    `differing` are the rectangles whose replicas differ; with `is_told` False nobody knows who holds what. The
    pieces of a tensor that `is_computed` are those of its inputs. None where there would be more regions than could be
    drawn.
    """
    if 0 in shape:
        return Division(tuple(tuple(sorted({0, size})) for size in shape), ())
    claims = [(owner, clipped, None) for owner, piece in pieces if (clipped := _clip(shape, piece)) is not None]
    debts = [
        (one.rank, clipped, one.reason)
        for one in owed
        if (clipped := _clip(shape, (one.offsets, one.sizes))) is not None
    ]
    edges = _edges(shape, [rectangle for _, rectangle, _ in (*claims, *debts)])
    if prod(len(cuts) - 1 for cuts in edges) > _MAX_REGIONS:
        return None
    held: dict[tuple[int, ...], dict[Rectangle, list[int]]] = {}
    lacking: dict[tuple[int, ...], list[tuple[int, str]]] = {}
    num_covered = 0
    for owner, rectangle, reason in (*claims, *debts):
        for cell in _cells(edges, rectangle):
            num_covered += 1
            if num_covered > _MAX_COVERED:
                return None
            if reason is None:
                held.setdefault(cell, {}).setdefault(rectangle, []).append(owner)
            else:
                lacking.setdefault(cell, []).append((owner, reason))
    regions = []
    for cell in product(*(range(len(cuts) - 1) for cuts in edges)):
        holders, debtors = held.get(cell, {}), lacking.get(cell, [])
        owners = {owner for found in holders.values() for owner in found}
        offsets = tuple(cuts[index] for cuts, index in zip(edges, cell, strict=True))
        sizes = tuple(cuts[index + 1] - cuts[index] for cuts, index in zip(edges, cell, strict=True))
        status = _status(holders, debtors, differing) if is_told else "untold"
        if is_computed and status in ("held", "replicated"):
            status = "computed"
        owed_by = tuple(sorted({rank for rank, _ in debtors}))
        regions.append(Region(offsets, sizes, status, tuple(sorted(owners)), owed_by))
    return Division(edges, tuple(regions))


def coarsen(division: Division, max_regions: int) -> Division:
    """Joins neighbours along the dims that are cut most, until at most `max_regions` are left.

    Along a dim, what is broken is joined with what is broken only, as long as the bound allows it.
    """
    for keep_broken_apart in (True, False):
        while len(division.regions) > max_regions:
            counts = [len(cuts) - 1 for cuts in division.edges]
            dim = max(range(len(counts)), key=counts.__getitem__)
            joined = _join_neighbours(division, dim, keep_broken_apart=keep_broken_apart)
            if len(joined.regions) == len(division.regions):
                break
            division = joined
    return division


def _clip(shape: tuple[int, ...], rectangle: Rectangle) -> Rectangle | None:
    """The part of a rectangle that lies in `shape`; None where there is none, or it has other dims."""
    offsets, sizes = rectangle
    if len(offsets) != len(shape):
        return None
    clipped = tuple(min(offset + size, full) - offset for offset, size, full in zip(offsets, sizes, shape, strict=True))
    return None if any(size <= 0 for size in clipped) else (offsets, clipped)


def _edges(shape: tuple[int, ...], rectangles: Sequence[Rectangle]) -> tuple[tuple[int, ...], ...]:
    edges = [{0, size} for size in shape]
    for offsets, sizes in set(rectangles):
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            edges[dim] |= {offset, offset + size}
    return tuple(tuple(sorted(cuts)) for cuts in edges)


def _cells(edges: tuple[tuple[int, ...], ...], rectangle: Rectangle) -> Iterator[tuple[int, ...]]:
    """The indices of the cells that a rectangle covers; all of its borders are among the edges."""
    return product(
        *(
            range(bisect_left(cuts, offset), bisect_left(cuts, offset + size))
            for cuts, offset, size in zip(edges, *rectangle, strict=True)
        )
    )


def _status(
    holders: dict[Rectangle, list[int]], debtors: Sequence[tuple[int, str]], differing: Collection[Rectangle]
) -> Status:
    reasons = {reason for _, reason in debtors}
    if "misfit" in reasons:
        return "misfit"
    if "odd" in reasons:
        return "odd"
    if not holders:
        return "hole"
    if len(holders) > 1:
        return "overlap"
    ((rectangle, owners),) = holders.items()
    if rectangle in differing:
        return "differ"
    if debtors:
        return "lacking"
    return "replicated" if len(owners) > 1 else "held"


def _join_neighbours(division: Division, dim: int, *, keep_broken_apart: bool) -> Division:
    """Joins pairs of neighbouring intervals of one dim."""
    counts = [len(cuts) - 1 for cuts in division.edges]
    is_broken = [False] * counts[dim]
    index_of = {offset: index for index, offset in enumerate(division.edges[dim])}
    for region in division.regions:
        is_broken[index_of[region.offsets[dim]]] |= region.status in BROKEN
    # The number of the group that each interval goes to.
    groups: list[int] = [0]
    for index in range(1, counts[dim]):
        is_full = index > 1 and groups[index - 2] == groups[index - 1]
        apart = is_full or (keep_broken_apart and is_broken[index] != is_broken[index - 1])
        groups.append(groups[-1] + apart)
    cuts = division.edges[dim]
    kept = [cuts[index] for index in range(len(groups)) if index == 0 or groups[index] != groups[index - 1]]
    edges = (*division.edges[:dim], (*kept, cuts[-1]), *division.edges[dim + 1 :])
    joined: dict[tuple[int, ...], Region] = {}
    for region in division.regions:
        start = kept[groups[index_of[region.offsets[dim]]]]
        key = (*region.offsets[:dim], start, *region.offsets[dim + 1 :])
        joined[key] = _joined(joined[key], region, dim) if key in joined else region
    return Division(edges, tuple(joined[key] for key in sorted(joined)))


def _joined(first: Region, second: Region, dim: int) -> Region:
    sizes = tuple(size + second.sizes[dim] * (axis == dim) for axis, size in enumerate(first.sizes))
    return replace(
        first,
        sizes=sizes,
        status=min(first.status, second.status, key=_SEVERITY.index),
        owners=tuple(sorted({*first.owners, *second.owners})),
        owed_by=tuple(sorted({*first.owed_by, *second.owed_by})),
        num_pieces=first.num_pieces + second.num_pieces,
    )


def dims_drawn(shape: tuple[int, ...], division: Division) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which dims run down a flat drawing of a tensor, and which across; the outermost first.

    A matrix has its rows down; a vector runs across. With more dims, the first that is cut runs down and all others
    across, those that are cut outermost: so every region is one rectangle.
    """
    dims = range(len(shape))
    if len(shape) < 2:  # noqa: PLR2004 - a matrix has two
        return (), tuple(dims)
    if len(shape) == 2:  # noqa: PLR2004
        return (0,), (1,)
    cut = [dim for dim in dims if len(division.edges[dim]) > 2]  # noqa: PLR2004 - its two ends
    down = cut[0] if cut else 0
    across = sorted((dim for dim in dims if dim != down), key=lambda dim: dim not in cut)
    return (down,), tuple(across)
