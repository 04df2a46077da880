"""A scene as SVG text, alone or in a page of HTML. Pure, and the same text every time.

Names come from files that are not to be trusted: every text goes through `_escaped`, and none becomes markup.
"""

from __future__ import annotations

from html import escape

from merger.picture.palette import COLOURS, DARK_GREY, DARK_RED, GREY, RED, Paint
from merger.picture.shapes import FONT_SIZES, Cell, Group, Scene, Shape, Style, Surface, Words, shown

_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
# The width of a stripe, in pixels.
_STRIPE = 6
# Where the line between cells would take away too much of them, it is thinner.
_THIN = 6.0
_ON_LIGHT = {
    "page": "fill:#ffffff",
    "card": "fill:#f6f8fa;stroke:#d0d7de",
    "bad-card": "fill:#fff4f3;stroke:#cc1f1f",
    "outline": "fill:none;stroke:#8c959f;stroke-dasharray:4 3",
    "text": "fill:#1f2328",
    "weak": "fill:#59636e",
    "red": "fill:#b01212",
    "cell": "stroke:#ffffff",
}
_ON_DARK = {
    "page": "fill:#0d1117",
    "card": "fill:#161b22;stroke:#30363d",
    "bad-card": "fill:#2a1517;stroke:#f85149",
    "outline": "fill:none;stroke:#8b949e;stroke-dasharray:4 3",
    "text": "fill:#e6edf3",
    "weak": "fill:#9da7b3",
    "red": "fill:#ff9a92",
    "cell": "stroke:#0d1117",
}
_COLOUR_OF: dict[Style, str] = {
    "title": "text",
    "heading": "text",
    "name": "text",
    "fact": "text",
    "note": "weak",
    "bad": "red",
    "number": "on",
    "small-number": "on",
    "bad-number": "on-red",
    "tick": "weak",
}
_BOLD: frozenset[Style] = frozenset({"title", "heading", "name", "bad-number"})


def svg_text(scene: Scene) -> str:
    """The scene as a document of its own."""
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + _svg(scene)


def html_text(scene: Scene) -> str:
    """The scene in a page that needs nothing else."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_escaped(scene.label)}</title>\n'
        '<meta name="viewport" content="width=device-width">\n'
        "<style>body{margin:0}svg{display:block;max-width:100%;height:auto}"
        "@media (prefers-color-scheme:dark){body{background:#0d1117}}</style>\n</head>\n<body>\n"
        f"{_svg(scene)}</body>\n</html>\n"
    )


def _svg(scene: Scene) -> str:
    cells = (shape for group in scene.groups for shape in group.shapes if isinstance(shape, Cell))
    paints = dict.fromkeys(cell.paint for cell in cells)
    patterns = {paint: f"p{index}" for index, paint in enumerate(paints) if len(paint.colours) != 1}
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_number(scene.width)}" height="{_number(scene.height)}" '
            f'viewBox="0 0 {_number(scene.width)} {_number(scene.height)}" role="img" '
            f'aria-label="{_escaped(scene.label)}">'
        ),
        f"<style>\n{_style()}</style>",
        "<defs>",
        *(_pattern(paint, name) for paint, name in patterns.items()),
        "</defs>",
        *(_group(group, patterns) for group in scene.groups),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _style() -> str:
    rules = [f"text{{font-family:{_FONT};white-space:pre}}"]
    rules += [
        f".{style}{{font-size:{_number(size)}px{';font-weight:bold' if style in _BOLD else ''}}}"
        for style, size in FONT_SIZES.items()
    ]
    rules += [f".c{index}{{fill:{colour}}}" for index, colour in enumerate(COLOURS)]
    rules += [
        ".on,.on-red{paint-order:stroke;stroke-width:3px;stroke-linejoin:round;pointer-events:none}",
        ".on{fill:#111111;stroke:#ffffff;stroke-opacity:.9}",
        f".on-red{{fill:#ffffff;stroke:{DARK_RED}}}",
        ".small-number{stroke-width:2px}",
        ".thin{stroke-width:.4}",
        f".edged{{stroke:{RED}!important;stroke-width:2}}",
    ]
    rules += [f".{name}{{{rule}}}" for name, rule in _ON_LIGHT.items()]
    dark = "".join(f".{name}{{{rule}}}" for name, rule in _ON_DARK.items())
    rules.append(f"@media (prefers-color-scheme:dark){{{dark}}}")
    return "\n".join(rules) + "\n"


def _pattern(paint: Paint, name: str) -> str:
    """Diagonal stripes of the colours of a paint; crossing lines on red for what is broken."""
    if paint.broken:
        size = _STRIPE + 2
        content = (
            f'<rect width="{size}" height="{size}" fill="{RED}"/>'
            f'<path d="M0 0H{size}M0 0V{size}" stroke="{DARK_RED}" stroke-width="3"/>'
        )
    else:
        size = _STRIPE * len(paint.colours)
        fills = [
            COLOURS[colour]
            if colour is not None
            else (GREY if index % 2 == 0 and set(paint.colours) == {None} else DARK_GREY)
            for index, colour in enumerate(paint.colours)
        ]
        content = "".join(
            f'<rect x="{_STRIPE * index}" width="{_STRIPE}" height="{size}" fill="{fill}"/>'
            for index, fill in enumerate(fills)
        )
    return (
        f'<pattern id="{name}" width="{size}" height="{size}" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)">{content}</pattern>'
    )


def _group(group: Group, patterns: dict[Paint, str]) -> str:
    content = "\n".join(_shape(shape, patterns) for shape in group.shapes)
    return f'<g transform="translate({_number(group.x)} {_number(group.y)})">\n{content}\n</g>'


def _shape(shape: Shape, patterns: dict[Paint, str]) -> str:
    if isinstance(shape, Words):
        middle = ' text-anchor="middle"' if shape.is_centred else ""
        return (
            f'<text class="{shape.style} {_COLOUR_OF[shape.style]}" x="{_number(shape.x)}" y="{_number(shape.y)}"'
            f"{middle}>{_title(shape.title)}{_escaped(shape.text)}</text>"
        )
    place = (
        f'x="{_number(shape.x)}" y="{_number(shape.y)}" width="{_number(shape.width)}" height="{_number(shape.height)}"'
    )
    if isinstance(shape, Surface):
        corner = "" if shape.kind == "page" else ' rx="6"'
        return f'<rect class="{shape.kind}" {place}{corner}/>'
    edged = " edged" if shape.paint.is_edged else " thin" if min(shape.width, shape.height) < _THIN else ""
    if shape.paint in patterns:
        return f'<rect class="cell{edged}" fill="url(#{patterns[shape.paint]})" {place}>{_title(shape.title)}</rect>'
    return f'<rect class="cell c{shape.paint.colours[0]}{edged}" {place}>{_title(shape.title)}</rect>'


def _title(text: str) -> str:
    return f"<title>{_escaped(text)}</title>" if text else ""


def _escaped(text: str) -> str:
    return escape(shown(text))


def _number(value: float) -> str:
    """A length to a hundredth of a pixel, without what it does not need."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
