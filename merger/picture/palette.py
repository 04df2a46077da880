"""Which colours a region is painted in, and what is written into it.

Pure. Ranks go through the colours in turn. Red is kept for what is broken, and what is broken is hatched too, so that
nothing hangs on telling red from the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from merger.picture.names import runs_text
from merger.picture.regions import BROKEN, Region, Status

# Pale enough for black numbers on them, and apart for every common kind of colour blindness: the scheme "light" of Paul
# Tol (https://sronpersonalpages.nl/~pault/, SRON/EPS/TN/09-002), less the orange, which is too near to red, and the
# grey, which stands for every rank. Seven, because the sizes of mesh axes are seldom multiples of that: so neighbours
# along any axis differ.
COLOURS = ("#77aadd", "#eedd88", "#44bb99", "#ffaabb", "#aaaa00", "#99ddff", "#bbcc33")
GREY = "#d5d5d5"
DARK_GREY = "#aeaeae"
RED = "#cc1f1f"
DARK_RED = "#8a0f0f"

# Stripes of more colours than this are no longer told apart.
_MAX_STRIPES = 4


@dataclass(frozen=True, slots=True)
class Paint:
    """A fill: `colours` of which several alternate as stripes; None is grey, for more ranks than stripes can show.

    What is `broken` has no colours.
    `is_edged` is a red edge: held, but not by all that should.
    """

    colours: tuple[int | None, ...]
    broken: bool = False
    is_edged: bool = False


EVERY = (None, None)

_LABELS: dict[Status, tuple[str, ...]] = {
    "computed": ("of {owners}",),
    "overlap": ("{owners} overlap", "{owners}!", "!"),
    "differ": ("{kind}s {owners} differ", "{owners} differ", "{owners}!", "!"),
    "odd": ("{kind} {owed} disagrees", "{owed}!", "!"),
    "misfit": ("{kind} {owed}: wrong size", "{owed}!", "!"),
    "untold": ("cannot be told", "?"),
}
_ABOUT: dict[Status, str] = {
    "held": "{owners}",
    "replicated": "replicas on {owners}",
    "computed": "computed from what {owners} hold",
    "lacking": "{owners}; {owed} should hold a replica too",
    "hole": "no {kind} holds it",
    "overlap": "{owners} hold rectangles that overlap in part here",
    "differ": "replicas on {owners} differ",
    "odd": "{owed} contradicts the others",
    "misfit": "{owed} should hold it, but its local tensor has another size",
    "untold": "which {kind} holds its value cannot be told; see below",
}


def colour_of(owner: int) -> int:
    """The index of the colour of a rank or file."""
    return owner % len(COLOURS)


def paint_of(region: Region, num_owners: int) -> Paint:
    """How a region is painted where there are `num_owners` ranks or files in all."""
    if region.status in BROKEN:
        return Paint((), broken=True)
    is_edged = region.status == "lacking"
    if region.status == "held" or len(region.owners) == 1:
        return Paint((colour_of(region.owners[0]),), is_edged=is_edged)
    if len(region.owners) == num_owners and region.status != "computed":
        return Paint(EVERY, is_edged=is_edged)
    if len(region.owners) > _MAX_STRIPES or region.num_pieces > 1:
        return Paint((colour_of(region.owners[0]), None), is_edged=is_edged)
    return Paint(tuple(colour_of(owner) for owner in region.owners), is_edged=is_edged)


def labels_of(region: Region, num_owners: int, kind: str) -> Sequence[str]:
    """What may be written into a region, the longest first; `kind` is "rank" or "file"."""
    owners, owed = _short(region.owners), _short(region.owed_by)
    if region.status in _LABELS:
        return tuple(label.format(kind=kind, owners=owners, owed=owed) for label in _LABELS[region.status])
    if region.status == "hole":
        kinds = kind if len(region.owed_by) == 1 else f"{kind}s"
        return (f"{kinds} {owed} missing", f"{owed} missing", f"{owed}?", "?") if owed else (f"no {kind}", "?")
    if 1 < len(region.owners) == num_owners:
        return f"every {kind}", "all"
    more = len(region.owners) - 1
    return (owners, f"{region.owners[0]} +{more}") if more else (owners,)


def about(region: Region, kind: str) -> str:
    """Who holds a region, as a clause for people."""
    owners, owed = _named(kind, region.owners), _named(kind, region.owed_by)
    if region.num_pieces > 1 and region.status in ("held", "replicated"):
        return f"{region.num_pieces} pieces of {owners}"
    text = _ABOUT[region.status].format(kind=kind, owners=owners, owed=owed)
    if region.status == "hole" and owed:
        text += f"; {owed} should"
    if region.status == "odd" and owners:
        text += f"; held by {owners}"
    return text


def _named(kind: str, owners: Sequence[int]) -> str:
    if not owners:
        return ""
    return f"{kind} {owners[0]}" if len(owners) == 1 else f"{kind}s {runs_text(owners)}"


def _short(owners: Sequence[int]) -> str:
    return runs_text(owners).replace(" ", "")
