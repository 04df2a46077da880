"""What stands beside the cards: which colour is which rank, what the marks mean, and the meshes. Pure."""

from __future__ import annotations

from itertools import product
from math import prod

from merger.picture.boxes import box_of
from merger.picture.cards import cell_words, mesh_letter
from merger.picture.palette import EVERY, Paint, colour_of, paint_of
from merger.picture.panels import MeshPanel, Picture
from merger.picture.shapes import Cell, Shape, Style, shown, stacked, wrapped

WIDTH = 236.0
_MOST_ACROSS = 8
_CELL_HEIGHT = 22.0
_CELL_WIDTH = WIDTH / _MOST_ACROSS
# Ranks in the legend, and ranks of a mesh, before the rest is counted: a page high at most.
_MAX_OWNERS = 128
_MAX_MESH_CELLS = 128
_MAX_MESHES = 16
_INDENT = 30.0


def sidebar_of(picture: Picture) -> tuple[list[Shape], float]:
    """The shapes of the side bar at the origin, and its height."""
    shapes: list[Shape] = []
    y = _owners(picture, shapes, 0.0)
    y = _marks(picture, shapes, y)
    for index, panel in enumerate(picture.meshes[:_MAX_MESHES]):
        y = _mesh(panel, index, picture, shapes, y)
    if len(picture.meshes) > _MAX_MESHES:
        y = _say(f"and {len(picture.meshes) - _MAX_MESHES:,} more meshes", "note", shapes, y)
    return shapes, y


def _say(text: str, style: Style, shapes: list[Shape], y: float, *, x: float = 0.0, breaks: str = " ") -> float:
    lines, y = stacked(wrapped(shown(text), style, WIDTH - x, max_lines=6, breaks=breaks), style, x, y)
    shapes += lines
    return y


def _owners(picture: Picture, shapes: list[Shape], y: float) -> float:
    y = _say(f"{picture.owner_kind.capitalize()}s", "heading", shapes, y) + 4
    if picture.owner_names:
        for owner, name in zip(picture.owners[:_MAX_OWNERS], picture.owner_names, strict=False):
            shapes.append(Cell(0, y, _INDENT - 8, 16, Paint((colour_of(owner),)), name))
            shapes += cell_words(0, y, _INDENT - 8, 16, (str(owner),), is_bad=False)
            y = max(_say(name, "note", shapes, y + 1, x=_INDENT, breaks="-. "), y + 18)
    else:
        y = _ranks(list(picture.owners[:_MAX_OWNERS]), picture, shapes, y)
    if len(picture.owners) > _MAX_OWNERS:
        y = _say(f"and {len(picture.owners) - _MAX_OWNERS:,} more, the colours in turn", "note", shapes, y + 2)
    return y + 14


def _ranks(ranks: list[int], picture: Picture, shapes: list[Shape], y: float) -> float:
    """Ranks in lines, those without a file in red."""
    for position, rank in enumerate(ranks):
        x, top = _CELL_WIDTH * (position % _MOST_ACROSS), y + _CELL_HEIGHT * (position // _MOST_ACROSS)
        lost = rank in picture.lost
        paint = Paint((), broken=True) if lost else Paint((colour_of(rank),))
        title = f"rank {rank}" + (": its file is missing, or cannot be used" if lost else "")
        shapes.append(Cell(x, top, _CELL_WIDTH, _CELL_HEIGHT, paint, title))
        shapes += cell_words(x, top, _CELL_WIDTH, _CELL_HEIGHT, (str(rank),), is_bad=lost)
    return y + _CELL_HEIGHT * -(-len(ranks) // _MOST_ACROSS)


def _marks(picture: Picture, shapes: list[Shape], y: float) -> float:
    """What the paints mean, of those that occur."""
    y = _say("How to read it", "heading", shapes, y) + 4
    y = _say("Rows run down, columns across; lengths within a box are to scale.", "note", shapes, y) + 4
    regions = [region for panel in picture.panels if panel.division for region in panel.division.regions]
    paints = {paint_of(region, len(picture.owners)) for region in regions}
    kind = picture.owner_kind
    marks: list[tuple[bool, Paint, str]] = [
        (any(len(paint.colours) == 1 for paint in paints), Paint((0,)), f"held by one {kind}: its number, its colour"),
        (
            any(len(paint.colours) > 1 and None not in paint.colours for paint in paints),
            Paint((0, 1)),
            f"replicas: each of the {kind}s of these colours holds the same",
        ),
        (
            any(None in paint.colours and paint.colours != EVERY for paint in paints),
            Paint((0, None)),
            f"replicas on more {kind}s than colours can show: the colour of the first",
        ),
        (any(paint.colours == EVERY for paint in paints), Paint(EVERY), f"the same on every {kind}"),
        (any(paint.is_edged for paint in paints), Paint((0,), is_edged=True), "held, but a replica of it is missing"),
        (any(paint.broken for paint in paints) or bool(picture.lost), Paint((), broken=True), "broken, or missing"),
    ]
    for occurs, paint, text in marks:
        if occurs:
            shapes.append(Cell(0, y + 1, _INDENT - 8, 16, paint, text))
            y = max(_say(text, "note", shapes, y + 1, x=_INDENT), y + 20) + 3
    if any(region.num_pieces > 1 for region in regions):
        y = (
            _say("Small pieces that lie side by side are drawn as one, in the colour of the first.", "note", shapes, y)
            + 3
        )
    if any(box_of(panel.shape, panel.division).is_stretched for panel in picture.panels if panel.division):
        y = _say("Pieces too thin to be seen are drawn thicker than they are.", "note", shapes, y) + 3
    return y + 12


def _mesh(panel: MeshPanel, index: int, picture: Picture, shapes: list[Shape], y: float) -> float:
    """A mesh as a grid: its last axis across, the one before down, any others as grids one under the other."""
    mesh = panel.mesh
    names = mesh.axis_names or tuple(f"axis {axis}" for axis in range(len(mesh.shape)))
    axes = " x ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    y = _say(f"Mesh {mesh_letter(index)}: {axes}", "heading", shapes, y)
    counted = "1 tensor" if panel.num_tensors == 1 else f"{panel.num_tensors:,} tensors"
    y = _say(counted, "note", shapes, y) + 4
    across = mesh.shape[-1] if mesh.shape else 1
    down = mesh.shape[-2] if len(mesh.shape) > 1 else 1
    num_drawn = 0
    for outer in product(*(range(size) for size in mesh.shape[:-2])):
        if num_drawn >= min(_MAX_MESH_CELLS, len(mesh.ranks)):
            break
        if outer:
            where = ", ".join(f"{name}={place}" for name, place in zip(names, outer, strict=False))
            y = _say(where, "note", shapes, y)
        if len(mesh.shape) > 1:
            y = _say(f"{names[-2]} down, {names[-1]} across", "note", shapes, y) + 2
        for _ in range(down):
            line = list(mesh.ranks[num_drawn : num_drawn + across][: _MAX_MESH_CELLS - num_drawn])
            if not line:
                break
            num_drawn += len(line)
            y = _ranks(line, picture, shapes, y) + (3 if across > _MOST_ACROSS else 0)
        y += 4
    if num_drawn < prod(mesh.shape):
        y = _say(f"and {prod(mesh.shape) - num_drawn:,} more ranks", "note", shapes, y)
    return y + 12
