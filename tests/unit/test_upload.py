"""Uploads to a Hub on this machine (`hub_server`), by the command: no network.

huggingface_hub reads its settings from the environment when it is imported, so most tests set what it read. The Hub
here speaks the plain protocol of git-lfs; that of Xet, which huggingface_hub takes where the package hf_xet is
installed, is switched off but in the tests that say so.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

import merger
from merger.cli import main
from tests.unit.archives import ARCHIVES
from tests.unit.hub_server import OWNER, TOKEN, Hub, Repo, serving
from tests.unit.peft_models import saved, under_peft

ROOT = Path(__file__).parents[2]
CASE = ARCHIVES / "2.14.1" / "fsdp2_hsdp_w4"
ADVICE = "store one by `hf auth login`, or set HF_TOKEN to one; it needs write access"
FORBIDDEN = "the access token may not write there (403); take one with write access to this namespace, or another name"
UNKNOWN = (
    "the Hub has no such repository or revision, or does not show it to this access token (404); check the name and "
    "the token"
)
# Older releases ask again for some calls and answers only: then the upload is refused, and its own advice goes on.
ASKS_AGAIN = tuple(map(int, huggingface_hub.__version__.split(".")[:2])) >= (1, 3)
NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class Command:
    """Runs the command in this process, as if huggingface_hub had read other settings from the environment."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def set(self, *, endpoint: str, token: str = TOKEN) -> None:
        self.monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        self.monkeypatch.setenv("HF_TOKEN", token)

    def __call__(self, *words: str | Path) -> tuple[int, str, str]:
        self.capsys.readouterr()
        code = main([str(word) for word in words])
        printed = self.capsys.readouterr()
        return code, printed.out, printed.err


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as served:
        yield served


@pytest.fixture
def run(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)  # older ones have no Xet
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    command = Command(monkeypatch, capsys)
    command.set(endpoint=hub.endpoint)
    yield command
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of two files of weights."""
    merger.merge(CASE, tmp_path / "out", weights_only=True, max_shard_size="3KB")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*NAMES, "merger_report.json"}
    return tmp_path / "out"


def process(hub: Hub, home: Path, *words: str | Path, **more: str) -> subprocess.Popen[str]:
    """Starts the command in a process of its own."""
    told = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    return subprocess.Popen(
        [sys.executable, "-m", "merger", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**told, **settings, **more},
        cwd=ROOT,
    )


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def held(hub: Hub, name: str = f"{OWNER}/qwen", branch: str = "main") -> dict[str, bytes]:
    """What the Hub holds, but for the file that it makes itself."""
    return {path: data for path, data in hub.repos[name].branches[branch].items() if path != ".gitattributes"}


def test_a_model_arrives_whole_in_a_repository_that_is_made_for_it(run: Command, hub: Hub, model: Path) -> None:
    run.monkeypatch.chdir(model.parent)
    code, out, err = run("upload", "out", f"{OWNER}/qwen", "--private")
    size = sum(map(len, content(model).values()))
    assert (code, err) == (0, "")
    assert out == (
        f"uploaded 4 files, {size / 1000:.2f} kB, of out\n"
        f"  to        {hub.endpoint}/{OWNER}/qwen\n"
        f"  commit    {2:040x}\n"
        f'next: AutoModel.from_pretrained("{OWNER}/qwen")\n'
    )
    assert held(hub) == content(model)
    assert hub.repos[f"{OWNER}/qwen"].private


def test_a_second_upload_of_the_same_sends_nothing(run: Command, hub: Hub, model: Path) -> None:
    assert run("upload", model, "qwen")[0] == 0
    commits, sent = hub.repos[f"{OWNER}/qwen"].num_commits, hub.puts()
    assert len(sent) == 2
    code, out, err = run("upload", model, "qwen", "--json")
    assert (code, err) == (0, "")
    assert (hub.repos[f"{OWNER}/qwen"].num_commits, hub.puts()) == (commits, sent)
    assert json.loads(out) == {
        "output": str(model),
        "repo": f"{OWNER}/qwen",
        "revision": "main",
        "url": f"{hub.endpoint}/{OWNER}/qwen",
        "commit": f"{2:040x}",
        "num_files": 4,
        "num_bytes": sum(map(len, content(model).values())),
        "deleted": [],
        "is_adapter": False,
    }


def test_an_interrupted_upload_goes_on_with_what_is_missing(
    run: Command, hub: Hub, model: Path, tmp_path: Path
) -> None:
    hub.held = threading.Event()
    started = process(hub, tmp_path / "home", "upload", model, "qwen")
    assert hub.has_begun.wait(60)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=60)
    assert (started.returncode, out) == (130, "")
    assert err == "merger: interrupted; what was sent stays: run `merger upload` to send the rest\n"
    hub.held.set()
    hub.held = None
    assert len(hub.objects) == 1
    assert held(hub) == {}
    (kept,), hub.requests[:] = hub.objects, []
    assert run("upload", model, "qwen")[0] == 0
    assert held(hub) == content(model)
    assert len(hub.puts()) == 1
    assert kept not in hub.puts()


def test_a_killed_upload_goes_on_with_what_is_missing(run: Command, hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.held = threading.Event()
    started = process(hub, tmp_path / "home", "upload", model, "qwen")
    assert hub.has_begun.wait(60)
    started.kill()
    started.communicate(timeout=60)
    assert started.returncode == -signal.SIGKILL
    hub.held.set()
    hub.held = None
    (kept,), hub.requests[:] = hub.objects, []
    assert run("upload", model, "qwen")[0] == 0
    assert held(hub) == content(model)
    assert len(hub.puts()) == 1
    assert kept not in hub.puts()


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("part", ["/object/", "objects/batch", "preupload/main"])
def test_a_hub_that_is_busy_for_a_moment_is_asked_again(
    *, run: Command, hub: Hub, model: Path, part: str, status: int
) -> None:
    run.monkeypatch.setattr("time.sleep", lambda _seconds: None)
    hub.hiccups[part] = [status]
    code, _, err = run("upload", model, "qwen")
    if not ASKS_AGAIN and code == 2:
        assert f"go on with: merger upload {model} qwen" in err
        code, _, err = run("upload", model, "qwen")
    assert (code, err) == (0, "")
    assert hub.hiccups[part] == []
    assert held(hub) == content(model)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (429, "the Hub has had too many requests of late (429); wait for some minutes"),
        (500, "the Hub cannot answer now, through a fault of its own (500); try again later"),
        (503, "the Hub cannot answer now, through a fault of its own (503); try again later"),
    ],
)
def test_a_hub_that_stays_busy_is_said(*, run: Command, hub: Hub, model: Path, status: int, message: str) -> None:
    run.monkeypatch.setattr("time.sleep", lambda _seconds: None)
    hub.refusals["/object/"] = status
    code, out, err = run("upload", model, f"{OWNER}/qwen")
    assert (code, out) == (2, "")
    assert err == (
        f"merger: error: {OWNER}/qwen: {message}; {model} is whole, go on with: merger upload {model} {OWNER}/qwen\n"
    )
    assert held(hub) == {}


def test_a_hub_without_xet_is_sent_the_files_by_git_lfs(run: Command, hub: Hub, model: Path) -> None:
    """huggingface_hub takes Xet for granted where hf_xet is installed, which it asks for itself on most machines."""
    run.monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    run.monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    code, out, err = run("upload", model, "qwen", "--revision", "a/b")
    assert (code, err) == (0, ""), out
    assert ("GET", f"/api/models/{OWNER}/qwen/xet-write-token/a%2Fb") in hub.requests
    assert held(hub, branch="a/b") == content(model)
    assert constants.HF_HUB_DISABLE_XET is False


def test_what_a_hub_with_xet_refuses_is_said_as_elsewhere(run: Command, hub: Hub, model: Path) -> None:
    run.monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    run.monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    ending = f"; {model} is whole, go on with: merger upload {model} {OWNER}/qwen\n"
    for status, message in ((401, f"the Hub does not accept the access token (401): {ADVICE}"), (403, FORBIDDEN)):
        hub.refusals["xet-write-token"] = status
        assert run("upload", model, f"{OWNER}/qwen") == (
            2,
            "",
            f"merger: error: {OWNER}/qwen: {message}{ending}",
        )


@pytest.mark.parametrize("switch", ["0", "1"])
def test_an_upload_works_with_the_settings_of_a_new_machine_and_without_xet(
    *, hub: Hub, model: Path, tmp_path: Path, switch: str
) -> None:
    started = process(hub, tmp_path / "home", "upload", model, "qwen", HF_HUB_DISABLE_XET=switch)
    _, err = started.communicate(timeout=60)
    assert (started.returncode, err) == (0, "")
    assert held(hub) == content(model)
    assert len(hub.puts()) == 2


def test_weights_of_an_earlier_upload_go_and_other_files_stay(run: Command, hub: Hub, model: Path) -> None:
    """S16: transformers would load model.safetensors in the place of the new files."""
    old = {
        "model.safetensors": b"old",
        "model-00003-of-00003.safetensors": b"old",
        "pytorch_model.bin": b"old",
        "adapter/model.safetensors": b"not ours",
        "README.md": b"a card",
    }
    hub.repos[f"{OWNER}/qwen"] = Repo(branches={"main": dict(old)})
    code, out, _ = run("upload", model, f"{OWNER}/qwen")
    assert code == 0
    assert out.splitlines()[-3:-1] == [
        "  deleted   model-00003-of-00003.safetensors, model.safetensors,",
        "            pytorch_model.bin",
    ]
    kept = {name: data for name, data in old.items() if name in ("adapter/model.safetensors", "README.md")}
    assert held(hub) == content(model) | kept


def test_after_an_adapter_the_last_line_is_how_peft_loads_it(run: Command, hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "lora_adapter"
    folder.mkdir()
    save_file({"base_model.model.q_proj.lora_A.weight": torch.ones(2, 3)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    code, out, err = run("upload", folder, f"{OWNER}/qwen-lora")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f'next: PeftModel.from_pretrained(base, "{OWNER}/qwen-lora")'
    assert held(hub, f"{OWNER}/qwen-lora") == content(folder)


@pytest.mark.parametrize("more", [[], ["value_head.safetensors"]], ids=["adapter", "adapter and value head"])
def test_the_folder_above_an_adapter_is_refused_with_what_to_upload(
    more: list[str], run: Command, hub: Hub, tmp_path: Path
) -> None:
    """Else it would lie where peft does not look for it, and no model would be there to load."""
    out = tmp_path / "out"
    (out / "lora_adapter").mkdir(parents=True)
    for file in ["lora_adapter/adapter_model.safetensors", *more]:
        save_file({"w": torch.ones(2, 3)}, out / file)
    (out / "lora_adapter" / "adapter_config.json").write_text("{}")
    code, _, err = run("upload", out, f"{OWNER}/qwen")
    assert code == 2
    assert err == (
        f"merger: error: {out}: holds an adapter and no model; peft looks for it at the top of a repository, so upload "
        f"its folder: merger upload {out}/lora_adapter {OWNER}/qwen\n"
    )
    assert not hub.repos


def test_an_adapter_leaves_the_weights_that_are_there(run: Command, hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "lora_adapter"
    folder.mkdir()
    save_file({"base_model.model.q_proj.lora_A.weight": torch.ones(2, 3)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    model = {"model.safetensors": b"the model", "config.json": b"{}"}
    hub.repos[f"{OWNER}/qwen"] = Repo(branches={"main": dict(model)})
    code, out, _ = run("upload", folder, f"{OWNER}/qwen")
    assert (code, "deleted" in out) == (0, False)
    assert held(hub) == content(folder) | model


def test_a_merge_of_adapters_alone_sends_the_adapter(run: Command, hub: Hub, tmp_path: Path) -> None:
    adapters = {
        name: tensor for name, tensor in under_peft(target_modules=["wide"]).state_dict().items() if "lora_" in name
    }
    checkpoint = saved(adapters, tmp_path / "checkpoint", r=3, lora_alpha=12)
    code, out, err = run("merge", checkpoint, tmp_path / "out", "--upload", f"{OWNER}/qwen")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f'next: PeftModel.from_pretrained(base, "{OWNER}/qwen")'
    assert held(hub).keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert held(hub) == content(tmp_path / "out" / "lora_adapter")


def test_a_branch_is_made_where_it_is_not(run: Command, hub: Hub, model: Path) -> None:
    code, out, err = run("upload", model, f"{OWNER}/qwen", "--revision", "step-100")
    assert (code, err) == (0, "")
    assert out.splitlines()[-3] == f"  to        {hub.endpoint}/{OWNER}/qwen/tree/step-100"
    assert out.splitlines()[-1] == f'next: AutoModel.from_pretrained("{OWNER}/qwen", revision="step-100")'
    assert held(hub, branch="step-100") == content(model)
    assert held(hub) == {}
    assert run("upload", model, f"{OWNER}/qwen", "--revision", "step-100")[0] == 0


def test_a_merge_uploads_what_it_made(run: Command, hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("merge", CASE, out, "--weights-only", "--upload", f"{OWNER}/qwen", "--private")
    code, printed, err = run(*words)
    assert (code, err) == (0, "")
    assert [line.partition(" ")[0] for line in printed.splitlines() if not line.startswith(" ")] == [
        "merged",
        "uploaded",
        "next:",
    ]
    assert held(hub) == content(out)
    assert hub.repos[f"{OWNER}/qwen"].private


def test_a_merge_says_as_json_what_it_made_and_where_it_is(run: Command, hub: Hub, tmp_path: Path) -> None:
    """The flag of verl's merger means the same."""
    out = tmp_path / "out"
    flags = ("--backend", "fsdp", "--local_dir", CASE, "--target_dir", out, "--hf_upload_path", "qwen")
    code, printed, _ = run("merge", *flags, "--weights-only", "--json")
    assert code == 0
    report = json.loads(printed)
    assert (report["num_tensors"], report["upload"]["repo"]) == (17, f"{OWNER}/qwen")
    assert not hub.repos[f"{OWNER}/qwen"].private


@pytest.mark.parametrize(
    ("part", "status", "message"),
    [
        ("repos/create", 401, f"the Hub does not accept the access token (401): {ADVICE}"),
        ("repos/create", 403, FORBIDDEN),
        ("tree/main", 404, UNKNOWN),
        ("commit/main", 403, FORBIDDEN),
    ],
    ids=["401", "403", "404", "403 on commit"],
)
def test_a_refusal_is_one_message_with_the_way_on(
    *, run: Command, part: str, status: int, message: str, hub: Hub, model: Path
) -> None:
    hub.refusals[part] = status
    before = content(model)
    code, out, err = run("upload", model, f"{OWNER}/qwen", "--private")
    assert (code, out) == (2, "")
    assert err == (
        f"merger: error: {OWNER}/qwen: {message}; {model} is whole, go on with: merger upload {model} {OWNER}/qwen "
        "--private\n"
    )
    assert content(model) == before


def test_another_answer_is_told_with_its_status(run: Command, hub: Hub, model: Path) -> None:
    hub.refusals["repos/create"] = 418
    code, _, err = run("upload", model, f"{OWNER}/qwen")
    assert code == 2
    assert err.startswith(f"merger: error: {OWNER}/qwen: the Hub answered with an error (418: ")


def test_a_hub_that_cannot_be_reached_is_said(run: Command, model: Path) -> None:
    with serving() as gone:
        endpoint = gone.endpoint
    run.set(endpoint=endpoint)
    code, out, err = run("upload", model, f"{OWNER}/qwen")
    assert (code, out) == (2, "")
    assert err.startswith(f"merger: error: {OWNER}/qwen: the Hub cannot be reached at {endpoint} (")
    assert err.endswith(f"; {model} is whole, go on with: merger upload {model} {OWNER}/qwen\n")


def test_a_token_that_the_hub_does_not_know_is_said_before_the_merge(run: Command, hub: Hub, tmp_path: Path) -> None:
    run.set(endpoint=hub.endpoint, token="hf_another")
    code, out, err = run("merge", CASE, tmp_path / "out", "--weights-only", "--upload", "qwen")
    assert (code, out) == (2, "")
    assert err == f"merger: error: qwen: the Hub does not accept the access token (401): {ADVICE}\n"
    assert not (tmp_path / "out").exists()
    assert hub.repos == {}


def refused_at_once(run: Command, model: Path, repo: str, tmp_path: Path) -> str:
    """What the upload says; a merge that is to be uploaded is refused before it begins."""
    code, out, err = run("upload", model, repo)
    assert (code, out) == (2, "")
    assert run("merge", CASE, tmp_path / "other", "--weights-only", "--upload", repo)[0] == 2
    assert not (tmp_path / "other").exists()
    return err


def test_being_offline_is_said_at_once(run: Command, hub: Hub, model: Path, tmp_path: Path) -> None:
    run.monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refused_at_once(run, model, "qwen", tmp_path) == (
        "merger: error: qwen: HF_HUB_OFFLINE is set, so nothing is sent to the Hub; unset it, then run: merger upload "
        f"{model} qwen\n"
    )
    assert hub.requests == []


def test_a_missing_token_is_said_at_once(run: Command, hub: Hub, model: Path, tmp_path: Path) -> None:
    run.monkeypatch.delenv("HF_TOKEN")
    assert refused_at_once(run, model, "qwen", tmp_path) == (
        f"merger: error: qwen: there is no access token for the Hub: {ADVICE}, then run: merger upload {model} qwen\n"
    )
    assert hub.requests == []


def test_what_is_no_name_of_a_repository_is_said_at_once(run: Command, hub: Hub, model: Path, tmp_path: Path) -> None:
    message = refused_at_once(run, model, "a/b/c", tmp_path)
    assert message.startswith("merger: error: a/b/c: is no name of a repository on the Hub: ")
    assert hub.requests == []


def test_the_settings_are_those_of_the_environment(hub: Hub, model: Path, tmp_path: Path) -> None:
    started = process(hub, tmp_path / "home", "upload", model, "qwen", HF_HUB_OFFLINE="1")
    out, err = started.communicate(timeout=60)
    assert (started.returncode, out) == (2, "")
    assert "HF_HUB_OFFLINE is set" in err


def test_a_public_repository_is_not_taken_for_a_private_one(run: Command, hub: Hub, model: Path) -> None:
    hub.repos[f"{OWNER}/qwen"] = Repo()
    code, _, err = run("upload", model, f"{OWNER}/qwen", "--private")
    assert code == 2
    assert err == (
        f"merger: error: {OWNER}/qwen: is there already and is public, though --private was asked for; nothing was "
        "uploaded: make it private in its settings on the Hub, or choose another name\n"
    )
    assert held(hub) == {}


def test_what_is_no_whole_model_is_not_sent(run: Command, hub: Hub, model: Path) -> None:
    (model / NAMES[0]).write_bytes((model / NAMES[0]).read_bytes()[:-1])
    code, _, err = run("upload", model, "qwen")
    assert code == 2
    assert err.startswith(f"merger: error: {NAMES[0]}: is no whole safetensors file: it has ")
    shutil.rmtree(model)
    assert run("upload", model, "qwen")[2] == (
        f"merger: error: {model}: is no Hugging Face model directory: it holds no *.safetensors file\n"
    )
    assert hub.requests == []


def test_a_dry_run_checks_the_token_and_sends_nothing(run: Command, hub: Hub, tmp_path: Path) -> None:
    words = ("merge", CASE, tmp_path / "out", "--weights-only", "--dry-run", "--upload", "qwen")
    code, out, _ = run(*words)
    assert code == 0
    assert out.splitlines()[-2] == "nothing was written (--dry-run)"
    assert hub.requests == [("GET", "/api/whoami-v2")]


def test_files_that_are_no_weights_are_sent_too(run: Command, hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "deep").mkdir(parents=True)
    save_file({"w": torch.ones(2)}, out / "model.safetensors")
    (out / "deep" / "modeling_own.py").write_text("pass\n")
    (out / "config.json").write_text("{}")
    assert run("upload", out, "qwen")[0] == 0
    assert held(hub) == content(out)
