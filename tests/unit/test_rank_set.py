"""The set of rank files in a folder, by names alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from merger.errors import Problem
from merger.sources.rank_set import beside_siblings, find_rank_set, world_sizes


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


def names(world_size: int, *ranks: int) -> list[str]:
    return [f"model_world_size_{world_size}_rank_{rank}.pt" for rank in ranks]


def test_ranks_are_numbers(tmp_path: Path) -> None:
    """S7: 0, 1, 10, 11, 2 is the order of the names."""
    found = find_rank_set(make(tmp_path, *names(12, *range(12))), None)
    assert found.world_size == 12
    assert {rank: path.name for rank, path in found.paths.items()} == dict(enumerate(names(12, *range(12))))
    assert found.problems == ()


def test_other_files_are_none_of_it(tmp_path: Path) -> None:
    others = ["optim_world_size_2_rank_0.pt", "model_world_size_2_rank_0.pt.tmp", "xmodel_world_size_2_rank_0.pt"]
    found = find_rank_set(make(tmp_path, *names(1, 0), *others), None)
    assert (found.world_size, set(found.paths), found.problems) == (1, {0}, ())
    assert world_sizes(tmp_path) == [1]


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ((0, 2), "ranks 1 and 3 of 4 are missing (found ranks 0 and 2)"),
        ((1, 2, 3), "rank 0 of 4 is missing (found ranks 1-3)"),
        ((3,), "ranks 0-2 of 4 are missing (found rank 3)"),
    ],
)
def test_all_missing_ranks_are_listed(present: tuple[int, ...], message: str, tmp_path: Path) -> None:
    """L1."""
    found = find_rank_set(make(tmp_path, *names(4, *present)), None)
    assert found.problems == (
        Problem(
            "missing-ranks",
            str(tmp_path),
            f"{message}; each node of a run writes the files of its own ranks to its own disk: copy "
            "model_world_size_4_rank_*.pt from the other nodes into this folder",
        ),
    )


def test_two_world_sizes_need_a_choice(tmp_path: Path) -> None:
    """L3."""
    make(tmp_path, *names(2, 0, 1), *names(4, 0, 1, 2, 3))
    assert find_rank_set(tmp_path, None).problems == (
        Problem(
            "several-world-sizes",
            str(tmp_path),
            "holds rank files of 2 runs (2 of world size 2 and 4 of world size 4); say which with --world-size",
        ),
    )
    assert set(find_rank_set(tmp_path, 2).paths) == {0, 1}
    assert find_rank_set(tmp_path, 4).problems == ()


def test_a_world_size_that_is_not_there(tmp_path: Path) -> None:
    assert find_rank_set(make(tmp_path, *names(2, 0, 1)), 8).problems == (
        Problem("no-such-world-size", str(tmp_path), "holds no rank files of world size 8, only of 2"),
    )


def test_ranks_beyond_the_world_size(tmp_path: Path) -> None:
    assert find_rank_set(make(tmp_path, *names(2, 0, 1, 2)), None).problems == (
        Problem("foreign-rank", str(tmp_path), "has files of rank 2, but a run of world size 2 has ranks 0 to 1 only"),
    )


def test_one_rank_with_two_files(tmp_path: Path) -> None:
    make(tmp_path, *names(2, 0, 1), "model_world_size_2_rank_01.pt")
    assert find_rank_set(tmp_path, None).problems == (
        Problem(
            "duplicate-rank",
            str(tmp_path),
            "rank 1 has 2 files (model_world_size_2_rank_01.pt, model_world_size_2_rank_1.pt); keep the right one",
        ),
    )


def test_a_config_that_disagrees_is_an_error_unless_the_set_was_chosen(tmp_path: Path) -> None:
    """L3."""
    make(tmp_path, *names(2, 0, 1))
    (tmp_path / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 4}')
    assert find_rank_set(tmp_path, None).problems == (
        Problem(
            "fsdp-config",
            "fsdp_config.json",
            "says world size 4, but the rank files are those of world size 2; delete it if it is stale, or confirm the "
            "files with --world-size 2",
        ),
    )
    assert find_rank_set(tmp_path, 2).problems == ()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '"x"', "\ufffd"])
def test_a_config_that_cannot_be_read_is_named(content: str, tmp_path: Path) -> None:
    make(tmp_path, *names(1, 0))
    (tmp_path / "fsdp_config.json").write_text(content)
    assert find_rank_set(tmp_path, None).problems == (
        Problem(
            "fsdp-config",
            "fsdp_config.json",
            'is not JSON with a "world_size"; restore it or delete it, the names of the files suffice',
        ),
    )


def test_a_broken_file_is_shown_beside_its_siblings(tmp_path: Path) -> None:
    """L2."""
    for rank, size in enumerate((10, 1200, 1100)):
        (tmp_path / names(3, rank)[0]).write_bytes(bytes(size))
    paths = find_rank_set(tmp_path, None).paths
    problem = Problem("truncated", names(3, 0)[0], "is short.")
    assert beside_siblings([problem], paths) == [
        Problem("truncated", names(3, 0)[0], "is short (the files of the other ranks have 1,100 to 1,200 bytes)")
    ]
    only = {0: paths[0]}
    assert beside_siblings([problem], only) == [problem]
    other = Problem("checksum", names(3, 0)[0], "is damaged.")
    assert beside_siblings([other], paths) == [other]
