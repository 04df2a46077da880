"""Every fault of the harness: refused with the whole message, or merged exactly with what was done said aloud.

Each message says what was found, what was expected and what to do. Where it shows sizes, checksums or trained values,
which depend on the torch and the processor that made the files, those stand here by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

import merger
from fixtures.case import Exact
from fixtures.cases import CASES
from fixtures.faults import FAULTS
from merger.errors import CheckpointError, ChecksumError, MergerError, ModelError, NotACheckpointError

FAULTY = {name: CASES[f"{fault.base}+{name}"] for name, fault in FAULTS.items()}
TIED = "lm_head.weight equals model.embed_tokens.weight, to which it is tied; written once"

STALE = (
    "model.embed_tokens.weight",
    *(f"model.layers.0.self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")),
    "model.layers.0.self_attn.o_proj.weight",
)

# `@` is the folder of the checkpoint.
REFUSED: dict[str, tuple[type[MergerError], str]] = {
    "ranks_missing": (
        CheckpointError,
        (
            "@: ranks 1 and 3 of 4 are missing (found ranks 0 and 2); each node of a run writes the files of its own "
            "ranks to its own disk: copy model_world_size_4_rank_*.pt from the other nodes into this folder"
        ),
    ),
    "rank_zero_missing": (
        CheckpointError,
        (
            "@: rank 0 of 4 is missing (found ranks 1-3); each node of a run writes the files of its own ranks to its "
            "own disk: copy model_world_size_4_rank_*.pt from the other nodes into this folder"
        ),
    ),
    "zero_byte_rank": (
        CheckpointError,
        (
            "model_world_size_4_rank_1.pt: The file is empty (0 bytes): it was never written to its end; copy it again "
            "from where it was saved (the files of the other ranks have <size> bytes)"
        ),
    ),
    "truncated_rank": (
        CheckpointError,
        (
            "model_world_size_4_rank_2.pt: The file is cut short: its <cut> bytes begin as a torch.save archive, but "
            "the directory at the end is missing. The copy or the save was not finished; copy it again from where it "
            "was saved (the files of the other ranks have <size> bytes)"
        ),
    ),
    "half_copied_rank": (
        CheckpointError,
        (
            "model_world_size_4_rank_2.pt: The file is cut short: its <size> bytes begin as a torch.save archive, but "
            "the directory at the end is missing. The copy or the save was not finished; copy it again from where it "
            "was saved (the files of the other ranks have <size> bytes)"
        ),
    ),
    "html_rank": (
        CheckpointError,
        (
            "model_world_size_4_rank_1.pt: The file is 98 bytes of an HTML page, not a torch.save archive: a download "
            "returned an error or a login page; download it again (the files of the other ranks have <size> bytes)"
        ),
    ),
    "not_zip_rank": (
        CheckpointError,
        (
            "model_world_size_4_rank_1.pt: The file is <size> bytes of something else than a torch.save archive; copy "
            "it again from where it was saved (the files of the other ranks have <size> bytes)"
        ),
    ),
    "rank_copied_over": (
        CheckpointError,
        (
            "model_world_size_4_rank_2.pt: was saved by rank 1, but its name says rank 2; it was renamed or copied "
            "over: restore the file that rank 2 saved"
        ),
    ),
    "ranks_swapped": (
        CheckpointError,
        (
            "2 problems:\n"
            "  - model_world_size_4_rank_1.pt: was saved by rank 2, but its name says rank 1; it was renamed or copied "
            "over: restore the file that rank 1 saved\n"
            "  - model_world_size_4_rank_2.pt: was saved by rank 1, but its name says rank 2; it was renamed or copied "
            "over: restore the file that rank 2 saved"
        ),
    ),
    "bit_flipped": (
        ChecksumError,
        (
            "model_world_size_4_rank_2.pt: model.layers.0.mlp.gate_proj.weight: the bytes on disk (rank 2) are not "
            "those that were saved: record data/9 has CRC-32 <crc>, its archive recorded <crc>; copy the file "
            "again from where it was written, or use another step's checkpoint (--no-checksum merges the damaged bytes)"
        ),
    ),
    "key_renamed_by_flip": (
        CheckpointError,
        (
            "model_world_size_4_rank_2.pt: The checksum of data.pkl is <crc>, but <crc> was recorded when it was "
            "saved. The file is damaged; copy it again from where it was saved."
        ),
    ),
    "two_world_sizes": (
        CheckpointError,
        "@: holds rank files of 2 runs (2 of world size 2 and 4 of world size 4); say which with --world-size",
    ),
    "two_world_sizes_untold": (
        CheckpointError,
        "@: holds rank files of 2 runs (2 of world size 2 and 4 of world size 4); say which with --world-size",
    ),
    "steps_differ": (
        CheckpointError,
        (
            "a_buffers.steps: should be the same on all ranks that hold it, but at [] rank 0 has 9007199254740993 and "
            "rank 3 has 9007199254740983; the files are not of one run and one step, or the ranks went apart in "
            "training"
        ),
    ),
    "stale_replica": (
        CheckpointError,
        "9 problems:\n"
        + "".join(
            f"  - {name}: should be the same on all ranks that hold it, but at {'[0]' if 'bias' in name else '[0, 0]'} "
            "rank 0 has <value> and rank 2 has <value>; the files are not of one run and one step, or the ranks went "
            "apart in training\n"
            for name in STALE
        )
        + "  - and 19 more of this kind (replicas-differ)",
    ),
    "buffer_differs": (
        CheckpointError,
        (
            "a_buffers.vector: should be the same on all ranks that hold it, but at [4] rank 0 has 0 and rank 2 has 1; "
            "the files are not of one run and one step, or the ranks went apart in training"
        ),
    ),
    "replica_differs": (
        CheckpointError,
        (
            "model.layers.0.mlp.gate_proj.weight: should be the same on all ranks that hold it, but at [3, 1] rank 0 "
            "has <value> and rank 2 has <value>; the files are not of one run and one step, or the ranks "
            "went apart in training"
        ),
    ),
    "key_missing_on_rank": (
        CheckpointError,
        (
            "model.layers.0.mlp.gate_proj.weight: held by ranks 0, 1 and 3 but missing on rank 2, though its device "
            "mesh names them all; save the checkpoint again, or restore the right files of those ranks"
        ),
    ),
    "key_missing_in_stage": (
        CheckpointError,
        (
            "lm_head.weight: held by rank 2 but missing on rank 3, though all ranks of a pipeline stage save a plain "
            "tensor; save the checkpoint again, or restore the right files of those ranks"
        ),
    ),
    "key_missing_everywhere": (
        ModelError,
        (
            "1 tensor is missing that Qwen2ForCausalLM has: model.layers.0.mlp.gate_proj.weight. If config.json is not "
            "that of the model that was trained, name the right one by --config DIR."
        ),
    ),
    "key_extra_on_rank": (
        CheckpointError,
        (
            "model.layers.7.mlp.gate_proj.weight: held by rank 3 but missing on ranks 0-2, though its device mesh "
            "names them all; save the checkpoint again, or restore the right files of those ranks"
        ),
    ),
    "key_unexpected": (
        ModelError,
        (
            "1 tensor is not of Qwen2ForCausalLM: model.layers.7.mlp.gate_proj.weight. --unexpected keep writes them "
            "along, --unexpected drop leaves them out; if config.json is not that of the model that was trained, name "
            "the right one by --config DIR."
        ),
    ),
    "plain_on_rank": (
        CheckpointError,
        (
            "model.layers.0.mlp.gate_proj.weight: ranks disagree: a DTensor on ranks 0, 2 and 3, a plain tensor on "
            "rank 1; their files are not of one run and one step"
        ),
    ),
    "shape_disagrees": (
        CheckpointError,
        (
            "model.layers.0.mlp.gate_proj.weight: ranks disagree: shape (37, 24) on ranks 0, 2 and 3, shape (38, 24) "
            "on rank 1; their files are not of one run and one step"
        ),
    ),
    "dtype_disagrees": (
        CheckpointError,
        (
            "model.layers.0.mlp.gate_proj.weight: ranks disagree: float16 on rank 1, float32 on ranks 0, 2 and 3; "
            "their files are not of one run and one step"
        ),
    ),
    "placement_disagrees": (
        CheckpointError,
        (
            "model.layers.0.mlp.gate_proj.weight: ranks disagree: (Replicate()) on rank 1, (Shard(0)) on ranks 0, 2 "
            "and 3; their files are not of one run and one step"
        ),
    ),
    "hole": (
        CheckpointError,
        (
            "rank 1: model.layers.0.mlp.gate_proj.weight: holds a local tensor of shape (9, 24), but of shape (37, 24) "
            "with placements (Shard(0)) this rank has [10:20, 0:24], shape (10, 24); the checkpoint would have holes "
            "or shifted rows: save it again"
        ),
    ),
    "partial_placement": (
        CheckpointError,
        (
            "model.layers.0.mlp.gate_proj.weight: is Partial(sum) on mesh axis 0 (fsdp): each rank holds its own "
            "contribution, not the value; reduce it now with --reduce-partial, or redistribute it to Replicate() or "
            "Shard() before saving"
        ),
    ),
    "tied_without_embedding": (
        ModelError,
        (
            "model.embed_tokens.weight: the checkpoint lacks this tensor of Qwen2ForCausalLM, and has only "
            "lm_head.weight, which by config.json is tied to it. If config.json is not that of the model that was "
            "trained, name the right one by --config DIR."
        ),
    ),
    "hostile_pickle": (
        CheckpointError,
        (
            "model_world_size_4_rank_1.pt: data.pkl asks for posix.system, which is not among the classes that sharded "
            "checkpoints are made of. Nothing of it was run. If you trust the origin of this file, save it again with "
            "tensors only."
        ),
    ),
    "hostile_eval": (
        CheckpointError,
        (
            "model_world_size_4_rank_1.pt: data.pkl asks for __builtin__.eval, which is not among the classes that "
            "sharded checkpoints are made of. Nothing of it was run. If you trust the origin of this file, save it "
            "again with tensors only."
        ),
    ),
    "storage_out_of_bounds": (
        CheckpointError,
        (
            "model_world_size_4_rank_1.pt: model.extra: its shape (2, 2), stride (2, 1) and offset 1000000000 leave "
            "its storage of 4 elements."
        ),
    ),
    "unknown_class": (
        CheckpointError,
        (
            "model_world_size_4_rank_1.pt: data.pkl asks for trainer_of_somebody.NotOnAnyList, which is not among "
            "the classes that sharded checkpoints are made of. Nothing of it was run. If you trust the origin of this "
            "file, save it again with tensors only."
        ),
    ),
    "fsdp_config_disagrees": (
        CheckpointError,
        (
            "fsdp_config.json: says world size 8, but the rank files are those of world size 4; delete it if it is "
            "stale, or confirm the files with --world-size 4"
        ),
    ),
    "huggingface_only": (
        NotACheckpointError,
        (
            "@: holds optimizer or extra state of ranks but no model_world_size_*_rank_*.pt; the model was not saved "
            "here, or not copied: look on the other nodes, and in the trainer's setting of what to save"
        ),
    ),
    "format_dcp": (
        NotACheckpointError,
        (
            "@: is a torch.distributed.checkpoint (DCP) checkpoint, which this version does not read; turn it into one "
            "file with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch`"
        ),
    ),
    "format_zero": (
        NotACheckpointError,
        "@: is a DeepSpeed ZeRO checkpoint, which this version does not read; run the zero_to_fp32.py beside it",
    ),
    "format_megatron": (
        NotACheckpointError,
        "@: is a Megatron-Core checkpoint, which this version does not read; convert it with Megatron's own tools",
    ),
    "format_merged": (
        NotACheckpointError,
        "@: is a Hugging Face model directory already: there is nothing to merge",
    ),
    "no_huggingface": (
        ModelError,
        (
            "@: has no huggingface/ folder with config.json; give the folder of the base model with --config DIR, or "
            "merge the weights alone with --weights-only"
        ),
    ),
    "no_architectures": (
        ModelError,
        (
            '@/huggingface/config.json: it names no class under "architectures", such as ["Qwen2ForCausalLM"]. Add '
            "it. Name a folder with the right config.json by --config DIR, or merge the tensors as they are, without "
            "this check, by --weights-only."
        ),
    ),
    "larger_vocabulary": (
        ModelError,
        (
            "2 tensors are not of the shape that Qwen2ForCausalLM has by config.json: model.embed_tokens.weight (saved "
            "[101, 24], expected [103, 24]), lm_head.weight (saved [101, 24], expected [103, 24]). If config.json is "
            "not that of the model that was trained, name the right one by --config DIR."
        ),
    ),
    "nothing_saved": (CheckpointError, "@: the rank files hold no tensor; the model was not saved"),
    "unknown_head": (
        ModelError,
        (
            "2 tensors are not of LlamaForCausalLM: q_head.summary.weight, q_head.summary.bias. --unexpected keep "
            "writes them along, --unexpected drop leaves them out; if config.json is not that of the model that was "
            "trained, name the right one by --config DIR."
        ),
    ),
    "critic_without_labels": (
        ModelError,
        (
            "2 tensors are not of Qwen2ForCausalLM: score.weight, score.bias. --unexpected keep writes them along, "
            "--unexpected drop leaves them out; if config.json is not that of the model that was trained, name the "
            "right one by --config DIR. If this is a critic, give --is-value-model: Qwen2ForTokenClassification has "
            "all tensors of the checkpoint."
        ),
    ),
    "causal_config": (
        ModelError,
        (
            "2 problems:\n"
            "  - 1 tensor is missing that Qwen2ForCausalLM has: lm_head.weight. If config.json is not that of the "
            "model that was trained, name the right one by --config DIR.\n"
            "  - 2 tensors are not of Qwen2ForCausalLM: score.weight, score.bias. --unexpected keep writes them along, "
            "--unexpected drop leaves them out; if config.json is not that of the model that was trained, name the "
            "right one by --config DIR. If this is a critic, give --is-value-model: Qwen2ForTokenClassification has "
            "all tensors of the checkpoint."
        ),
    ),
    "no_model_type": (
        ModelError,
        (
            '@/huggingface/config.json: it has no "model_type", such as "qwen2". Add it. Name a folder with the '
            "right config.json by --config DIR, or merge the tensors as they are, without this check, by "
            "--weights-only."
        ),
    ),
}

# What is merged all the same, and what is said of it.
MERGED: dict[str, tuple[str, ...]] = {
    "padded_shards": (TIED,),
    "norms_all_ones": (TIED,),
    "prefixed_fsdp": (
        TIED,
        (
            "names stripped of wrappers: 26, such as _fsdp_wrapped_module.model.embed_tokens.weight -> "
            "model.embed_tokens.weight"
        ),
    ),
    "prefixed_compile": (
        TIED,
        "names stripped of wrappers: 26, such as _orig_mod.model.embed_tokens.weight -> model.embed_tokens.weight",
    ),
    "prefixed_checkpointing": (
        TIED,
        (
            "names stripped of wrappers: 24, such as model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight "
            "-> model.layers.0.self_attn.q_proj.weight"
        ),
    ),
    "prefixed_ddp": (
        TIED,
        "names stripped of wrappers: 26, such as module.model.embed_tokens.weight -> model.embed_tokens.weight",
    ),
    "prefixed_peft": (
        TIED,
        (
            "names stripped of wrappers: 26, such as base_model.model.model.embed_tokens.weight -> "
            "model.embed_tokens.weight"
        ),
    ),
    "prefixed_deep": (
        TIED,
        (
            "names stripped of wrappers: 26, such as model.base_model.model.embed_tokens._fsdp_wrapped_module.weight "
            "-> model.embed_tokens.weight"
        ),
    ),
    "prefixed_trl": (
        (
            "the value head is in value_head.safetensors, as LlamaForCausalLM has no place for it, and from_pretrained "
            "does not read it: v_head.summary.weight, v_head.summary.bias"
        ),
        (
            "names stripped of wrappers: 21, such as pretrained_model.model.embed_tokens.weight -> "
            "model.embed_tokens.weight"
        ),
    ),
    "prefixed_mixed": (
        TIED,
        (
            "names stripped of wrappers: 26, such as module._orig_mod._fsdp_wrapped_module.model.embed_tokens.weight "
            "-> model.embed_tokens.weight"
        ),
    ),
    "tied_diverged": (
        (
            "lm_head.weight differs from model.embed_tokens.weight, to which it was tied; both are written and "
            "tie_word_embeddings is set to false"
        ),
        "config.json: tie_word_embeddings set to false",
    ),
    "tied_without_head": ("lm_head.weight was not saved; it is tied to model.embed_tokens.weight",),
    "old_format": (
        (
            "ranks 0-3: saved in the old format of torch.save, without checksums, so damage to the files cannot be "
            "noticed"
        ),
        TIED,
    ),
    "checksums_off": (
        "ranks 0-3: saved with checksums off, so damage to the files cannot be noticed",
        TIED,
    ),
    "fsdp_config_missing": (TIED,),
    "in_global_step": (
        "read from @/global_step_10/actor",
        TIED,
    ),
    "fsdp_prefixed_architecture": (
        TIED,
        'config.json: architectures set to ["Qwen2ForCausalLM"]',
    ),
    "generation_config_rejected": (
        TIED,
        (
            "generation_config.json was copied as it is, but transformers objects to it: GenerationConfig is invalid: "
            "- `temperature`: `do_sample` is not set to `True`. However, `temperature` is set to `0.6` -- this flag is "
            "only used in sample-based generation modes. You should set `do_sample=True` or unset `temperature`. - "
            "`top_p`: `do_sample` is not set to `True`. However, `top_p` is set to `0.95` -- this flag is only used in "
            "sample-based generation modes. You should set `do_sample=True` or unset `top_p`."
        ),
    ),
    "remote_code": (TIED,),
    "slow_tokenizer": (TIED,),
    "template_in_tokenizer_config": (TIED,),
    "template_in_json": ("renamed as on the hub: 64, such as lm_head.weight -> language_model.lm_head.weight",),
    "templates_with_names": (TIED,),
    "tokenizer_missing": (
        TIED,
        "beside config.json is no tokenizer, so the output has none; copy it from the base model",
    ),
}

# Where the head is written, because it differs from the embedding, or is not tied to it.
WRITTEN = {"tied_diverged", "prefixed_trl", "template_in_json"}


def normalised(text: str, folder: Path, sound: Path) -> str:
    """The message with the folder, and what depends on the machine that made the files, replaced by names."""
    text = text.replace(str(folder), "@")
    sizes = {path.stat().st_size: "<size>" for path in sound.glob("model_*")}
    cut = folder / "model_world_size_4_rank_2.pt"
    if cut.exists():
        sizes.setdefault(cut.stat().st_size, "<cut>")
    for size, name in sizes.items():
        text = text.replace(f"{size:,} bytes", f"{name} bytes")
    text = re.sub(r"\b(CRC-32|recorded|data\.pkl is|but) [0-9a-f]{8}\b", r"\1 <crc>", text)
    return re.sub(r"\bhas -?[0-9]+\.[0-9e-]+", "has <value>", text)


def test_every_fault_has_an_expectation() -> None:
    assert set(REFUSED) | set(MERGED) == set(FAULTS)


@pytest.mark.parametrize("fault", REFUSED)
def test_is_refused_with_the_whole_message(fault: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """S5, S8, S9, S11, S12, S14, S20, S21, L1-L6, L10, L11, L14: nothing is written, nothing is left."""
    case = FAULTY[fault]
    assert case.base is not None
    folder, sound = checkpoint(case.name) / "checkpoint", checkpoint(case.base) / "checkpoint"
    kind, message = REFUSED[fault]
    with pytest.raises(MergerError) as caught:
        merger.merge(folder, tmp_path / "out", weights_only="weights-only" in case.marks)
    assert normalised(str(caught.value), folder, sound) == message
    assert type(caught.value) is kind
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", MERGED)
def test_is_merged_exactly_and_said(fault: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """S1, S6, S12, S14, S24, L3, L4, L6-L8, L14: what was done is in the report."""
    if (
        fault == "generation_config_rejected"
        and "strict" not in inspect.signature(GenerationConfig.validate).parameters
    ):
        pytest.skip("this version of transformers says it in other words")
    case = FAULTY[fault]
    made = checkpoint(case.name)
    folder = made / "checkpoint"
    (exact,) = (outcome for outcome in case.expected if isinstance(outcome, Exact))
    truth = load_file(made / "truth" / f"{exact.truth}.safetensors")
    if exact.truth == "saved" and truth.keys() == load_file(made / "truth" / "truth.safetensors").keys():
        pytest.skip("this version of transformers has the same names in memory, so there is nothing to say")
    report = merger.merge(folder, tmp_path / "out")
    assert tuple(note.replace(str(folder), "@") for note in report.notes) == MERGED[fault]
    truth = exact.change(truth) if exact.change is not None else truth
    if fault not in WRITTEN:
        del truth["lm_head.weight"]
    merged = {
        name: tensor for path in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    assert set(merged) == set(truth)
    assert {name for name in truth if not torch.equal(merged[name], truth[name])} == set()
    assert merger.verify_merge(tmp_path / "out", folder).is_equal


@pytest.mark.parametrize("fault", ["no_huggingface", "no_architectures", "no_model_type"])
@pytest.mark.parametrize("way", ["weights_only", "config"])
def test_without_a_config_that_can_be_used_weights_are_merged_where_that_is_asked_for(
    fault: str, way: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """L6: alone, or with the config.json of another folder."""
    made = checkpoint(FAULTY[fault].name)
    truth = load_file(made / "truth" / "truth.safetensors")
    if way == "weights_only":
        merger.merge(made / "checkpoint", tmp_path / "out", weights_only=True)
    else:
        right = checkpoint(FAULTS[fault].base) / "checkpoint" / "huggingface"
        merger.merge(made / "checkpoint", tmp_path / "out", config=right)
        del truth["lm_head.weight"]
        assert (tmp_path / "out" / "config.json").read_bytes() == (right / "config.json").read_bytes()
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == truth.keys()
    assert {name for name in truth if not torch.equal(merged[name], truth[name])} == set()
