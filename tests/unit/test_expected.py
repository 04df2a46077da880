"""What an architecture expects, with transformers itself as the oracle: what it saves, loads and rejects."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from merger.errors import ModelError, Problem
from merger.huggingface.architecture import Architecture
from merger.huggingface.expected import (
    _ties,
    expected_architecture,
    generation_config_complaint,
    quiet,
    read_config,
    stated_dtype,
)
from merger.huggingface.side_files import output_config
from merger.huggingface.ties import plan_ties, settle_ties

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
MODELS = {
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=False)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=64)
    ),
    "bert-classifier": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL)),
    "bert-mlm": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64)
    ),
}
OTHERWISE = (
    "Name a folder with the right config.json by --config DIR, or merge the tensors as they are, without this check, "
    "by --weights-only."
)
VERSION = f"transformers {transformers.__version__}"


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Architecture]:
    """A model of random weights, the folder that it was saved to, and what we expect from that folder's config."""
    folder = tmp_path_factory.mktemp(request.param)
    model = MODELS[request.param]()
    model.save_pretrained(folder)
    return model, folder, expected_architecture(folder)


def write_config(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def test_names_and_shapes_without_aliases_are_those_in_the_file_that_save_pretrained_writes(
    saved: tuple[Any, Path, Architecture],
) -> None:
    _, folder, architecture = saved
    with safe_open(folder / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    aliases = {alias for group in architecture.ties for alias in group[1:]}
    assert {name: shape for name, shape in architecture.shapes.items() if name not in aliases} == written


def test_names_with_aliases_are_those_of_the_state_dict_in_its_order(saved: tuple[Any, Path, Architecture]) -> None:
    model, _, architecture = saved
    assert list(architecture.shapes.items()) == [(name, tuple(t.shape)) for name, t in model.state_dict().items()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_stays_float32_is_what_from_pretrained_keeps_in_float32(
    saved: tuple[Any, Path, Architecture], dtype: str
) -> None:
    """FAULTS S13: T5 keeps `wo` in float32 when it is float16, not when it is bfloat16."""
    model, folder, architecture = saved
    loaded = type(model).from_pretrained(folder, torch_dtype=getattr(torch, dtype))
    kept = {name for name, tensor in loaded.state_dict().items() if tensor.dtype == torch.float32}
    assert architecture.kept_in_float32(dtype) == (kept if dtype != "float32" else set())


def test_what_the_class_lists_as_strict_or_makes_float32_itself_stays_so_in_both_dtypes(tmp_path: Path) -> None:
    """FAULTS S13: a router's bias among bfloat16 weights."""
    if not getattr(transformers.DeepseekV3ForCausalLM, "_keep_in_fp32_modules_strict", None):
        pytest.skip("this version of transformers casts it")
    config = transformers.DeepseekV3Config(
        **{**SMALL, "num_hidden_layers": 1}, num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=0, moe_intermediate_size=16, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    )  # fmt: skip
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    loaded = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name for name, tensor in loaded.state_dict().items() if tensor.dtype == torch.float32}
    architecture = expected_architecture(tmp_path)
    assert "model.layers.0.mlp.gate.e_score_correction_bias" in kept
    assert architecture.kept_in_float32("bfloat16") == architecture.kept_in_float32("float16") == kept


def test_a_strict_list_holds_in_both_dtypes_and_the_other_in_float16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS S13."""
    if not hasattr(transformers.PreTrainedModel, "_keep_in_fp32_modules_strict"):
        pytest.skip("this version of transformers has no strict list")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["input_layernorm"])
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules", ["layers.*.o_proj"])
    MODELS["llama"]().save_pretrained(tmp_path)
    architecture = expected_architecture(tmp_path)
    for dtype in ("bfloat16", "float16"):
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
        kept = {name for name, tensor in loaded.state_dict().items() if tensor.dtype == torch.float32}
        assert architecture.kept_in_float32(dtype) == kept
        assert len(kept) == {"bfloat16": 2, "float16": 4}[dtype]


@pytest.mark.parametrize(
    ("name", "ties"),
    [
        ("qwen2", (("model.embed_tokens.weight", "lm_head.weight"),)),
        ("llama", ()),
        ("gpt2", (("transformer.wte.weight", "lm_head.weight"),)),
        ("bert-classifier", ()),
        (
            "bert-mlm",
            (
                ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
                ("cls.predictions.bias", "cls.predictions.decoder.bias"),
            ),
        ),
        (
            "t5",
            (("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),),
        ),
    ],
)
def test_ties_are_the_models_with_the_written_name_first(
    name: str, ties: tuple[tuple[str, ...], ...], tmp_path: Path
) -> None:
    """FAULTS S12."""
    MODELS[name]().config.save_pretrained(tmp_path)
    config = {**read_config(tmp_path), "architectures": [type(MODELS[name]()).__name__]}
    write_config(tmp_path, **config)
    assert expected_architecture(tmp_path).ties == ties


def test_where_a_class_lists_all_tied_names_the_last_is_the_written_one() -> None:
    """FAULTS S12: as `save_pretrained` has it, which removes listed names in order until one is left."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in ("b", "c", "a")})
    model["a"].weight = model["b"].weight = model["c"].weight
    vars(model)["_tied_weights_keys"] = ["a.weight", r"[bc]\.weight"]  # a list, as transformers 4 has it
    assert _ties(model, model.state_dict(keep_vars=True)) == (("c.weight", "b.weight", "a.weight"),)


def test_a_model_whose_tie_was_broken_loads_with_both_tensors_as_they_were(tmp_path: Path) -> None:
    """FAULTS S12, the whole way: diverged tensors, both written, and the switch in config.json."""
    from safetensors.torch import save_file

    model = MODELS["qwen2"]()
    model.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    architecture = expected_architecture(tmp_path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["lm_head.weight"] += 1
    outcome = settle_ties(plan_ties(architecture, state), diverged={"lm_head.weight"}, written={})
    assert outcome.broken
    write_config(tmp_path, **output_config(config, dtype=None, tied=False))
    save_file({name: t for name, t in state.items() if name not in outcome.drop}, tmp_path / "model.safetensors")
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in state.items())


def test_former_buffers_and_what_the_class_lists_are_ignored(tmp_path: Path) -> None:
    write_config(tmp_path, architectures=["BertModel"], model_type="bert", **SMALL)
    assert expected_architecture(tmp_path).ignore_unexpected == (r"(^|\.)position_ids$",)
    write_config(tmp_path, architectures=["LlamaModel"], model_type="llama", **SMALL)
    assert expected_architecture(tmp_path).ignore_unexpected == (r"rotary_emb\.inv_freq",)
    write_config(tmp_path, architectures=["T5EncoderModel"], model_type="t5", d_model=32, d_ff=48, num_layers=1)
    assert expected_architecture(tmp_path).ignore_unexpected == ("decoder",)


def test_the_prefix_that_fsdp1_leaves_before_the_class_is_stripped(tmp_path: Path) -> None:
    """FAULTS L6."""
    write_config(tmp_path, architectures=["FSDPLlamaForCausalLM"], model_type="llama", **SMALL)
    assert expected_architecture(tmp_path).class_name == "LlamaForCausalLM"


def test_the_class_of_a_head_is_that_of_architectures(tmp_path: Path) -> None:
    """FAULTS S20."""
    write_config(tmp_path, architectures=["LlamaForTokenClassification"], model_type="llama", num_labels=1, **SMALL)
    assert expected_architecture(tmp_path).shapes["score.weight"] == (1, 32)


def test_the_callers_default_dtype_and_the_verbosity_of_transformers_are_left_as_they_were(tmp_path: Path) -> None:
    logging = transformers.utils.logging
    write_config(tmp_path, architectures=["LlamaForCausalLM"], model_type="llama", **SMALL)
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        expected_architecture(tmp_path)
        assert torch.get_default_dtype() == torch.float32
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)


def test_warnings_of_libraries_are_kept_off_the_terminal() -> None:
    with quiet():
        warnings.warn("advice", FutureWarning, stacklevel=1)


def test_nothing_is_printed_while_the_model_is_built_and_nothing_is_imported_before(tmp_path: Path) -> None:
    write_config(tmp_path, architectures=["Qwen2ForCausalLM"], model_type="qwen2", use_sliding_window=True, **SMALL)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    script = (
        "import sys; from pathlib import Path\n"
        "from merger.huggingface import expected, names, side_files, ties\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "expected.expected_architecture(Path(sys.argv[1])); expected.generation_config_complaint(Path(sys.argv[1]))"
    )
    run = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        (
            {"model_type": "llama"},
            "no-architecture",
            f'it names no class under "architectures", such as ["Qwen2ForCausalLM"]. Add it. {OTHERWISE}',
        ),
        (
            {"architectures": [], "model_type": "llama"},
            "no-architecture",
            f'it names no class under "architectures", such as ["Qwen2ForCausalLM"]. Add it. {OTHERWISE}',
        ),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "no-model-type",
            f'it has no "model_type", such as "qwen2". Add it. {OTHERWISE}',
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "lama"},
            "unknown-model-type",
            f'{VERSION} does not know the model_type "lama"; another version may. {OTHERWISE}',
        ),
        (
            {"architectures": ["LamaForCausalLM"], "model_type": "llama"},
            "unknown-architecture",
            f"{VERSION} has no model class LamaForCausalLM; another version may. {OTHERWISE}",
        ),
        (
            {"architectures": ["LlamaConfig"], "model_type": "llama"},
            "unknown-architecture",
            f"{VERSION} has no model class LlamaConfig; another version may. {OTHERWISE}",
        ),
        (
            {"architectures": ["OwnModel"], "model_type": "own", "auto_map": {"AutoModel": "own.OwnModel"}},
            "remote-code",
            (
                f"OwnModel is not in {VERSION} but in code that comes with the model (auto_map), which is not run "
                f"here. {OTHERWISE}"
            ),
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bf16"},
            "bad-config",
            f'it states the unknown dtype "bf16". {OTHERWISE}',
        ),
        (["LlamaForCausalLM"], "bad-config", f"it holds no JSON object but list. {OTHERWISE}"),
    ],
)
def test_a_config_that_does_not_tell_the_architecture_is_an_error(
    config: object, kind: str, message: str, tmp_path: Path
) -> None:
    """FAULTS L6."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        expected_architecture(tmp_path)
    assert caught.value.problems == (Problem(kind, str(tmp_path / "config.json"), message),)


def test_a_missing_config_is_an_error(tmp_path: Path) -> None:
    """FAULTS L6."""
    with pytest.raises(ModelError) as caught:
        expected_architecture(tmp_path)
    assert str(caught.value) == f"{tmp_path}/config.json: there is no such file. {OTHERWISE}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b'{"a": 1', "Expecting ',' delimiter: line 1 column 8 (char 7)"),
        (b'{"a": "\xff"}', "'utf-8' codec can't decode byte 0xff in position 7: invalid start byte"),
    ],
)
def test_a_config_that_is_not_json_is_an_error(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        expected_architecture(tmp_path)
    assert str(caught.value) == f"{tmp_path}/config.json: it cannot be read as JSON ({reason}). {OTHERWISE}"


def test_a_config_from_which_the_class_cannot_be_built_is_an_error(tmp_path: Path) -> None:
    write_config(tmp_path, architectures=["LlamaForCausalLM"], model_type="llama", **{**SMALL, "hidden_size": -8})
    with pytest.raises(ModelError) as caught:
        expected_architecture(tmp_path)
    message = caught.value.problems[0].message
    assert message.startswith(f"{VERSION} cannot build LlamaForCausalLM from it (")
    assert message.endswith(f"). {OTHERWISE}")
    assert "\n" not in message
    assert torch.get_default_dtype() == torch.float32


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    auto_map = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    write_config(tmp_path, architectures=["LlamaForCausalLM"], model_type="llama", auto_map=auto_map, **SMALL)
    assert expected_architecture(tmp_path).class_name == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float32"}, "float32"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"torch_dtype": "auto"}, None),
        ({"torch_dtype": None}, None),
        ({}, None),
        ({"text_config": {"torch_dtype": "bfloat16"}}, "bfloat16"),
        ({"torch_dtype": "float32", "text_config": {"torch_dtype": "bfloat16"}}, "float32"),
        ({"text_config": None}, None),
    ],
)
def test_the_dtype_is_that_of_the_top_then_that_of_the_text_model(config: dict[str, Any], dtype: str | None) -> None:
    assert stated_dtype(config) == dtype


@pytest.mark.parametrize("content", [None, {"do_sample": True, "temperature": 0.6}, {"eos_token_id": [1, 2]}])
def test_a_generation_config_that_transformers_accepts_draws_no_complaint(
    content: dict[str, Any] | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert generation_config_complaint(tmp_path) is None


def test_a_generation_config_that_transformers_rejects_draws_one_line(tmp_path: Path) -> None:
    """FAULTS L7."""
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "top_p": 0.9}')
    complaint = generation_config_complaint(tmp_path)
    assert complaint is not None
    assert "\n" not in complaint
    assert "`temperature` is set to `0.6`" in complaint
    assert "`top_p` is set to `0.9`" in complaint
    assert "pretrained" not in complaint  # the advice that follows is on another matter


def test_a_generation_config_that_is_not_json_draws_a_complaint(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    complaint = generation_config_complaint(tmp_path)
    assert complaint is not None
    assert complaint.endswith("is not a valid JSON file.")


# value models


@pytest.mark.parametrize(
    ("config", "num_labels"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, 1),
        ({}, 1),
        ({"architectures": ["FSDPLlamaForTokenClassification"]}, 1),
        ({"architectures": ["LlamaForCausalLM"], "id2label": {"0": "a", "1": "b", "2": "c"}}, 3),
        ({"architectures": ["LlamaForCausalLM"], "num_labels": 1}, 1),
    ],
)
def test_a_value_model_is_of_the_class_for_token_classification(
    config: dict[str, Any], num_labels: int, tmp_path: Path
) -> None:
    """S20."""
    write_config(tmp_path, model_type="llama", **config, **SMALL)
    architecture = expected_architecture(tmp_path, is_value_model=True)
    assert architecture.class_name == "LlamaForTokenClassification"
    assert architecture.shapes["score.weight"] == (num_labels, SMALL["hidden_size"])
    assert "lm_head.weight" not in architecture.shapes


@pytest.mark.parametrize("model_type", ["mamba", "nonsense", None])
def test_a_type_of_model_without_such_a_class_is_refused(model_type: str | None, tmp_path: Path) -> None:
    """S20."""
    path = write_config(tmp_path, architectures=["MambaForCausalLM"], model_type=model_type)
    with pytest.raises(ModelError) as caught:
        expected_architecture(tmp_path, is_value_model=True)
    message = (
        f"{VERSION} has no class for token classification of the model_type {json.dumps(model_type)}, which a value "
        "model is; leave --is-value-model out"
    )
    assert caught.value.problems == (Problem("no-value-class", str(path), message),)
