"""The names of a state dict under peft: which are adapters, which trained copies, which the base. S14, S15."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from merger.dtypes import BY_NAME
from merger.errors import MergerError, ModelError
from merger.huggingface.lora import Lora, find_lora, has_lora, holds_base, peft_name
from merger.tensors import StoredTensor

Q, P = "layers.0.q_proj", "base_model.model"


def stored(*names: str) -> dict[str, StoredTensor]:
    """Tensors of shape (2, 2), of which nothing but the names is looked at."""
    return {name: StoredTensor(name, BY_NAME["float32"], (2, 2), ()) for name in names}


def found(names: Iterable[str], adapter: str | None = None) -> Lora:
    lora = find_lora(stored(*names), None, adapter=adapter)
    assert lora is not None
    return lora


def message(*names: str, adapter: str | None = None) -> str:
    with pytest.raises(MergerError) as caught:
        found(names, adapter)
    return str(caught.value)


PAIR = (f"{P}.{Q}.lora_A.default.weight", f"{P}.{Q}.lora_B.default.weight")


@pytest.mark.parametrize(
    "names",
    [
        (*PAIR, f"{P}.{Q}.base_layer.weight", f"{P}.norm.weight"),
        (
            f"_fsdp_wrapped_module.{P}._orig_mod.{Q}.lora_A.default._fsdp_wrapped_module.weight",
            f"_fsdp_wrapped_module.{P}._orig_mod.{Q}.lora_B.default.weight",
            f"_fsdp_wrapped_module.{P}._orig_mod.{Q}._checkpoint_wrapped_module.base_layer.weight",
            f"_fsdp_wrapped_module.{P}.norm.weight",
        ),
        # As a file of peft has them, which leaves the adapter's name out.
        (f"{P}.{Q}.lora_A.weight", f"{P}.{Q}.lora_B.weight", f"{P}.{Q}.weight", f"{P}.norm.weight"),
        (f"module.{Q}.lora_A.weight", f"module.{Q}.lora_B.weight", f"module.{Q}.weight", "module.norm.weight"),
    ],
    ids=["peft", "wrapped", "peft's file", "module"],
)
def test_factors_and_base_have_the_names_of_the_model(names: tuple[str, ...]) -> None:
    lora = found(names)
    assert [(module.name, module.wrapper) for module in lora.modules] == [(Q, Q)]
    assert lora.modules[0].factors == {"lora_A": stored(names[0])[names[0]], "lora_B": stored(names[1])[names[1]]}
    assert set(lora.base) == {f"{Q}.weight", "norm.weight"}
    assert lora.saved_as == {f"{Q}.weight": names[2], "norm.weight": names[3]}
    assert lora.adapters == ("default",)


def test_wrappers_around_wrappers_keep_their_own_names() -> None:
    """So peft wraps several parameters of one layer."""
    lora = found(
        f"{P}.mlp.experts.{middle}lora_{factor}.default.weight" for middle in ("", "base_layer.") for factor in "AB"
    )
    assert [(module.name, module.wrapper) for module in lora.modules] == [
        ("mlp.experts", "mlp.experts"),
        ("mlp.experts", "mlp.experts.base_layer"),
    ]
    assert lora.is_adapter_only


def test_trained_copies_go_before_what_they_replaced() -> None:
    names = (*PAIR, f"{P}.head.original_module.weight", f"{P}.head.modules_to_save.default.weight")
    lora = found(names)
    assert (set(lora.originals), set(lora.trained), set(lora.base)) == ({"head.weight"}, {"head.weight"}, set())
    assert not lora.is_adapter_only


def test_the_magnitude_of_dora_and_a_bias_belong_to_their_layer() -> None:
    names = (*PAIR, f"{P}.{Q}.lora_magnitude_vector.default.weight", f"{P}.{Q}.lora_B.default.bias")
    (module,) = found(names).modules
    assert module.magnitude is not None
    assert (module.magnitude.fqn, module.bias is not None and module.bias.fqn) == names[2:]


def test_one_of_several_adapters_is_asked_for() -> None:
    names = [f"{P}.{Q}.lora_{factor}.{adapter}.weight" for adapter in ("one", "two") for factor in "AB"]
    assert message(*names) == (
        "the checkpoint holds 2 adapters: one, two. Say which one is meant by --lora-adapter NAME."
    )
    assert message(*names, adapter="three") == "the checkpoint has no adapter three, only one, two"
    lora = found(names, "two")
    assert lora.adapters == ("two", "one")
    assert [factor.fqn for factor in lora.modules[0].factors.values()] == names[2:]


@pytest.mark.parametrize(
    ("names", "collision"),
    [
        ((*PAIR, f"{P}.{Q}.lora_A.weight"), f"{Q}.lora_A"),
        ((*PAIR, f"{P}._orig_mod.{Q}.lora_B.default.weight"), f"{Q}.lora_B"),
        ((*PAIR, f"{P}.{Q}.lora_B.default.bias", f"{P}.{Q}.lora_B.bias"), f"{Q}.lora_B.bias"),
        ((*PAIR, f"{P}.{Q}.base_layer.weight", f"{P}.{Q}.weight"), f"{Q}.weight"),
        ((*PAIR, f"{P}.head.weight", f"{P}.head.original_module.weight"), "head.weight"),
        (
            (*PAIR, f"{P}.head.modules_to_save.default.weight", f"{P}._orig_mod.head.modules_to_save.default.weight"),
            "head.weight",
        ),
    ],
)
def test_names_that_become_one_are_refused(names: tuple[str, ...], collision: str) -> None:
    """One of two would be lost in silence."""
    told = message(*names)
    assert told.startswith(f"{collision}: ")
    assert told.endswith(
        " become this one name when the names of wrappers are stripped. Save the state dict of one model only."
    )
    assert sum(name in told for name in names) == 2


def test_half_an_adapter_is_refused() -> None:
    assert message(PAIR[0], f"{P}.{Q}.weight") == (
        f"{Q}: has lora_A and not one pair of lora_A and lora_B; the checkpoint is incomplete: save it again"
    )
    assert message(f"{P}.{Q}.lora_B.default.bias") == (
        f"{Q}: has a bias and not one pair of lora_A and lora_B; the checkpoint is incomplete: save it again"
    )


def test_trained_copies_alone_are_no_lora() -> None:
    assert message(f"{P}.head.modules_to_save.default.weight") == (
        "the checkpoint was saved under peft (adapters: default) but holds no LoRA factors; the training would be lost"
    )


@pytest.mark.parametrize("part", ["token_adapter", "ranknum", "lora_E", "lora_diag", "lora_monteclora_sampler"])
def test_adapters_of_other_kinds_are_refused(part: str) -> None:
    assert message(*PAIR, f"{P}.embed.{part}.default") == (
        f"{P}.embed.{part}.default: adapters of a kind that this version does not fold. Fold them in where they were "
        "trained and save again."
    )


def test_what_the_model_itself_calls_so_is_no_adapter() -> None:
    """RWKV has parameters of such names."""
    names = [f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"]
    assert has_lora(names, ())
    assert not has_lora([f"{P}.{name}" for name in names], names)
    assert find_lora(stored(*names), names) is None
    with pytest.raises(ModelError):
        find_lora(stored(*names, f"{P}.other.lora_A.weight"), names)


def test_base_weights_are_told_from_adapters() -> None:
    assert not holds_base([*PAIR, f"{P}.head.modules_to_save.default.weight"])
    assert holds_base([*PAIR, f"{P}.norm.weight"])
    assert holds_base([f"{P}.head.original_module.weight"])


def test_the_name_that_peft_uses_has_each_base_layer() -> None:
    assert peft_name(f"module.{P}.mlp._orig_mod.experts.base_layer.base_layer", "mlp.experts") == (
        "mlp.experts.base_layer.base_layer"
    )
    assert peft_name(f"{P}.{Q}.base_layer.bias", f"{Q}.bias") == f"{Q}.base_layer.bias"
