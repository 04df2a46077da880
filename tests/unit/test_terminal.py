"""Reports as a person reads them: whole texts, at most 80 columns wide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from merger.errors import Problem
from merger.huggingface.logits import LogitsComparison
from merger.inspect import InspectReport, MeshSummary, TensorSummary
from merger.page import Page
from merger.report import MergeReport
from merger.terminal import inspect_text, merge_text, size_text, verify_text
from merger.verify import TensorComparison, VerifyReport

MERGED = MergeReport(
    checkpoint=Path("/run/global_step_10/actor"),
    output=Path("/models/qwen"),
    format="per-rank FSDP files",
    world_size=4,
    dry_run=False,
    num_tensors=1290,
    num_bytes=988_097_824,
    weight_files=("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    side_files=(
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ),
    dtypes={"bfloat16": 1289, "int64": 1},
    casts={"float32 -> bfloat16": 1289},
    renamed={},
    dropped=(),
    notes=(
        "lm_head.weight equals model.embed_tokens.weight, to which it is tied; written once",
        'config.json: torch_dtype set to "bfloat16"',
    ),
)

INSPECTED = InspectReport(
    checkpoint=Path("/run/global_step_10/actor"),
    format="per-rank FSDP files",
    world_size=4,
    num_files=4,
    file_bytes=1_976_300_000,
    config_dir=Path("/run/global_step_10/actor/huggingface"),
    meshes=(
        MeshSummary((2, 2), ("ddp", "fsdp"), (0, 1, 2, 3), 289),
        MeshSummary((4,), None, (2, 0, 3, 1), 1),
    ),
    num_tensors=291,
    num_replicated=1,
    num_elements=494_048_912,
    num_bytes=1_976_195_648,
    dtypes={"float32": 290, "int64": 1},
    placements={"(Replicate(), Shard(0))": 289, "(Shard(0))": 1, "on every rank": 1},
    tensors=(),
    notes=(),
    problems=(),
)

COMPARED = VerifyReport(
    checkpoint=Path("/run/global_step_10/actor"),
    reference=Path("/models/qwen"),
    comparisons=(
        TensorComparison("model.embed_tokens.weight", "equal", "bfloat16", "bfloat16", 0.0, "equal"),
        TensorComparison("model.norm.weight", "equal", "bfloat16", "bfloat16", 0.0, "equal"),
    ),
    num_bytes=272_000,
    notes=(),
)


AS_REFERENCE = "next: merger upload /models/qwen REPO"


def compared(*comparisons: TensorComparison) -> VerifyReport:
    return replace(COMPARED, comparisons=(*COMPARED.comparisons, *comparisons))


def lines_of(text: str) -> list[str]:
    """The lines; none is wider than 80 or ends in a blank."""
    lines = text.split("\n")
    assert [line for line in lines if len(line) > 80 or line != line.rstrip()] == []
    return lines


# merge


def test_a_merge_says_what_was_written_and_what_to_do_next() -> None:
    assert lines_of(merge_text(MERGED)) == [
        "merged 4 ranks of /run/global_step_10/actor",
        "  into      /models/qwen",
        "  tensors   1,290: 1,289 bfloat16, 1 int64",
        "  weights   988.10 MB in 2 files",
        "  cast      1,289 float32 -> bfloat16",
        "  beside    config.json, generation_config.json, tokenizer.json,",
        "            tokenizer_config.json, chat_template.jinja",
        "  note      lm_head.weight equals model.embed_tokens.weight, to which it is",
        "            tied; written once",
        '  note      config.json: torch_dtype set to "bfloat16"',
        "next: merger verify /models/qwen --source /run/global_step_10/actor",
    ]


def test_a_dry_run_says_that_nothing_was_written() -> None:
    report = replace(
        MERGED,
        dry_run=True,
        world_size=1,
        num_tensors=1,
        weight_files=("model.safetensors",),
        side_files=(),
        dtypes={"float32": 1},
        casts={},
        notes=(),
    )
    assert lines_of(merge_text(report)) == [
        "would merge 1 rank of /run/global_step_10/actor",
        "  into      /models/qwen",
        "  tensors   1: 1 float32",
        "  weights   988.10 MB in 1 file",
        "nothing was written (--dry-run)",
        "next: the same command without --dry-run",
    ]


def test_the_next_command_can_be_pasted_whatever_the_paths() -> None:
    report = replace(MERGED, checkpoint=Path("/my runs/a"), output=Path("/out/it's"))
    assert lines_of(merge_text(report))[-1] == "next: merger verify '/out/it'\"'\"'s' --source '/my runs/a'"


def test_a_next_command_that_is_too_long_goes_on_below_and_can_still_be_pasted() -> None:
    report = replace(MERGED, checkpoint=Path("/a-long-way/" * 5), output=Path("/models/one/of/many"))
    assert lines_of(merge_text(report))[-2:] == [
        "next: merger verify /models/one/of/many \\",
        "        --source /a-long-way/a-long-way/a-long-way/a-long-way/a-long-way",
    ]


# inspect


def test_an_inspection_says_what_a_checkpoint_is() -> None:
    assert lines_of(inspect_text(INSPECTED)) == [
        "/run/global_step_10/actor",
        "  format    per-rank FSDP files",
        "  ranks     4 (4 files, 1.98 GB)",
        "  mesh      ddp=2 x fsdp=2 on ranks 0-3: 289 tensors",
        "  mesh      axis 0=4 on ranks 2, 0, 3, 1: 1 tensor",
        "  tensors   291, 494,048,912 elements, 1.98 GB merged",
        "  dtypes    290 float32, 1 int64",
        "  placed    289 (Replicate(), Shard(0)), 1 (Shard(0)), 1 on every rank",
        "  config    /run/global_step_10/actor/huggingface",
        "no fault found (headers only; a merge also checks config.json and all data)",
        "next: merger merge /run/global_step_10/actor OUT",
    ]


def test_an_inspection_lists_faults_and_notes() -> None:
    report = replace(
        INSPECTED,
        config_dir=None,
        meshes=(),
        num_tensors=0,
        num_elements=0,
        num_bytes=0,
        dtypes={},
        placements={},
        notes=("rank 3: saved with checksums off, so damage to the files cannot be noticed",),
        problems=(
            Problem("missing-ranks", "/run/actor", "rank 2 of 4 is missing (found ranks 0, 1 and 3); copy it here"),
            Problem("hole", "norm.weight", "no rank holds [2:4]"),
        ),
    )
    assert lines_of(inspect_text(report)) == [
        "/run/global_step_10/actor",
        "  format    per-rank FSDP files",
        "  ranks     4 (4 files, 1.98 GB)",
        "  config    none",
        "  note      rank 3: saved with checksums off, so damage to the files cannot be",
        "            noticed",
        "",
        "2 faults; it cannot be merged as it is:",
        "  - /run/actor: rank 2 of 4 is missing (found ranks 0, 1 and 3); copy it here",
        "  - norm.weight: no rank holds [2:4]",
        "next: mend these, then look again by the same command",
    ]


def test_tensors_that_were_asked_for_stand_in_columns() -> None:
    tensors = (
        TensorSummary("model.norm.weight", "float32", (896,), "(Shard(0))", 4),
        TensorSummary("step", "int64", (), "on every rank", 4),
    )
    assert lines_of(inspect_text(replace(INSPECTED, tensors=tensors)))[9:] == [
        "",
        "  model.norm.weight  float32 (896)  (Shard(0))",
        "  step               int64 ()  on every rank",
        "no fault found (headers only; a merge also checks config.json and all data)",
        "next: merger merge /run/global_step_10/actor OUT",
    ]


def test_where_columns_are_too_wide_each_tensor_takes_two_lines() -> None:
    tensors = (
        TensorSummary("model.layers.0.self_attn.q_proj.weight", "float32", (4096, 4096), "(Replicate(), Shard(0))", 4),
        TensorSummary("step", "int64", (), "on every rank", 4),
    )
    assert lines_of(inspect_text(replace(INSPECTED, tensors=tensors)))[9:] == [
        "",
        "  model.layers.0.self_attn.q_proj.weight",
        "    float32 (4096, 4096)  (Replicate(), Shard(0))",
        "  step",
        "    int64 ()  on every rank",
        "no fault found (headers only; a merge also checks config.json and all data)",
        "next: merger merge /run/global_step_10/actor OUT",
    ]


@pytest.mark.parametrize(
    ("mesh", "lines"),
    [
        (MeshSummary((64,), ("fsdp",), tuple(range(64)), 1), ["  mesh      fsdp=64 on ranks 0-63: 1 tensor"]),
        (
            MeshSummary((2, 2), ("dp", "tp"), (1, 3, 5, 7), 2),
            ["  mesh      dp=2 x tp=2 on ranks 1, 3, 5 and 7: 2 tensors"],
        ),
        (
            MeshSummary((20,), ("fsdp",), tuple(range(119, 99, -1)), 2),
            [
                "  mesh      fsdp=20 on ranks 119, 118, 117, 116, 115, 114, 113, 112, 111, 110,",
                "            109, 108, 107, 106, 105, 104, ...: 2 tensors",
            ],
        ),
        (
            MeshSummary((2, 2), ("fsdp", "tp"), (0, 2, 1, 3), 14),
            ["  mesh      fsdp=2 x tp=2 on ranks [[0, 2], [1, 3]]: 14 tensors"],
        ),
        (
            MeshSummary((2,), ("fsdp",), (0, 2), 7, copies=((1, 3),)),
            ["  mesh      fsdp=2 on ranks 0 and 2, and again on ranks 1 and 3: 7 tensors"],
        ),
        (
            MeshSummary((4,), ("fsdp",), (0, 8, 16, 24), 7, copies=tuple((n, n + 8, n + 16, n + 24) for n in range(7))),
            [
                "  mesh      fsdp=4 on ranks 0, 8, 16 and 24, and again on 7 other sets of ranks:",
                "            7 tensors",
            ],
        ),
        (
            MeshSummary((64,), ("fsdp",), tuple(range(0, 512, 8)), 7),
            ["  mesh      fsdp=64 on 64 ranks (0, 8, 16, ..., 504): 7 tensors"],
        ),
        (
            MeshSummary((32, 2), ("fsdp", "tp"), tuple(r + c for r in range(32) for c in (0, 32)), 7),
            [
                "  mesh      fsdp=32 x tp=2 on ranks 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6,",
                "            38, 7, 39, ...: 7 tensors",
            ],
        ),
    ],
)
def test_a_mesh_reads_as_its_axes_and_ranks(mesh: MeshSummary, lines: list[str]) -> None:
    """S10, S22."""
    text = lines_of(inspect_text(replace(INSPECTED, meshes=(mesh,))))
    assert text[3 : 3 + len(lines)] == lines


def test_each_way_to_be_placed_stands_on_a_line_where_one_is_too_short() -> None:
    """S10: a line never breaks within one."""
    placements = {
        "(_StridedShard(0, split_factor=2), Shard(0))": 10,
        "(Shard(0))": 1007,
        "(Replicate(), _StridedShard(0, split_factor=2), Shard(0), Replicate(), Replicate())": 4,
    }
    text = lines_of(inspect_text(replace(INSPECTED, placements=placements)))
    assert text[7:12] == [
        "  placed    10 (_StridedShard(0, split_factor=2), Shard(0))",
        "            1,007 (Shard(0))",
        "            4 (Replicate(), _StridedShard(0, split_factor=2), Shard(0),",
        "            Replicate(), Replicate())",
        "  config    /run/global_step_10/actor/huggingface",
    ]


def test_control_characters_in_names_are_shown_and_not_obeyed() -> None:
    """L11: a name may hold what clears a screen, or a line that looks like ours."""
    tensors = (TensorSummary("a\x1b[2Jb\nno fault found\u202e", "int64", (), "on every rank", 1),)
    text = lines_of(inspect_text(replace(INSPECTED, tensors=tensors)))
    assert text[10] == "  a\\x1b[2Jb\\nno fault found\\u202e  int64 ()  on every rank"
    assert len(text) == 13


# verify


def test_equal_checkpoints_are_the_same() -> None:
    assert lines_of(verify_text(COMPARED)) == [
        "/run/global_step_10/actor",
        "  against   /models/qwen",
        "  compared  2 equal",
        "the same: 2 tensors, 272.00 kB",
        AS_REFERENCE,
    ]


def test_tensors_equal_after_rounding_are_counted_by_what_was_rounded() -> None:
    details = ["bfloat16 in the reference", "bfloat16 in the reference", "float16 in the reference"]
    report = replace(
        COMPARED,
        notes=("the reference has no config.json, so ties are not known",),
        comparisons=tuple(
            TensorComparison(
                f"w.{number}", "equal", "float32", "x", 0.0, f"float32 here, {detail}; equal after rounding"
            )
            for number, detail in enumerate(details)
        ),
    )
    assert lines_of(verify_text(report)) == [
        "/run/global_step_10/actor",
        "  against   /models/qwen",
        "  note      the reference has no config.json, so ties are not known",
        "  note      2 tensors: float32 here, bfloat16 in the reference; equal after",
        "            rounding",
        "  note      1 tensor: float32 here, float16 in the reference; equal after",
        "            rounding",
        "  compared  3 equal",
        "the same: 3 tensors, 272.00 kB",
        AS_REFERENCE,
    ]


def test_the_largest_difference_within_the_tolerances_is_named() -> None:
    report = compared(
        TensorComparison("a", "close", "float32", "float32", 1e-7, "largest difference 1e-07"),
        TensorComparison("b", "close", "float32", "float32", 0.000123456789, "largest difference 0.000123457"),
    )
    assert lines_of(verify_text(report))[2:] == [
        "  compared  2 equal, 2 close",
        "  largest   0.000123457 within the tolerances, in b",
        "the same: 4 tensors, 272.00 kB",
        AS_REFERENCE,
    ]


def test_what_differs_is_listed_and_counted() -> None:
    report = compared(
        TensorComparison("a", "differs", "float32", "float32", 2.0, "largest difference 2"),
        TensorComparison("b", "shape", "float32", "float32", None, "shape (2), the reference has (3)"),
        TensorComparison("c", "unexpected", "float32", None, None, "(5), not in the reference"),
        TensorComparison("d", "missing", None, "float32", None, "(5), not in the checkpoint"),
        TensorComparison("e", "missing", None, "float32", None, "(6), not in the checkpoint"),
    )
    assert lines_of(verify_text(report))[2:] == [
        "  compared  2 equal, 1 differs, 1 shape, 1 unexpected, 2 missing",
        "  - a: largest difference 2",
        "  - b: shape (2), the reference has (3)",
        "  - c: (5), not in the reference",
        "  - d: (5), not in the checkpoint",
        "  - e: (6), not in the checkpoint",
        "not the same: 5 tensors of 7",
        "next: merger inspect /run/global_step_10/actor --tensors '*'",
    ]


def test_logits_have_a_line_of_their_own_and_a_part_in_the_verdict() -> None:
    far = LogitsComparison(
        is_close=False,
        max_difference=0.25,
        tolerance=0.001,
        num_tokens=16,
        seed=0,
        detail="largest difference 0.25, tolerance 0.001; 16 tokens (seed 0)",
    )
    assert lines_of(verify_text(replace(COMPARED, logits=far)))[2:] == [
        "  compared  2 equal",
        "  logits    largest difference 0.25, tolerance 0.001; 16 tokens (seed 0)",
        "not the same: the logits, though 2 tensors are",
        "next: if they may be that far apart, say how far by --logits-atol",
    ]
    near = replace(far, is_close=True)
    assert lines_of(verify_text(replace(COMPARED, logits=near)))[-2] == "the same: 2 tensors, 272.00 kB"


def test_past_twenty_differences_the_rest_are_counted() -> None:
    many = (TensorComparison(f"w.{n}", "differs", "int8", "int8", 1.0, "largest difference 1") for n in range(23))
    lines = lines_of(verify_text(compared(*many)))
    assert lines[3:5] == ["  - w.0: largest difference 1", "  - w.1: largest difference 1"]
    assert lines[22:] == [
        "  - w.19: largest difference 1",
        "  - and 3 more",
        "not the same: 23 tensors of 25",
        "next: if they may be that far apart, say how far by --atol and --rtol",
    ]


def test_one_tensor_is_not_many() -> None:
    report = replace(COMPARED, comparisons=COMPARED.comparisons[:1])
    assert lines_of(verify_text(report))[-2] == "the same: 1 tensor, 272.00 kB"
    bad = TensorComparison("a", "differs", "int8", "int8", 1.0, "largest difference 1")
    assert lines_of(verify_text(replace(COMPARED, comparisons=(bad,))))[-2] == "not the same: 1 tensor of 1"


def test_where_there_is_nothing_to_compare_it_is_said() -> None:
    assert lines_of(verify_text(replace(COMPARED, comparisons=(), num_bytes=0)))[2:] == [
        "  compared  nothing",
        "the same: 0 tensors, 0 bytes",
        AS_REFERENCE,
    ]


def test_of_a_merge_that_is_checked_the_next_step_is_to_upload_it_or_to_merge_again() -> None:
    report = replace(COMPARED, checkpoint=Path("/out"), reference=Path("/ckpt"))
    assert lines_of(verify_text(report, is_merge=True))[-1] == "next: merger upload /out REPO"
    bad = replace(report, comparisons=(TensorComparison("a", "differs", "int8", "int8", None, "1 of 2"),))
    assert lines_of(verify_text(bad, is_merge=True))[-1] == "next: merger merge /ckpt /out --overwrite"


def test_after_an_inspection_the_next_step_is_one_that_can_be_done() -> None:
    assert lines_of(inspect_text(replace(INSPECTED, config_dir=None)))[-1] == (
        "next: merger merge /run/global_step_10/actor OUT --config DIR"
    )
    model = replace(INSPECTED, format="Hugging Face model directory")
    assert lines_of(inspect_text(model))[-1] == "next: merger verify CKPT /run/global_step_10/actor"
    one = replace(INSPECTED, problems=(Problem("hole", "norm.weight", "no rank holds [2:4]"),))
    assert lines_of(inspect_text(one))[-1] == "next: mend that, then look again by the same command"


# pages


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_line_is_wider_than_the_page(width: int) -> None:
    tensors = (TensorSummary("model.norm.weight", "float32", (896,), "(Replicate(), Shard(0))", 4),)
    short = Path("/run/actor")
    page = Page(width)
    merged = replace(MERGED, checkpoint=short, side_files=("config.json", "tokenizer.json"))
    inspected = replace(INSPECTED, checkpoint=short, config_dir=short, tensors=tensors)
    unlike = replace(compared(TensorComparison("a", "shape", None, None, None, "other")), checkpoint=short)
    for text in (
        merge_text(merged, page=page),
        inspect_text(inspected, page=page),
        verify_text(unlike, page=page),
    ):
        assert [line for line in text.split("\n") if len(line) > width] == []


def test_a_coloured_page_has_bold_headings_and_a_green_or_red_verdict() -> None:
    page = Page(is_coloured=True)
    good = verify_text(COMPARED, page=page).split("\n")
    assert good[0] == "\x1b[1m/run/global_step_10/actor\x1b[0m"
    assert good[-2] == "\x1b[32mthe same: 2 tensors, 272.00 kB\x1b[0m"
    bad = verify_text(compared(TensorComparison("a", "shape", None, None, None, "shape (2), not (3)")), page=page)
    assert bad.split("\n")[-2] == "\x1b[31mnot the same: 1 tensor of 3\x1b[0m"
    # What a name holds is shown, not obeyed, on such a page too.
    named = replace(COMPARED, checkpoint=Path("/\x1b[31mred"))
    assert verify_text(named, page=page).split("\n")[0] == "\x1b[1m/\\x1b[31mred\x1b[0m"
    assert "\x1b" not in verify_text(named)


# sizes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (1536, "1.54 kB"),
        (999_994, "999.99 kB"),
        (999_996, "1.00 MB"),
        (5_000_000_000, "5.00 GB"),
        (999_999_999_999, "1.00 TB"),
        (1_340_000_000_000_000, "1340.00 TB"),
    ],
)
def test_sizes_read_in_powers_of_1000(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
