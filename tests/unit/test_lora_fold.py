"""LoRA folded in, held against peft's own `merge_and_unload` on the same model. S15, S23."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from merger import computing
from tests.unit.peft_models import EXPERTS, Tensors, base_of, folded, merged, saved, under_peft

LAYERS: dict[str, dict[str, Any]] = {
    "linear": {"target_modules": ["wide", "square"]},
    "with bias": {"target_modules": ["wide"]},
    "embedding": {"target_modules": ["embed"]},
    "conv1d": {"target_modules": ["turned", "turned_square"], "fan_in_fan_out": True},
    "convolutions": {"target_modules": ["line", "image", "point"]},
    "experts": {"target_modules": ["square"], "target_parameters": EXPERTS},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"wide": 5, "turned": 5, "image": 5}, "alpha_pattern": {"square": 3, "line": 7}},
    "dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
}
# peft has none of these.
IMPOSSIBLE = {
    ("experts", "dora"), ("experts", "lora_bias"), ("embedding", "lora_bias"), ("linear", "lora_bias"),
    ("experts", "patterns"),
}  # fmt: skip
# Where lengths are taken along columns, or convolution is a product here: other sums of the same numbers.
CLOSE = {"embed.weight", "turned.weight", "turned_square.weight", "line.weight", "image.weight"}


def differing(found: Tensors, expected: Tensors) -> dict[str, float]:
    """The tensors that differ, and by how many units in the last place of the largest element at most."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name].double() - expected[name].double()).abs().max() / _unit(expected[name]))
        for name in expected
        if not torch.equal(found[name], expected[name])
    }


def _unit(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) * torch.finfo(tensor.dtype).eps


@pytest.fixture(params=[1 << 20, 20], ids=["one band", "many bands"])
def _bands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "_BAND_ELEMENTS", request.param)


@pytest.mark.usefixtures("_bands")
@pytest.mark.parametrize(
    ("layers", "variant"),
    [(layers, variant) for layers in LAYERS for variant in VARIANTS if (layers, variant) not in IMPOSSIBLE],
)
def test_the_folded_model_is_that_of_peft(layers: str, variant: str, tmp_path: Path) -> None:
    model = under_peft(**LAYERS[layers], **VARIANTS[variant])
    base = base_of(model)
    found = merged(saved(model, tmp_path / "checkpoint"), tmp_path / "out")
    expected = folded(model)
    different = differing(found, expected)
    exact = variant != "dora" or layers in {"linear", "with bias"}
    assert {name for name in different if exact and layers != "convolutions"} == set()
    assert different.keys() <= CLOSE
    assert all(units <= 2 for units in different.values()), different
    # What peft gives is not the base, so the base would have been noticed.
    assert {name.split(".")[0] for name in differing(expected, base)} >= {
        name.split(".")[0] for name in LAYERS[layers]["target_modules"]
    }


@pytest.mark.parametrize("layers", LAYERS)
def test_float32_adapters_on_a_16_bit_base_are_added_and_rounded_once(layers: str, tmp_path: Path) -> None:
    """As peft has them unless told otherwise."""
    model = under_peft(torch.bfloat16, autocast=True, **LAYERS[layers])
    found = merged(saved(model, tmp_path / "checkpoint"), tmp_path / "out")
    different = differing(found, folded(model))
    # Of these peft rounds the product first, and of convolutions it takes other sums.
    assert {name for name in different if layers not in {"embedding", "experts", "convolutions"}} == set()
    assert all(units <= 1 for units in different.values()), different


def test_a_copy_that_was_trained_takes_the_place_of_what_it_was_copied_from(tmp_path: Path) -> None:
    model = under_peft(target_modules=["wide"], modules_to_save=["head", "turned"])
    base = base_of(model)
    found = merged(saved(model, tmp_path / "checkpoint"), tmp_path / "out")
    expected = folded(model)
    assert differing(found, expected) == {}
    assert differing(expected, base).keys() == {"wide.weight", "head.weight", "turned.weight", "turned.bias"}


@pytest.mark.parametrize("variant", ["plain", "rslora"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_adapters_are_folded_exactly_and_peft_is_within_a_unit(
    dtype: torch.dtype, variant: str, tmp_path: Path
) -> None:
    """It rounds the product before it adds, which this program does not."""
    model = under_peft(dtype, target_modules=["wide"], **VARIANTS[variant])
    layer: Any = model.get_submodule("base_model.model.wide")
    a, b = layer.lora_A["default"].weight.detach().float(), layer.lora_B["default"].weight.detach().float()
    exact = layer.base_layer.weight.detach().float() + b @ a * layer.scaling["default"]
    found = merged(saved(model, tmp_path / "checkpoint"), tmp_path / "out")
    assert torch.equal(found["wide.weight"], exact.to(dtype))
    different = differing(found, folded(model))
    assert set(different) == {"wide.weight"}
    assert different["wide.weight"] <= 1


def test_float64_is_folded_in_float64(tmp_path: Path) -> None:
    model = under_peft(torch.float64, target_modules=["wide", "embed"])
    found = merged(saved(model, tmp_path / "checkpoint"), tmp_path / "out")
    assert differing(found, folded(model)) == {}


def test_a_band_is_the_same_whatever_is_read_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid of bands does not follow what is asked for: one worker and four give the same bytes."""
    monkeypatch.setattr(computing, "_BAND_ELEMENTS", 20)
    folder = saved(under_peft(**LAYERS["linear"]), tmp_path / "checkpoint")
    first = merged(folder, tmp_path / "first", workers=1)
    other = merged(folder, tmp_path / "other", workers=4)
    assert differing(first, other) == {}
