"""The judge at work on checkpoints of real ranks: this project's merger, and mergers that are wrong on purpose."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from fixtures.cases import CASES
from fixtures.conformance import Suite
from fixtures.conformance.cache import made
from fixtures.ranks import RankPool

ROOT = Path(__file__).parents[2]

# One of each kind: whole and cut models, replicas, tensors alone, adapters, and faults that are loud and silent.
NAMES = (
    *("llama-fp32-w1", "qwen2-fp32-w3", "llama-fp32-ddp2xfsdp2", "tensors-bools", "qwen2-fp32-w4-lora"),
    *("qwen2-fp32-w4+rank_zero_missing", "qwen2-fp32-w4+tied_diverged", "qwen2-fp32-w4+hostile_pickle"),
)
OWN = f"{sys.executable} -m merger merge {{ckpt}} {{out}}"
OWN_WEIGHTS_ONLY = f"{sys.executable} -m merger merge --weights-only {{ckpt}} {{out}}"

RANK_0 = """
import shutil, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
checkpoint, out = map(Path, sys.argv[1:])
path = next(checkpoint.glob(f"model_world_size_*_rank_{0}.pt"))
state = torch.load(path, weights_only=False)
tensors = {name: getattr(value, "_local_tensor", value).contiguous().clone() for name, value in state.items()}
out.mkdir()
save_file(tensors, out / "model.safetensors", {"format": "pt"})
if (checkpoint / "huggingface").exists():
    shutil.copytree(checkpoint / "huggingface", out, dirs_exist_ok=True)
"""
HANGS = "import time; time.sleep(600)"
CRASHES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
BOASTS = 'print("saved the merged model")'


@pytest.fixture(scope="module")
def cache(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoints of NAMES lie, so that the processes below start no ranks."""
    folder = tmp_path_factory.mktemp("cache")
    for name in NAMES:
        made(CASES[name], folder, pool)
    return folder


def judged(
    cache: Path, command: str, folder: Path, names: Sequence[str], *options: str
) -> tuple[int, str, dict[str, str]]:
    """The exit code of `python -m fixtures judge`, what it printed, and the verdicts by case."""
    report = folder / "report.json"
    words = ["judge", "--command", command, "--cache", str(cache), "--json", str(report), *options]
    for name in names:
        words += ["--cases", name]
    done = subprocess.run(
        [sys.executable, "-m", "fixtures", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    found = json.loads(report.read_text())["judgements"]
    return done.returncode, done.stdout, {judgement["case"]: judgement["verdict"] for judgement in found}


def script(folder: Path, source: str) -> str:
    path = folder / "their_merger.py"
    path.write_text(source)
    return f"{sys.executable} {path} {{ckpt}} {{out}}"


def test_our_own_merger_is_right_throughout(cache: Path, tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    code, printed, verdicts = judged(
        cache, OWN, tmp_path, NAMES, "--weights-only-command", OWN_WEIGHTS_ONLY, "--junit", str(junit), "--jobs", "2"
    )
    assert verdicts == {
        "llama-fp32-w1": "right",
        "qwen2-fp32-w3": "right",
        "llama-fp32-ddp2xfsdp2": "right",
        "tensors-bools": "right",
        "qwen2-fp32-w4-lora": "right",
        "qwen2-fp32-w4+rank_zero_missing": "refused rightly",
        "qwen2-fp32-w4+tied_diverged": "right",
        "qwen2-fp32-w4+hostile_pickle": "refused rightly",
    }
    assert code == 0
    assert printed.endswith("\n\nright               6\nrefused rightly     2\nin all              8\n")
    assert 'failures="0"' in junit.read_text()


def test_a_merger_that_copies_the_first_is_wrong_nearly_throughout(cache: Path, tmp_path: Path) -> None:
    """S4: what one rank holds whole is right even so."""
    code, printed, verdicts = judged(cache, script(tmp_path, RANK_0), tmp_path, NAMES)
    assert verdicts == {
        "llama-fp32-w1": "right",
        "qwen2-fp32-w3": "wrong silently",
        "llama-fp32-ddp2xfsdp2": "wrong silently",
        "tensors-bools": "skipped",
        "qwen2-fp32-w4-lora": "wrong silently",
        "qwen2-fp32-w4+rank_zero_missing": "refused wrongly",
        "qwen2-fp32-w4+tied_diverged": "wrong silently",
        "qwen2-fp32-w4+hostile_pickle": "wrong silently",
    }
    assert code == 1
    assert "                 model.embed_tokens.weight: shape (34, 24) instead of (101," in printed
    assert "                 exit code 0, but: Rank 1 runs a shell command when it is\n" in printed
    assert "                 has no config.json, and no command for that was given\n" in printed


@pytest.mark.parametrize(
    ("source", "verdict", "reason"),
    [
        (HANGS, "hung", "had not ended after 1 s"),
        (CRASHES, "crashed", "killed by SIGSEGV"),
        (BOASTS, "wrong silently", "no weights in safetensors files at OUT"),
        ("raise ValueError('no')", "refused wrongly", "exit code 1: ValueError: no"),
    ],
)
def test_a_merger_that_does_not_merge_is_told_so(
    source: str, verdict: str, reason: str, cache: Path, tmp_path: Path
) -> None:
    code, printed, verdicts = judged(cache, script(tmp_path, source), tmp_path, ["qwen2-fp32-w3"], "--limit", "1")
    assert (code, verdicts) == (1, {"qwen2-fp32-w3": verdict})
    assert printed == (
        f"{verdict:<15}  qwen2-fp32-w3\n                 {reason}\n\n{verdict:<15}     1\nin all              1\n"
    )


def test_a_policy_says_whether_weights_may_be_cast(cache: Path, pool: RankPool) -> None:
    """S13."""
    cast = f"{OWN} --dtype bfloat16"
    verdicts = {
        policy: Suite(cast, dtype_policy=policy, cache=cache, pool=pool).judge("llama-fp32-w1")
        for policy in ("any", "keep", "bf16")
    }
    assert {policy: found.verdict for policy, found in verdicts.items()} == {
        "any": "right",
        "keep": "wrong silently",
        "bf16": "right",
    }
    assert verdicts["keep"].reason == "model.embed_tokens.weight: bfloat16 instead of float32; and 20 more"


def test_the_lines_of_the_page_judge_any_merger_in_pytest(cache: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "conformance.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(lines.strip().splitlines()) <= 10
    test = tmp_path / "test_merger.py"
    assert '"my-merger {ckpt} {out}"' in lines
    assert "SUITE.cases()" in lines
    own = lines.replace('"my-merger {ckpt} {out}"', f'"{script(tmp_path, RANK_0)}"')
    test.write_text(own.replace("SUITE.cases()", 'SUITE.cases("llama-fp32-w1", "qwen2-fp32-w3", "tensors-bools")'))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    (tmp_path / "merger-fixtures").symlink_to(cache)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert Counter(line.split("[")[0] for line in lines if line.startswith("FAILED")) == {
        "FAILED test_merger.py::test_merger": 1
    }
    assert "1 failed, 1 passed" in lines[-1]
