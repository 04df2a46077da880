"""What adapters were trained with: where it is read from, what goes before what, and what is refused. S15, S23."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from merger.errors import ModelError
from merger.huggingface.lora_settings import LoraSettings, read_settings

CONFIG, META = "adapter_config.json", "lora_train_meta.json"
OWN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "use_rslora": False, "task_type": "CAUSAL_LM"}


def put(folder: Path, name: str, content: object) -> Path:
    """Writes a file of settings; text goes as it is."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def read(*folders: Path, alpha: float | None = None) -> LoraSettings:
    return read_settings(folders, alpha=alpha)


def refused(*folders: Path, alpha: float | None = None) -> list[tuple[str, str]]:
    """Kinds and whole messages of all that is wrong."""
    with pytest.raises(ModelError) as caught:
        read(*folders, alpha=alpha)
    return [(problem.kind, str(problem)) for problem in caught.value.problems]


@pytest.mark.parametrize("below", [".", "lora_adapter", "huggingface", "huggingface/lora_adapter"])
@pytest.mark.parametrize("name", [CONFIG, META])
def test_settings_are_found_in_each_of_their_places(name: str, below: str, tmp_path: Path) -> None:
    path = put(tmp_path / below, name, {"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"})
    settings = read(tmp_path)
    assert (settings.path, settings.alpha, settings.rank, settings.task_type) == (path, 16, 8, "CAUSAL_LM")
    assert settings.config == (json.loads(path.read_text()) if name == CONFIG else None)


def test_the_settings_that_peft_saves_are_read(tmp_path: Path) -> None:
    LoraConfig(r=8, lora_alpha=16, use_rslora=True, rank_pattern={"q": 4}, alpha_pattern={"v": 3}).save_pretrained(
        str(tmp_path)
    )
    settings = read(tmp_path)
    assert (settings.rank, settings.alpha, settings.use_rslora) == (8, 16, True)
    assert (settings.rank_pattern, settings.alpha_pattern) == ({"q": 4}, {"v": 3})
    assert settings.stated("bias") == "none"
    assert not settings.changes_base


@pytest.mark.parametrize("below", [".", "lora_adapter", "huggingface", "huggingface/lora_adapter"])
def test_an_adapter_with_a_name_has_its_settings_in_a_folder_of_that_name(below: str, tmp_path: Path) -> None:
    """As peft saves them: what lies above is of the adapter that it calls "default"."""
    put(tmp_path / below, CONFIG, {**OWN, "lora_alpha": 32})
    path = put(tmp_path / below / "second", CONFIG, OWN)
    for adapters in (["second"], ["second", "default"], ["second", "third"]):
        settings = read_settings([tmp_path], alpha=None, adapters=adapters)
        assert (settings.path, settings.alpha) == (path, 16)
    assert read_settings([tmp_path], alpha=None, adapters=["default", "second"]).alpha == 32
    assert read_settings([tmp_path], alpha=None, adapters=["third"]).alpha == 32


def test_settings_of_the_default_adapter_are_not_those_of_another(tmp_path: Path) -> None:
    put(tmp_path, CONFIG, OWN)
    with pytest.raises(ModelError) as caught:
        read_settings([tmp_path], alpha=None, adapters=["second", "default"])
    message = (
        "the checkpoint holds LoRA adapters, but how strongly they count is not known: no second/adapter_config.json "
        "lies beside the checkpoint, and others are of the adapter default. Give alpha as it was set in training by "
        "--lora-alpha N."
    )
    assert [str(problem) for problem in caught.value.problems] == [message]
    assert read_settings([tmp_path], alpha=3, adapters=["second", "default"]).config is None


def test_a_folder_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    put(tmp_path / "huggingface", CONFIG, OWN)
    assert read(tmp_path, tmp_path / "huggingface").rank == 8


def test_alpha_alone_is_enough(tmp_path: Path) -> None:
    settings = read(tmp_path, alpha=12)
    assert (settings.path, settings.config, settings.alpha, settings.rank) == (None, None, 12, None)
    assert settings.stated("bias") is None
    assert settings.rank_of("q_proj") is None


@pytest.mark.parametrize("name", [CONFIG, META])
def test_alpha_as_asked_goes_before_what_is_stated(name: str, tmp_path: Path) -> None:
    put(tmp_path, name, OWN)
    assert read(tmp_path, alpha=3).alpha == 3


def test_what_peft_wrote_goes_before_what_trainers_wrote_where_they_agree(tmp_path: Path) -> None:
    config, _ = put(tmp_path / "lora_adapter", CONFIG, OWN), put(tmp_path, META, {"r": 8, "lora_alpha": 16})
    assert (read(tmp_path).path, read(tmp_path).alpha) == (config, 16)


def test_what_one_file_leaves_out_the_other_states(tmp_path: Path) -> None:
    put(tmp_path, CONFIG, {"peft_type": "LORA", "r": None})
    put(tmp_path, META, {"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"})
    settings = read(tmp_path)
    assert (settings.alpha, settings.rank, settings.task_type) == (16, 8, "CAUSAL_LM")


def test_files_that_disagree_are_told_with_all_that_they_disagree_in(tmp_path: Path) -> None:
    main = put(tmp_path, CONFIG, {**OWN, "use_rslora": True})
    other = put(tmp_path, META, {"r": 4, "lora_alpha": 32})
    third = put(tmp_path / "huggingface", CONFIG, OWN)
    end = "remove the one that is not of this run"
    assert refused(tmp_path) == [
        ("lora-settings", f"{third}: states use_rslora false, but {main} states true; {end}"),
        ("lora-settings", f"{other}: states r 4, but {main} states 8; {end}"),
        ("lora-settings", f"{other}: states lora_alpha 32, but {main} states 16; {end}"),
    ]


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_files_that_disagree_in_single_layers_are_told(key: str, tmp_path: Path) -> None:
    main, other = put(tmp_path, CONFIG, {**OWN, key: {}}), put(tmp_path / "huggingface", CONFIG, {**OWN, key: {"q": 4}})
    end = "remove the one that is not of this run"
    assert refused(tmp_path) == [("lora-settings", f'{other}: states {key} {{"q": 4}}, but {main} states {{}}; {end}')]


def test_files_may_disagree_on_alpha_where_it_is_given(tmp_path: Path) -> None:
    put(tmp_path, CONFIG, OWN)
    put(tmp_path, META, {"r": 8, "lora_alpha": 32})
    assert read(tmp_path, alpha=12).alpha == 12


LAYERS = ["model.layers.0.q_proj", "model.layers.10.q_proj", "q_proj", "model.q_proj2", "xq_proj", "head"]


@pytest.mark.parametrize("key", ["q_proj", "layers.0.q_proj", r"layers\.\d+\.q_proj", "q|head", ".*0.q_proj", "^head"])
def test_patterns_match_what_they_match_in_peft(key: str, tmp_path: Path) -> None:
    put(tmp_path, CONFIG, {**OWN, "rank_pattern": {key: 2, ".*": 5}, "alpha_pattern": {key: 7}})
    settings = read(tmp_path)
    for layer in LAYERS:
        is_meant = get_pattern_key([key], layer) == key
        assert (settings.rank_of(layer), settings.alpha_of(layer)) == ((2, 7) if is_meant else (5, 16)), layer


def test_the_first_pattern_that_matches_counts(tmp_path: Path) -> None:
    put(tmp_path, CONFIG, {**OWN, "alpha_pattern": {"q_proj": 2, "0.q_proj": 3}})
    assert read(tmp_path).alpha_of("layers.0.q_proj") == 2


@pytest.mark.parametrize(
    ("use_rslora", "scale"), [(True, 16 / math.sqrt(4)), (1, 16 / math.sqrt(4)), (False, 4), (None, 4)]
)
def test_the_scale_is_alpha_by_r_or_by_its_root(use_rslora: object, scale: float, tmp_path: Path) -> None:
    put(tmp_path, CONFIG, {**OWN, "use_rslora": use_rslora})
    assert read(tmp_path).scaling_of("q_proj", 4) == scale


@pytest.mark.parametrize(
    ("start", "changes"),
    [
        *((start, True) for start in ("pissa", "pissa_niter_4", "OLoRA", "corda", "loftq", "lora_ga")),
        *((start, False) for start in (True, False, "gaussian", "eva", "orthogonal", None)),
    ],
)
def test_starting_values_that_change_the_base_are_known(
    start: object,
    changes: bool,  # noqa: FBT001 - a parameter of the test
    tmp_path: Path,
) -> None:
    put(tmp_path, CONFIG, {**OWN, "init_lora_weights": start})
    assert read(tmp_path).changes_base is changes


NOT_KNOWN = "the checkpoint holds LoRA adapters, but how strongly they count is not known: "
GIVE = ". Give alpha as it was set in training by --lora-alpha N."


def test_without_any_file_alpha_is_asked_for(tmp_path: Path) -> None:
    found = f"no {CONFIG} or {META} lies beside the checkpoint"
    assert refused(tmp_path) == [("no-lora-alpha", f"{NOT_KNOWN}{found}{GIVE}")]


@pytest.mark.parametrize("name", [CONFIG, META])
@pytest.mark.parametrize("alpha", ["0", "-4", '"16"', "null", "true", "NaN", "Infinity", "[16]"])
def test_an_alpha_that_is_none_is_never_guessed_to_be_another(alpha: str, name: str, tmp_path: Path) -> None:
    """RL trainers write 0 where they do not know it."""
    path = put(tmp_path, name, f'{{"peft_type": "LORA", "r": 8, "lora_alpha": {alpha}}}')
    assert refused(tmp_path) == [("no-lora-alpha", f"{NOT_KNOWN}{path} states lora_alpha {alpha}{GIVE}")]
    assert read(tmp_path, alpha=16).alpha == 16


@pytest.mark.parametrize("name", [CONFIG, META])
def test_a_file_that_is_no_json_is_told(name: str, tmp_path: Path) -> None:
    path = put(tmp_path, name, "{")
    found = "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    ask = "Restore it, or remove it and give --lora-alpha N."
    assert refused(tmp_path, alpha=3) == [("lora-settings", f"{path}: it cannot be read as JSON ({found}). {ask}")]
    path.write_text("[8, 16]")
    words = "it holds no JSON object but list. Remove it and give --lora-alpha N."
    assert refused(tmp_path) == [("lora-settings", f"{path}: {words}")]


def test_all_files_that_cannot_be_read_are_told_at_once(tmp_path: Path) -> None:
    paths = [put(tmp_path, CONFIG, "[]"), put(tmp_path, META, "7")]
    assert [message.split(": ")[0] for _, message in refused(tmp_path)] == [str(path) for path in paths]


def test_adapters_of_another_method_are_told(tmp_path: Path) -> None:
    path = put(tmp_path, CONFIG, {**OWN, "peft_type": "IA3"})
    ask = "this version folds LORA alone. Fold them in where they were trained and save again."
    assert refused(tmp_path) == [("unknown-adapter", f'{path}: states peft_type "IA3": {ask}')]


FOREIGN = [
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"),
    *("velora_config", "layer_replication", "trainable_token_indices", "megatron_config"),
]


def test_kinds_of_lora_that_are_not_folded_are_told_all_at_once(tmp_path: Path) -> None:
    path = put(tmp_path, CONFIG, {**OWN, **{key: [1] for key in FOREIGN}})
    ask = "such adapters this version does not fold. Fold them in where they were trained and save again."
    assert refused(tmp_path) == [("unknown-adapter", f"{path}: states {key} [1]: {ask}") for key in FOREIGN]
    put(tmp_path, CONFIG, {**OWN, **dict.fromkeys(FOREIGN, None)})
    assert read(tmp_path).alpha == 16


def test_what_a_message_shows_of_a_setting_is_short(tmp_path: Path) -> None:
    path = put(tmp_path, CONFIG, {**OWN, "layer_replication": [[0, 4]] * 20})
    shown = "[" + "[0, 4], " * 7 + "..."
    assert len(shown) == 60
    assert f"{path}: states layer_replication {shown}: such adapters" in refused(tmp_path)[0][1]


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("regex", ["q_(proj", "(?i)q_proj", "a{99999999999}"])
def test_a_pattern_that_is_no_regular_expression_is_told(regex: str, key: str, tmp_path: Path) -> None:
    """Neither alone nor behind the beginning of a name, where flags have no place."""
    path = put(tmp_path, CONFIG, {**OWN, key: {regex: 2}})
    words = f"{key} holds {json.dumps(regex)}, which is no regular expression for the end of a layer's name"
    ask = "put the settings there that it was trained with"
    assert refused(tmp_path) == [("lora-settings", f"{path}: {words}; {ask}")]


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("rank_pattern", {"q_proj": 0}, "q_proj 0, which is no whole number above 0"),
        ("rank_pattern", {"q_proj": 2.5}, "q_proj 2.5, which is no whole number above 0"),
        ("rank_pattern", {"q_proj": True}, "q_proj true, which is no whole number above 0"),
        ("alpha_pattern", {"q_proj": 0}, "q_proj 0, which is no number above 0"),
        ("alpha_pattern", {"v": 4, "q_proj": "8"}, 'q_proj "8", which is no number above 0'),
        ("alpha_pattern", {"q_proj": math.inf}, "q_proj Infinity, which is no number above 0"),
    ],
)
def test_a_pattern_of_no_such_number_is_told_and_not_left_out(
    key: str, value: dict[str, Any], shown: str, tmp_path: Path
) -> None:
    """Left out, the layers would count as strongly as all others."""
    path = put(tmp_path, CONFIG, {**OWN, key: value})
    ask = "put the settings there that it was trained with"
    assert refused(tmp_path) == [("lora-settings", f"{path}: {key} states for {shown}; {ask}")]


def test_patterns_that_are_no_object_are_told(tmp_path: Path) -> None:
    path = put(tmp_path, CONFIG, {**OWN, "rank_pattern": [2], "alpha_pattern": None})
    words = "rank_pattern is [2], not an object of patterns and numbers"
    ask = "put the settings there that it was trained with"
    assert refused(tmp_path) == [("lora-settings", f"{path}: {words}; {ask}")]


def test_a_rank_that_is_none_is_told_by_the_tensors(tmp_path: Path) -> None:
    for stated in (0, "8", None, True):
        put(tmp_path, CONFIG, {**OWN, "r": stated})
        assert read(tmp_path).rank is None


def test_what_is_wrong_is_told_all_at_once(tmp_path: Path) -> None:
    put(tmp_path, CONFIG, {**OWN, "lora_alpha": 0, "use_qalora": True, "rank_pattern": {"(": 2}})
    put(tmp_path, META, {"r": 4})
    assert [kind for kind, _ in refused(tmp_path)] == [
        "lora-settings", "unknown-adapter", "lora-settings", "no-lora-alpha",
    ]  # fmt: skip
