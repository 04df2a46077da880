"""LoRA folded in, held against peft's own `merge_and_unload` on the same model. S15, S23."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

import merger
from merger import computing
from merger.errors import ModelError
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


def factors(layer: str, rank: int, inputs: int, outputs: int) -> Tensors:
    """Those of a layer, under the names that peft saves."""
    own = f"base_model.model.{layer}"
    return {
        f"{own}.lora_A.default.weight": torch.ones(rank, inputs),
        f"{own}.lora_B.default.weight": torch.ones(outputs, rank),
    }


def weights(**shapes: tuple[int, ...]) -> Tensors:
    return {f"base_model.model.{name.replace('__', '.')}": torch.ones(shape) for name, shape in shapes.items()}


def refused(folder: Path, **options: Any) -> list[tuple[str, str]]:
    """Kind and whole message of all that a merge is refused for."""
    with pytest.raises(ModelError) as caught:
        merged(folder, folder.parent / "out", **options)
    assert not (folder.parent / "out").exists()
    return [(problem.kind, str(problem)) for problem in caught.value.problems]


def exports_alone(folder: Path) -> bool:
    """Whether the adapter is written by itself, as messages advise, with all of its factors."""
    merger.merge(folder, folder.parent / "alone", lora="adapter")
    found = load_file(folder.parent / "alone" / "lora_adapter" / "adapter_model.safetensors")
    told = json.loads((folder.parent / "alone" / "lora_adapter" / "adapter_config.json").read_text())
    state = torch.load(folder / "model_world_size_1_rank_0.pt")
    factors = {name.replace(".default", ""): tensor.shape for name, tensor in state.items() if "lora_" in name}
    return {name: tensor.shape for name, tensor in found.items()} == factors and told["r"] == 3


ASK = (
    "the base may be quantised, or that of another model: name the one that was trained with by --base DIR where the "
    "checkpoint itself has none, or export the adapter alone with --lora adapter, and fold with peft"
)


@pytest.mark.parametrize(
    ("base", "found"),
    [
        # As bitsandbytes lays four bits per element.
        (
            weights(q__base_layer__weight=(24, 1), q__base_layer__bias=(8,)),
            "fit none of its parameters: bias (8), weight (24, 1)",
        ),
        (weights(k__weight=(8, 6)), "but the base has no such layer"),
    ],
    ids=["quantised", "no layer"],
)
def test_factors_that_fit_no_weight_are_told(base: Tensors, found: str, tmp_path: Path) -> None:
    folder = saved({**factors("q", 3, 6, 8), **base}, tmp_path / "checkpoint", r=3, lora_alpha=12)
    comma = "" if found.startswith("but") else " which"
    assert refused(folder) == [("no-base-weight", f"q: has factors of shape (3, 6) and (8, 3),{comma} {found}; {ASK}")]
    assert exports_alone(folder)


def test_factors_that_fit_several_parameters_are_told(tmp_path: Path) -> None:
    """Which of them peft wrapped, only its own settings say."""
    base = weights(experts__base_layer__up=(5, 8, 6), experts__base_layer__gate=(5, 8, 6))
    folder = saved({**factors("experts", 15, 6, 8), **base}, tmp_path / "checkpoint", lora_alpha=12)
    several = "experts: has factors of shape (15, 6) and (8, 15), which fit several of its parameters: gate, up"
    assert refused(folder) == [("no-base-weight", f"{several}; {ASK}")]
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 12, "target_parameters": ["experts.up"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    assert exports_alone(folder)


@pytest.mark.parametrize("mode", ["adapter", "base"])
def test_an_adapter_of_which_settings_would_be_made_up_is_not_written(mode: str, tmp_path: Path) -> None:
    """Nested wrappers are on parameters, and which these are nothing says here."""
    base = weights(experts__base_layer__up=(5, 8, 6), experts__base_layer__gate=(5, 8, 6))
    nested = {**factors("experts", 15, 6, 8), **factors("experts.base_layer", 15, 6, 8)}
    folder = saved({**nested, **base}, tmp_path / "checkpoint", lora_alpha=12)
    found = "has factors of shape (15, 6) and (8, 15), which fit several of its parameters: gate, up"
    ask = "put adapter_config.json beside the checkpoint, which says what it is"
    assert refused(folder, lora=mode) == [
        ("no-base-weight", f"{wrapper}: {found}; {ask}") for wrapper in ("experts", "experts.base_layer")
    ]


@pytest.mark.parametrize("mode", ["both", "adapter"])
def test_a_rank_that_is_not_the_stated_one_is_told_in_every_mode(mode: str, tmp_path: Path) -> None:
    """An adapter with the settings of another run does not load, or counts for more or less than it did."""
    for name, base in (("whole", weights(q__weight=(8, 6), k__weight=(8, 6))), ("alone", {})):
        state = {**factors("q", 3, 6, 8), **factors("k", 3, 6, 8), **base}
        folder = saved(state, tmp_path / name, r=4, lora_alpha=12)
        message = (
            f"k: has factors of rank 3, but {folder}/lora_train_meta.json states 4 (and 1 more layers); the settings "
            "are those of another run: put the right ones there, or remove them and give --lora-alpha N"
        )
        assert refused(folder, lora=mode) == [("lora-rank", message)]


def test_the_file_that_states_a_wrong_rank_is_named(tmp_path: Path) -> None:
    """Which need not be the one of peft, where that leaves it out."""
    state = {**factors("q", 3, 6, 8), **weights(q__weight=(8, 6))}
    folder = saved(state, tmp_path / "checkpoint", r=4, lora_alpha=12)
    config, meta = folder / "adapter_config.json", folder / "lora_train_meta.json"
    for settings, path, stated in (({}, meta, 4), ({"rank_pattern": {"q": 5}}, config, 5)):
        config.write_text(json.dumps({"peft_type": "LORA", **settings}))
        message = (
            f"q: has factors of rank 3, but {path} states {stated}; the settings are those of another run: put the "
            "right ones there, or remove them and give --lora-alpha N"
        )
        assert refused(folder) == [("lora-rank", message)]


@pytest.mark.parametrize("told", [{"use_rslora": True}, {"use_rslora": False}, {}], ids=str)
def test_that_nothing_says_whether_rslora_was_used_is_told_only_where_nothing_does(
    told: dict[str, bool], tmp_path: Path
) -> None:
    state = {**factors("q", 3, 6, 8), **weights(q__weight=(8, 6))}
    folder = saved(state, tmp_path / "checkpoint", lora_alpha=12, **told)
    note = (
        "lora_train_meta.json does not say whether rsLoRA was used, so the scale is alpha / r; an adapter_config.json "
        "beside it would say"
    )
    assert (note in merger.merge(folder, tmp_path / "out", weights_only=True).notes) is (told == {})


def test_a_quantised_base_is_told(tmp_path: Path) -> None:
    base = {"base_model.model.q.base_layer.weight": torch.ones(8, 6).to(torch.float8_e4m3fn)}
    folder = saved({**factors("q", 3, 6, 8), **base}, tmp_path / "checkpoint", lora_alpha=12)
    message = (
        "q.weight: is float8_e4m3fn, to which LoRA cannot be added: the base is quantised. Export the adapter alone "
        "with --lora adapter, and use it on the base model."
    )
    assert refused(folder) == [("quantised-base", message)]
    assert exports_alone(folder)


def test_square_experts_are_not_folded_by_a_guess(tmp_path: Path) -> None:
    base = weights(experts__base_layer__up=(5, 6, 6))
    folder = saved({**factors("experts", 15, 6, 6), **base}, tmp_path / "checkpoint", lora_alpha=12)
    message = (
        "experts.up: has experts of shape (6, 6), from which it cannot be told whether they lie as (outputs, inputs) "
        "or as (inputs, outputs); export the adapter alone with --lora adapter, and fold with peft"
    )
    assert refused(folder) == [("lora-layout", message)]
    assert exports_alone(folder)


def test_square_matrices_are_not_folded_by_a_setting_that_other_layers_contradict(tmp_path: Path) -> None:
    """One fan_in_fan_out stands for all layers, and peft leaves in it what the last one asked for."""
    model = under_peft(target_modules=["wide", "square", "turned", "turned_square"], fan_in_fan_out=True)
    folder = saved(model, tmp_path / "checkpoint")
    message = (
        "has the shape (6, 6), from which it cannot be told whether it lies as (outputs, inputs) or as (inputs, "
        "outputs), and fan_in_fan_out does not fit other layers; merge without --weights-only, with the model's "
        "config.json, or export the adapter alone with --lora adapter"
    )
    names = ["square.weight", "turned_square.weight"]
    assert refused(folder) == [("lora-layout", f"{name}: {message}") for name in names]
    assert exports_alone(folder)


def test_the_architecture_says_how_square_matrices_lie_whatever_the_settings_say(tmp_path: Path) -> None:
    """Layers of both kinds in one model, as of an encoder of images before GPT-2; the latter is wrapped last."""
    sizes = {"hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 9}
    encoder = ViTConfig(**sizes, image_size=4, patch_size=2)
    names = {"bos_token_id": 1, "eos_token_id": 2}
    decoder = GPT2Config(vocab_size=11, n_embd=6, n_inner=9, n_layer=1, n_head=2, n_positions=8, **names)
    wrapped: list[dict[str, Any]] = [
        {"target_modules": ["query", "q_proj", "attn.c_proj"]},
        {"target_modules": ["query", "q_proj"], "target_parameters": ["attn.c_proj.weight"]},
    ]
    for settings in wrapped:
        folder = tmp_path / str(len(settings))
        config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        config.architectures = ["VisionEncoderDecoderModel"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings that fit one kind of layer only
            model: Any = get_peft_model(
                VisionEncoderDecoderModel(config), LoraConfig(r=3, init_lora_weights=False, **settings)
            )
        saved(model, folder)
        config.save_pretrained(folder / "huggingface")
        merger.merge(folder, folder / "out", names="as-is")
        expected = folded(model)
        found = load_file(folder / "out" / "model.safetensors")
        assert len(found) > 20
        assert differing(found, {name: expected[name] for name in found}) == {}


def test_a_bias_without_one_to_add_it_to_is_told(tmp_path: Path) -> None:
    base = weights(q__base_layer__weight=(8, 6))
    biases = {"base_model.model.q.lora_B.default.bias": torch.ones(8)}
    folder = saved({**factors("q", 3, 6, 8), **base, **biases}, tmp_path / "checkpoint", lora_alpha=12)
    message = (
        "q.bias: the adapter has a bias of shape (8) (lora_bias), but the layer has none of that shape to add it to, "
        "so it cannot be folded; export the adapter alone with --lora adapter"
    )
    assert refused(folder) == [("no-base-bias", message)]
    assert exports_alone(folder)


def test_what_cannot_be_folded_is_told_all_at_once(tmp_path: Path) -> None:
    base = weights(q__base_layer__weight=(8, 6), experts__base_layer__up=(5, 6, 6))
    biases = {"base_model.model.q.lora_B.default.bias": torch.ones(8)}
    state = {**factors("q", 2, 6, 8), **factors("k", 3, 6, 8), **factors("experts", 15, 6, 6), **base, **biases}
    folder = saved(state, tmp_path / "checkpoint", r=3, lora_alpha=12)
    kinds = [kind for kind, _ in refused(folder)]
    assert kinds == ["no-base-weight", "lora-layout", "lora-rank", "no-base-bias"]
