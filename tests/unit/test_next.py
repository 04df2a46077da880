"""What the last line says to do next after a merge with adapters does work: it is done. S15."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from merger.cli import main
from merger.sources import read_reference
from tests.unit.peft_models import Tiny, base_of, saved, under_peft


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a checkpoint of adapters and base weights, one of adapters alone, and the base model."""
    model = under_peft(target_modules=["wide"])
    whole = saved(model, tmp_path / "whole")
    alone = saved({n: t for n, t in model.state_dict().items() if "lora_" in n}, tmp_path / "alone", r=3, lora_alpha=12)
    (alone / "adapter_config.json").write_bytes((whole / "adapter_config.json").read_bytes())
    (tmp_path / "base").mkdir()
    save_file(base_of(model), tmp_path / "base" / "model.safetensors", {"format": "pt"})
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    """Exit code, and the words of what is said to be next."""
    code = main(list(map(str, arguments)))
    printed = capsys.readouterr()
    assert printed.err == ""
    return code, shlex.split(printed.out.rpartition("next: ")[2].replace("\\\n", ""))[1:]


CASES: list[tuple[str, list[str]]] = [
    ("whole", []),
    ("whole", ["--lora", "adapter"]),
    ("whole", ["--lora", "merge", "--dtype", "bfloat16", "--names", "as-is"]),
    ("whole", ["--lora", "base", "--lora-alpha", "7"]),
    ("alone", ["--base", "base", "--lora", "merge", "--lora-alpha", "7"]),
    ("alone", []),
    ("alone", ["--base", "base"]),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_what_is_next_can_be_pasted(
    name: str, options: list[str], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    weights_only = [] if (name == "alone" and not options) or "adapter" in options else ["--weights-only"]
    code, verify = run(capsys, "merge", name, "out", *options, *weights_only)
    assert (code, verify[:4]) == (0, ["verify", "out", "--source", name])
    code, upload = run(capsys, *verify)
    assert code == 0
    has_model = (folder / "out" / "model.safetensors").exists()
    assert upload == ["upload", "out" if has_model else "out/lora_adapter", "REPO"]
    read_reference(Path(upload[1]))  # as an upload does first
    if not has_model:
        loaded: Any = PeftModel.from_pretrained(Tiny(), upload[1])  # what is there is what a repository has at its top
        written = load_file(Path(upload[1]) / "adapter_model.safetensors")
        held = {key.replace(".default", ""): tensor for key, tensor in loaded.state_dict().items() if "lora_" in key}
        assert written.keys() == held.keys()
        assert all(torch.equal(written[key], held[key]) for key in written)
    # Something is changed: then the way back is said.
    (weights,) = (folder / "out").rglob("*model.safetensors") if not has_model else [folder / "out/model.safetensors"]
    changed = {key: torch.zeros_like(tensor) for key, tensor in load_file(weights).items()}
    save_file(changed, weights, {"format": "pt"})
    code, merge = run(capsys, *verify)
    assert code == 1
    code, again = run(capsys, *merge)
    assert (code, again) == (0, verify)
    assert run(capsys, *again) == (0, upload)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--lora", "merge"],
        ["--lora", "merge", "--dtype", "float16"],
        ["--lora", "adapter"],
        ["--lora", "base"],
        ["--lora-alpha", "7"],
        ["--lora", "merge", "--lora-alpha", "0.5"],
    ],
    ids=str,
)
def test_what_is_next_after_a_merge_without_a_report_says_what_that_would_state(
    options: list[str], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    given = [*options, "--weights-only"]
    code, verify = run(capsys, "merge", "whole", "out", "--no-report", *given)
    told = [word for at, word in enumerate(options) if "--dtype" not in options[max(at - 1, 0) : at + 1]]
    assert (code, verify) == (0, ["verify", "out", "--source", "whole", *told])
    assert run(capsys, *verify)[0] == 0
    (weights, *_) = sorted((folder / "out").rglob("*model.safetensors"), reverse=True)
    written = {path: path.read_bytes() for path in (folder / "out").rglob("*model.safetensors")}
    save_file({key: tensor + 1 for key, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    code, merge = run(capsys, *verify)
    assert code == 1
    assert run(capsys, *merge)[0] == 0
    assert {path: path.read_bytes() for path in (folder / "out").rglob("*model.safetensors")} == written
