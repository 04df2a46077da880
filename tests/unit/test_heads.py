"""Which names are of a value head, and whether the architecture has a place for it."""

from __future__ import annotations

import pytest

from merger.huggingface.architecture import Architecture
from merger.huggingface.heads import has_value_head, value_head_names, value_model_config
from merger.huggingface.names import strip_wrappers


def architecture(*names: str) -> Architecture:
    return Architecture(
        class_name="TestForCausalLM",
        shapes=dict.fromkeys(names, (2, 3)),
        ties=(),
        keep_fp32=frozenset(),
        keep_fp32_in_float16=frozenset(),
        ignore_unexpected=(),
        dtype=None,
    )


def test_a_value_head_is_what_the_wrapper_calls_so_and_nothing_like_it() -> None:
    """S20."""
    names = ["w", "v_head.summary.weight", "v_head.bias", "v_head", "v_heads.w", "my.v_head.w", "score.v_head"]
    assert value_head_names(architecture("w"), names) == ["v_head.summary.weight", "v_head.bias", "v_head"]


def test_an_architecture_with_such_a_head_of_its_own_has_a_place_for_it() -> None:
    """S20: what is missing or wrong of it is for the comparison with the architecture to say."""
    assert value_head_names(architecture("w", "v_head.weight"), ["w", "v_head.weight", "v_head.bias"]) == []
    assert value_head_names(None, ["w", "v_head.weight"]) == []


@pytest.mark.parametrize("prefix", ["", "module.", "_fsdp_wrapped_module."])
def test_a_head_is_seen_under_wrappers(prefix: str) -> None:
    """S14, S20."""
    saved = [f"{prefix}pretrained_model.w", f"{prefix}v_head.summary._fsdp_wrapped_module.weight"]
    assert has_value_head(saved)
    assert not has_value_head(["w", "value_head.weight", "vv_head.w"])
    assert [*strip_wrappers(saved, {"w"}).values()] == ["w", "v_head.summary.weight"]


def test_a_model_of_that_name_keeps_it() -> None:
    """S14: no prefix goes that is the architecture's own."""
    assert strip_wrappers(["pretrained_model.w"], {"pretrained_model.w"}) == {
        "pretrained_model.w": "pretrained_model.w"
    }


def test_a_config_that_speaks_of_labels_keeps_them() -> None:
    """S20."""
    assert value_model_config({"a": 1, "id2label": {}}, "X") == {"a": 1, "id2label": {}, "architectures": ["X"]}
    assert value_model_config({"architectures": ["Y"]}, "X") == {
        "architectures": ["X"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
