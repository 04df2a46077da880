"""Which tensors are written, under which name, as which type; architectures made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merger.dtypes import BY_NAME
from merger.errors import CheckpointError, ModelError, Problem
from merger.huggingface.architecture import Architecture
from merger.huggingface.outputs import Outputs, Unexpected, choose_outputs, main_dtype
from merger.plan import OutputTensor
from merger.tensors import Chunk, Record, SourceFile, StoredTensor, row_major_strides

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
AS_SAVED = "names and shapes are as saved: those of the hub need a config"
FILE = SourceFile(Path("rank_0.pt"), 999, 1, 0)


def stored(fqn: str, dtype: str = "float32", shape: tuple[int, ...] = (2, 3)) -> StoredTensor:
    chunk = Chunk((0,) * len(shape), shape, FILE, 0, row_major_strides(shape), Record("data/0", 0, 999, None))
    return StoredTensor(fqn, BY_NAME[dtype], shape, (chunk,))


def all_stored(*fqns: str) -> dict[str, StoredTensor]:
    return {fqn: stored(fqn) for fqn in fqns}


def architecture(
    *names: str,
    ties: tuple[tuple[str, ...], ...] = (),
    keep_fp32: tuple[str, ...] = (),
    keep_fp32_in_float16: tuple[str, ...] = (),
    ignore_unexpected: tuple[str, ...] = (),
) -> Architecture:
    return Architecture(
        class_name="TestForCausalLM",
        shapes=dict.fromkeys(names, (2, 3)),
        ties=ties,
        keep_fp32=frozenset(keep_fp32),
        keep_fp32_in_float16=frozenset(keep_fp32_in_float16),
        ignore_unexpected=ignore_unexpected,
        dtype=None,
    )


def never_asked(first: StoredTensor, other: StoredTensor) -> bool:
    raise AssertionError(f"{first.fqn} and {other.fqn} are not to be compared")


def choose(
    tensors: dict[str, StoredTensor],
    expected: Architecture | None = None,
    *,
    dtype: str | None = None,
    unexpected: Unexpected = "error",
    are_equal: Callable[[StoredTensor, StoredTensor], bool] = never_asked,
) -> Outputs:
    return choose_outputs(tensors, expected, dtype=dtype, unexpected=unexpected, are_equal=are_equal)


def names(outputs: Outputs) -> list[str]:
    return [tensor.name for tensor in outputs.tensors]


def dtypes(outputs: Outputs) -> dict[str, str]:
    return {tensor.name: tensor.dtype.name for tensor in outputs.tensors}


# order


def test_tensors_come_in_the_order_of_the_architecture_whatever_that_of_saving() -> None:
    expected = architecture("model.norm", "model.layers.10", "model.layers.2")
    assert names(choose(all_stored("model.layers.2", "model.norm", "model.layers.10"), expected)) == [
        "model.norm",
        "model.layers.10",
        "model.layers.2",
    ]


def test_without_an_architecture_layer_two_comes_before_layer_ten() -> None:
    fqns = ["layers.10.w", "layers.2.w", "layers.2.b", "embed", "layers.02.w", "norm"]
    assert names(choose(all_stored(*fqns))) == [
        "embed",
        "layers.02.w",
        "layers.2.b",
        "layers.2.w",
        "layers.10.w",
        "norm",
    ]


def test_extra_tensors_come_behind_those_of_the_architecture() -> None:
    expected = architecture("z", "y")
    assert names(choose(all_stored("b.10", "b.9", "y", "z"), expected, unexpected="keep")) == ["z", "y", "b.9", "b.10"]


def test_a_name_may_hold_any_number_of_digits() -> None:
    long = "9" * 5000
    assert names(choose(all_stored(f"w.{long}", "w.1", "w.0", "w.00"))) == ["w.0", "w.00", "w.1", f"w.{long}"]


@given(st.permutations(["w.0", "w.1", "w.01", "w.10", "w.9.a", "w.9", "w", "w.x", "²", "1²", "w.1²"]))
def test_the_order_of_saving_does_not_change_that_of_writing(fqns: list[str]) -> None:
    assert names(choose(all_stored(*fqns))) == names(choose(all_stored(*sorted(fqns))))


# types


@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
def test_floating_tensors_are_cast_and_counted_and_others_never(target: str) -> None:
    """S13."""
    kinds = ["float64", "float32", "float16", "bfloat16"]
    others = ["int64", "int32", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
    outputs = choose({name: stored(name, name) for name in kinds + others}, dtype=target)
    assert dtypes(outputs) == {**dict.fromkeys(kinds, target), **{name: name for name in others}}
    assert outputs.casts == {f"{name} -> {target}": 1 for name in sorted(kinds) if name != target}


def test_without_a_target_type_everything_is_kept() -> None:
    outputs = choose({name: stored(name, name) for name in ("float64", "bfloat16", "int64")})
    assert dtypes(outputs) == {"float64": "float64", "bfloat16": "bfloat16", "int64": "int64"}
    assert outputs.casts == {}


@pytest.mark.parametrize(
    ("target", "expected", "notes"),
    [
        (
            "bfloat16",
            {"router.bias": "float32", "wo.weight": "bfloat16", "w": "bfloat16"},
            ("kept as saved, as the architecture asks: router.bias",),
        ),
        (
            "float16",
            {"router.bias": "float32", "wo.weight": "float32", "w": "float16"},
            ("kept as saved, as the architecture asks: router.bias, wo.weight",),
        ),
        ("float64", {"router.bias": "float64", "wo.weight": "float64", "w": "float64"}, ()),
        (None, {"router.bias": "float32", "wo.weight": "float32", "w": "float32"}, ()),
    ],
)
def test_what_the_architecture_keeps_in_float32_is_not_cast_to_less(
    target: str | None, expected: dict[str, str], notes: tuple[str, ...]
) -> None:
    """S13."""
    model = architecture(
        "router.bias", "wo.weight", "w", keep_fp32=("router.bias",), keep_fp32_in_float16=("wo.weight",)
    )
    outputs = choose(all_stored("router.bias", "wo.weight", "w"), model, dtype=target)
    assert dtypes(outputs) == expected
    assert outputs.notes == notes


@pytest.mark.parametrize("stated", ["float8_e4m3fn", "int8"])
def test_nothing_is_cast_to_a_type_that_nobody_trains_in(stated: str) -> None:
    """S13: a config.json may state one, for weights that are stored quantised."""
    outputs = choose(all_stored("w"), architecture("w"), dtype=stated)
    assert dtypes(outputs) == {"w": "float32"}
    assert outputs.notes == (f"nothing is cast to {stated}, which is no type to train in; all types are kept as saved",)


def test_the_main_type_is_the_one_of_most_bytes_written() -> None:
    def output(name: str, dtype: str, count: int, saved: str = "float32") -> OutputTensor:
        return OutputTensor(name, BY_NAME[dtype], stored(name, saved, (count,)))

    assert main_dtype([]) is None
    assert main_dtype([output("a", "int64", 9, "int64"), output("b", "bool", 9, "bool")]) is None
    assert main_dtype([output("a", "int64", 99, "int64"), output("b", "bfloat16", 1)]) == "bfloat16"
    assert main_dtype([output("a", "float32", 5), output("b", "bfloat16", 9)]) == "float32"
    assert main_dtype([output("a", "float32", 4), output("b", "bfloat16", 9)]) == "bfloat16"
    assert main_dtype([output("a", "bfloat16", 2), output("b", "bfloat16", 3), output("c", "float32", 2)]) == "bfloat16"


def test_the_main_type_of_float8_weights_is_what_they_are_computed_in() -> None:
    weights = OutputTensor("w", BY_NAME["float8_e4m3fn"], stored("w", "float8_e4m3fn", (999,)))
    scales = OutputTensor("s", BY_NAME["bfloat16"], stored("s", "bfloat16", (9,)))
    assert main_dtype([weights, scales]) == "bfloat16"
    assert main_dtype([weights]) is None


# names


def test_wrappers_are_stripped_and_said() -> None:
    """S14."""
    outputs = choose(
        {fqn: stored(fqn) for fqn in ("_orig_mod.layers.0._fsdp_wrapped_module.w", "norm")},
        architecture("norm", "layers.0.w"),
    )
    assert names(outputs) == ["norm", "layers.0.w"]
    assert outputs.renamed == {"_orig_mod.layers.0._fsdp_wrapped_module.w": "layers.0.w"}
    assert outputs.notes == (
        "names stripped of wrappers: 1, such as _orig_mod.layers.0._fsdp_wrapped_module.w -> layers.0.w",
    )
    assert outputs.tensors[1].source.fqn == "_orig_mod.layers.0._fsdp_wrapped_module.w"


def test_two_names_that_become_one_are_refused() -> None:
    """S14."""
    with pytest.raises(CheckpointError) as caught:
        choose(all_stored("_orig_mod.w", "w"))
    assert caught.value.problems == (
        Problem(
            "colliding-names",
            "w",
            "_orig_mod.w and w become this one name when the names of wrappers are stripped. Save the state dict of "
            "one model only.",
        ),
    )


def test_what_does_not_fit_the_architecture_is_refused_all_at_once() -> None:
    """S14, S20."""
    tensors = {"a": stored("a"), "b": stored("b", shape=(3, 2)), "score.weight": stored("score.weight")}
    with pytest.raises(ModelError) as caught:
        choose(tensors, architecture("a", "b", "c"))
    assert caught.value.problems == (
        Problem(
            "missing-tensors",
            "",
            "1 tensor is missing that TestForCausalLM has: c. If config.json is not that of the model that was "
            "trained, name the right one by --config DIR.",
        ),
        Problem(
            "unexpected-tensors",
            "",
            "1 tensor is not of TestForCausalLM: score.weight. --unexpected keep writes them along, --unexpected drop "
            "leaves them out; if config.json is not that of the model that was trained, name the right one by "
            "--config DIR.",
        ),
        Problem(
            "wrong-shapes",
            "",
            "1 tensor is not of the shape that TestForCausalLM has by config.json: b (saved [3, 2], expected [2, 3]). "
            "If config.json is not that of the model that was trained, name the right one by --config DIR.",
        ),
    )


def test_unexpected_tensors_are_kept_when_asked_and_it_is_said() -> None:
    """S20."""
    outputs = choose(all_stored("w", "q_head.weight"), architecture("w"), unexpected="keep")
    assert names(outputs) == ["w", "q_head.weight"]
    assert outputs.dropped == ()
    assert outputs.notes == ("not of TestForCausalLM, kept as asked: q_head.weight",)


def test_unexpected_tensors_are_dropped_when_asked_and_it_is_said() -> None:
    """S20."""
    extra = [f"extra.{number}" for number in range(7)]
    outputs = choose(all_stored(*extra, "w"), architecture("w"), unexpected="drop")
    assert names(outputs) == ["w"]
    assert outputs.dropped == tuple(extra)
    assert outputs.notes == (
        "not of TestForCausalLM, dropped as asked: extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more",
    )


@pytest.mark.parametrize("unexpected", ["keep", "drop"])
def test_missing_tensors_are_refused_whatever_is_done_with_extra_ones(unexpected: Unexpected) -> None:
    with pytest.raises(ModelError) as caught:
        choose(all_stored("x"), architecture("w"), unexpected=unexpected)
    assert [problem.kind for problem in caught.value.problems] == ["missing-tensors"]


def test_names_that_the_class_ignores_are_kept_where_that_is_asked() -> None:
    """Such as the layers for multi-token prediction, which are trained all the same."""
    expected = architecture("w", ignore_unexpected=(r"mtp",))
    outputs = choose(all_stored("mtp.w", "w"), expected, unexpected="keep")
    assert names(outputs) == ["w", "mtp.w"]
    assert (outputs.dropped, outputs.notes) == ((), ("not of TestForCausalLM, kept as asked: mtp.w",))


@pytest.mark.parametrize("unexpected", ["error", "drop"])
def test_names_that_the_class_ignores_are_left_out_and_it_is_said(unexpected: Unexpected) -> None:
    expected = architecture("w", ignore_unexpected=(r"rotary_emb\.inv_freq",))
    outputs = choose(all_stored("module.rotary_emb.inv_freq", "module.w"), expected, unexpected=unexpected)
    assert names(outputs) == ["w"]
    assert outputs.dropped == ("module.rotary_emb.inv_freq",)
    assert outputs.notes == (
        "left out, as TestForCausalLM does not read them: rotary_emb.inv_freq",
        "names stripped of wrappers: 1, such as module.w -> w",
    )


def test_without_an_architecture_nothing_is_checked_or_left_out() -> None:
    outputs = choose(all_stored("rotary_emb.inv_freq", HEAD, EMBEDDING, "anything"), unexpected="drop")
    assert names(outputs) == ["anything", HEAD, EMBEDDING, "rotary_emb.inv_freq"]
    assert (outputs.dropped, outputs.notes, outputs.ties_broken) == ((), (AS_SAVED,), False)


@pytest.mark.parametrize("expected", [None, architecture()])
def test_a_model_without_any_tensor_is_refused(expected: Architecture | None) -> None:
    with pytest.raises(ModelError) as caught:
        choose(all_stored("w") if expected else {}, expected, unexpected="drop")
    message = "no tensor is left to write; is this the folder of the weights?"
    assert caught.value.problems == (Problem("no-tensors", "", message),)


# ties

TIED = architecture(EMBEDDING, "w", HEAD, ties=((EMBEDDING, HEAD),))


def test_equal_ties_are_written_once() -> None:
    """S12."""
    asked: list[tuple[str, str]] = []

    def are_equal(first: StoredTensor, other: StoredTensor) -> bool:
        asked.append((first.fqn, other.fqn))
        return True

    outputs = choose(all_stored(HEAD, "w", EMBEDDING), TIED, are_equal=are_equal)
    assert names(outputs) == [EMBEDDING, "w"]
    assert asked == [(EMBEDDING, HEAD)]
    assert outputs.dropped == (HEAD,)
    assert outputs.ties_broken is False
    assert outputs.notes == (f"{HEAD} equals {EMBEDDING}, to which it is tied; written once",)


def test_diverged_ties_are_both_written_and_the_tie_is_broken() -> None:
    """S12."""
    outputs = choose(all_stored(HEAD, "w", EMBEDDING), TIED, are_equal=lambda _first, _other: False)
    assert names(outputs) == [EMBEDDING, "w", HEAD]
    assert [tensor.source.fqn for tensor in outputs.tensors] == [EMBEDDING, "w", HEAD]
    assert (outputs.dropped, outputs.ties_broken) == ((), True)
    [note] = outputs.notes
    assert note == (
        f"{HEAD} differs from {EMBEDDING}, to which it was tied; both are written and tie_word_embeddings is set to "
        "false"
    )


def test_an_alias_that_was_not_saved_is_filled_by_the_tie() -> None:
    """S12."""
    outputs = choose(all_stored("w", EMBEDDING), TIED)
    assert names(outputs) == [EMBEDDING, "w"]
    assert (outputs.dropped, outputs.ties_broken) == ((), False)
    assert outputs.notes == (f"{HEAD} was not saved; it is tied to {EMBEDDING}",)


def test_a_canonical_tensor_that_was_not_saved_is_an_error() -> None:
    """S12."""
    with pytest.raises(ModelError) as caught:
        choose(all_stored("w", HEAD), TIED)
    assert caught.value.problems == (
        Problem(
            "missing-tied-tensor",
            EMBEDDING,
            f"the checkpoint lacks this tensor of TestForCausalLM, and has only {HEAD}, which by config.json is tied "
            "to it. If config.json is not that of the model that was trained, name the right one by --config DIR.",
        ),
    )


def test_where_one_alias_diverged_one_that_was_not_saved_is_written_as_a_copy() -> None:
    """S12: one switch turns off all ties."""
    expected = architecture("shared", "encoder", "decoder", ties=(("shared", "encoder", "decoder"),))
    outputs = choose(
        {"shared": stored("shared"), "encoder": stored("encoder", "bfloat16")},
        expected,
        dtype="float16",
        are_equal=lambda _first, _other: False,
    )
    assert [(tensor.name, tensor.source.fqn) for tensor in outputs.tensors] == [
        ("shared", "shared"),
        ("encoder", "encoder"),
        ("decoder", "shared"),
    ]
    assert outputs.casts == {"float32 -> float16": 2, "bfloat16 -> float16": 1}
    assert outputs.ties_broken is True
    assert outputs.notes == (
        "encoder differs from shared, to which it was tied; both are written and tie_word_embeddings is set to false",
        "decoder was not saved; it is written as a copy of shared",
    )


def test_ties_are_found_under_their_wrappers_and_dropped_by_the_saved_name() -> None:
    """S12, S14."""
    saved = [f"_fsdp_wrapped_module.{name}" for name in (HEAD, "w", EMBEDDING)]
    outputs = choose(all_stored(*saved), TIED, are_equal=lambda _first, _other: True)
    assert names(outputs) == [EMBEDDING, "w"]
    assert outputs.dropped == (f"_fsdp_wrapped_module.{HEAD}",)
    assert outputs.renamed == {saved[1]: "w", saved[2]: EMBEDDING}


# complex


def test_complex128_is_written_as_pairs_where_weights_alone_are_merged() -> None:
    tensors = {"freqs": stored("freqs", "complex128", (4,)), "w": stored("w")}
    outputs = choose(tensors, dtype="bfloat16")
    assert dtypes(outputs) == {"freqs": "float64", "w": "bfloat16"}
    assert outputs.tensors[0].source.shape == (4, 2)
    assert outputs.notes == (AS_SAVED, "complex128 written as pairs of float64 (see torch.view_as_complex): freqs")


def test_complex128_stays_what_it_is_where_an_architecture_will_load_it() -> None:
    outputs = choose({"w": stored("w", "complex128")}, architecture("w"))
    assert dtypes(outputs) == {"w": "complex128"}
