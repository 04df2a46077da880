"""What adapters were trained with: an alpha that nobody states is never made up. S15, S23."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from merger.errors import ModelError
from merger.huggingface.lora_settings import read_settings

ASKED = (
    "the checkpoint holds LoRA adapters, but how strongly they count is not known: {}. Give alpha as it was set in "
    "training by --lora-alpha N."
)


def write(folder: Path, name: str, fields: dict[str, Any]) -> Path:
    (folder / name).write_text(json.dumps(fields))
    return folder / name


def test_without_any_settings_alpha_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read_settings([tmp_path], alpha=None)
    assert str(caught.value) == ASKED.format(
        "no adapter_config.json or lora_train_meta.json lies beside the checkpoint"
    )


@pytest.mark.parametrize("name", ["adapter_config.json", "lora_train_meta.json"])
@pytest.mark.parametrize(
    ("stated", "shown"), [({}, "null"), ({"lora_alpha": 0}, "0"), ({"lora_alpha": "auto"}, '"auto"')]
)
def test_an_alpha_that_settings_do_not_state_is_neither_r_nor_nothing(
    name: str, stated: dict[str, Any], shown: str, tmp_path: Path
) -> None:
    path = write(tmp_path, name, {"r": 8, **stated})
    with pytest.raises(ModelError) as caught:
        read_settings([tmp_path], alpha=None)
    assert str(caught.value) == ASKED.format(f"{path} states lora_alpha {shown}")
    assert read_settings([tmp_path], alpha=12).scaling_of("layers.0.q_proj", 8) == 1.5


def test_an_alpha_that_is_asked_for_goes_before_the_one_that_is_stated(tmp_path: Path) -> None:
    write(tmp_path, "lora_train_meta.json", {"r": 8, "lora_alpha": 16})
    assert read_settings([tmp_path], alpha=None).alpha == 16
    assert read_settings([tmp_path], alpha=4).alpha == 4
