"""From mesh and placements to rectangles, with torch's own cutting of index tensors as the oracle."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from merger.sharding import (
    Holding,
    Mesh,
    Piece,
    Placement,
    holding,
    is_shard_order,
    mesh_coordinates,
    shard_coordinate,
    unordered_axis,
)

ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]

REPLICATE = Placement("replicate")


def shard(dim: int) -> Placement:
    return Placement("shard", dim=dim)


def strided(dim: int, split_factor: int) -> Placement:
    return Placement("strided_shard", dim=dim, split_factor=split_factor)


def index_tensor(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape)).view(shape)


def nth_chunk(tensor: torch.Tensor, count: int, index: int, dim: int) -> torch.Tensor:
    """`torch.chunk`, which leaves trailing empty chunks out."""
    chunks = tensor.chunk(count, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def local_tensor(
    whole: torch.Tensor, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], coordinate: tuple[int, ...]
) -> torch.Tensor:
    """What the rank at `coordinate` holds: mesh axes from left to right, each cutting what the last one left.

    But a strided shard whose factor is the number of pieces that the later axes make of its dim comes after them.
    """
    axes = [axis for axis, placement in enumerate(placements) if placement.kind in ("shard", "strided_shard")]

    def comes_after(axis: int, later: list[int]) -> bool:
        same = [other for other in later if placements[other].dim == placements[axis].dim]
        plain = [
            other
            for other in same
            if placements[other].kind == "shard" or comes_after(other, axes[axes.index(other) + 1 :])
        ]
        return plain == same and placements[axis].split_factor == prod(mesh_shape[other] for other in same)

    def cut(local: torch.Tensor, todo: list[int]) -> torch.Tensor:
        if not todo:
            return local
        axis, later = todo[0], todo[1:]
        size, placement, index = mesh_shape[axis], placements[axis], coordinate[axis]
        assert placement.dim is not None
        if placement.kind == "shard":
            return cut(nth_chunk(local, size, index, placement.dim), later)
        if comes_after(axis, later):
            return nth_chunk(cut(local, later), size, index, placement.dim)
        parts = local.chunk(placement.split_factor or 1, placement.dim)
        return cut(torch.cat([nth_chunk(part, size, index, placement.dim) for part in parts], placement.dim), later)

    return cut(whole, axes)


def assembled(whole: torch.Tensor, held: Holding) -> torch.Tensor:
    """The local tensor that `held` describes: its pieces, read from the whole and laid at their local offsets."""
    local = torch.full(held.sizes, -1)
    for piece in held.pieces:
        source = tuple(slice(low, low + size) for low, size in zip(piece.offsets, piece.sizes, strict=True))
        target = tuple(slice(low, low + size) for low, size in zip(piece.local_offsets, piece.sizes, strict=True))
        assert (local[target] == -1).all(), "no local element is in two pieces"
        local[target] = whole[source]
    return local


def coordinates(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(product(*map(range, mesh_shape)))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    shape = draw(st.lists(st.integers(0, 9), max_size=4).map(tuple))
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    kinds = [st.just(REPLICATE)]
    if shape:
        dims = st.integers(0, len(shape) - 1)
        kinds += [st.builds(shard, dims), st.builds(strided, dims, st.integers(1, 4))]
    placements = tuple(draw(st.one_of(kinds)) for _ in mesh_shape)
    return shape, mesh_shape, placements


@given(layouts())
def test_every_rank_holds_what_torch_chunk_gives_it_and_together_they_hold_all(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    """S1, S2, S10."""
    shape, mesh_shape, placements = layout
    cut_dims = [placement.dim for placement in placements if placement.dim is not None]
    event(f"a dim cut twice: {len(set(cut_dims)) < len(cut_dims)}")
    event(f"strided: {any(placement.kind == 'strided_shard' for placement in placements)}")
    event(f"uneven: {any(shape[dim] % prod(mesh_shape) for dim in cut_dims)}")
    whole = index_tensor(shape)
    seen = set()
    for coordinate in coordinates(mesh_shape):
        held = holding(shape, mesh_shape, placements, coordinate)
        expected = local_tensor(whole, mesh_shape, placements, coordinate)
        assert held.sizes == tuple(expected.shape)
        assert torch.equal(assembled(whole, held), expected)
        assert all(prod(piece.sizes) > 0 for piece in held.pieces)
        seen |= set(expected.flatten().tolist())
    assert seen == set(range(whole.numel()))


@pytest.mark.skipif(torch.__version__ < "2.8", reason="this torch cuts in strides only what divides")
@given(layouts())
def test_one_cut_is_the_one_that_torch_makes_to_distribute_a_tensor(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    """The pieces, and with padding the sizes, of `Shard._split_tensor` and `_StridedShard._split_tensor`."""
    shape, (size, *_), (placement, *_) = layout
    assume(placement.dim is not None)
    assert placement.dim is not None
    whole = index_tensor(shape)
    if placement.split_factor is None:
        pieces, _ = Shard(placement.dim)._split_tensor(whole, size, with_padding=False)
        padded, _ = Shard(placement.dim)._split_tensor(whole, size, with_padding=True)
    else:
        upstream = _StridedShard(placement.dim, split_factor=placement.split_factor)
        pieces, _ = upstream._split_tensor(whole, size, with_padding=False)
        padded = []
    for index, expected in enumerate(pieces):
        held = holding(shape, (size,), (placement,), (index,))
        assert torch.equal(assembled(whole, held), expected)
        if padded:
            assert held.padded_sizes == tuple(padded[index].shape)


@given(layouts())
def test_the_padded_size_is_the_same_on_every_rank_and_no_less_than_any_exact_one(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    """S1."""
    shape, mesh_shape, placements = layout
    held = [holding(shape, mesh_shape, placements, coordinate) for coordinate in coordinates(mesh_shape)]
    if all(placement.kind != "strided_shard" for placement in placements):
        assert len({entry.padded_sizes for entry in held}) == 1
    for dim in range(len(shape)):
        assert all(entry.sizes[dim] <= entry.padded_sizes[dim] for entry in held)


def test_tensor_parallel_rows_that_do_not_divide_are_cut_before_they_are_sharded() -> None:
    """S10: 7 rows on dp=3 x tp=2: TP gives 4 and 3 rows, and each of these is dealt to three ranks."""
    rows = {
        coordinate: [
            row
            for piece in holding((7,), (3, 2), (strided(0, 2), shard(0)), coordinate).pieces
            for row in range(piece.offsets[0], piece.offsets[0] + piece.sizes[0])
        ]
        for coordinate in coordinates((3, 2))
    }
    assert rows == {(0, 0): [0, 1], (1, 0): [2, 3], (2, 0): [], (0, 1): [4], (1, 1): [5], (2, 1): [6]}


def test_nothing_is_known_of_padding_in_parts_that_later_axes_do_not_explain() -> None:
    held = holding((6,), (2,), (strided(0, 2),), (1,))
    assert (held.sizes, held.padded_sizes) == ((2,), (2,))


def test_a_shard_order_must_name_the_axes_that_shard_each_dim() -> None:
    placements = (shard(0), REPLICATE, shard(0), shard(1))
    assert is_shard_order(((0, (2, 0)), (1, (3,))), placements)
    assert not is_shard_order(((0, (2, 7)), (1, (3,))), placements)
    assert not is_shard_order(((0, (2, 3)), (1, (0,))), placements)
    assert not is_shard_order((), placements)


@pytest.mark.parametrize("kinds", [("replicate", "shard"), ("partial", "shard")])
def test_replicate_and_partial_cut_nothing(kinds: tuple[str, str]) -> None:
    whole = Placement("partial", reduce_op="sum") if kinds[0] == "partial" else REPLICATE
    assert holding((4, 3), (2, 2), (whole, shard(0)), (1, 1)) == Holding(
        (2, 3), (2, 3), (Piece((2, 0), (2, 3), (0, 0)),)
    )


def test_seven_rows_on_four_ranks_are_two_two_two_and_one() -> None:
    """S1, S2: as FSDP2 saves them; the last rank's piece is padded to two rows."""
    held = [holding((7, 3), (4,), (shard(0),), (rank,)) for rank in range(4)]
    assert held == [
        Holding((2, 3), (2, 3), (Piece((0, 0), (2, 3), (0, 0)),)),
        Holding((2, 3), (2, 3), (Piece((2, 0), (2, 3), (0, 0)),)),
        Holding((2, 3), (2, 3), (Piece((4, 0), (2, 3), (0, 0)),)),
        Holding((1, 3), (2, 3), (Piece((6, 0), (1, 3), (0, 0)),)),
    ]


def test_five_rows_on_four_ranks_leave_the_last_one_empty() -> None:
    """S2."""
    assert [holding((5,), (4,), (shard(0),), (rank,)).sizes for rank in range(4)] == [(2,), (2,), (1,), (0,)]
    assert holding((5,), (4,), (shard(0),), (3,)) == Holding((0,), (2,), ())


def test_a_tensor_without_dims_is_one_piece_on_every_rank() -> None:
    assert holding((), (2,), (REPLICATE,), (1,)) == Holding((), (), (Piece((), (), ()),))


def test_fsdp_over_tensor_parallel_rows_come_in_one_piece_by_the_strided_placement() -> None:
    """S10: eight rows on ("fsdp", "tp") = 2 x 2: tp cuts first, so rank (1, 0) holds rows 2 and 3."""
    placements = (strided(0, 2), shard(0))
    rows = {
        coordinate: [
            (piece.offsets[0], piece.sizes[0]) for piece in holding((8,), (2, 2), placements, coordinate).pieces
        ]
        for coordinate in coordinates((2, 2))
    }
    assert rows == {(0, 0): [(0, 2)], (0, 1): [(4, 2)], (1, 0): [(2, 2)], (1, 1): [(6, 2)]}


def test_a_strided_shard_alone_holds_rows_apart_that_lie_together_in_its_own_tensor() -> None:
    held = holding((8,), (2,), (strided(0, 2),), (1,))
    assert held == Holding((4,), (4,), (Piece((2,), (2,), (0,)), Piece((6,), (2,), (2,))))


def test_strided_parts_that_follow_one_another_are_one_piece() -> None:
    """One rank along the axis holds every part, and its rows go to the output in one copy."""
    assert holding((8, 3), (1,), (strided(0, 4),), (0,)) == Holding((8, 3), (8, 3), (Piece((0, 0), (8, 3), (0, 0)),))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_mesh_axes_cut_in_the_saved_order(order: tuple[int, int]) -> None:
    """Seven rows on 2 x 3; the axis that the order names first cuts the whole, the other one its piece."""
    whole = index_tensor((7,))
    mesh_shape = (2, 3)
    shard_order: ShardOrder = ((0, order),)
    for coordinate in coordinates(mesh_shape):
        first, second = order
        expected = nth_chunk(
            nth_chunk(whole, mesh_shape[first], coordinate[first], 0), mesh_shape[second], coordinate[second], 0
        )
        held = holding((7,), mesh_shape, (shard(0), shard(0)), coordinate, shard_order)
        assert torch.equal(assembled(whole, held), expected)


def test_where_a_placement_is_strided_the_mesh_axes_cut_from_left_to_right_whatever_the_saved_order() -> None:
    placements = (strided(0, 2), shard(0))
    for coordinate in coordinates((2, 2)):
        plain = holding((9, 2), (2, 2), placements, coordinate)
        assert holding((9, 2), (2, 2), placements, coordinate, ((0, (1, 0)),)) == plain


MESHES = [
    pytest.param(Mesh((4,), (2, 0, 3, 1)), id="[2,0,3,1]"),
    pytest.param(Mesh((2, 2), (0, 2, 1, 3)), id="[[0,2],[1,3]]"),
    pytest.param(Mesh((2, 2), (3, 1, 2, 0)), id="[[3,1],[2,0]]"),
    pytest.param(Mesh((2, 1, 3), (5, 0, 4, 1, 3, 2)), id="[[[5,0,4]],[[1,3,2]]]"),
]


@pytest.mark.parametrize("mesh", MESHES)
def test_the_coordinate_of_a_rank_is_where_it_stands_in_the_mesh(mesh: Mesh) -> None:
    array = torch.tensor(mesh.ranks).view(mesh.shape)
    for rank in mesh.ranks:
        assert mesh_coordinates(mesh)[rank] == tuple((array == rank).nonzero()[0].tolist())
    assert set(mesh_coordinates(mesh)) == set(mesh.ranks)


@pytest.mark.parametrize("mesh", MESHES)
def test_pieces_are_dealt_by_place_in_the_sorted_group_or_by_coordinate(mesh: Mesh) -> None:
    """S22."""
    array = torch.tensor(mesh.ranks).view(mesh.shape)
    for rank in mesh.ranks:
        coordinate = mesh_coordinates(mesh)[rank]
        by_group = []
        for axis in range(len(mesh.shape)):
            line = [slice(None) if other == axis else index for other, index in enumerate(coordinate)]
            by_group.append(sorted(array[tuple(line)].tolist()).index(rank))
        assert shard_coordinate(mesh, coordinate, "group") == tuple(by_group)
        assert shard_coordinate(mesh, coordinate, "coordinate") == coordinate


def test_the_pieces_of_a_shuffled_mesh_written_out() -> None:
    """S22: on mesh [2, 0, 3, 1], `fully_shard` gives rank r piece r; `distribute_tensor` gives rank 2 piece 0."""
    mesh = Mesh((4,), (2, 0, 3, 1))
    by_group = {rank: shard_coordinate(mesh, (index,), "group") for index, rank in enumerate(mesh.ranks)}
    by_coordinate = {rank: shard_coordinate(mesh, (index,), "coordinate") for index, rank in enumerate(mesh.ranks)}
    assert by_group == {0: (0,), 1: (1,), 2: (2,), 3: (3,)}
    assert by_coordinate == {2: (0,), 0: (1,), 3: (2,), 1: (3,)}


@pytest.mark.parametrize(
    ("mesh", "placements", "expected"),
    [
        (Mesh((4,), (0, 1, 2, 3)), (shard(0),), None),
        (Mesh((4,), (2, 0, 3, 1)), (shard(0),), 0),
        (Mesh((4,), (2, 0, 3, 1)), (strided(0, 2),), 0),
        (Mesh((4,), (2, 0, 3, 1)), (REPLICATE,), None),
        (Mesh((2,), (1, 3)), (shard(1),), None),
        (Mesh((2, 2), (0, 2, 1, 3)), (shard(0), shard(1)), None),
        (Mesh((2, 2), (3, 1, 2, 0)), (shard(0), shard(1)), 0),
        (Mesh((2, 2), (3, 1, 2, 0)), (REPLICATE, shard(1)), 1),
        (Mesh((2, 2), (0, 1, 3, 2)), (shard(0), shard(0)), 1),
        (Mesh((2, 2), (0, 3, 2, 1)), (shard(0), REPLICATE), 0),
        (Mesh((1, 2), (1, 0)), (shard(0), REPLICATE), None),
        (Mesh((1, 2), (1, 0)), (shard(0), shard(0)), 1),
    ],
)
def test_the_unordered_axis_is_the_first_that_shards_and_whose_ranks_do_not_ascend(
    mesh: Mesh, placements: tuple[Placement, ...], expected: int | None
) -> None:
    """S22."""
    assert unordered_axis(mesh, placements) == expected


@given(st.data())
def test_where_no_axis_is_unordered_both_ways_of_dealing_agree(data: st.DataObject) -> None:
    """S22: the choice is asked for exactly where it matters."""
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    ordered = list(range(prod(shape)))
    ranks = data.draw(st.one_of(st.just(ordered), st.permutations(ordered)))
    mesh = Mesh(shape, tuple(ranks))
    placements = tuple(data.draw(st.sampled_from([REPLICATE, shard(0)])) for _ in shape)
    sharded = [axis for axis, placement in enumerate(placements) if placement.kind == "shard"]
    differs = any(
        shard_coordinate(mesh, coordinate, "group")[axis] != coordinate[axis]
        for coordinate in coordinates(shape)
        for axis in sharded
    )
    event(f"differs: {differs}")
    assert (unordered_axis(mesh, placements) is not None) == differs


def test_placements_read_as_torch_prints_them() -> None:
    assert str(shard(1)) == "Shard(1)"
    assert str(strided(0, 4)) == "_StridedShard(0, split_factor=4)"
    assert str(REPLICATE) == "Replicate()"
    assert str(Placement("partial", reduce_op="avg")) == "Partial(avg)"
