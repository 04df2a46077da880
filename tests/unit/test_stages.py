"""Which ranks are one stage of a pipeline, by what is sharded over them. S9."""

from __future__ import annotations

from merger.checks import Held
from merger.dtypes import BY_NAME
from merger.sharding import Cut, Mesh, Placement
from merger.sources.stages import find_stages

FLOAT = BY_NAME["float32"]
SHARD_0 = Placement("shard", dim=0)
ALL = (frozenset(range(4)),)


def on(*ranks: int, shape: tuple[int, ...] = ()) -> list[Held]:
    """What the ranks of one mesh say of a tensor on it."""
    mesh = Mesh(shape or (len(ranks),), ranks)
    return [Held(rank, FLOAT, (4, 4), mesh, (SHARD_0,) * len(mesh.shape)) for rank in ranks]


def plain(*ranks: int) -> list[Held]:
    return [Held(rank, FLOAT, (3,), None, ()) for rank in ranks]


def shards(*ranks: int) -> list[Held]:
    cut = Cut(tuple(((2 * at, 0), (2, 4)) for at in range(len(ranks))), ranks)
    return [Held(rank, FLOAT, (2 * len(ranks), 4), None, (), cut) for rank in ranks]


def test_meshes_that_share_no_rank_are_stages() -> None:
    assert find_stages([on(2, 3), on(0, 1), plain(0, 1), on(2, 3)], 4) == (frozenset({0, 1}), frozenset({2, 3}))
    assert find_stages([on(0, 2), on(1, 3)], 4) == (frozenset({0, 2}), frozenset({1, 3}))


def test_a_mesh_connects_what_it_reaches() -> None:
    assert find_stages([on(0, 1), on(2, 3), on(1, 2)], 4) == ALL
    assert find_stages([on(0, 1), on(2, 3), on(0, 1, 2, 3, shape=(2, 2))], 4) == ALL
    assert find_stages([on(4, 5), on(0, 1), on(6, 7), on(2, 3), on(5, 6), on(1, 2)], 8) == (
        frozenset({0, 1, 2, 3}),
        frozenset({4, 5, 6, 7}),
    )


def test_groups_that_shard_the_same_name_are_copies_and_no_stages() -> None:
    """As under hybrid sharding, where each group has a mesh of its own."""
    assert find_stages([[*on(0, 1), *on(2, 3)], plain(0, 1)], 4) == ALL
    assert find_stages([[*shards(0, 1), *shards(2, 3)]], 4) == ALL


def test_a_stand_in_on_a_rank_outside_the_mesh_connects_it() -> None:
    mesh = Mesh((2,), (0, 1))
    spread = [Held(rank, FLOAT, (4, 4), mesh, (SHARD_0,)) for rank in range(4)]
    assert find_stages([on(2, 3), spread], 4) == ALL


def test_shards_without_a_mesh_tell_as_much() -> None:
    assert find_stages([shards(0, 1), shards(2, 3)], 4) == (frozenset({0, 1}), frozenset({2, 3}))


def test_a_rank_on_no_mesh_leaves_nothing_to_tell_stages_by() -> None:
    assert find_stages([on(0, 1), plain(0, 1, 2, 3)], 4) == ALL
    assert find_stages([on(0, 1), on(3)], 4) == ALL
    assert find_stages([plain(0), plain(1)], 4) == ALL
    assert find_stages([], 4) == ALL


def test_a_rank_that_lost_its_shards_is_of_the_stage_that_its_mesh_names() -> None:
    assert find_stages([on(0, 1), on(2, 3)[:1]], 4) == (frozenset({0, 1}), frozenset({2, 3}))


def test_ranks_beyond_the_world_do_not_count() -> None:
    assert find_stages([on(0, 1), on(2, 3), on(1, 9), on(3, 8)], 4) == (frozenset({0, 1}), frozenset({2, 3}))
    assert find_stages([on(8, 9)], 4) == ALL
