"""What the properties draw: every hard case, so that they prove what they say."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.layouts import Strided, TensorSpec
from tests.pieces import is_gathered_again
from tests.strategies import DTYPES, Layout, features, layouts


def test_every_hard_case_is_drawn() -> None:
    reached: set[str] = set()

    @settings(max_examples=100, database=None)
    @given(layouts(world_sizes=st.sampled_from([1, 2, 3, 4, 4, 4, 8]), orders=(None, "coordinate"), max_tensors=10))
    def draw(layout: Layout) -> None:
        for spec in layout.specs:
            reached.update(features(spec, layout.world_size))

    draw()
    assert reached == {
        *DTYPES,
        *("0 dims", "1 dims", "2 dims", "3 dims", "4 dims", "1 axes", "2 axes", "3 axes"),
        *("dtensor", "fully_shard", "plain", "scalar", "on some ranks only", "permuted", "replicated"),
        *("strided over later axes", "strided freely", "one dim on several axes", "uneven", "empty pieces"),
    }


def spec(shape: tuple[int, ...], mesh_shape: tuple[int, ...], *placements: Strided | int | None) -> TensorSpec:
    return TensorSpec("w", shape, "float32", 1, mesh_shape, placements=placements)


def test_which_strided_layouts_torch_gathers_again() -> None:
    """Found on real ranks with torch 2.13: of the first all that were tried, of the second none."""
    assert is_gathered_again(spec((7,), (2,), Strided(0, 3)))
    assert is_gathered_again(spec((9,), (2, 2), Strided(0, 2), 0))
    assert is_gathered_again(spec((9, 5), (2, 2), Strided(0, 3), Strided(1, 4)))
    assert is_gathered_again(spec((8,), (2, 2, 2), Strided(0, 4), Strided(0, 2), 0))
    assert not is_gathered_again(spec((8,), (2, 2), Strided(0, 3), 0))
    assert not is_gathered_again(spec((8, 8), (2, 2, 2), Strided(0, 2), 0, Strided(1, 3)))
    assert not is_gathered_again(spec((7,), (3, 2), Strided(0, 2), 0))
