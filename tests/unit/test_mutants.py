"""The mutants are those of the code as it is: a change that leaves one without its place has to move it along."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_into_other_code_that_parses(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1
    assert ast.dump(ast.parse(source.replace(mutant.old, mutant.new))) != ast.dump(ast.parse(source))
    assert all((ROOT / path).exists() for path in mutant.tests.split())
