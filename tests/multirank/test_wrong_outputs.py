"""What the judge says of an output that is right but for one thing: each row of the catalogue can be failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import merger
from fixtures.cases import CASES
from fixtures.conformance.running import Ran
from fixtures.conformance.verdicts import judged

Change = Callable[[Path], object]

QWEN2, GPT2, LLAVA, GLM4 = "qwen2-fp32-w4", "gpt2-fp32-w4", "llava-fp32-w4", "glm4_moe-bf16-w4"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
TAKEN_IN, IN_JSON, WITH_NAMES = (
    f"{QWEN2}+template_in_tokenizer_config",
    f"{LLAVA}+template_in_json",
    f"{QWEN2}+templates_with_names",
)


def lost(name: str) -> Change:
    return lambda out: (out / name).unlink()


def reformatted(name: str) -> Change:
    """The same settings in other bytes, as where they are read and saved again."""
    return lambda out: (out / name).write_text(json.dumps(json.loads((out / name).read_text()), sort_keys=True))


def appended(name: str) -> Change:
    return lambda out: (out / name).write_text((out / name).read_text() + "\n")


def made_up(name: str) -> Change:
    return lambda out: (out / name).write_text("{}\n")


def with_tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    def edit(out: Path) -> None:
        path = out / "model.safetensors"
        save_file(change(load_file(path)), path, {"format": "pt"})

    return edit


def without_setting(name: str, key: str) -> Change:
    def edit(out: Path) -> None:
        settings: dict[str, Any] = json.loads((out / name).read_text())
        del settings[key]
        (out / name).write_text(json.dumps(settings))

    return edit


def re_saved_tokenizer(out: Path) -> None:
    """As mergers do that load a tokenizer and save it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    for path in (*out.glob("*token*"), out / "vocab.json", out / "merges.txt"):
        path.unlink()
    tokenizer.save_pretrained(out)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        # L8: a chat template in each of its places, the tokenizer, a processor, remote code.
        (WITH_NAMES, lost("chat_template.jinja"), "chat_template.jinja: missing; and 1 more"),
        (WITH_NAMES, appended("chat_template.jinja"), "chat_template.jinja: is not the same bytes"),
        (
            WITH_NAMES,
            lost("additional_chat_templates/tool_use.jinja"),
            "additional_chat_templates/tool_use.jinja: missing",
        ),
        (IN_JSON, lost("chat_template.json"), "chat_template.json: missing"),
        (IN_JSON, reformatted("preprocessor_config.json"), "preprocessor_config.json: is not the same bytes"),
        (
            TAKEN_IN,
            without_setting("tokenizer_config.json", "chat_template"),
            "tokenizer_config.json: is not the same bytes; and 1 more",
        ),
        (TAKEN_IN, reformatted("tokenizer_config.json"), "tokenizer_config.json: is not the same bytes"),
        (f"{QWEN2}+slow_tokenizer", lost("added_tokens.json"), "added_tokens.json: missing"),
        (f"{QWEN2}+slow_tokenizer", lost("merges.txt"), "merges.txt: missing"),
        (f"{QWEN2}+slow_tokenizer", re_saved_tokenizer, "tokenizer"),
        (LLAVA, lost("processor_config.json"), "processor_config.json: missing"),
        (LLAVA, reformatted("preprocessor_config.json"), "preprocessor_config.json: is not the same bytes"),
        (f"{QWEN2}+remote_code", lost("modeling_own.py"), "modeling_own.py: missing"),
        (f"{QWEN2}+remote_code", appended("modeling_own.py"), "modeling_own.py: is not the same bytes"),
        (f"{QWEN2}+remote_code", without_setting("config.json", "auto_map"), "config.json: auto_map is null instead"),
        # L7.
        (
            f"{QWEN2}+generation_config_rejected",
            reformatted("generation_config.json"),
            "generation_config.json: is not the same bytes",
        ),
        # S24.
        (f"{QWEN2}+tokenizer_missing", made_up("tokenizer.json"), "tokenizer.json: was made up"),
        (f"{QWEN2}+tokenizer_missing", made_up("special_tokens_map.json"), "special_tokens_map.json: was made up"),
        # S12.
        (
            GPT2,
            with_tensors(lambda found: {**found, "lm_head.weight": found["transformer.wte.weight"].clone()}),
            "lm_head.weight: is written again, though it is tied to what equals it",
        ),
        (
            f"{QWEN2}+tied_diverged",
            without_setting("config.json", "tie_word_embeddings"),
            "config.json: tie_word_embeddings is null instead of false",
        ),
        # S13.
        (GLM4, with_tensors(lambda found: {**found, BIAS: found[BIAS].bfloat16()}), f"{BIAS}: bfloat16 instead of"),
        # Projections as (outputs, inputs), which they are not where they are no Linear; these are square.
        (
            GPT2,
            with_tensors(
                lambda found: {k: v.t().contiguous() if "attn.c_proj.w" in k else v for k, v in found.items()}
            ),
            "transformer.h.0.attn.c_proj.weight: ",
        ),
        # S19: under the names that they have in memory.
        (
            LLAVA,
            with_tensors(
                lambda found: {k.replace("language_model.model.", "model.language_model."): v for k, v in found.items()}
            ),
            "20 tensors are missing: language_model.model.embed_tokens.weight and 19 more; and 1 more",
        ),
        # S20.
        (
            "qwen2-reward-fp32-w2",
            with_tensors(lambda found: {k: v for k, v in found.items() if k != "score.weight"}),
            "1 tensor is missing: score.weight",
        ),
    ],
)
def test_one_thing_that_is_wrong_is_found(
    name: str, change: Change, reason: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """L7, L8, S12, S13, S19, S20, S24: what it says before and after the change."""
    made, out = checkpoint(name), tmp_path / "out"
    merger.merge(made / "checkpoint", out, report=False)
    assert judged(CASES[name], Ran(0, "", 0.0), out, made, "any").verdict == "right"
    change(out)
    judgement = judged(CASES[name], Ran(0, "", 0.0), out, made, "any")
    assert (judgement.verdict, judgement.reason[: len(reason)]) == ("wrong silently", reason)


@pytest.mark.parametrize(
    ("image_mean", "verdict", "reason"),
    [
        (None, "right", ""),
        ([0.5, 0.5, 0.5], "wrong silently", "preprocessor_config.json: image_mean is [0.5, 0.5, 0.5], not"),
    ],
)
def test_a_processor_in_one_file_is_judged_by_what_it_says(
    image_mean: list[float] | None, verdict: str, reason: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """L8: where bytes are not asked for, as transformers 5 saves it is as good."""
    name, out = "llava-bf16-ddp2xfsdp2", tmp_path / "out"
    made = checkpoint(name)
    merger.merge(made / "checkpoint", out, report=False)
    images = json.loads((out / "preprocessor_config.json").read_text())
    (out / "preprocessor_config.json").unlink()
    path = out / "processor_config.json"
    images |= {} if image_mean is None else {"image_mean": image_mean}
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_processor": images}))
    judgement = judged(CASES[name], Ran(0, "", 0.0), out, made, "any")
    assert (judgement.verdict, judgement.reason[: len(reason)]) == (verdict, reason)
