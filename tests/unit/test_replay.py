"""`merger.verify_merge`: outputs that safetensors and torch changed by hand, held against genuine rank files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import merger
from merger.adapters import LoraMode
from merger.cli import main
from merger.errors import MergerError, NotACheckpointError, TargetError
from merger.verify import TensorComparison
from tests.unit.archives import ARCHIVES, CASES, IDS
from tests.unit.peft_models import filled, saved, under_peft

CASE = ARCHIVES / "2.14.1" / "fsdp2_hsdp_w4"
AS_STATED = "merged again as merger_report.json says: --dtype keep --weights-only"


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    merger.merge(CASE, tmp_path / "out", weights_only=True, dtype="keep")
    return tmp_path / "out"


def edit(out: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes the tensors of an output as somebody else's program might."""
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def unlike(report: merger.VerifyReport) -> list[TensorComparison]:
    return [comparison for comparison in report.comparisons if comparison.status != "equal"]


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "max_shard_size": "1KB"}, {"report": False}], ids=str)
def test_what_a_merge_wrote_is_what_it_writes(case: Path, options: dict[str, object], tmp_path: Path) -> None:
    merged = merger.merge(case, tmp_path / "out", weights_only=True, **options)  # type: ignore[arg-type]
    report = merger.verify_merge(tmp_path / "out", case)
    assert unlike(report) == []
    assert (len(report.comparisons), report.num_bytes) == (merged.num_tensors, merged.num_bytes)
    assert (report.checkpoint, report.reference) == (tmp_path / "out", case)


def test_each_tensor_that_differs_is_told_with_its_first_element(merged: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["emb.weight"][2, 5] = 0.25
        tensors["emb.weight"][31, 7] = float("nan")
        tensors["step"] += 1

    was = load_file(merged / "model.safetensors")
    edit(merged, change)
    first, step = f"{float(was['emb.weight'][2, 5]):.9g}", int(was["step"])
    report = merger.verify_merge(merged, CASE)
    assert not report.is_equal
    assert report.notes == (AS_STATED,)
    assert unlike(report) == [
        TensorComparison(
            "emb.weight",
            "differs",
            "float32",
            "float32",
            None,
            f"2 of 256 elements differ, the first at [2, 5]: 0.25, the merge gives {first}",
        ),
        TensorComparison(
            "step",
            "differs",
            "int64",
            "int64",
            None,
            f"1 of 1 elements differ, the first at []: {step + 1}, the merge gives {step}",
        ),
    ]


def test_a_sign_of_zero_is_a_difference(tmp_path: Path) -> None:
    """Nothing is close here: bits are compared."""
    torch.save({"w": torch.zeros(3)}, tmp_path / "model_world_size_1_rank_0.pt")
    merger.merge(tmp_path, tmp_path / "out", weights_only=True)
    edit(tmp_path / "out", lambda tensors: tensors["w"].neg_())
    (comparison,) = merger.verify_merge(tmp_path / "out", tmp_path).comparisons
    assert comparison.detail == "3 of 3 elements differ, the first at [0]: -0, the merge gives 0"


def test_missing_added_reshaped_and_cast_tensors_are_told(merged: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["head.weight"]
        tensors["added"] = torch.zeros(2, 2)
        tensors["inv_freq"] = torch.zeros(2, 2)
        tensors["tbl"] = tensors["tbl"].to(torch.bfloat16)

    edit(merged, change)
    assert unlike(merger.verify_merge(merged, CASE)) == [
        TensorComparison("head.weight", "missing", None, "float32", None, "(32, 8), not in the output"),
        TensorComparison("inv_freq", "shape", "float32", "float32", None, "shape (2, 2), the merge gives (4)"),
        TensorComparison("tbl", "differs", "bfloat16", "float32", None, "is bfloat16, the merge gives float32"),
        TensorComparison("added", "unexpected", "float32", None, None, "(2, 2), which the merge does not write"),
    ]


def test_without_a_report_the_options_are_told_from_the_output(tmp_path: Path) -> None:
    merger.merge(CASE, tmp_path / "out", weights_only=True, dtype="float16", report=False)
    report = merger.verify_merge(tmp_path / "out", CASE)
    assert report.is_equal
    told = "by its names and types the output is of a merge with --dtype float16 --weights-only"
    assert report.notes == (f"there is no merger_report.json; {told}",)


def test_another_checkpoint_than_the_one_merged_is_said_before_its_tensors(merged: Path) -> None:
    report = merger.verify_merge(merged, ARCHIVES / "2.14.1" / "fsdp2_1d_w4")
    names = [f"model_world_size_4_rank_{rank}.pt" for rank in range(4)]
    assert report.notes == (
        AS_STATED,
        f"merger_report.json tells of other files than lie here: {', '.join(names)}",
    )
    assert [comparison.name for comparison in unlike(report)] == ["head.weight"]


def test_a_report_of_another_version_is_refused_with_the_way_on(merged: Path) -> None:
    path = merged / "merger_report.json"
    fields = json.loads(path.read_bytes())
    del fields["options"]["dtype"], fields["options"]["unexpected"]
    path.write_text(json.dumps(fields))
    with pytest.raises(TargetError) as caught:
        merger.verify_merge(merged, CASE)
    assert str(caught.value) == (
        f"{path}: lacks the options dtype, unexpected, as of another version; delete it to go without"
    )
    path.unlink()
    assert merger.verify_merge(merged, CASE).is_equal


def test_options_that_a_report_makes_up_are_refused(merged: Path) -> None:
    path = merged / "merger_report.json"
    fields = json.loads(path.read_bytes())
    fields["options"] |= {"dtype": "double", "max_shard_size": "many"}
    path.write_text(json.dumps(fields))
    with pytest.raises(MergerError) as caught:
        merger.verify_merge(merged, CASE)
    assert [problem.where for problem in caught.value.problems] == ["dtype", "max_shard_size"]


def test_the_shard_order_of_the_merge_is_taken_from_its_report(tmp_path: Path) -> None:
    """S22: else the checkpoint could not be read."""
    merger.merge(CASE, tmp_path / "out", weights_only=True, shard_order="coordinate")
    fields = json.loads((tmp_path / "out" / "merger_report.json").read_bytes())
    assert fields["options"]["shard_order"] == "coordinate"
    assert merger.verify_merge(tmp_path / "out", CASE).is_equal


def test_what_is_no_model_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError) as caught:
        merger.verify_merge(tmp_path, CASE)
    assert str(caught.value) == f"{tmp_path}: is no Hugging Face model directory: it holds no *.safetensors file"


def test_progress_counts_every_byte_of_the_output(merged: Path) -> None:
    calls: list[tuple[int, int]] = []
    merger.verify_merge(merged, CASE, progress=lambda *call: calls.append(call))
    total = sum(tensor.nbytes for tensor in load_file(merged / "model.safetensors").values())
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_the_command_exits_0_where_all_is_the_same_and_1_where_not(
    merged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(merged), "--source", str(CASE)]) == 0
    assert capsys.readouterr().out.startswith(
        f"{merged}\n  against   {CASE}\n  note      {AS_STATED}\n  compared  17 equal\nthe same: 17 tensors, 3.94 kB\n"
        "next: merger upload "
    )
    edit(merged, lambda tensors: tensors["step"].add_(1))
    assert main(["verify", str(merged), "--source", str(CASE), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["is_equal"] is False
    assert {one["name"] for one in printed["comparisons"] if one["status"] != "equal"} == {"step"}
    assert main(["verify", str(tmp_path / "none"), "--source", str(CASE)]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b", "--source", "c"], "give OUT --source CKPT, without a REFERENCE"),
        (["--source", "c"], "give OUT --source CKPT, without a REFERENCE"),
        (["a", "--source", "c", "--atol", "1"], "--source compares bit for bit: leave out --atol, --rtol and --logits"),
        (["a", "b", "--config", "c"], "--config, --base, --lora and --lora-adapter are for --source alone"),
        (["a", "b", "--lora", "both"], "--config, --base, --lora and --lora-adapter are for --source alone"),
        (["a", "b", "--lora-adapter", "c"], "--config, --base, --lora and --lora-adapter are for --source alone"),
    ],
)
def test_a_call_without_meaning_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", *arguments])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"merger verify: error: {message}"


def test_another_version_of_a_checkpoint_in_the_same_place_is_noticed(tmp_path: Path) -> None:
    """Such as a step that was written over after its merge."""
    pytest.importorskip("torch.distributed._mesh_layout", reason="this torch cannot load the case to change it")
    shutil.copytree(CASE, tmp_path / "checkpoint")
    merger.merge(tmp_path / "checkpoint", tmp_path / "out", weights_only=True)
    for path in (tmp_path / "checkpoint").glob("model_*.pt"):
        state = torch.load(path, weights_only=False)
        state["step"] += 1
        torch.save(state, path)
    report = merger.verify_merge(tmp_path / "out", tmp_path / "checkpoint")
    assert report.notes[1].startswith("merger_report.json tells of other files than lie here: ")
    assert [comparison.name for comparison in unlike(report)] == ["step"]


# Adapters: what peft folded and saved is held against what the merge gives in other tests.


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """A checkpoint of base weights under two adapters, of which no report tells what was made."""
    model = under_peft(target_modules=["wide"])
    model.add_adapter("other", model.peft_config["default"])
    filled(model)
    folder = saved(model, tmp_path / "adapters")
    model.peft_config["other"].save_pretrained(str(folder / "other"))
    return folder


@pytest.mark.parametrize("mode", ["both", "merge", "adapter", "base"])
def test_without_a_report_what_was_written_of_adapters_is_told(mode: LoraMode, adapters: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    merger.merge(adapters, out, weights_only=True, report=False, lora=mode, lora_adapter="default")
    for given in (None, mode):
        report = merger.verify_merge(out, adapters, lora=given, lora_adapter="default")
        assert report.is_equal
        assert report.options["lora"] == mode


def test_a_difference_that_may_be_one_of_options_is_told_so(adapters: Path, tmp_path: Path) -> None:
    out, asked = tmp_path / "out", {"lora_alpha": 7, "lora_adapter": "other"}
    merger.merge(adapters, out, weights_only=True, report=False, lora="merge", **asked)  # type: ignore[arg-type]
    report = merger.verify_merge(out, adapters, lora_adapter="other")
    assert [one.name for one in unlike(report)] == ["wide.weight"]
    assert report.notes[1] == "if that merge was given --lora-alpha N, give it here too: the output does not tell it"
    assert merger.verify_merge(out, adapters, **asked).is_equal  # type: ignore[arg-type]


def test_base_weights_that_tell_nothing_are_told_so(adapters: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    merger.merge(adapters, out, weights_only=True, report=False, lora="base", lora_adapter="default")
    edit(out, lambda tensors: tensors["wide.weight"].zero_())
    report = merger.verify_merge(out, adapters, lora_adapter="default")
    told = "if that merge was given --lora base or --lora-alpha N, give it here too: the output does not tell it"
    assert report.notes[1] == told


def test_options_other_than_the_report_states_are_refused(adapters: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    merger.merge(adapters, out, weights_only=True, lora="merge", lora_adapter="other")
    stated = f"and {out / 'merger_report.json'} states"
    with pytest.raises(MergerError) as caught:
        merger.verify_merge(out, adapters, lora="both", lora_alpha=7, lora_adapter="default")
    on = "; leave it out, or delete that file to go without"
    assert [(one.where, one.message) for one in caught.value.problems] == [
        ("lora", f"both is given, {stated} merge{on}"),
        ("lora_alpha", f"7 is given, {stated} that none was given{on}"),
        ("lora_adapter", f"default is given, {stated} other{on}"),
    ]
    assert merger.verify_merge(out, adapters, lora="merge", lora_adapter="other").is_equal
