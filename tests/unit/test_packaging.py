"""What pyproject.toml promises of other packages, against what is tested."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def floors(pyproject: str, key: str) -> dict[str, Version]:
    """The least release of each package in the list `key`, each with one such bound and no other."""
    (listed,) = re.findall(rf"^{key} = \[(.*?)\]", pyproject, re.MULTILINE | re.DOTALL)
    found = {}
    for text in re.findall(r'"([^"]+)"', listed):
        requirement = Requirement(text)
        (specifier,) = requirement.specifier
        assert specifier.operator == ">=", text
        found[requirement.name] = Version(specifier.version)
    return found


def test_the_lowest_releases_that_are_tested_are_those_that_are_allowed() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "constraints" / "minimums.txt").read_text(), re.MULTILINE))
    assert {name: Version(pin) for name, pin in pins.items()} == floors(pyproject, "dependencies")
