"""The command as a user runs it: what it prints, how it exits, what it imports."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import merger
from merger.cli import main
from tests.unit.archives import ARCHIVES

ROOT = Path(__file__).parents[2]
CHECKPOINT = ARCHIVES / "2.14.1" / "fsdp2_hsdp_w4"


def imported_by(*arguments: str) -> set[str]:
    """The top-level modules that a command has imported when it ends."""
    program = (
        "import sys\nfrom merger.cli import main\n"
        f"try: main({list(arguments)!r})\nexcept SystemExit: pass\n"
        "print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_imports_neither_torch_nor_transformers_nor_numpy() -> None:
    assert imported_by("--help").isdisjoint({"torch", "transformers", "numpy", "safetensors", "tqdm"})


def test_inspect_imports_neither_torch_nor_numpy() -> None:
    assert imported_by("inspect", str(CHECKPOINT), "--tensors", "*").isdisjoint({"torch", "transformers", "numpy"})


def test_a_picture_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    imported = imported_by("inspect", str(CHECKPOINT), "--picture", str(picture))
    assert imported.isdisjoint({"torch", "transformers", "numpy", "safetensors", "tqdm"})
    assert picture.exists()


def test_a_merge_without_casts_or_config_never_imports_torch(tmp_path: Path) -> None:
    assert imported_by("merge", str(CHECKPOINT), str(tmp_path / "out"), "--weights-only").isdisjoint(
        {"torch", "transformers"}
    )
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_public_names_are_a_decision() -> None:
    assert set(merger.__all__) == {
        "ArchiveError",
        "CheckpointError",
        "ChecksumError",
        "InspectReport",
        "MergeReport",
        "MergerError",
        "ModelError",
        "NotACheckpointError",
        "Problem",
        "TargetError",
        "UnsafePickleError",
        "UploadError",
        "UploadReport",
        "VerifyReport",
        "check_upload",
        "inspect",
        "merge",
        "upload",
        "verify",
        "verify_merge",
    }


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (
            "merge",
            {
                "--dtype", "--max-shard-size", "--overwrite", "--dry-run", "--world-size", "--config", "--weights-only",
                "--unexpected", "--names", "--is-value-model",
                "--no-checksum", "--check-replicas", "--shard-order", "--reduce-partial",
                "--workers", "--lora", "--lora-alpha", "--lora-adapter", "--base",
                "--json", "--quiet", "--no-report", "--upload", "--private", "--revision",
            },
        ),
        (
            "inspect",
            {
                "--tensors", "--picture", "--overwrite", "--world-size", "--shard-order", "--reduce-partial",
                "--workers", "--json",
            },
        ),
        (
            "verify",
            {
                "--atol", "--rtol", "--source", "--config", "--base", "--lora-alpha", "--world-size", "--shard-order",
                "--reduce-partial", "--workers", "--json", "--logits", "--logits-atol", "--quiet",
                "--lora", "--lora-adapter",
            },
        ),
        (
            "test",
            {
                "--atol", "--rtol", "--lora-alpha", "--world-size", "--shard-order", "--reduce-partial", "--workers",
                "--json", "--quiet",
            },
        ),
        ("upload", {"--private", "--revision", "--quiet", "--json"}),
    ],
)  # fmt: skip
def test_the_flags_are_a_decision(command: str, flags: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    words = capsys.readouterr().out.replace("[", " ").replace("]", " ").replace(",", " ").split()
    assert {word for word in words if word.startswith("--")} == flags | {"--help"}


def test_merge_says_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CHECKPOINT, "ckpt")
    assert main(["merge", "ckpt", "out", "--weights-only"]) == 0
    printed = capsys.readouterr()
    assert printed.out == (
        "merged 4 ranks of ckpt\n"
        "  into      out\n"
        "  tensors   17: 16 float32, 1 int64\n"
        "  weights   3.94 kB in 1 file\n"
        "  note      names and shapes are as saved: those of the hub need a config\n"
        "next: merger verify out --source ckpt\n"
    )
    assert printed.err == ""


def test_quiet_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", str(CHECKPOINT), str(tmp_path / "out"), "--weights-only", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_quiet_verification_has_its_exit_code_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["merge", str(ARCHIVES / "2.14.1" / "fsdp2_1d_w4"), out, "--weights-only", "--quiet"]) == 0
    for other, code in (("fsdp2_1d_w4", 0), ("fsdp2_uneven_w4", 1)):
        case = str(ARCHIVES / "2.14.1" / other)
        assert main(["verify", case, out, "--quiet"]) == code
        assert main(["verify", out, "--source", case, "--quiet"]) == code
    assert capsys.readouterr() == ("", "")


def test_json_is_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", str(CHECKPOINT), str(tmp_path / "out"), "--weights-only", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_tensors"] == 17
    assert report["checkpoint"] == str(CHECKPOINT)
    assert main(["inspect", str(CHECKPOINT), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["meshes"][0]["axis_names"] == ["ddp", "fsdp"]
    assert main(["verify", str(CHECKPOINT), str(tmp_path / "out"), "--json"]) == 0
    assert {entry["status"] for entry in json.loads(capsys.readouterr().out)["comparisons"]} == {"equal"}


def test_bad_input_exits_2_with_one_message_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rule 10: also as JSON, for programs."""
    assert main(["merge", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr() == ("", f"merger: error: {tmp_path / 'none'}: does not exist\n")
    assert main(["inspect", str(tmp_path / "none"), "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "error": f"{tmp_path / 'none'}: does not exist",
        "problems": [{"kind": "no-such-path", "where": str(tmp_path / "none"), "message": "does not exist"}],
    }


def test_differences_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", str(ARCHIVES / "2.14.1" / "fsdp2_1d_w4"), str(tmp_path / "out"), "--weights-only"]) == 0
    case = ARCHIVES / "2.14.1" / "fsdp2_uneven_w4"
    assert main(["verify", str(case), str(tmp_path / "out")]) == 1
    assert "not the same: " in capsys.readouterr().out


def test_verls_flags_work_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    merge = ["merge", "--backend", "fsdp", "--local_dir", str(CHECKPOINT), "--target_dir", out]
    assert main([*merge, "--weights-only"]) == 0
    test = ["test", "--backend", "fsdp", "--local_dir", str(CHECKPOINT), "--test_hf_dir", out]
    assert main(test) == 0
    assert "\nthe same: 17 tensors, 3.94 kB\nnext: merger upload " in capsys.readouterr().out


def test_verls_flags_that_change_nothing_are_taken_and_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    flags = ["--trust-remote-code", "--tie-word-embedding", "--use_cpu_initialization"]
    merge = ["merge", "--backend", "fsdp", "--local_dir", str(CHECKPOINT), "--target_dir", out, "--weights-only"]
    test = ["test", "--backend", "fsdp", "--local_dir", str(CHECKPOINT), "--test_hf_dir", out]
    for command in (merge, test):
        assert main([*command, *flags, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["notes"][-3:] == [
            (
                "--trust-remote-code changes nothing: code that comes with a model is never run to merge it, and is "
                "copied as it is"
            ),
            (
                "--tie-word-embedding changes nothing: config.json says whether embeddings are tied; a head that "
                "differs is written all the same"
            ),
            "--use_cpu_initialization changes nothing: no model is initialised, and no GPU is used",
        ]
    assert "changes nothing" not in (tmp_path / "out" / "merger_report.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["merge"], "give CKPT and OUT (or --local_dir and --target_dir)"),
        (["verify", "x"], "give CKPT and REFERENCE (or --local_dir and --test_hf_dir)"),
        (["merge", "a", "b", "--workers", "0"], "argument --workers: '0' is no positive whole number"),
        (
            ["merge", "a", "b", "--max-shard-size", "5 apples"],
            "argument --max-shard-size: '5 apples' is no size; write a number of bytes, or one with a unit such as 5GB "  # noqa: ISC004
            "or 500MB",
        ),
        (["merge", "a", "b", "--private"], "--private and --revision are for --upload"),
        (
            ["merge", "a", "b", "--lora", "adapter", "--upload", "me/model"],
            "--upload sends a model, and --lora adapter writes none",
        ),
        (["upload", "a"], "the following arguments are required: REPO"),
        (
            ["merge", "a", "b", "--frobnicate"],
            "unrecognized arguments: --frobnicate; merger merge --help lists them",
        ),
        (["merge", "a", "b", "--shard-size=5GB"], "unrecognized arguments: --shard-size=5GB; is it --max-shard-size?"),
        (["merge", "a", "b", "c"], "unrecognized arguments: c; a path with blanks has to be quoted"),
        (["merge", "", "b"], "an argument is empty; is a variable of the shell not set?"),
        (["verify", "a", "--source"], "argument --source: expected one argument"),
    ],
)
def test_a_wrong_call_exits_2_and_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].split(": error: ")[1] == message


@pytest.mark.parametrize("name", ["with blanks", "\u00fc \u8bed\u8a00", "it's", "-", "a\nb"])
def test_paths_may_hold_what_a_shell_or_a_terminal_would_take_amiss(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, out = tmp_path / name / "ckpt", tmp_path / name / "out"
    shutil.copytree(CHECKPOINT, checkpoint)
    assert main(["merge", str(checkpoint), str(out), "--weights-only"]) == 0
    assert main(["verify", str(out), "--source", str(checkpoint)]) == 0
    assert (out / "model.safetensors").exists()
    assert capsys.readouterr().err == ""


def test_a_name_that_the_file_system_cannot_hold_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / ("x" * 300)
    assert main(["merge", str(CHECKPOINT), str(out), "--weights-only"]) == 2
    assert capsys.readouterr().err == (
        f"merger: error: {out}: cannot be written (File name too long); nothing was left there; make room or choose "
        "another place\n"
    )


def test_a_checkpoint_is_no_place_for_its_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(CHECKPOINT, folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for place in (folder, tmp_path / "ckpt" / ".." / "ckpt"):
        assert main(["merge", str(folder), str(place), "--weights-only", "--overwrite"]) == 2
        assert capsys.readouterr().err == (
            f"merger: error: {place}: is, or contains, what is to be read; choose another directory\n"
        )
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_hostile_pickle_is_refused_by_name_and_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """L11."""
    import zipfile

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    marker = tmp_path / "marker"
    pickle = (
        b"\x80\x02cos\nsystem\n(X" + len(f"touch {marker}").to_bytes(4, "little") + f"touch {marker}".encode() + b"tR."
    )
    with zipfile.ZipFile(folder / "model_world_size_1_rank_0.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickle)
        archive.writestr("a/byteorder", "little")
    assert main(["merge", str(folder), str(tmp_path / "out"), "--weights-only"]) == 2
    assert "os.system" in capsys.readouterr().err
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-m", "merger", "inspect", str(CHECKPOINT), "--tensors", "*"]
    shell = f"{shlex.join(command)} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_missing_rank_is_listed_with_where_it_may_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """L1."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, folder)
    for rank in (0, 3):
        (folder / f"model_world_size_4_rank_{rank}.pt").unlink()
    assert main(["merge", str(folder), str(tmp_path / "out"), "--weights-only"]) == 2
    assert capsys.readouterr().err == (
        f"merger: error: {folder}: ranks 0 and 3 of 4 are missing (found ranks 1 and 2); each node of a run writes the "
        "files of its own ranks to its own disk: copy model_world_size_4_rank_*.pt from the other nodes into this "
        "folder\n"
    )


def test_what_a_terminal_would_obey_is_shown_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "\x1b[2Jnone")]) == 2
    assert capsys.readouterr().err == f"merger: error: {tmp_path}/\\x1b[2Jnone: does not exist\n"


def test_a_report_that_cannot_be_printed_is_not_taken_for_a_failed_merge(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "merger", "merge", str(CHECKPOINT), str(tmp_path / "out"), "--weights-only"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert done.stderr == (
        "merger: error: all is done, but the report could not be printed (No space left on device)\n"
    )
    assert done.returncode == 2
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("is_full", [True, False])
def test_an_error_that_cannot_be_printed_as_json_is_still_told(tmp_path: Path, *, is_full: bool) -> None:
    """Onto a full disk, or to a program that has ended."""
    command = [sys.executable, "-m", "merger", "inspect", str(tmp_path / "nowhere"), "--json"]
    if is_full:
        stdout = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, stdout = os.pipe()
        os.close(reading)
    try:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    finally:
        os.close(stdout)
    assert (done.returncode, done.stderr) == (2, f"merger: error: {tmp_path}/nowhere: does not exist\n")


def test_an_output_encoding_that_lacks_a_letter_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "merger", "merge", str(CHECKPOINT), str(tmp_path / "\u00fc"), "--weights-only"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xfc" in done.stdout


def test_options_that_contradict_each_other_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["merge", "a", "b", "--config", "c", "--weights-only"], "--config and --weights-only exclude each other"),
        (
            ["merge", "a", "b", "--local_dir", "c"],
            "give CKPT and OUT once: as they are, or by --local_dir and --target_dir",
        ),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert capsys.readouterr().err.splitlines()[-1].endswith(message)


def test_an_inspection_that_finds_faults_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(CHECKPOINT / "model_world_size_4_rank_0.pt", tmp_path)
    assert main(["inspect", str(tmp_path)]) == 2
    assert "1 fault; it cannot be merged as it is:" in capsys.readouterr().out


def test_an_inspection_draws_a_picture_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.html"
    assert main(["inspect", str(CHECKPOINT), "--picture", str(picture)]) == 0
    assert f"  picture   {picture}\n" in capsys.readouterr().out
    assert main(["inspect", str(CHECKPOINT), "--picture", str(picture)]) == 2
    assert capsys.readouterr().err == (
        f"merger: error: {picture}: exists; choose another name, or replace it with --overwrite\n"
    )
    assert main(["inspect", str(CHECKPOINT), "--picture", str(picture), "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["picture"] == str(picture)


def test_a_damaged_checkpoint_has_a_picture_and_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(CHECKPOINT / "model_world_size_4_rank_0.pt", tmp_path)
    assert main(["inspect", str(tmp_path), "--picture", str(tmp_path / "picture.svg")]) == 2
    assert f"  picture   {tmp_path}/picture.svg\n" in capsys.readouterr().out
    assert "ranks 1,3 missing" in (tmp_path / "picture.svg").read_text()
