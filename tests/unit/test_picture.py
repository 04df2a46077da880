"""`merger inspect --picture`, from rank files to what stands in the SVG."""

from __future__ import annotations

import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import merger
from merger.checkpoint import Checkpoint, Layout
from merger.dtypes import BY_NAME
from merger.picture import picture_text
from merger.sharding import Mesh, Placement
from merger.sources import read_any
from merger.tensors import Chunk, Record, SourceFile, StoredTensor
from tests.unit.archives import ARCHIVES, CASES, IDS, truth
from tests.unit.drawn import Card, by_name, read_picture, read_svg

NEWEST = ARCHIVES / "2.14.1"


def drawn(folder: Path, tmp_path: Path, tensors: str | None = None) -> dict[str, Card]:
    merger.inspect(folder, picture=tmp_path / "picture.svg", tensors=tensors)
    return by_name(read_picture(tmp_path / "picture.svg"))


def rows(card: Card) -> list[tuple[str, str, str]]:
    return [(cell.paint, cell.where, cell.about) for cell in card.cells]


def damaged(case: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(NEWEST / case, tmp_path / "checkpoint"))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_element_of_every_tensor_is_drawn_once(case: Path, tmp_path: Path) -> None:
    shapes = defaultdict(list)
    for name, value in truth(case).items():
        shapes[name.replace(".0.", ".{0, 1}.").replace(".1.", ".{0, 1}.")].append(value)
    cards = drawn(case, tmp_path)
    assert {name.removesuffix(" (x 2)") for name in cards} == set(shapes)
    for name, card in cards.items():
        values = shapes[name.removesuffix(" (x 2)")]
        assert len(values) == (2 if name.endswith(" (x 2)") else 1)
        assert sum(cell.num_elements for cell in card.cells) == values[0].numel()
        assert not card.is_broken
        assert "red" not in {cell.paint for cell in card.cells}


def test_one_axis_of_four_ranks_cuts_the_rows_in_four_colours(tmp_path: Path) -> None:
    cards = drawn(NEWEST / "fsdp2_1d_w4", tmp_path)
    card = cards["layers.{0, 1}.up.weight (x 2)"]
    assert rows(card) == [
        ("c0", "[0:3, 0:8]", "rank 0"),
        ("c1", "[3:6, 0:8]", "rank 1"),
        ("c2", "[6:9, 0:8]", "rank 2"),
        ("c3", "[9:12, 0:8]", "rank 3"),
    ]
    assert card.texts["number"] == ("0", "1", "2", "3")
    assert card.texts["fact"] == ("float32 (12, 8)  mesh A", "(Shard(0))")


def test_replicas_are_hatched_in_the_colours_of_their_ranks(tmp_path: Path) -> None:
    """HSDP, on a mesh [[0, 1], [2, 3]]: a replica of each half of the rows on two ranks."""
    card = drawn(NEWEST / "fsdp2_hsdp_w4", tmp_path)["layers.{0, 1}.up.weight (x 2)"]
    assert rows(card) == [
        ("#77aadd #44bb99", "[0:6, 0:8]", "replicas on ranks 0, 2"),
        ("#eedd88 #ffaabb", "[6:12, 0:8]", "replicas on ranks 1, 3"),
    ]
    assert card.texts["fact"] == ("float32 (12, 8)  mesh A", "(Replicate(), Shard(0))")


def test_tensor_parallel_weights_are_cut_both_ways(tmp_path: Path) -> None:
    """Column-parallel rows go to ranks 0, 2, 1, 3; row-parallel ones in rows and columns."""
    cards = drawn(NEWEST / "fsdp2_tp_w4", tmp_path)
    assert [cell.about for cell in cards["layers.{0, 1}.up.weight (x 2)"].cells] == [
        "rank 0", "rank 2", "rank 1", "rank 3"
    ]  # fmt: skip
    down = cards["layers.{0, 1}.down.weight (x 2)"]
    assert [(cell.where, cell.about) for cell in down.cells] == [
        ("[0:4, 0:6]", "rank 0"),
        ("[0:4, 6:12]", "rank 1"),
        ("[4:8, 0:6]", "rank 2"),
        ("[4:8, 6:12]", "rank 3"),
    ]
    assert [(cell.x > 12, cell.y > down.cells[0].y) for cell in down.cells] == [
        (False, False), (True, False), (False, True), (True, True)
    ]  # fmt: skip


def test_meshes_stand_beside_with_their_axes_ranks_and_tensors(tmp_path: Path) -> None:
    merger.inspect(NEWEST / "fsdp2_tp_w4", picture=tmp_path / "picture.svg")
    bar = read_picture(tmp_path / "picture.svg").bar
    assert bar.texts["heading"] == (
        "Ranks",
        "How to read it",
        "Mesh A: fsdp=2 x tp=2",
        "Mesh B: fsdp=2",
        "Mesh C: fsdp=2",
    )
    assert [line for line in bar.texts["note"] if "tensor" in line or "across" in line] == [
        "Rows run down, columns across;",
        "8 tensors",
        "fsdp down, tp across",
        "6 tensors",
        "6 tensors",
    ]
    assert bar.texts["number"] == ("0", "1", "2", "3", "0", "1", "2", "3", "0", "2", "1", "3")


def test_a_plain_tensor_is_on_every_rank(tmp_path: Path) -> None:
    cards = drawn(NEWEST / "fsdp2_dtypes_buf_w2", tmp_path)
    plain = [card for card in cards.values() if "on every rank" in card.texts["fact"]]
    assert plain
    for card in plain:
        assert [(cell.paint, cell.about) for cell in card.cells] == [("#d5d5d5 #aeaeae", "replicas on ranks 0, 1")]


def test_ranks_with_an_empty_piece_are_named(tmp_path: Path) -> None:
    """S2: five rows on four ranks are 2, 2, 1 and 0."""
    cards = drawn(NEWEST / "fsdp2_uneven_w4", tmp_path)
    notes = {card.texts.get("note", ()) for card in cards.values()}
    assert ("rank 3: an empty piece",) in notes


def test_a_missing_rank_leaves_red_where_its_rows_were(tmp_path: Path) -> None:
    """L1."""
    folder = damaged("fsdp2_1d_w4", tmp_path)
    (folder / "model_world_size_4_rank_2.pt").unlink()
    report = merger.inspect(folder, picture=tmp_path / "picture.svg")
    page = read_picture(tmp_path / "picture.svg")
    card = by_name(page)["layers.{0, 1}.up.weight (x 2)"]
    assert rows(card) == [
        ("c0", "[0:3, 0:8]", "rank 0"),
        ("c1", "[3:6, 0:8]", "rank 1"),
        ("red", "[6:9, 0:8]", "no rank holds it; rank 2 should"),
        ("c3", "[9:12, 0:8]", "rank 3"),
    ]
    assert card.texts["bad"] == ("no rank holds [6:9, 0:8], the piece of", "rank 2")
    assert card.is_broken
    assert page.heading.is_broken
    assert "".join(page.heading.texts["bad"]).replace(" ", "") == str(report.problems[0]).replace(" ", "")
    assert [cell.paint for cell in page.bar.cells[:4]] == ["c0", "c1", "red", "c3"]


def test_a_missing_rank_of_a_sharded_tensor_leaves_red_where_its_shard_was(tmp_path: Path) -> None:
    """L1, L13: the metadata of the other ranks say which shard it was."""
    folder = damaged("fsdp1_nomesh_w4", tmp_path)
    whole = drawn(folder, tmp_path)
    (folder / "model_world_size_4_rank_1.pt").unlink()
    (tmp_path / "picture.svg").unlink()
    cards = drawn(folder, tmp_path)
    name = "layers.{0, 1}.up.weight (x 2)"
    assert whole[name].texts["fact"] == ("float32 (12, 8)", "ShardedTensor in 4 shards")
    assert rows(cards[name]) == [
        ("c0", "[0:3, 0:8]", "rank 0"),
        ("red", "[3:6, 0:8]", "no rank holds it; rank 1 should"),
        ("c2", "[6:9, 0:8]", "rank 2"),
        ("c3", "[9:12, 0:8]", "rank 3"),
    ]


def test_a_missing_rank_whose_replica_is_there_leaves_a_red_edge(tmp_path: Path) -> None:
    folder = damaged("fsdp2_hsdp_w4", tmp_path)
    (folder / "model_world_size_4_rank_3.pt").unlink()
    card = drawn(folder, tmp_path)["layers.{0, 1}.up.weight (x 2)"]
    assert rows(card) == [
        ("#77aadd #44bb99", "[0:6, 0:8]", "replicas on ranks 0, 2"),
        ("c1 edged", "[6:12, 0:8]", "rank 1; rank 3 should hold a replica too"),
    ]
    assert card.texts["note"] == ("rank 3 should hold a replica too",)
    assert not card.is_broken


def test_a_file_of_another_rank_says_nothing_of_its_own(tmp_path: Path) -> None:
    """S8."""
    folder = damaged("fsdp2_1d_w4", tmp_path)
    shutil.copy(folder / "model_world_size_4_rank_1.pt", folder / "model_world_size_4_rank_3.pt")
    merger.inspect(folder, picture=tmp_path / "picture.svg")
    page = read_picture(tmp_path / "picture.svg")
    card = by_name(page)["layers.{0, 1}.up.weight (x 2)"]
    assert [cell.paint for cell in card.cells] == ["c0", "c1", "c2", "red"]
    assert [cell.paint for cell in page.bar.cells[:4]] == ["c0", "c1", "c2", "red"]


def test_a_broken_file_is_a_missing_rank(tmp_path: Path) -> None:
    """L2."""
    folder = damaged("fsdp2_1d_w4", tmp_path)
    (folder / "model_world_size_4_rank_0.pt").write_bytes(b"<html>")
    card = drawn(folder, tmp_path)["layers.{0, 1}.up.weight (x 2)"]
    assert [cell.paint for cell in card.cells] == ["red", "c1", "c2", "c3"]


def test_a_checkpoint_of_which_nothing_can_be_read_has_a_picture_of_its_problems(tmp_path: Path) -> None:
    (tmp_path / "model_world_size_2_rank_1.pt").write_bytes(b"")
    merger.inspect(tmp_path, picture=tmp_path / "picture.svg")
    page = read_picture(tmp_path / "picture.svg")
    assert page.cards == ()
    assert page.footer.texts["note"] == ("no tensor to draw",)
    assert [cell.paint for cell in page.bar.cells[:2]] == ["red", "red"]
    assert "rank 0 of 2 is missing" in " ".join(page.heading.texts["bad"])
    assert "The file is empty" in " ".join(page.heading.texts["bad"])


def test_replicas_that_differ_are_red_and_say_so(tmp_path: Path) -> None:
    """S5; the layer that is whole stands on its own."""
    for rank in range(3):
        state = {f"layers.{layer}.buffer": torch.tensor([1.0, float(rank == layer == 1)]) for layer in range(4)}
        torch.save(state, tmp_path / f"model_world_size_3_rank_{rank}.pt")
    cards = drawn(tmp_path, tmp_path)
    assert list(cards) == ["layers.1.buffer", "layers.{0, 2, 3}.buffer (x 3)"]
    assert rows(cards["layers.1.buffer"]) == [("red", "[0:2]", "replicas on ranks 0-2 differ")]
    assert " ".join(cards["layers.1.buffer"].texts["bad"]) == (
        "should be the same on all ranks that hold it, but rank 1 has other bytes than rank 0 (by the checksums in the "
        "files)"
    )


def test_tensors_of_no_one_and_many_dims(tmp_path: Path) -> None:
    state = {
        "none": torch.tensor(3),
        "one": torch.zeros(5),
        "empty": torch.zeros(0, 4),
        "three": torch.zeros(2, 3, 4),
    }
    torch.save(state, tmp_path / "model_world_size_1_rank_0.pt")
    cards = drawn(tmp_path, tmp_path)
    assert {name: card.texts.get("note") for name, card in cards.items()} == {
        "none": ("no dims: one element",),
        "one": None,
        "empty": ("no elements",),
        "three": ("drawn flat: rows are dim 0, columns dims", "1 x 2"),
    }
    assert [(cell.where, cell.about) for cell in cards["three"].cells] == [("[0:2, 0:3, 0:4]", "rank 0")]
    assert [(cell.where, cell.width, cell.height) for cell in cards["none"].cells] == [("[]", 26, 26)]
    assert cards["empty"].cells == ()


def test_a_pattern_picks_what_is_drawn(tmp_path: Path) -> None:
    merger.inspect(NEWEST / "fsdp2_1d_w4", picture=tmp_path / "picture.svg", tensors="layers.1.up*")
    page = read_picture(tmp_path / "picture.svg")
    assert list(by_name(page)) == ["layers.1.up.weight", "layers.1.up.bias"]
    assert page.footer.texts["note"] == ("15 tensors that --tensors does not match are not drawn",)


def test_a_model_directory_shows_its_files(tmp_path: Path) -> None:
    merger.merge(NEWEST / "fsdp2_1d_w4", tmp_path / "out", weights_only=True, max_shard_size=2000)
    merger.inspect(tmp_path / "out", picture=tmp_path / "picture.svg")
    page = read_picture(tmp_path / "picture.svg")
    assert page.bar.texts["heading"][0] == "Files"
    assert {cell.about for card in page.cards for cell in card.cells} <= {"file 1", "file 2", "file 3"}
    assert page.bar.texts["note"][:2] == ("model-00001-of-00003.", "safetensors")


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.html", "b.html"):
        merger.inspect(NEWEST / "fsdp2_tp_w4", picture=tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_the_page_holds_the_same_picture_and_asks_for_nothing_else(tmp_path: Path) -> None:
    merger.inspect(NEWEST / "fsdp2_tp_w4", picture=tmp_path / "a.svg")
    merger.inspect(NEWEST / "fsdp2_tp_w4", picture=tmp_path / "a.html")
    svg, html = (tmp_path / "a.svg").read_text(), (tmp_path / "a.html").read_text()
    assert svg.removeprefix('<?xml version="1.0" encoding="UTF-8"?>\n') in html
    assert html.startswith("<!DOCTYPE html>")
    for asks in ("src=", "href", "@import", "<script", "<link"):
        assert asks not in html
    assert html.count("http") == svg.count("http") == svg.count('xmlns="http://www.w3.org/2000/svg"') == 1


HOSTILE = [
    '</text></svg><script>alert(1)</script><svg><text>',
    '" onload="alert(1)',
    "' onclick='alert(1)",
    "</style><style>*{display:none}",
    "]]><![CDATA[<b>",
    "<!--",
    "&lt;script&gt;&#60;&amp;",
    "\x00\x1b[2J\ud800\uffff\u202e",
    "a\nb\tc\u2028d",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_text_and_no_markup(name: str) -> None:
    """L11."""
    page = read_svg(picture_text(whole(name), as_html=False))
    (card,) = page.cards
    escaped = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)
    assert card.name.replace(" ", "") == escaped.replace(" ", "")
    assert [(cell.where, cell.about) for cell in card.cells] == [("[0:4]", "rank 0")]
    html = picture_text(whole(name), as_html=True)
    assert "<script" not in html
    html.encode()


@given(st.text(max_size=200))
def test_any_name_is_text_and_no_markup(name: str) -> None:
    (card,) = read_svg(picture_text(whole(name), as_html=False)).cards
    assert len(card.cells) == 1


@pytest.mark.parametrize("name", ["<svg onload=alert(1)>", '" onload="alert(1)', "a\x01\n\u202eb"])
def test_hostile_names_of_axes_folders_and_files_are_text(name: str) -> None:
    source = whole("w")
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)
    layout = Layout((Mesh((1,), (0,), (name,)),), (Placement("shard", 0),))
    page = read_svg(picture_text(replace(source, path=Path("/x", name), layouts={"w": layout}), as_html=False))
    assert f"Mesh A: {shown}=1" in " ".join(page.bar.texts["heading"])
    assert page.heading.texts["title"] == (f"x/{shown}",)
    file = replace(source.files[0], path=Path("/x", name), rank=None)
    chunk = replace(source.tensors["w"].chunks[0], file=file)
    of_file = replace(source, files=(file,), tensors={"w": replace(source.tensors["w"], chunks=(chunk,))}, layouts={})
    page = read_svg(picture_text(of_file, as_html=False))
    assert "".join(page.bar.texts["note"]).startswith(shown)
    assert page.bar.cells[0].where == shown


def whole(name: str) -> Checkpoint:
    return sharded({name: (4,)}, 1)


def sharded(shapes: dict[str, tuple[int, ...]], world_size: int) -> Checkpoint:
    """Tensors whose rows are dealt to ranks in equal pieces, one after the other."""
    files = tuple(
        SourceFile(Path(f"/run/model_world_size_{world_size}_rank_{rank}.pt"), 1, 1, rank) for rank in range(world_size)
    )
    mesh = Mesh((world_size,), tuple(range(world_size)), ("fsdp",))
    tensors = {}
    for name, shape in shapes.items():
        step, rest = shape[0] // world_size, shape[1:]
        chunks = tuple(
            Chunk(
                (file.rank * step, *(0 for _ in rest)), (step, *rest), file, 0, (1,) * len(shape), Record("r", 0, 1, 1)
            )
            for file in files
            if file.rank is not None
        )
        tensors[name] = StoredTensor(name, BY_NAME["bfloat16"], shape, chunks)
    layouts = {name: Layout((mesh,), (Placement("shard", 0),)) for name in shapes}
    return Checkpoint(Path("/run"), "per-rank FSDP files", world_size, files, tensors, layouts, {}, None, (), ())


def test_like_layers_are_one_and_unlike_ones_stand_on_their_own() -> None:
    shapes: dict[str, tuple[int, ...]] = {f"layers.{layer}.w": (64, 8) for layer in range(32)}
    shapes |= {"layers.7.w": (64, 16), "embed.w": (640, 8)}
    cards = read_svg(picture_text(sharded(shapes, 4), as_html=False)).cards
    assert [card.name for card in cards] == ["layers.{0-6, 8-31}.w (x 31)", "layers.7.w", "embed.w"]


def test_a_huge_checkpoint_makes_no_huge_picture() -> None:
    """Hundreds of unlike tensors on 512 ranks: what is joined and what is left out is said."""
    text = picture_text(sharded({f"unlike{i}.w": (5120, 64 + i) for i in range(200)}, 512), as_html=False)
    assert len(text) < 10_000_000
    page = read_svg(text)
    assert len(page.cards) == 160
    assert page.footer.texts["note"] == ("40 more tensors are not drawn; pick some with --tensors GLOB",)
    card = page.cards[0]
    assert len(card.cells) == 256
    assert sum(cell.num_elements for cell in card.cells) == 5120 * 64
    assert card.texts["note"] == ("512 pieces, of which neighbours are", "joined")
    assert card.cells[1].about == "2 pieces of ranks 2, 3"
    assert "and 384 more, the colours in turn" in page.bar.texts["note"]


def test_what_is_broken_comes_first_however_much_is_left_out(tmp_path: Path) -> None:
    for rank in range(2):
        state = {f"unlike{i}.w": torch.zeros(i + 1) for i in range(300)}
        state["unlike250.w"][0] = rank
        torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    merger.inspect(tmp_path, picture=tmp_path / "picture.svg")
    page = read_picture(tmp_path / "picture.svg")
    assert page.cards[0].name == "unlike250.w"
    assert page.cards[1].name == "unlike0.w"
    assert page.footer.texts["note"] == ("140 more tensors are not drawn; pick some with --tensors GLOB",)


@pytest.mark.parametrize("world_size", [24, 64])
def test_with_many_ranks_each_can_be_found(world_size: int) -> None:
    shape = (world_size * 10, 64)
    page = read_svg(picture_text(sharded({"w": shape}, world_size), as_html=False))
    assert page.bar.texts["number"][:world_size] == tuple(map(str, range(world_size)))
    (card,) = page.cards
    assert [cell.about for cell in card.cells] == [f"rank {rank}" for rank in range(world_size)]
    # In the cells where they are high enough, else beside them.
    written = card.texts["number"] if world_size == 24 else card.texts["tick"]
    assert written == tuple(str(rank) for rank in range(0, world_size, 1 if world_size == 24 else 3))


def test_where_most_numbers_have_no_room_in_their_cells_all_stand_outside() -> None:
    """A bar of 24 pieces, of which only those with one digit could hold it."""
    (card,) = read_svg(picture_text(sharded({"w": (240,)}, 24), as_html=False)).cards
    assert "small-number" not in card.texts
    assert "number" not in card.texts
    assert card.texts["tick"][0] == "0"
    assert card.texts["tick"][-1] in ("22", "23")


def test_a_rank_that_contradicts_is_believed_less_than_two(tmp_path: Path) -> None:
    """S11: fragments are kept for a picture only."""
    for rank in range(3):
        torch.save({"b": torch.zeros(4 + (rank == 1))}, tmp_path / f"model_world_size_3_rank_{rank}.pt")
    assert read_any(tmp_path).fragments == {}
    fragments = read_any(tmp_path, keep_fragments=True).fragments
    assert fragments["b"].tensor.shape == (4,)
    assert [(owed.rank, owed.offsets, owed.sizes, owed.reason) for owed in fragments["b"].owed] == [
        (1, (0,), (4,), "odd")
    ]
    (card,) = drawn(tmp_path, tmp_path).values()
    assert rows(card) == [("red", "[0:4]", "rank 1 contradicts the others; held by ranks 0, 2")]
