"""Reads a picture back with an XML parser: what a person would see on it, as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

_SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Cell:
    """A painted rectangle: "red", "edged", or the indices of its colours; and what its tooltip says."""

    paint: str
    x: float
    y: float
    width: float
    height: float
    where: str
    about: str

    @property
    def num_elements(self) -> int:
        """The elements in the ranges of the tooltip, as "[0:2, 0:8]"."""
        count = 1
        for part in filter(None, self.where.strip("[]").split(", ")):
            low, high = part.split(":")
            count *= int(high) - int(low)
        return count


@dataclass(frozen=True)
class Card:
    """A tensor: its name and everything said of it, by the style of the text."""

    cells: tuple[Cell, ...]
    texts: dict[str, tuple[str, ...]]
    is_broken: bool

    @property
    def name(self) -> str:
        return "".join(self.texts["name"])


@dataclass(frozen=True)
class Page:
    """The groups of a picture, and all text on it."""

    heading: Card
    bar: Card
    cards: tuple[Card, ...]
    footer: Card
    text: str


def read_picture(path: Path) -> Page:
    """Reads an SVG file."""
    return read_svg(path.read_text(encoding="utf-8"))


def read_svg(text: str) -> Page:
    """Reads an SVG document; anything but rectangles and text in its groups is an error."""
    root = ET.fromstring(text)
    assert set(root.attrib) == {"width", "height", "viewBox", "role", "aria-label"}
    paints = {}
    for pattern in root.iter(f"{_SVG}pattern"):
        fills = [rect.attrib["fill"] for rect in pattern.iter(f"{_SVG}rect")]
        paints[f"url(#{pattern.attrib['id']})"] = "red" if fills == ["#cc1f1f"] else " ".join(fills)
    groups = [_group(group, paints) for group in root.findall(f"{_SVG}g")]
    _, heading, bar, *cards, footer = groups
    return Page(heading, bar, tuple(cards), footer, "\n".join(root.itertext()))


def by_name(page: Page) -> dict[str, Card]:
    """The cards by the names on them."""
    return {card.name: card for card in page.cards}


def _group(group: ET.Element, paints: dict[str, str]) -> Card:
    cells: list[Cell] = []
    texts: dict[str, list[str]] = {}
    broken = False
    for element in group:
        classes = element.attrib["class"].split()
        assert set(element.attrib) <= {"class", "x", "y", "width", "height", "rx", "fill", "text-anchor"}
        if element.tag == f"{_SVG}text":
            title = element.find(f"{_SVG}title")
            line = "".join(element.itertext())
            if title is not None and title.text is not None:
                line = line.removeprefix(title.text)
            texts.setdefault(classes[0], []).append(line)
            continue
        assert element.tag == f"{_SVG}rect", element.tag
        if "cell" not in classes:
            broken |= "bad-card" in classes
            continue
        paint = paints[element.attrib["fill"]] if "fill" in element.attrib else classes[1]
        if "edged" in classes:
            paint += " edged"
        where, _, about = "".join(element.itertext()).partition(": ")
        x, y, width, height = (float(element.attrib[name]) for name in ("x", "y", "width", "height"))
        cells.append(Cell(paint, x, y, width, height, where, about))
    return Card(tuple(cells), {style: tuple(lines) for style, lines in texts.items()}, broken)
