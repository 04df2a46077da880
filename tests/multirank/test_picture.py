"""`merger inspect --picture` of checkpoints that real ranks made, whole and damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import merger
from fixtures.layouts import TensorSpec, save_dtensors
from fixtures.partials import PartialSpec, save_partials
from fixtures.ranks import RankPool
from fixtures.sharded_tensors import save_hybrid
from tests.unit.drawn import Card, by_name, read_picture

DOCS = Path(__file__).parents[2] / "docs"
APART = "their files are not of one run and one step"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture
def cards(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., dict[str, Card]]:
    return lambda case, **options: pictured(checkpoint(case) / "checkpoint", tmp_path, **options)


def pictured(folder: Path, tmp_path: Path, **options: Any) -> dict[str, Card]:
    merger.inspect(folder, picture=tmp_path / "picture.svg", **options)
    return by_name(read_picture(tmp_path / "picture.svg"))


def saved(pool: RankPool, tmp_path: Path, *specs: TensorSpec) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    pool.run(4, save_dtensors, specs, str(folder))
    return folder


def rows(card: Card) -> list[tuple[str, str, str]]:
    return [(cell.paint, cell.where, cell.about) for cell in card.cells]


@pytest.mark.parametrize(
    ("case", "about", "text"),
    [
        (
            "qwen2-fp32-w4+hole",
            "rank 1 should hold it, but its local tensor has another size",
            (
                "rank 1 holds a local tensor of shape (9, 24), but of shape (37, 24) with placements (Shard(0)) this "
                "rank has [10:20, 0:24], shape (10, 24); the checkpoint would have holes or shifted rows: save it again"
            ),
        ),
        (
            "qwen2-fp32-w4+shape_disagrees",
            "rank 1 contradicts the others",
            f"ranks disagree: shape (37, 24) on ranks 0, 2 and 3, shape (38, 24) on rank 1; {APART}",
        ),
        (
            "qwen2-fp32-w4+dtype_disagrees",
            "rank 1 contradicts the others",
            f"ranks disagree: float16 on rank 1, float32 on ranks 0, 2 and 3; {APART}",
        ),
        (
            "qwen2-fp32-w4+placement_disagrees",
            "rank 1 contradicts the others",
            f"ranks disagree: (Replicate()) on rank 1, (Shard(0)) on ranks 0, 2 and 3; {APART}",
        ),
        (
            "qwen2-fp32-w4+plain_on_rank",
            "rank 1 contradicts the others",
            f"ranks disagree: a DTensor on ranks 0, 2 and 3, a plain tensor on rank 1; {APART}",
        ),
    ],
)
def test_the_piece_of_a_damaged_rank_is_red_and_the_fault_stands_beneath(
    case: str, about: str, text: str, cards: Callable[..., dict[str, Card]]
) -> None:
    """S9, S11: of all the tensors only the one that is damaged, though its sister in the next layer looks alike."""
    found = cards(case)
    assert [name for name, card in found.items() if card.is_broken] == [GATE]
    assert rows(found[GATE]) == [
        ("c0", "[0:10, 0:24]", "rank 0"),
        ("red", "[10:20, 0:24]", about),
        ("c2", "[20:30, 0:24]", "rank 2"),
        ("c3", "[30:37, 0:24]", "rank 3"),
    ]
    assert " ".join(found[GATE].texts["bad"]) == text
    assert [cell.paint for cell in found["model.layers.1.mlp.gate_proj.weight"].cells] == ["c0", "c1", "c2", "c3"]


def test_a_key_that_a_rank_lacks_leaves_its_piece_red(cards: Callable[..., dict[str, Card]]) -> None:
    """S9."""
    found = cards("qwen2-fp32-w4+key_missing_on_rank")
    (broken,) = (card for card in found.values() if card.is_broken)
    assert [(cell.paint, cell.about) for cell in broken.cells] == [
        ("c0", "rank 0"),
        ("c1", "rank 1"),
        ("red", "no rank holds it; rank 2 should"),
        ("c3", "rank 3"),
    ]


def test_a_plain_tensor_of_a_pipeline_stage_is_drawn_on_its_ranks_alone(cards: Callable[..., dict[str, Card]]) -> None:
    """S9."""
    found = cards("llama-fp32-pp2xfsdp2-pipeline")
    assert "on ranks 2 and 3" in found["lm_head.weight"].texts["fact"]
    assert [cell.about for cell in found["lm_head.weight"].cells] == ["replicas on ranks 2, 3"]
    broken = cards("llama-fp32-pp2xfsdp2-pipeline+key_missing_in_stage", overwrite=True)["lm_head.weight"]
    assert "on ranks 2 and 3" in broken.texts["fact"]
    assert "rank 3 should hold a replica too" in broken.texts["note"]


def test_where_the_file_does_not_tell_all_is_red_until_it_is_said(cards: Callable[..., dict[str, Card]]) -> None:
    """S22: on a mesh [2, 0, 3, 1]."""
    name = "model.norm.weight"
    assert rows(cards("qwen2-fp32-w4-permuted")[name]) == [
        ("red", "[0:24]", "which rank holds its value cannot be told; see below")
    ]
    told = cards("qwen2-fp32-w4-permuted", shard_order="coordinate", overwrite=True)[name]
    assert [cell.about for cell in told.cells] == ["rank 2", "rank 0", "rank 3", "rank 1"]
    told = cards("qwen2-fp32-w4-permuted", shard_order="group", overwrite=True)[name]
    assert [cell.about for cell in told.cells] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_a_missing_rank_leaves_red_where_it_was_dealt_its_piece(copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    """L1, S22: on a mesh [2, 0, 3, 1], by the place in the group or by the coordinate."""
    folder = copy_of("qwen2-fp32-w4-permuted") / "checkpoint"
    (folder / "model_world_size_4_rank_0.pt").unlink()
    for order, expected in (("group", ["red", "c1", "c2", "c3"]), ("coordinate", ["c2", "red", "c3", "c1"])):
        found = pictured(folder, tmp_path, shard_order=order, overwrite=True)
        assert [cell.paint for cell in found["model.norm.weight"].cells] == expected


def test_a_missing_rank_of_hybrid_sharded_tensors_leaves_a_red_edge(pool: RankPool, tmp_path: Path) -> None:
    """L1, L13: the metadata of each half of the ranks name that half only."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    pool.run(4, save_hybrid, str(folder))
    (folder / "model_world_size_4_rank_3.pt").unlink()
    found = pictured(folder, tmp_path)
    # What has one row is one shard, and lies on the first rank of each half alone.
    both = ["replicas on ranks 0, 2", "rank 1; rank 3 should hold a replica too"]
    assert sorted([cell.about for cell in card.cells] for card in found.values()) == [both[:1], both[:1], both, both]
    assert not any(card.is_broken for card in found.values())


def test_summands_are_red_until_they_may_be_reduced(pool: RankPool, tmp_path: Path) -> None:
    """L10: on a mesh [[0, 1], [2, 3]], of which the first axis is to be summed and the second cuts the rows."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    pool.run(4, save_partials, [PartialSpec("w", (4, 3), "float32", (2, 2), ("sum", 0))], str(folder))
    assert rows(pictured(folder, tmp_path)["w"]) == [
        ("red", "[0:4, 0:3]", "which rank holds its value cannot be told; see below")
    ]
    assert rows(pictured(folder, tmp_path, reduce_partial=True, overwrite=True)["w"]) == [
        ("#77aadd #44bb99", "[0:2, 0:3]", "computed from what ranks 0, 2 hold"),
        ("#eedd88 #ffaabb", "[2:4, 0:3]", "computed from what ranks 1, 3 hold"),
    ]


def test_only_where_pieces_overlap_in_part_it_is_red(pool: RankPool, tmp_path: Path) -> None:
    """S11: rank 0 has all rows, ranks 1 and 2 a half each."""
    specs = [TensorSpec("w", (4, 2), "float32", 3, (len(ranks),), ranks, (0,)) for ranks in ((0,), (1, 2, 3))]
    folder = saved(pool, tmp_path, *specs)
    (card,) = pictured(folder, tmp_path).values()
    assert rows(card) == [
        ("red", "[0:2, 0:2]", "ranks 0, 1 hold rectangles that overlap in part here"),
        ("red", "[2:4, 0:2]", "ranks 0, 2 hold rectangles that overlap in part here"),
    ]
    assert " ".join(card.texts["bad"]) == (
        "[0:4, 0:2] of rank 0 and [0:2, 0:2] of rank 1 overlap in part, so that one element would be written twice; "
        "the files are not of one run"
    )


def test_a_mesh_of_three_axes_and_a_crossed_one_are_drawn_by_coordinate(pool: RankPool, tmp_path: Path) -> None:
    """S10."""
    folder = saved(
        pool,
        tmp_path,
        TensorSpec("crossed", (4, 4), "float32", 1, (2, 2), (0, 2, 1, 3), (0, 1)),
        TensorSpec("deep", (4, 4), "float32", 1, (2, 1, 2), (0, 1, 2, 3), (1, None, 0)),
    )
    found = pictured(folder, tmp_path)
    assert [cell.about for cell in found["crossed"].cells] == ["rank 0", "rank 2", "rank 1", "rank 3"]
    assert [(cell.where, cell.about) for cell in found["deep"].cells] == [
        ("[0:2, 0:2]", "rank 0"),
        ("[0:2, 2:4]", "rank 2"),
        ("[2:4, 0:2]", "rank 1"),
        ("[2:4, 2:4]", "rank 3"),
    ]


@pytest.mark.parametrize(
    ("picture", "case"),
    [
        ("one-axis", "qwen2-fp32-w4"),
        ("replicas", "qwen2-fp32-ddp2xfsdp2"),
        ("tensor-parallel", "llama-fp32-fsdp2xtp2-tensor_parallel"),
        ("hole", "qwen2-fp32-w4+hole"),
        ("missing-ranks", "qwen2-fp32-w4+ranks_missing"),
    ],
)
def test_the_pictures_in_the_documentation_are_those_that_are_drawn(
    picture: str, case: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands that stand with them; to renew one, run its command again."""
    monkeypatch.chdir(checkpoint(case).parent)
    merger.inspect(f"{case}/checkpoint", picture=tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_bytes() == (DOCS / "pictures" / f"{picture}.svg").read_bytes()
    assert f"merger inspect {case}/checkpoint --picture {picture}.svg" in (DOCS / "pictures.md").read_text()
