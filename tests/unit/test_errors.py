"""Faults as data, and the errors that carry them."""

from __future__ import annotations

import copy
import pickle

import pytest

import merger
from merger import errors
from merger.errors import (
    ArchiveError,
    CheckpointError,
    ChecksumError,
    Faults,
    MergerError,
    ModelError,
    NotACheckpointError,
    Problem,
    TargetError,
    UnsafePickleError,
    listed,
)

KINDS = (ArchiveError, CheckpointError, ChecksumError, MergerError, ModelError, NotACheckpointError, TargetError)
HOLE = Problem("hole", "norm.weight", "no rank holds [2:4]")
MISSING = Problem("missing-ranks", "/run/step", "rank 3 of 4 is missing")


def test_a_problem_reads_as_its_place_and_its_message() -> None:
    assert str(HOLE) == "norm.weight: no rank holds [2:4]"


def test_a_problem_of_no_place_reads_as_its_message() -> None:
    assert str(Problem("missing-tensors", "", "1 tensor is missing")) == "1 tensor is missing"


def test_an_error_of_one_problem_reads_as_that_problem() -> None:
    error = CheckpointError(HOLE)
    assert str(error) == "norm.weight: no rank holds [2:4]"
    assert error.problems == (HOLE,)


def test_an_error_of_several_problems_counts_and_lists_them_in_the_order_given() -> None:
    error = CheckpointError([MISSING, HOLE])
    assert str(error) == (
        "2 problems:\n  - /run/step: rank 3 of 4 is missing\n  - norm.weight: no rank holds [2:4]"  # as a list
    )
    assert error.problems == (MISSING, HOLE)


def test_an_error_keeps_its_problems_when_the_list_it_came_from_changes() -> None:
    found = [HOLE]
    error = CheckpointError(found)
    found.append(MISSING)
    assert error.problems == (HOLE,)


def test_an_error_without_a_problem_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match=r"^an error needs a problem$"):
        MergerError([])


@pytest.mark.parametrize("kind", [*KINDS, UnsafePickleError])
def test_every_error_is_a_merger_error_and_a_value_error(kind: type[MergerError]) -> None:
    assert issubclass(kind, MergerError)
    assert issubclass(kind, ValueError)
    assert not issubclass(kind, OSError)


def test_a_refused_pickle_is_a_bad_archive_too() -> None:
    assert issubclass(UnsafePickleError, ArchiveError)


@pytest.mark.parametrize("kind", [*KINDS, UnsafePickleError])
@pytest.mark.parametrize("problems", [(HOLE,), (MISSING, HOLE)], ids=["one", "two"])
def test_an_error_comes_whole_out_of_another_process(kind: type[MergerError], problems: tuple[Problem, ...]) -> None:
    for again in (pickle.loads(pickle.dumps(kind(problems))), copy.copy(kind(problems))):
        assert type(again) is kind
        assert again.problems == problems
        assert str(again) == str(kind(problems))


def test_problems_sort_by_kind_then_place_then_message() -> None:
    problems = [MISSING, HOLE, Problem("hole", "a", "z"), Problem("hole", "a", "b")]
    assert sorted(problems) == [Problem("hole", "a", "b"), Problem("hole", "a", "z"), HOLE, MISSING]


def test_equal_problems_count_as_one_in_a_set() -> None:
    assert {HOLE, Problem("hole", "norm.weight", "no rank holds [2:4]")} == {HOLE}


def test_every_error_is_a_public_name() -> None:
    defined = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, MergerError)
    }
    assert defined <= set(merger.__all__)


class TestFaults:
    def test_several_checks_raise_all_they_found_at_once(self) -> None:
        faults = Faults()
        for name in ("a", "b"):
            with faults:
                raise CheckpointError(Problem("x", name, "is wrong"))
        with faults:
            pass
        with pytest.raises(CheckpointError) as caught:
            faults.raise_all()
        assert str(caught.value) == "2 problems:\n  - a: is wrong\n  - b: is wrong"

    def test_problems_of_several_kinds_are_a_plain_error(self) -> None:
        faults = Faults()
        for error in (CheckpointError(Problem("x", "a", "is wrong")), TargetError(Problem("y", "b", "is full"))):
            with faults:
                raise error
        with pytest.raises(MergerError) as caught:
            faults.raise_all()
        assert type(caught.value) is MergerError
        assert [problem.where for problem in caught.value.problems] == ["a", "b"]

    def test_nothing_found_raises_nothing(self) -> None:
        Faults().raise_all()

    def test_other_errors_pass(self) -> None:
        with pytest.raises(KeyError), Faults():
            raise KeyError("a")


def test_lists_are_short() -> None:
    assert listed("fabcdeg") == "f, a, b, c, d and 2 more"
    assert listed(range(3), most=2) == "0, 1 and 1 more"
    assert listed(["b", "a"], most=2) == "b, a"
    assert listed([]) == ""
