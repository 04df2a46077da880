"""`merger.picture.palette`: colours that people tell apart, also those who see fewer of them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from merger.picture.palette import COLOURS, GREY, RED, Paint, about, labels_of, paint_of
from merger.picture.regions import Region, Status

# How the colour blind see linear RGB, all of the deficiency. Source: Machado, Oliveira and Fernandes, "A
# Physiologically-based Model for Simulation of Color Vision Deficiency" (2009), the tables for severity 1.0.
SIGHT = {
    "all colours": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
# From linear sRGB to CIE XYZ, and the white point D65.
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])


def linear(colour: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    encoded = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def lab(colour: str, sight: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """CIE L*a*b*, in which distances are how different colours look."""
    xyz = TO_XYZ @ np.clip(SIGHT[sight] @ linear(colour), 0, 1) / WHITE
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHT)
def test_any_two_colours_are_told_apart(sight: str) -> None:
    """A difference of 2.3 is just noticeable side by side; red is far from all, and hatched."""
    for one, other in combinations((*COLOURS, GREY), 2):
        assert np.linalg.norm(lab(one, sight) - lab(other, sight)) > 8, (one, other)
    for colour in COLOURS:
        assert np.linalg.norm(lab(RED, sight) - lab(colour, sight)) > 20, colour


def test_black_numbers_are_read_on_every_colour() -> None:
    """WCAG 2 asks for a contrast of 4.5."""
    for colour in (*COLOURS, GREY):
        luminance = float(TO_XYZ[1] @ linear(colour))
        assert (luminance + 0.05) / 0.05 > 4.5


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64])
def test_neighbours_along_any_mesh_axis_differ_in_colour(size: int) -> None:
    for rank in range(3 * size):
        assert rank % len(COLOURS) != (rank + size) % len(COLOURS)


def region(status: Status, owners: tuple[int, ...], owed: tuple[int, ...] = (), num_pieces: int = 1) -> Region:
    return Region((0,), (4,), status, owners, owed, num_pieces)


@pytest.mark.parametrize(
    ("one", "paint", "labels", "clause"),
    [
        (region("held", (9,)), Paint((2,)), ("9",), "rank 9"),
        (region("held", (0, 1, 2, 3), (), 4), Paint((0,)), ("0-3", "0 +3"), "4 pieces of ranks 0-3"),
        (region("replicated", (0, 2)), Paint((0, 2)), ("0,2", "0 +1"), "replicas on ranks 0, 2"),
        (region("replicated", tuple(range(6))), Paint((0, None)), ("0-5", "0 +5"), "replicas on ranks 0-5"),
        (region("replicated", tuple(range(8))), Paint((None, None)), ("every rank", "all"), "replicas on ranks 0-7"),
        (
            region("computed", (0, 1)),
            Paint((0, 1)),
            ("of 0,1",),
            "computed from what ranks 0, 1 hold",
        ),
        (
            region("lacking", (1,), (3,)),
            Paint((1,), is_edged=True),
            ("1",),
            "rank 1; rank 3 should hold a replica too",
        ),
        (
            region("hole", (), (3,)),
            Paint((), broken=True),
            ("rank 3 missing", "3 missing", "3?", "?"),
            "no rank holds it; rank 3 should",
        ),
        (region("hole", ()), Paint((), broken=True), ("no rank", "?"), "no rank holds it"),
        (
            region("overlap", (0, 1)),
            Paint((), broken=True),
            ("0,1 overlap", "0,1!", "!"),
            "ranks 0, 1 hold rectangles that overlap in part here",
        ),
        (
            region("differ", (0, 1)),
            Paint((), broken=True),
            ("ranks 0,1 differ", "0,1 differ", "0,1!", "!"),
            "replicas on ranks 0, 1 differ",
        ),
        (
            region("odd", (), (1,)),
            Paint((), broken=True),
            ("rank 1 disagrees", "1!", "!"),
            "rank 1 contradicts the others",
        ),
        (
            region("misfit", (), (1,)),
            Paint((), broken=True),
            ("rank 1: wrong size", "1!", "!"),
            "rank 1 should hold it, but its local tensor has another size",
        ),
        (
            region("untold", ()),
            Paint((), broken=True),
            ("cannot be told", "?"),
            "which rank holds its value cannot be told; see below",
        ),
    ],
)
def test_what_each_kind_of_region_looks_like(one: Region, paint: Paint, labels: tuple[str, ...], clause: str) -> None:
    assert paint_of(one, 8) == paint
    assert tuple(labels_of(one, 8, "rank")) == labels
    assert about(one, "rank") == clause
