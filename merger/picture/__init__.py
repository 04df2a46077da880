"""Draws which rank holds which part of which tensor: from a `Checkpoint` to the text of an SVG or HTML file.

`picture_text` goes through it all: what is to be seen (`panels`), where it lies on the page (`scene`), and its text
(`svg`). Pure; headers are all it needs.
"""

from __future__ import annotations

from merger.checkpoint import Checkpoint
from merger.picture.panels import picture_of
from merger.picture.scene import scene_of
from merger.picture.svg import html_text, svg_text


def picture_text(source: Checkpoint, *, as_html: bool, tensors: str | None = None) -> str:
    """The picture of a checkpoint, of those tensors whose names match the shell pattern `tensors`."""
    scene = scene_of(picture_of(source, tensors=tensors))
    return html_text(scene) if as_html else svg_text(scene)
