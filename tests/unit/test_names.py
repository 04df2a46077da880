"""Names of tensors: wrappers, and the comparison with an architecture."""

from __future__ import annotations

import pytest

from merger.errors import CheckpointError, Problem
from merger.huggingface.architecture import Architecture
from merger.huggingface.names import compare_with, ignored_names, strip_wrappers, unexpected_names
from merger.huggingface.ties import TieOutcome, TiePlan, plan_ties, settle_ties


def architecture(
    shapes: dict[str, tuple[int, ...]], ties: tuple[tuple[str, ...], ...] = (), ignore: tuple[str, ...] = ()
) -> Architecture:
    return Architecture("TinyModel", shapes, ties, frozenset(), frozenset(), ignore, None)


TIED = architecture(
    {"embed.weight": (8, 4), "norm.weight": (4,), "head.weight": (8, 4)}, ties=(("embed.weight", "head.weight"),)
)


class TestStripWrappers:
    @pytest.mark.parametrize("wrapper", ["_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"])
    @pytest.mark.parametrize("expected", [None, ["layers.0.mlp.weight"]])
    def test_a_wrapper_goes_from_any_depth_and_more_than_once(self, wrapper: str, expected: list[str] | None) -> None:
        """FAULTS S14."""
        saved = f"{wrapper}.layers.0.{wrapper}.{wrapper}.mlp.weight"
        assert strip_wrappers([saved], expected) == {saved: "layers.0.mlp.weight"}

    def test_a_wrapper_is_stripped_as_a_whole_component_only(self) -> None:
        names = ["a_orig_mod.weight", "_orig_mod_b.weight"]
        assert strip_wrappers(names, None) == {name: name for name in names}

    def test_all_names_are_listed_in_order_with_themselves_where_nothing_changes(self) -> None:
        assert list(strip_wrappers(["b", "_orig_mod.c", "a"], None).items()) == [
            ("b", "b"),
            ("_orig_mod.c", "c"),
            ("a", "a"),
        ]

    @pytest.mark.parametrize("prefix", ["module", "base_model.model", "module.module", "module.base_model.model"])
    def test_without_an_architecture_a_prefix_goes_where_every_name_has_it(self, prefix: str) -> None:
        """FAULTS S14."""
        saved = [f"{prefix}.a.weight", f"{prefix}.b.module.weight"]
        assert list(strip_wrappers(saved, None).values()) == ["a.weight", "b.module.weight"]

    @pytest.mark.parametrize("prefix", ["module", "base_model.model"])
    def test_without_an_architecture_a_prefix_stays_where_one_name_lacks_it(self, prefix: str) -> None:
        names = [f"{prefix}.a.weight", "b.weight"]
        assert strip_wrappers(names, None) == {name: name for name in names}

    def test_with_an_architecture_prefixes_go_from_any_depth(self) -> None:
        """FAULTS S14."""
        saved = {
            "module.embed.weight": "embed.weight",
            "layers.0.module.mlp.weight": "layers.0.mlp.weight",
            "module.layers.1.module.mlp.weight": "layers.1.mlp.weight",
            "layers.2.base_model.model.mlp.module.weight": "layers.2.mlp.weight",
            "_orig_mod.base_model.model._fsdp_wrapped_module.norm.weight": "norm.weight",
        }
        assert strip_wrappers(saved, list(saved.values())) == saved

    def test_a_real_submodule_called_module_survives(self) -> None:
        """FAULTS S14."""
        expected = ["module.weight", "layers.0.module.bias", "base_model.model.norm.weight"]
        assert strip_wrappers(expected, expected) == {name: name for name in expected}

    @pytest.mark.parametrize("prefix", ["", "module."])
    def test_a_model_that_is_all_in_a_submodule_called_module_survives(self, prefix: str) -> None:
        """FAULTS S14."""
        assert strip_wrappers([f"{prefix}module.weight"], ["module.weight"]) == {
            f"{prefix}module.weight": "module.weight"
        }

    def test_an_expected_name_stays_though_it_would_be_expected_without_a_prefix_too(self) -> None:
        """FAULTS S14."""
        assert strip_wrappers(["a.module.b", "a.b"], ["a.module.b", "a.b"]) == {
            "a.module.b": "a.module.b",
            "a.b": "a.b",
        }

    def test_a_real_submodule_called_module_survives_the_stripping_of_a_wrapper_before_it(self) -> None:
        """FAULTS S14."""
        saved = {"module.module.weight": "module.weight", "module.layers.module.bias": "layers.module.bias"}
        assert strip_wrappers(saved, list(saved.values())) == saved

    def test_the_leading_prefix_goes_first_where_either_would_do(self) -> None:
        assert strip_wrappers(["module.a.module.b"], ["a.module.b", "module.a.b"]) == {
            "module.a.module.b": "a.module.b"
        }

    def test_a_prefix_that_every_name_has_goes_from_unexpected_names_too(self) -> None:
        saved = ["module.norm.weight", "module.v_head.weight"]
        assert list(strip_wrappers(saved, ["norm.weight"]).values()) == ["norm.weight", "v_head.weight"]

    def test_a_name_that_nothing_makes_expected_is_left_as_it_is(self) -> None:
        assert strip_wrappers(["norm.weight", "module.x"], ["norm.weight"])["module.x"] == "module.x"

    def test_two_names_that_become_one_are_an_error_that_names_both(self) -> None:
        """FAULTS S14."""
        with pytest.raises(CheckpointError) as caught:
            strip_wrappers(["norm.weight", "_orig_mod.norm.weight", "x"], None)
        assert str(caught.value) == (
            "norm.weight: norm.weight and _orig_mod.norm.weight become this one name when the names of wrappers are "
            "stripped. Save the state dict of one model only."
        )

    def test_a_name_made_of_wrappers_only_a_hundred_deep_ends_quickly(self) -> None:
        name = ".".join(["module"] * 100)
        assert strip_wrappers([name, "a"], ["a"]) == {name: name, "a": "a"}


class TestCompareWith:
    def test_the_same_names_and_shapes_are_no_problem(self) -> None:
        assert compare_with(TIED, TIED.shapes) == []

    def test_members_of_ties_are_not_missing_here(self) -> None:
        assert compare_with(TIED, {"norm.weight": (4,)}) == []

    def test_each_kind_is_one_problem_with_all_its_tensors(self) -> None:
        wanted = architecture({"a.weight": (2, 3), "b.weight": (2,), "c.weight": (), "d.weight": (1,)})
        assert compare_with(wanted, {"b.weight": (3,), "d.weight": (), "e.weight": (1,)}) == [
            Problem(
                "missing-tensors",
                "",
                "2 tensors are missing that TinyModel has: a.weight, c.weight. If config.json is not "
                "that of the model that was trained, name the right one by --config DIR.",
            ),
            Problem(
                "unexpected-tensors",
                "",
                "1 tensor is not of TinyModel: e.weight. --unexpected keep writes them along, --unexpected drop "
                "leaves them out; if config.json is not that of the model that was trained, name the right one by "
                "--config DIR.",
            ),
            Problem(
                "wrong-shapes",
                "",
                "2 tensors are not of the shape that TinyModel has by config.json: b.weight (saved [3], expected [2]), "
                "d.weight (saved [], expected [1]). If config.json is not that of the model that was trained, name "
                "the right one by --config DIR.",
            ),
        ]

    def test_ten_names_are_listed_and_the_rest_counted(self) -> None:
        wanted = architecture({f"layers.{i}.weight": (1,) for i in range(13)})
        (problem,) = compare_with(wanted, {})
        assert "layers.9.weight and 3 more. If" in problem.message
        assert "layers.10.weight" not in problem.message

    @pytest.mark.parametrize(
        "name",
        [
            "layers.0.q_proj.ia3_l.default",
            "layers.0.q_proj.hada_w1_a.default",
            "layers.0.q_proj.oft_R.default.weight",
            "layers.0.q_proj.vera_lambda_b.default",
            "layers.0.q_proj.base_layer.weight",
        ],
    )
    def test_adapters_are_told_from_other_unexpected_tensors(self, name: str) -> None:
        """FAULTS S15."""
        (problem,) = compare_with(architecture({}), {name: (1,)})
        assert problem.message == (
            f"1 tensor is not of TinyModel: {name}. This checkpoint carries adapters of a kind that this version does "
            "not fold into the weights; to drop them would give the model without its training. Fold them in where "
            "it was trained and save again, or merge the tensors as they are by --weights-only."
        )

    def test_what_the_class_says_may_be_there_is_ignored_and_the_rest_is_unexpected(self) -> None:
        wanted = architecture({"rotary_emb.inv_freq": (2,), "norm.weight": (4,)}, ignore=(r"rotary_emb\.inv_freq",))
        names = ["layers.0.rotary_emb.inv_freq", "rotary_emb.inv_freq", "norm.weight", "v_head.weight"]
        assert ignored_names(wanted, names) == ["layers.0.rotary_emb.inv_freq"]
        assert unexpected_names(wanted, names) == ["v_head.weight"]
        shapes: dict[str, tuple[int, ...]] = {**wanted.shapes, "layers.0.rotary_emb.inv_freq": (2,)}
        assert compare_with(wanted, shapes) == []


class TestTies:
    """FAULTS S12."""

    def test_equal_names_are_written_once(self) -> None:
        plan = plan_ties(TIED, TIED.shapes)
        assert plan == TiePlan((("embed.weight", "head.weight"),), (), ())
        assert settle_ties(plan, diverged=(), written={}) == TieOutcome(
            drop=frozenset({"head.weight"}),
            copies={},
            broken=False,
            notes=("head.weight equals embed.weight, to which it is tied; written once",),
        )

    def test_a_diverged_alias_is_written_and_breaks_the_tie(self) -> None:
        assert settle_ties(plan_ties(TIED, TIED.shapes), diverged={"head.weight"}, written={}) == TieOutcome(
            drop=frozenset(),
            copies={},
            broken=True,
            notes=(
                (
                    "head.weight differs from embed.weight, to which it was tied; both are written and "
                    "tie_word_embeddings is set to false"
                ),
            ),
        )

    def test_a_missing_alias_is_filled_by_the_tie(self) -> None:
        plan = plan_ties(TIED, ["embed.weight", "norm.weight"])
        assert plan == TiePlan((), (("embed.weight", "head.weight"),), ())
        assert settle_ties(plan, diverged=(), written={}) == TieOutcome(
            frozenset(), {}, broken=False, notes=("head.weight was not saved; it is tied to embed.weight",)
        )

    def test_a_missing_canonical_is_a_problem(self) -> None:
        plan = plan_ties(TIED, ["head.weight", "norm.weight"])
        assert plan.problems == (
            Problem(
                "missing-tied-tensor",
                "embed.weight",
                "the checkpoint lacks this tensor of TinyModel, and has only head.weight, which by config.json is "
                "tied to it. If config.json is not that of the model that was trained, name the right one by "
                "--config DIR.",
            ),
        )
        assert plan.compare == plan.absent == ()

    def test_a_missing_tie_is_a_problem(self) -> None:
        (problem,) = plan_ties(TIED, ["norm.weight"]).problems
        assert str(problem) == (
            "embed.weight: the checkpoint lacks this tensor of TinyModel. If config.json is not that of the model that "
            "was trained, name the right one by --config DIR."
        )

    def test_one_diverged_alias_has_all_names_of_all_ties_written(self) -> None:
        wanted = architecture({}, ties=(("shared", "encoder", "decoder", "head"), ("bias", "head.bias")))
        outcome = settle_ties(plan_ties(wanted, ["shared", "encoder", "head", "bias"]), diverged=["head"], written={})
        assert outcome == TieOutcome(
            drop=frozenset(),
            copies={"decoder": "shared", "head.bias": "bias"},
            broken=True,
            notes=(
                (
                    "head differs from shared, to which it was tied; both are written and tie_word_embeddings is set "
                    "to false"
                ),
                "decoder was not saved; it is written as a copy of shared",
                "head.bias was not saved; it is written as a copy of bias",
            ),
        )
