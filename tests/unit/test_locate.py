"""Finding the folder that is meant, and naming what is there instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from merger.errors import NotACheckpointError
from merger.sources.locate import locate


def rank_file(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_world_size_1_rank_0.pt").write_bytes(b"x")
    return folder


def refusal(path: Path) -> str:
    with pytest.raises(NotACheckpointError) as caught:
        locate(path)
    return str(caught.value)


def test_the_folder_itself_is_found_without_a_word(tmp_path: Path) -> None:
    assert locate(rank_file(tmp_path)) == (tmp_path, ())


def test_a_rank_file_stands_for_its_folder(tmp_path: Path) -> None:
    rank_file(tmp_path)
    assert locate(tmp_path / "model_world_size_1_rank_0.pt") == (tmp_path, ())


@pytest.mark.parametrize("below", ["actor", "global_step_10", "global_step_10/actor"])
def test_a_folder_below_is_found_and_said(below: str, tmp_path: Path) -> None:
    """L4."""
    folder = rank_file(tmp_path / below)
    assert locate(tmp_path) == (folder, (f"read from {folder}",))


def test_the_folder_above_huggingface_is_found_and_said(tmp_path: Path) -> None:
    """L4."""
    rank_file(tmp_path)
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "config.json").write_text("{}")
    assert locate(tmp_path / "huggingface") == (
        tmp_path,
        (f"read from {tmp_path}, the folder above huggingface/",),
    )


def test_the_policy_is_meant_where_a_step_saved_several_models(tmp_path: Path) -> None:
    actor, _ = rank_file(tmp_path / "actor"), rank_file(tmp_path / "critic")
    assert locate(tmp_path) == (actor, (f"read from {actor} (critic/ beside it left alone)",))


def test_several_steps_need_a_choice_and_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """L4."""
    for step in (100, 20, 3):
        rank_file(tmp_path / f"global_step_{step}" / "actor")
    assert refusal(tmp_path) == (
        f"{tmp_path}: holds 3 checkpoints; give one of them: {tmp_path}/global_step_3/actor, "
        f"{tmp_path}/global_step_20/actor, {tmp_path}/global_step_100/actor"
    )


def test_nothing_at_all(tmp_path: Path) -> None:
    assert refusal(tmp_path) == (
        f"{tmp_path}: holds no checkpoint: no model_world_size_*_rank_*.pt here, nor up to two levels below"
    )
    assert refusal(tmp_path / "none") == f"{tmp_path / 'none'}: does not exist"


_DCP = (
    "is a torch.distributed.checkpoint (DCP) checkpoint, which this version does not read; turn it into one file with "
    "`python -m torch.distributed.checkpoint.format_utils dcp_to_torch`"
)
_MEGATRON = "is a Megatron-Core checkpoint, which this version does not read; convert it with Megatron's own tools"
_ZERO = "is a DeepSpeed ZeRO checkpoint, which this version does not read; run the zero_to_fp32.py beside it"
_MERGED = "is a Hugging Face model directory already: there is nothing to merge"
_NO_MODEL = (
    "holds optimizer or extra state of ranks but no model_world_size_*_rank_*.pt; the model was not saved here, or not "
    "copied: look on the other nodes, and in the trainer's setting of what to save"
)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([".metadata", "__0_0.distcp"], _DCP),
        (["__0_0.distcp"], _DCP),
        ([".metadata", "__0_0.distcp", "common.pt", "metadata.json"], _MEGATRON),
        (["iter_0000010/mp_rank_00/model_optim_rng.pt"], _MEGATRON),
        (["mp_rank_00/model.pt"], _MEGATRON),
        (["dist_ckpt/common.pt"], _MEGATRON),
        (["zero_to_fp32.py", "latest", "global_step5/mp_rank_00_model_states.pt"], _ZERO),
        (["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], _ZERO),
        (["model.safetensors", "config.json"], _MERGED),
        (["pytorch_model.bin", "config.json"], _MERGED),
        (["optim_world_size_2_rank_0.pt"], _NO_MODEL),
    ],
)
def test_another_format_is_recognised_and_named(files: list[str], message: str, tmp_path: Path) -> None:
    """L5."""
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert refusal(tmp_path) == f"{tmp_path}: {message}"
