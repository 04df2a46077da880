"""Each fault does to a checkpoint what its description says, and nothing else."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from fixtures.cases import CASES
from fixtures.fault_files import FLIPPED_TENSOR, rank_files, record, tensor_record
from fixtures.fault_states import EMBEDDING, HEAD, WEIGHT, load_state
from fixtures.faults import FAULTS

CopyOf = Callable[[str], Path]
FSDP = "_fsdp_wrapped_module."
QWEN2 = "qwen2-fp32-w4"
BASE_NAMES = [f"model_world_size_4_rank_{rank}.pt" for rank in range(4)]


def broken(checkpoint: CopyOf, fault: str) -> Path:
    return checkpoint(f"{FAULTS[fault].base}+{fault}") / "checkpoint"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def changed(checkpoint: CopyOf, fault: str) -> set[str]:
    before = contents(checkpoint(FAULTS[fault].base) / "checkpoint")
    after = contents(broken(checkpoint, fault))
    return {name for name in before | after if before.get(name) != after.get(name)}


def states(checkpoint: CopyOf, fault: str) -> list[dict[str, Any]]:
    return [load_state(path) for path in rank_files(broken(checkpoint, fault))]


def config(checkpoint: CopyOf, fault: str) -> dict[str, Any]:
    return dict(json.loads((broken(checkpoint, fault) / "huggingface/config.json").read_text()))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_changes_the_checkpoint_and_leaves_the_truth(checkpoint: CopyOf, fault: str) -> None:
    base = checkpoint(FAULTS[fault].base)
    assert changed(checkpoint, fault)
    assert contents(broken(checkpoint, fault).parent / "truth") == contents(base / "truth")
    assert FAULTS[fault].description.endswith(".")


def test_every_fault_has_a_case_with_its_rows_of_the_catalogue() -> None:
    cases = {case.fault: case.ids for case in CASES.values() if case.fault is not None}
    assert cases == {name: fault.ids for name, fault in FAULTS.items()}


RANK_FAULTS = {
    "ranks_missing": {1, 3},
    "rank_zero_missing": {0},
    "zero_byte_rank": {1},
    "truncated_rank": {2},
    "half_copied_rank": {2},
    "html_rank": {1},
    "not_zip_rank": {1},
    "rank_copied_over": {2},
    "ranks_swapped": {1, 2},
    "bit_flipped": {2},
    "key_renamed_by_flip": {2},
    "buffer_differs": {2},
    "replica_differs": {2},
    "key_missing_on_rank": {2},
    "key_missing_in_stage": {3},
    "key_extra_on_rank": {3},
    "plain_on_rank": {1},
    "hole": {1},
    "shape_disagrees": {1},
    "dtype_disagrees": {1},
    "placement_disagrees": {1},
    "hostile_pickle": {1},
    "unknown_class": {1},
}


@pytest.mark.parametrize("fault", RANK_FAULTS)
def test_a_fault_of_some_ranks_leaves_the_files_of_all_others(checkpoint: CopyOf, fault: str) -> None:
    assert changed(checkpoint, fault) == {BASE_NAMES[rank] for rank in RANK_FAULTS[fault]}


def test_cut_files_have_the_sizes_that_they_claim(checkpoint: CopyOf) -> None:
    """L2."""
    size = (checkpoint(QWEN2) / "checkpoint" / BASE_NAMES[2]).stat().st_size
    assert (broken(checkpoint, "zero_byte_rank") / BASE_NAMES[1]).stat().st_size == 0
    assert (broken(checkpoint, "truncated_rank") / BASE_NAMES[2]).stat().st_size == size * 2 // 3
    half = (broken(checkpoint, "half_copied_rank") / BASE_NAMES[2]).read_bytes()
    assert len(half) == size
    assert not any(half[size // 2 :])


def test_a_flipped_bit_lies_in_the_named_tensor_and_the_checksum_tells(checkpoint: CopyOf) -> None:
    """S21."""
    sound = checkpoint(QWEN2) / "checkpoint" / BASE_NAMES[2]
    flipped = broken(checkpoint, "bit_flipped") / BASE_NAMES[2]
    begin, size = tensor_record(sound, FLIPPED_TENSOR)
    pairs = enumerate(zip(sound.read_bytes(), flipped.read_bytes(), strict=True))
    different = [(index, a ^ b) for index, (a, b) in pairs if a != b]
    assert different == [(begin + 5, 64)]
    before, after = load_state(sound), load_state(flipped)
    assert [key for key in before if not torch.equal(local(before[key]), local(after[key]))] == [FLIPPED_TENSOR]
    crcs = {info.CRC for info in zipfile.ZipFile(flipped).infolist()}
    assert zlib.crc32(flipped.read_bytes()[begin : begin + size]) not in crcs


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_a_flipped_bit_in_the_pickle_renames_one_key(checkpoint: CopyOf) -> None:
    """S21."""
    ranks = states(checkpoint, "key_renamed_by_flip")
    assert set(ranks[2]) ^ set(ranks[1]) == {"model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.tp_proj.weight"}


def test_records_are_found_where_zipfile_reads_them(checkpoint: CopyOf) -> None:
    path = checkpoint(QWEN2) / "checkpoint" / BASE_NAMES[1]
    begin, size = record(path, "data.pkl")
    assert path.read_bytes()[begin : begin + size] == zipfile.ZipFile(path).read(f"{path.stem}/data.pkl")
    begin, _ = tensor_record(path, WEIGHT)
    piece = local(load_state(path)[WEIGHT]).contiguous()
    raw = piece.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert path.read_bytes()[begin : begin + len(raw)] == raw


def test_padded_pieces_have_the_ceiling_of_rows_and_the_saved_shape(checkpoint: CopyOf) -> None:
    """S1."""
    embeddings = [state[EMBEDDING] for state in states(checkpoint, "padded_shards")]
    assert [local(piece).shape[0] for piece in embeddings] == [26, 26, 26, 26]
    assert [piece.shape[0] for piece in embeddings] == [101, 101, 101, 101]
    assert set(local(embeddings[3])[23:].flatten().tolist()) == {7.0}


def test_a_hole_is_one_row(checkpoint: CopyOf) -> None:
    """S11."""
    assert [local(state[WEIGHT]).shape[0] for state in states(checkpoint, "hole")] == [10, 9, 10, 7]


def test_edits_on_one_rank_are_those_described(checkpoint: CopyOf) -> None:
    """S5, S9, S11."""
    buffers = [state["a_buffers.vector"] for state in states(checkpoint, "buffer_differs")]
    assert (buffers[2] != buffers[1]).tolist() == [False] * 4 + [True] + [False] * 4
    assert [WEIGHT in state for state in states(checkpoint, "key_missing_on_rank")] == [True, True, False, True]
    extra = "model.layers.7.mlp.gate_proj.weight"
    assert [extra in state for state in states(checkpoint, "key_extra_on_rank")] == [False, False, False, True]
    plain = [isinstance(state[WEIGHT], DTensor) for state in states(checkpoint, "plain_on_rank")]
    assert plain == [True, False, True, True]
    assert [state[WEIGHT].shape[0] for state in states(checkpoint, "shape_disagrees")] == [37, 38, 37, 37]
    dtypes = [state[WEIGHT].dtype for state in states(checkpoint, "dtype_disagrees")]
    assert dtypes == [torch.float32, torch.float16, torch.float32, torch.float32]
    placements = [state[WEIGHT].placements[0] for state in states(checkpoint, "placement_disagrees")]
    assert [placement == Replicate() for placement in placements] == [False, True, False, False]


def test_replicas_differ_in_one_element(checkpoint: CopyOf) -> None:
    """S11."""
    ranks = states(checkpoint, "replica_differs")
    assert (local(ranks[0][WEIGHT]) != local(ranks[2][WEIGHT])).nonzero().tolist() == [[3, 1]]
    assert torch.equal(local(ranks[1][WEIGHT]), local(ranks[3][WEIGHT]))


def test_edits_on_all_ranks_are_those_described(checkpoint: CopyOf) -> None:
    """L10, S12, S14."""
    assert {state[WEIGHT].placements for state in states(checkpoint, "partial_placement")} == {(Partial(),)}
    assert [WEIGHT in state for state in states(checkpoint, "key_missing_everywhere")] == [False] * 4
    extra = "model.layers.7.mlp.gate_proj.weight"
    assert [extra in state for state in states(checkpoint, "key_unexpected")] == [True] * 4
    diverged = states(checkpoint, "tied_diverged")[0]
    assert not torch.equal(local(diverged[HEAD]), local(diverged[EMBEDDING]))
    assert [HEAD in state for state in states(checkpoint, "tied_without_head")] == [False] * 4
    assert [EMBEDDING in state for state in states(checkpoint, "tied_without_embedding")] == [False] * 4


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("prefixed_fsdp", "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.gate_proj.weight"),
        ("prefixed_compile", "_orig_mod.model.layers.0._orig_mod.mlp.gate_proj.weight"),
        ("prefixed_checkpointing", "model.layers.0._checkpoint_wrapped_module.mlp.gate_proj.weight"),
        ("prefixed_ddp", "module.model.layers.0.mlp.gate_proj.weight"),
        ("prefixed_peft", "base_model.model.model.layers.0.mlp.gate_proj.weight"),
        (
            "prefixed_deep",
            f"model.base_model.model.layers.0.module.mlp._orig_mod.gate_proj._checkpoint_wrapped_module.{FSDP}weight",
        ),
        (
            "prefixed_mixed",
            f"module._orig_mod.{FSDP}model.layers.0.{FSDP}_checkpoint_wrapped_module._orig_mod.mlp.gate_proj.weight",
        ),
    ],
)
def test_wrappers_stand_in_the_names(checkpoint: CopyOf, fault: str, name: str) -> None:
    """S14."""
    sound = load_state(checkpoint(QWEN2) / "checkpoint" / BASE_NAMES[3])
    state = states(checkpoint, fault)[3]
    assert len(state) == len(sound)
    assert torch.equal(local(state[name]), local(sound[WEIGHT]))


def test_edited_files_still_say_which_rank_saved_them(checkpoint: CopyOf) -> None:
    for rank, state in enumerate(states(checkpoint, "prefixed_ddp")):
        assert state[f"module.{WEIGHT}"].device_mesh.get_coordinate() in ([rank], (rank,))


def test_a_hostile_pickle_runs_its_command_where_nobody_stops_it(copy_of: CopyOf) -> None:
    """L11."""
    made = copy_of(QWEN2)
    FAULTS["hostile_pickle"].apply(made / "checkpoint")
    script = "import sys, torch; torch.load(sys.argv[1], weights_only=False)"
    path = made / "checkpoint" / BASE_NAMES[1]
    assert not (made / "ran").exists()
    subprocess.run([sys.executable, "-c", script, path], check=True, capture_output=True)
    assert (made / "ran").exists()
    pickled = zipfile.ZipFile(path).read(f"{path.stem}/data.pkl")
    assert f"c{os.system.__module__}\nsystem\n".encode() in pickled


def test_an_unknown_class_is_named_in_the_pickle(checkpoint: CopyOf) -> None:
    """L11."""
    path = broken(checkpoint, "unknown_class") / BASE_NAMES[1]
    assert b"ctrainer_of_somebody\nNotOnAnyList\n" in zipfile.ZipFile(path).read(f"{path.stem}/data.pkl")


def test_old_files_are_not_archives_and_unchecked_ones_have_zeros_for_checksums(checkpoint: CopyOf) -> None:
    """L14."""
    assert [zipfile.is_zipfile(path) for path in rank_files(broken(checkpoint, "old_format"))] == [False] * 4
    unchecked = rank_files(broken(checkpoint, "checksums_off"))
    assert {info.CRC for path in unchecked for info in zipfile.ZipFile(path).infolist()} == {0}


def test_faults_of_config_json_are_those_described(checkpoint: CopyOf) -> None:
    """L6."""
    assert "architectures" not in config(checkpoint, "no_architectures")
    assert "model_type" not in config(checkpoint, "no_model_type")
    assert config(checkpoint, "fsdp_prefixed_architecture")["architectures"] == ["FSDPQwen2ForCausalLM"]
    assert not (broken(checkpoint, "no_huggingface") / "huggingface").exists()


def test_transformers_rejects_the_generation_config(checkpoint: CopyOf) -> None:
    """L7."""
    from transformers import GenerationConfig

    if "strict" not in inspect.signature(GenerationConfig.validate).parameters:
        pytest.skip("this version of transformers only warns of it")
    settings = GenerationConfig.from_pretrained(broken(checkpoint, "generation_config_rejected") / "huggingface")
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        settings.validate(strict=True)


@pytest.mark.parametrize(
    ("fault", "files"),
    [
        ("fsdp_config_missing", set(BASE_NAMES)),
        ("two_world_sizes", {*BASE_NAMES, "model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"}),
        ("huggingface_only", set()),
    ],
)
def test_the_rank_files_are_those_described(checkpoint: CopyOf, fault: str, files: set[str]) -> None:
    """L1, L3."""
    folder = broken(checkpoint, fault)
    assert {path.name for path in folder.glob("model_*")} == files


@pytest.mark.parametrize(
    ("fault", "files"),
    [
        ("format_dcp", {".metadata", "__0_0.distcp"}),
        (
            "format_zero",
            {
                "latest",
                "zero_to_fp32.py",
                "global_step10/zero_pp_rank_0_mp_rank_00_model_states.pt",
                "global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt",
                "global_step10/zero_pp_rank_1_mp_rank_00_model_states.pt",
                "global_step10/zero_pp_rank_1_mp_rank_00_optim_states.pt",
            },
        ),
        (
            "format_megatron",
            {
                "latest_checkpointed_iteration.txt",
                "iter_0000010/mp_rank_00/model_optim_rng.pt",
                "iter_0000010/mp_rank_01/model_optim_rng.pt",
            },
        ),
    ],
)
def test_other_formats_have_their_own_files_beside_huggingface(checkpoint: CopyOf, fault: str, files: set[str]) -> None:
    """L5."""
    found = set(contents(broken(checkpoint, fault)))
    assert {name for name in found if not name.startswith("huggingface/")} == files


def test_a_merged_directory_has_weights_beside_its_config(checkpoint: CopyOf) -> None:
    """L5."""
    assert {"model.safetensors", "config.json"} <= set(contents(broken(checkpoint, "format_merged")))


def test_a_nested_checkpoint_is_whole_two_levels_down(checkpoint: CopyOf) -> None:
    """L4."""
    folder = broken(checkpoint, "in_global_step")
    assert [path.name for path in folder.iterdir()] == ["global_step_10"]
    assert contents(folder / "global_step_10/actor") == contents(checkpoint(QWEN2) / "checkpoint")


def test_side_files_are_missing_or_added_as_described(checkpoint: CopyOf) -> None:
    """L8, S24."""
    assert changed(checkpoint, "tokenizer_missing") == {
        "huggingface/chat_template.jinja",
        "huggingface/special_tokens_map.json",
        "huggingface/tokenizer.json",
        "huggingface/tokenizer_config.json",
    }
    assert changed(checkpoint, "remote_code") == {
        "huggingface/config.json",
        "huggingface/modeling_own.py",
        "huggingface/preprocessor_config.json",
    }
    assert changed(checkpoint, "slow_tokenizer") == {
        "huggingface/added_tokens.json",
        "huggingface/merges.txt",
        "huggingface/vocab.json",
    }


def test_a_chat_template_is_in_the_place_that_is_described(checkpoint: CopyOf) -> None:
    """L8: the file of its own that it has in the sound case, moved to the other places or with one beside it."""
    folders = {fault: broken(checkpoint, fault) / "huggingface" for fault in FAULTS if fault.startswith("template")}
    jinja = (checkpoint(QWEN2) / "checkpoint/huggingface/chat_template.jinja").read_text()
    assert jinja.startswith("{% for message in messages %}")
    told = {fault: folder / "chat_template.jinja" for fault, folder in folders.items()}
    assert {fault for fault, path in told.items() if path.exists()} == {"templates_with_names"}
    inside = json.loads((folders["template_in_tokenizer_config"] / "tokenizer_config.json").read_text())
    assert inside["chat_template"] == jinja
    assert json.loads((folders["template_in_json"] / "chat_template.json").read_text()) == {"chat_template": jinja}
    others = folders["templates_with_names"] / "additional_chat_templates"
    assert [path.name for path in others.iterdir()] == ["tool_use.jinja"]
    sound = contents(checkpoint(FAULTS["template_in_json"].base) / "checkpoint")
    assert {"huggingface/preprocessor_config.json", "huggingface/processor_config.json"} <= set(sound)
