"""From the names and shapes in memory to those of the hub; layouts made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from merger.dtypes import BY_NAME
from merger.errors import ModelError, Problem
from merger.huggingface.architecture import Architecture, HubLayout
from merger.huggingface.hub_names import Names, check_known, on_hub, renamed_on_hub, saved_architecture
from merger.huggingface.movements import Movement
from merger.huggingface.movements import stored as as_it_is
from merger.huggingface.outputs import Outputs, Unexpected, choose_outputs
from merger.tensors import Chunk, Record, SourceFile, StoredTensor, row_major_strides

SHAPE = (4, 3)
FILE = SourceFile(Path("rank_0.pt"), 999, 1, 0)


def stored(fqn: str, dtype: str = "float32", shape: tuple[int, ...] = SHAPE) -> StoredTensor:
    chunk = Chunk((0,) * len(shape), shape, FILE, 0, row_major_strides(shape), Record("data/0", 0, 999, None))
    return StoredTensor(fqn, BY_NAME[dtype], shape, (chunk,))


def all_stored(*fqns: str) -> dict[str, StoredTensor]:
    return {fqn: stored(fqn) for fqn in fqns}


def under(*names: str, ties: tuple[tuple[str, ...], ...] = (), hub: HubLayout | None = None) -> Architecture:
    return Architecture(
        class_name="TestModel",
        shapes={name: (2, 3) if "half" in name else SHAPE for name in names},
        ties=ties,
        keep_fp32=frozenset(),
        keep_fp32_in_float16=frozenset(),
        ignore_unexpected=(),
        dtype=None,
        hub=hub,
    )


def half(start: int) -> Movement:
    return Movement("narrow", (2, 3), (as_it_is("joined", SHAPE),), (0, start, 2))


# In memory: a head tied to what is embedded, two projections in one tensor, a norm. On the hub the first two are
# called otherwise, the projections are two tensors, and the norm is the same.
TIED = {"text.embed": as_it_is("embed", SHAPE), "half.0": half(0), "half.1": half(2), "norm": as_it_is("norm", SHAPE)}
LAYOUT = HubLayout(
    under("text.embed", "half.0", "half.1", "norm", "text.head", ties=(("text.embed", "text.head"),)),
    TIED,
    {**TIED, "text.head": as_it_is("head", SHAPE)},
)
MODEL = under("embed", "joined", "norm", "head", ties=(("embed", "head"),), hub=LAYOUT)


def choose(
    *saved: str,
    are_equal: bool = True,
    naming: Names = "hub",
    unexpected: Unexpected = "error",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Outputs:
    tensors = {fqn: stored(fqn, shape=(shapes or {}).get(fqn, SHAPE)) for fqn in saved}
    return choose_outputs(
        tensors, MODEL, dtype=None, unexpected=unexpected, are_equal=lambda _first, _other: are_equal, naming=naming
    )


def names(outputs: Outputs) -> list[str]:
    return [tensor.name for tensor in outputs.tensors]


# ties are told under the names that are written


def test_an_equal_tie_is_told_under_the_names_of_the_hub_and_what_is_dropped_under_its_saved_one() -> None:
    """S12, S19."""
    outputs = choose("embed", "joined", "norm", "head")
    assert names(outputs) == ["text.embed", "half.0", "half.1", "norm"]
    assert (outputs.tied, outputs.untied, outputs.dropped) == ({"text.head": "text.embed"}, {}, ("head",))
    assert outputs.notes[0] == "text.head equals text.embed, to which it is tied; written once"


def test_an_alias_that_was_not_saved_is_told_under_the_names_of_the_hub() -> None:
    """S12, S19."""
    outputs = choose("embed", "joined", "norm")
    assert outputs.tied == {"text.head": "text.embed"}
    assert outputs.notes[0] == "text.head was not saved; it is tied to text.embed"


def test_a_broken_tie_is_told_under_the_names_of_the_hub() -> None:
    """S12, S19."""
    outputs = choose("embed", "joined", "norm", "head", are_equal=False)
    assert names(outputs) == ["text.embed", "half.0", "half.1", "norm", "text.head"]
    assert (outputs.tied, outputs.untied) == ({}, {"text.head": "text.embed"})
    assert outputs.notes[0] == (
        "text.head differs from text.embed, to which it was tied; both are written and tie_word_embeddings is set to "
        "false"
    )


def test_a_tie_is_told_under_the_names_in_memory_where_these_are_written() -> None:
    """S12, S19."""
    outputs = choose("embed", "joined", "norm", "head", naming="as-is")
    assert names(outputs) == ["embed", "joined", "norm"]
    assert outputs.tied == {"head": "embed"}
    assert outputs.notes == (
        "head equals embed, to which it is tied; written once",
        "names and shapes are those in memory, as asked; those of the hub are others",
    )


def test_a_tie_is_told_under_the_names_of_the_hub_where_those_were_saved() -> None:
    """S12, S19."""
    halves = {"half.0": (2, 3), "half.1": (2, 3)}
    outputs = choose("text.embed", "half.0", "half.1", "norm", "text.head", shapes=halves)
    assert outputs.tied == {"text.head": "text.embed"}
    assert (outputs.dropped, outputs.renamed, outputs.converted) == (("text.head",), {}, {})
    assert outputs.notes == (
        "text.head equals text.embed, to which it is tied; written once",
        "saved under the names and in the shapes of the hub",
    )


# which names were saved


def shapes_of(*names: str) -> dict[str, tuple[int, ...]]:
    return {name: (2, 3) if "half" in name else SHAPE for name in names}


def test_the_names_that_a_checkpoint_fits_better_are_those_it_was_saved_under() -> None:
    """S19: one tensor that neither has does not decide."""
    in_memory = shapes_of("embed", "joined", "norm", "head", "more")
    on_the_hub = shapes_of("text.embed", "half.0", "half.1", "norm", "more")
    assert saved_architecture(MODEL, in_memory) is MODEL
    assert saved_architecture(MODEL, on_the_hub) is LAYOUT.architecture
    assert saved_architecture(MODEL, shapes_of("norm")) is MODEL  # it lacks as many of either
    assert saved_architecture(under("norm"), on_the_hub).hub is None


def test_shapes_decide_where_names_are_the_same() -> None:
    """S19."""
    turned = replace(under("w"), shapes={"w": (3, 4)})
    model = replace(under("w"), hub=HubLayout(turned, {}, {}))
    assert saved_architecture(model, {"w": (4, 3)}) is model
    assert saved_architecture(model, {"w": (3, 4)}) is turned


# what is written


def test_a_tensor_that_is_cut_is_told_as_what_it_is_made_of() -> None:
    """S19."""
    outputs = choose("embed", "joined", "norm")
    assert outputs.renamed == {"embed": "text.embed"}
    assert outputs.converted == {"half.0": ("joined",), "half.1": ("joined",)}
    assert [tensor.source.shape for tensor in outputs.tensors] == [SHAPE, (2, 3), (2, 3), SHAPE]
    assert outputs.notes[1:] == (
        "renamed as on the hub: 1, such as embed -> text.embed",
        "in the shapes of the hub: 1 tensor became 2, such as joined -> half.0",
    )


def test_a_count_of_several_tensors_is_told_so() -> None:
    pair = Movement("concat", (8, 3), (as_it_is("a", SHAPE), as_it_is("b", SHAPE)), (0,))
    result = on_hub(HubLayout(under("pair"), {"pair": pair}, {}), all_stored("a", "b"), untied=False)
    assert {name: tensor.shape for name, tensor in result.tensors.items()} == {"pair": (8, 3)}
    assert (result.renamed, result.converted) == ({}, {"pair": ("a", "b")})
    assert result.notes == ("in the shapes of the hub: 2 tensors became 1, such as a -> pair",)


def test_names_of_aliases_are_known_without_the_tensors() -> None:
    assert renamed_on_hub(LAYOUT) == {"embed": "text.embed", "head": "text.head"}


def test_what_is_made_of_tensors_that_are_not_all_there_is_left_out() -> None:
    result = on_hub(LAYOUT, all_stored("norm"), untied=True)
    assert list(result.tensors) == ["norm"]
    assert (result.renamed, result.converted, result.notes) == ({}, {}, ())


def test_additional_tensors_stay_as_they_are_at_the_end() -> None:
    """S20."""
    outputs = choose("aux", "embed", "joined", "norm", unexpected="keep")
    assert names(outputs) == ["text.embed", "half.0", "half.1", "norm", "aux"]
    assert "aux" not in outputs.renamed


def test_an_additional_tensor_may_not_have_the_name_of_one_on_the_hub() -> None:
    """S19, S20."""
    with pytest.raises(ModelError) as caught:
        choose("text.embed", "embed", "joined", "norm", unexpected="keep")
    message = (
        "is a tensor of its own in the checkpoint, and what another one is called on the hub; keep the names and "
        "shapes of the checkpoint by --names as-is, or leave additional tensors out by --unexpected drop"
    )
    assert caught.value.problems == (Problem("colliding-names", "text.embed", message),)


def test_tensors_of_several_types_do_not_become_one() -> None:
    """S13, S19."""
    pair = Movement("concat", (8, 3), (as_it_is("a", SHAPE), as_it_is("b", SHAPE)), (0,))
    tensors = {"a": stored("a"), "b": stored("b", "bfloat16")}
    with pytest.raises(ModelError) as caught:
        on_hub(HubLayout(under("pair"), {"pair": pair}, {}), tensors, untied=False)
    message = (
        "on the hub this is one tensor, made of ones that were saved in several types: a (float32), b (bfloat16). "
        "Save all in one type, or keep the names and shapes in memory by --names as-is."
    )
    assert caught.value.problems == (Problem("mixed-dtypes", "pair", message),)


# where the names of the hub are not known


def test_names_of_the_hub_that_are_not_known_are_an_error_that_says_why() -> None:
    with pytest.raises(ModelError) as caught:
        check_known(replace(under("w"), no_hub="KeyError: w"))
    message = (
        "transformers cannot tell under which names and shapes TestModel is saved (KeyError: w); keep those of the "
        "checkpoint by --names as-is"
    )
    assert caught.value.problems == (Problem("no-hub-names", "", message),)
    check_known(under("w"))


def test_names_of_the_hub_need_not_be_known_where_those_in_memory_are_written() -> None:
    unknown = replace(under("w"), no_hub="KeyError: w")
    outputs = choose_outputs(
        all_stored("w"), unknown, dtype=None, unexpected="error", are_equal=lambda _first, _other: True, naming="as-is"
    )
    assert names(outputs) == ["w"]
    with pytest.raises(ModelError):
        choose_outputs(all_stored("w"), unknown, dtype=None, unexpected="error", are_equal=lambda _first, _other: True)
