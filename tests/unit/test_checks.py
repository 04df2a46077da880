"""Census, agreement, exact cover and replicas; every message whole, and a boolean mask as the oracle of cover."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from merger.checks import (
    Held,
    ReplicaPair,
    check_agreement,
    check_census,
    check_cover,
    limit_problems,
    placements_text,
    range_text,
    ranks_text,
    replica_pairs,
    shape_text,
)
from merger.dtypes import BY_NAME
from merger.errors import Problem
from merger.sharding import Mesh, Placement
from merger.tensors import Chunk, Record, SourceFile, StoredTensor, row_major_strides

REPLICATE = Placement("replicate")
SHARD_0 = Placement("shard", dim=0)
FOUR = Mesh((4,), (0, 1, 2, 3), ("fsdp",))
CRC = 0x1234ABCD


def chunk(
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    rank: int | None = 0,
    *,
    crc32: int | None = None,
    record_bytes: int | None = None,
    byte_offset: int = 64,
    strides: tuple[int, ...] | None = None,
) -> Chunk:
    """A piece of float32 elements; its record begins at byte 64 and holds nothing else unless told."""
    size = 4 * int(np.prod(sizes, dtype=int))
    name = "model.safetensors" if rank is None else f"model_world_size_4_rank_{rank}.pt"
    return Chunk(
        offsets,
        sizes,
        SourceFile(Path("/run") / name, 1 << 20, 1, rank),
        byte_offset,
        row_major_strides(sizes) if strides is None else strides,
        Record("data/0", 64, size if record_bytes is None else record_bytes, crc32),
    )


def stored(shape: tuple[int, ...], *chunks: Chunk) -> StoredTensor:
    return StoredTensor("layers.0.weight", BY_NAME["float32"], shape, chunks)


def held(
    rank: int,
    *,
    dtype: str = "float32",
    shape: tuple[int, ...] = (8, 3),
    mesh: Mesh | None = FOUR,
    placements: tuple[Placement, ...] = (SHARD_0,),
) -> Held:
    return Held(rank, BY_NAME[dtype], shape, mesh, () if mesh is None else placements)


# census


def test_a_tensor_that_every_rank_of_its_mesh_holds_passes_the_census() -> None:
    assert check_census("w", [held(rank) for rank in range(4)], 4) == []


def test_a_plain_tensor_on_all_ranks_passes_the_census() -> None:
    assert check_census("w", [held(rank, mesh=None) for rank in range(3)], 3) == []


def test_a_tensor_whose_mesh_names_some_ranks_only_is_whole_on_those() -> None:
    """S9: legal where its own mesh has only those ranks."""
    pair = Mesh((2,), (1, 3))
    assert check_census("w", [held(1, mesh=pair), held(3, mesh=pair)], 4) == []


def test_a_tensor_on_the_sub_meshes_of_all_ranks_passes_the_census() -> None:
    """S3: the fsdp lines of a 2 x 2 mesh, as parameters outside tensor parallelism lie on them."""
    even, odd = Mesh((2,), (0, 2)), Mesh((2,), (1, 3))
    assert check_census("w", [held(rank, mesh=odd if rank % 2 else even) for rank in range(4)], 4) == []


def test_a_sharded_tensor_that_ranks_of_its_mesh_lack_is_a_problem() -> None:
    """S9."""
    assert check_census("layers.1.weight", [held(1), held(3)], 4) == [
        Problem(
            "missing-key",
            "layers.1.weight",
            "held by ranks 1 and 3 but missing on ranks 0 and 2, though its device mesh names them all; "
            "save the checkpoint again, or restore the right files of those ranks",
        )
    ]


def test_a_plain_tensor_that_a_rank_lacks_is_a_problem() -> None:
    """S9."""
    assert check_census("position_ids", [held(0, mesh=None), held(1, mesh=None)], 3) == [
        Problem(
            "missing-key",
            "position_ids",
            "held by ranks 0 and 1 but missing on rank 2, though all ranks save a plain tensor; "
            "save the checkpoint again, or restore the right files of those ranks",
        )
    ]


def test_a_plain_tensor_is_on_all_ranks_of_each_stage_that_has_it() -> None:
    """S9."""
    stages = [frozenset({0, 1}), frozenset({2, 3}), frozenset({4, 5})]
    for ranks in ([0, 1], [4, 5], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]):
        assert check_census("counts", [held(rank, mesh=None) for rank in ranks], 6, stages) == []
    assert check_census("counts", [held(rank, mesh=None) for rank in (0, 1, 3)], 6, stages) == [
        Problem(
            "missing-key",
            "counts",
            "held by ranks 0, 1 and 3 but missing on rank 2, though all ranks of a pipeline stage save a plain tensor; "
            "save the checkpoint again, or restore the right files of those ranks",
        )
    ]


def test_a_mesh_with_ranks_beyond_the_files_is_a_problem() -> None:
    assert check_census("w", [held(0), held(1)], 2) == [
        Problem(
            "mesh-mismatch",
            "w",
            "its device mesh names ranks 2 and 3, but the files are those of 2 ranks; "
            "the files are from a run of another size",
        )
    ]


# agreement


def test_ranks_that_say_the_same_agree() -> None:
    assert check_agreement("w", [held(rank) for rank in range(4)]) == []


def test_ranks_on_different_sub_meshes_of_one_layout_agree() -> None:
    """S3, S10."""
    assert check_agreement("w", [held(0, mesh=Mesh((2,), (0, 2))), held(1, mesh=Mesh((2,), (1, 3)))]) == []


@pytest.mark.parametrize(
    ("other", "kind", "found"),
    [
        (held(2, mesh=None), "kind-mismatch", "a DTensor on ranks 0, 1 and 3, a plain tensor on rank 2"),
        (held(2, dtype="bfloat16"), "dtype-mismatch", "bfloat16 on rank 2, float32 on ranks 0, 1 and 3"),
        (held(2, shape=(8, 4)), "shape-mismatch", "shape (8, 3) on ranks 0, 1 and 3, shape (8, 4) on rank 2"),
        (
            held(2, placements=(REPLICATE,)),
            "placements-mismatch",
            "(Replicate()) on rank 2, (Shard(0)) on ranks 0, 1 and 3",
        ),
    ],
)
def test_a_rank_that_says_otherwise_is_a_problem(other: Held, kind: str, found: str) -> None:
    assert check_agreement("w", [held(0), held(1), other, held(3)]) == [
        Problem(kind, "w", f"ranks disagree: {found}; their files are not of one run and one step")
    ]


def test_every_aspect_in_which_ranks_disagree_is_said_at_once() -> None:
    found = check_agreement("w", [held(0), held(1, dtype="int64", shape=(), placements=(REPLICATE,))])
    assert [problem.kind for problem in found] == ["dtype-mismatch", "shape-mismatch", "placements-mismatch"]


def test_where_ranks_disagree_on_what_it_is_no_placements_are_compared() -> None:
    found = check_agreement("w", [held(0), held(1, mesh=None, dtype="int64")])
    assert [problem.kind for problem in found] == ["kind-mismatch"]


# cover


@st.composite
def covers(draw: st.DrawFn) -> StoredTensor:
    """Rectangles that may leave holes, overlap or repeat; half of the time a grid that covers all, then spoilt."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    spans = [[(low, high - low) for low, high in pairwise(edges)] or [(0, 0)] for edges in cuts]
    found = [(tuple(low for low, _ in cell), tuple(size for _, size in cell)) for cell in product(*spans)]
    for _ in range(draw(st.integers(0, 2))):
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        found.append(
            (offsets, tuple(draw(st.integers(0, size - low)) for size, low in zip(shape, offsets, strict=True)))
        )
    kept = draw(st.lists(st.sampled_from(found), max_size=12)) if draw(st.booleans()) else draw(st.permutations(found))
    return stored(shape, *(chunk(offsets, sizes, rank) for rank, (offsets, sizes) in enumerate(kept)))


@given(covers())
def test_a_hole_and_an_overlap_are_found_where_a_mask_has_them(tensor: StoredTensor) -> None:
    """S11: identical rectangles are replicas; whatever else covers an element twice overlaps."""
    counts = np.zeros(tensor.shape, dtype=int)
    for offsets, sizes in {(part.offsets, part.sizes) for part in tensor.chunks}:
        counts[tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))] += 1
    expected = ["overlap"] if (counts > 1).any() else ["hole"] if (counts == 0).any() else []
    event(f"expected: {expected}")
    found = check_cover(tensor)
    assert [problem.kind for problem in found] == expected
    if expected == ["hole"]:
        named = found[0].message.removeprefix("no rank holds [").partition("]")[0]
        place = tuple(slice(*map(int, span.split(":"))) for span in named.split(", ") if span)
        assert counts[place].size > 0
        assert not counts[place].any()
        first = np.argwhere(counts == 0)[0]
        assert [part.start for part in place] == first.tolist()


def test_a_hole_is_named_with_what_is_held_around_it() -> None:
    """S11."""
    tensor = stored((8, 3), chunk((4, 0), (2, 3), 2), chunk((0, 0), (2, 3), 0), chunk((0, 0), (2, 3), 1))
    assert check_cover(tensor) == [
        Problem(
            "hole",
            "layers.0.weight",
            "no rank holds [2:4, 0:3] of shape (8, 3); what is held: [0:2, 0:3] of rank 0, [4:6, 0:3] of rank 2",
        )
    ]


def test_a_hole_is_told_in_one_piece_however_other_rows_are_cut() -> None:
    """S11."""
    columns = [chunk((0, 2 * rank), (2, 2), rank) for rank in range(3)]
    [problem] = check_cover(stored((8, 6), *columns, chunk((4, 0), (4, 6), 3)))
    assert problem.message.startswith("no rank holds [2:4, 0:6] of shape (8, 6); ")


def test_a_hole_among_a_thousand_chunks_in_three_dims_is_found() -> None:
    """S11."""
    cells = list(product(range(11), range(10), range(10)))
    chunks = [chunk(cell, (1, 1, 1), rank) for rank, cell in enumerate(cells) if cell != (10, 9, 8)]
    [problem] = check_cover(stored((11, 10, 10), *chunks))
    assert problem.message.startswith("no rank holds [10:11, 9:10, 8:9] of shape (11, 10, 10); ")


def test_a_hole_at_the_end_of_a_thousand_staggered_rows_is_found() -> None:
    """S11: cuts at a thousand places along either dim make a million cells."""
    rows = [chunk((row, 0), (1, 1 + row), row) for row in range(1000)]
    rest = [chunk((row, 1 + row), (1, 999 - row), row) for row in range(998)]
    [problem] = check_cover(stored((1000, 1000), *rows, *rest))
    assert problem.message.startswith("no rank holds [998:999, 999:1000] of shape (1000, 1000); ")


def test_a_tensor_that_nobody_holds_is_one_hole() -> None:
    """S11."""
    assert check_cover(stored((2,))) == [
        Problem("hole", "layers.0.weight", "no rank holds [0:2] of shape (2); what is held: nothing")
    ]
    assert check_cover(stored(())) == [
        Problem("hole", "layers.0.weight", "no rank holds [] of shape (); what is held: nothing")
    ]


def test_a_hole_among_many_chunks_lists_a_few_and_counts_the_rest() -> None:
    """S11."""
    [problem] = check_cover(stored((11,), *(chunk((rank,), (1,), rank) for rank in range(10))))
    listed = ", ".join(f"[{rank}:{rank + 1}] of rank {rank}" for rank in range(8))
    assert problem.message == f"no rank holds [10:11] of shape (11); what is held: {listed} and 2 more"


def test_an_overlap_is_named_by_both_pieces_and_their_ranks() -> None:
    """S11."""
    [problem] = check_cover(stored((4, 3), chunk((1, 0), (3, 3), 1), chunk((0, 0), (2, 3), 0)))
    assert str(problem) == (
        "layers.0.weight: [0:2, 0:3] of rank 0 and [1:4, 0:3] of rank 1 overlap in part, so that one element would be "
        "written twice; the files are not of one run"
    )


def test_a_file_that_belongs_to_no_rank_is_named_by_its_name() -> None:
    [problem] = check_cover(stored((4,), chunk((0,), (2,), None)))
    assert problem.message == "no rank holds [2:4] of shape (4); what is held: [0:2] of model.safetensors"


def test_chunks_that_only_touch_do_not_overlap_whichever_dim_is_cut() -> None:
    columns = [chunk((0, 2 * rank), (5, 2), rank) for rank in range(3)]
    assert check_cover(stored((5, 6), *columns)) == []


def test_a_tensor_without_elements_has_no_hole() -> None:
    """S2."""
    assert check_cover(stored((0, 3))) == []
    assert check_cover(stored((4, 3), chunk((0, 0), (4, 3), 0), chunk((2, 0), (0, 3), 1))) == []


# replicas

WHOLE = ((0, 0), (2, 3))


def test_replicas_with_equal_checksums_of_equal_records_are_decided() -> None:
    assert replica_pairs(stored((2, 3), chunk(*WHOLE, 0, crc32=CRC), chunk(*WHOLE, 1, crc32=CRC))) == []


def test_replicas_that_lie_at_other_places_of_their_files_are_decided_too() -> None:
    first = chunk(*WHOLE, 0, crc32=CRC)
    moved = chunk(*WHOLE, 1, crc32=CRC)
    moved = Chunk(
        moved.offsets, moved.sizes, moved.file, 640, moved.strides, Record("data/9", 640, moved.record.num_bytes, CRC)
    )
    assert replica_pairs(stored((2, 3), first, moved)) == []


def test_replicas_with_other_checksums_of_records_that_hold_nothing_else_differ() -> None:
    """S5."""
    first, other = chunk(*WHOLE, 0, crc32=CRC), chunk(*WHOLE, 1, crc32=CRC + 1)
    assert replica_pairs(stored((2, 3), first, other)) == [ReplicaPair(first, other, "differ")]


@pytest.mark.parametrize(("left", "right"), [(None, CRC), (CRC, None), (None, None)])
def test_without_a_recorded_checksum_only_the_bytes_can_tell(left: int | None, right: int | None) -> None:
    """L14."""
    first, other = chunk(*WHOLE, 0, crc32=left), chunk(*WHOLE, 1, crc32=right)
    assert replica_pairs(stored((2, 3), first, other)) == [ReplicaPair(first, other, "unknown")]


@pytest.mark.parametrize(
    ("first", "other"),
    [
        pytest.param(
            chunk(*WHOLE, 0, crc32=CRC, record_bytes=48),
            chunk(*WHOLE, 1, crc32=CRC + 1, record_bytes=48),
            id="padded: the difference may lie in the padding",
        ),
        pytest.param(
            chunk(*WHOLE, 0, crc32=CRC), chunk(*WHOLE, 1, crc32=CRC + 1, record_bytes=48), id="one of them is padded"
        ),
        pytest.param(
            chunk(*WHOLE, 0, crc32=CRC), chunk(*WHOLE, 1, crc32=CRC, record_bytes=48), id="same checksum, other length"
        ),
        pytest.param(
            chunk(*WHOLE, 0, crc32=CRC),
            chunk(*WHOLE, 1, crc32=CRC, strides=(1, 2)),
            id="same checksum, but one is transposed",
        ),
        pytest.param(
            chunk(*WHOLE, 0, crc32=CRC, record_bytes=48),
            chunk(*WHOLE, 1, crc32=CRC, record_bytes=48, byte_offset=88),
            id="same checksum, but they begin elsewhere in it",
        ),
    ],
)
def test_checksums_prove_nothing_of_records_that_are_laid_out_otherwise_or_hold_more(
    first: Chunk, other: Chunk
) -> None:
    assert replica_pairs(stored((2, 3), first, other)) == [ReplicaPair(first, other, "unknown")]


def test_replicas_laid_out_alike_with_strides_are_decided_by_equal_checksums_only() -> None:
    same = [chunk(*WHOLE, rank, crc32=CRC, strides=(1, 2)) for rank in range(2)]
    other = chunk(*WHOLE, 2, crc32=CRC + 1, strides=(1, 2))
    assert replica_pairs(stored((2, 3), *same, other)) == [ReplicaPair(same[0], other, "unknown")]


def test_padded_replicas_with_equal_checksums_are_decided() -> None:
    padded = [chunk(*WHOLE, rank, crc32=CRC, record_bytes=48) for rank in range(2)]
    assert replica_pairs(stored((2, 3), *padded)) == []


def test_every_replica_is_paired_with_the_first_of_its_rectangle() -> None:
    low = [chunk((0,), (2,), rank) for rank in (0, 2, 3)]
    high = [chunk((2,), (2,), rank) for rank in (1, 4)]
    tensor = stored((4,), low[0], high[0], low[1], high[1], low[2])
    expected = [
        ReplicaPair(low[0], low[1], "unknown"),
        ReplicaPair(high[0], high[1], "unknown"),
        ReplicaPair(low[0], low[2], "unknown"),
    ]
    assert replica_pairs(tensor) == expected
    assert replica_pairs(tensor, in_full=True) == expected


def test_all_replicas_are_to_be_read_whatever_their_checksums_say() -> None:
    same = [chunk(*WHOLE, rank, crc32=CRC) for rank in range(2)]
    assert replica_pairs(stored((2, 3), *same), in_full=True) == [ReplicaPair(same[0], same[1], "unknown")]


# words


def test_problems_past_the_limit_of_their_kind_are_counted() -> None:
    holes = [Problem("hole", f"layers.{number}", "m") for number in range(10)]
    overlap = Problem("overlap", "norm", "m")
    assert limit_problems([holes[0], overlap, *holes[1:]]) == [
        *holes[:8],
        Problem("hole", "", "and 2 more of this kind (hole)"),
        overlap,
    ]


def test_problems_up_to_the_limit_are_all_listed() -> None:
    holes = [Problem("hole", f"layers.{number}", "m") for number in range(8)]
    assert limit_problems(iter(holes)) == holes


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([0, 2], "ranks 0 and 2"),
        ([1, 0], "ranks 0 and 1"),
        ([2, 0, 1], "ranks 0-2"),
        ([0, 1, 2, 3, 7, 9], "ranks 0-3, 7 and 9"),
        ([4, 4, 4], "rank 4"),
        ([0, 1, 5, 6, 7], "ranks 0, 1 and 5-7"),
        ([10, 9, 2], "ranks 2, 9 and 10"),
    ],
)
def test_ranks_read_as_runs_in_numeric_order(ranks: list[int], text: str) -> None:
    """S7: 9 stands before 10."""
    assert ranks_text(ranks) == text


def test_shapes_ranges_and_placements_read_as_torch_writes_them() -> None:
    assert [shape_text(shape) for shape in ((), (5,), (7, 3))] == ["()", "(5)", "(7, 3)"]
    assert range_text((), ()) == "[]"
    assert range_text((2, 0), (2, 3)) == "[2:4, 0:3]"
    assert placements_text(()) == "()"
    assert placements_text((REPLICATE, SHARD_0)) == "(Replicate(), Shard(0))"
