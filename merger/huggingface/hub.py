"""Uploads a finished model directory to the Hugging Face Hub: one repository, one revision, nothing stale beside it.

`huggingface_hub` does the sending, and what was sent once it does not send again: a repeated call goes on where an
interrupted one stopped. Its errors, which differ from release to release, become `UploadError` here. It reads HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE from the environment when it is imported.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from merger.errors import Problem, UploadError

# Files of weights as transformers names them. Those of an earlier upload that are not in this one would be loaded in
# its place or along with it, so they go.
_WEIGHTS = re.compile(
    r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)|(pytorch_)?model\.(safetensors|bin)\.index\.json"
)
_DEFAULT_REVISION = "main"
_ADVICE = "store one by `hf auth login`, or set HF_TOKEN to one; it needs write access"
# How the libraries are called that huggingface_hub sends with, in its releases so far. Their errors are of the network.
_NETWORK_PACKAGES = frozenset({"requests", "urllib3", "httpx", "httpcore", "httpx2", "httpcore2", "socket", "ssl"})


@dataclass(frozen=True, slots=True)
class UploadReport:
    """What was uploaded: `num_files` of `num_bytes` in all, whether sent now or there before.

    `repo` is the name with its namespace, `commit` the id of the revision that now holds the model. `deleted` are files
    of weights that were in the repository and not in the model. `is_adapter` says that it is one of peft, and no model.
    """

    output: Path
    repo: str
    revision: str
    url: str
    commit: str
    num_files: int
    num_bytes: int
    deleted: tuple[str, ...]
    is_adapter: bool


def check_upload(repo: str) -> None:
    """Raises `UploadError` where an upload to `repo` is sure to fail: to be known before a long merge, not after.

    Asks the Hub whether it accepts the access token; whether that may write to `repo` shows in the upload itself.
    """
    with _speaking(repo, ""):
        api = _api(repo, "")
        try:
            api.whoami()
        except Exception as error:
            if _status(error) != 429:  # noqa: PLR2004 - too many requests: the one answer that says nothing of the token
                raise


def send(folder: Path, repo: str, *, private: bool, revision: str | None, show_progress: bool) -> UploadReport:
    """Sends all files of `folder` to `repo`, as `merger.upload` documents it; raises `UploadError`."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    is_adapter = "adapter_config.json" in files
    resume = shlex.join(["merger", "upload", str(folder), repo, *(["--private"] if private else [])])
    if revision is not None:
        resume += f" --revision {shlex.quote(revision)}"
    branch = revision or _DEFAULT_REVISION
    with _speaking(repo, f"; {folder} is whole, go on with: {resume}"):
        api = _api(repo, resume)
        with _told(show_progress=show_progress):
            name = str(api.create_repo(repo, private=private or None, exist_ok=True).repo_id)
            _refuse_public(api, name, private=private)
            if branch != _DEFAULT_REVISION:
                api.create_branch(name, branch=branch, exist_ok=True)
            there = api.list_repo_files(name, revision=branch)
            # An adapter may lie beside the model that it is for.
            stale = tuple(sorted(f for f in there if not is_adapter and _WEIGHTS.fullmatch(f) and f not in files))
            with _protocol(api, name, branch):
                done = api.upload_folder(
                    repo_id=name,
                    folder_path=str(folder),
                    revision=branch,
                    commit_message="Upload model",
                    delete_patterns=list(stale) or None,
                )
    return UploadReport(
        output=folder,
        repo=name,
        revision=branch,
        url=f"{api.endpoint}/{name}" + (f"/tree/{branch}" if branch != _DEFAULT_REVISION else ""),
        commit=str(done.oid),
        num_files=len(files),
        num_bytes=sum((folder / file).stat().st_size for file in files),
        deleted=stale,
        is_adapter=is_adapter,
    )


def _refuse_public(api: Any, name: str, *, private: bool) -> None:  # noqa: ANN401 - as `_api` has it
    """A repository that is there stays as public as it is, whatever is asked for when it is made again."""
    if private and not api.repo_info(name).private:
        message = (
            "is there already and is public, though --private was asked for; nothing was uploaded: make it private in "
            "its settings on the Hub, or choose another name"
        )
        _refuse("repo-public", name, message)


@contextmanager
def _protocol(api: Any, name: str, branch: str) -> Iterator[None]:  # noqa: ANN401 - as `_api` has it
    """Lets huggingface_hub send by git-lfs where the Hub, such as one within a company, has no storage of Xet.

    With the package hf_xet it takes that for granted. Asks for the token that Xet would ask for, and raises what the
    Hub answers: told by Xet, it would be an error of the network.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    if getattr(constants, "HF_HUB_DISABLE_XET", True) or importlib.util.find_spec("hf_xet") is None:
        yield
        return
    url = f"{api.endpoint}/api/models/{name}/xet-write-token/{quote(branch, safe='')}"
    answer = get_session().get(url, headers=build_hf_headers())
    has_xet = answer.status_code != 404  # noqa: PLR2004 - as below, the numbers are those of HTTP
    if has_xet:
        hf_raise_for_status(answer)
    constants.HF_HUB_DISABLE_XET = not has_xet
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = False


def _api(repo: str, resume: str) -> Any:  # noqa: ANN401 - untyped upstream in some releases
    """The Hub's client; an UploadError where it is told to be offline, has no token, or `repo` is no name."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import validate_repo_id

    again = f", then run: {resume}" if resume else ""
    try:
        validate_repo_id(repo)
    except ValueError as error:
        _refuse("bad-repo", repo, f"is no name of a repository on the Hub: {_one_line(error)}")
    if constants.HF_HUB_OFFLINE:
        _refuse("offline", repo, f"HF_HUB_OFFLINE is set, so nothing is sent to the Hub; unset it{again}")
    if get_token() is None:
        _refuse("no-token", repo, f"there is no access token for the Hub: {_ADVICE}{again}")
    return HfApi()


@contextmanager
def _speaking(repo: str, ending: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into an UploadError that says what to do."""
    try:
        yield
    except UploadError:
        raise
    except Exception as error:
        # What fails in a thread that sends comes wrapped in an error of its own.
        causes = list(_causes(error))
        for cause in causes:
            if (status := _status(cause)) is not None:
                kind, message = _answered(status, cause)
                raise UploadError(Problem(kind, repo, message + ending)) from error
        for cause in causes:
            if _is_of_network(cause):
                from huggingface_hub import constants

                message = f"the Hub cannot be reached at {constants.ENDPOINT} ({_one_line(cause)})"
                raise UploadError(Problem("no-network", repo, message + ending)) from error
        message = f"the upload failed ({type(error).__name__}: {_one_line(error)})"
        raise UploadError(Problem("upload-failed", repo, message + ending)) from error


def _causes(error: BaseException) -> Iterator[Exception]:
    """An error, and what it was raised from."""
    cause: BaseException | None = error
    while isinstance(cause, Exception):
        yield cause
        cause = cause.__cause__


def _is_of_network(error: Exception) -> bool:
    module = type(error).__module__.partition(".")[0]
    return module in _NETWORK_PACKAGES or isinstance(error, ConnectionError | TimeoutError)


def _answered(status: int, error: Exception) -> tuple[str, str]:
    """What an answer of the Hub that is no success means: a kind of problem, and a sentence."""
    if status == 401:  # noqa: PLR2004 - as below, the numbers are those of HTTP
        return "unauthorized", f"the Hub does not accept the access token (401): {_ADVICE}"
    if status == 403:  # noqa: PLR2004
        return "forbidden", (
            "the access token may not write there (403); take one with write access to this namespace, or another name"
        )
    if status == 404:  # noqa: PLR2004
        return "no-such-repo", (
            "the Hub has no such repository or revision, or does not show it to this access token (404); check the "
            "name and the token"
        )
    if status == 429:  # noqa: PLR2004
        return "too-many-requests", "the Hub has had too many requests of late (429); wait for some minutes"
    if status >= 500:  # noqa: PLR2004
        return "hub-down", f"the Hub cannot answer now, through a fault of its own ({status}); try again later"
    return "upload-failed", f"the Hub answered with an error ({status}: {_one_line(error)})"


def _status(error: Exception) -> int | None:
    """The status of the answer that an error tells of, whichever class it is in this release."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


@contextmanager
def _told(*, show_progress: bool) -> Iterator[None]:
    """Keeps the advice of huggingface_hub, and unless they are wanted its bars, off the terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("huggingface_hub")
    level, was_disabled = logger.level, are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not show_progress:
            disable_progress_bars()
        try:
            yield
        finally:
            if not show_progress and not was_disabled:
                enable_progress_bars()
            logger.setLevel(level)


def _refuse(kind: str, repo: str, message: str) -> NoReturn:
    raise UploadError(Problem(kind, repo, message))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
