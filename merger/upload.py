"""The upload: checks that a directory holds a whole model, and sends it to the Hugging Face Hub."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from merger.errors import NotACheckpointError, Problem
from merger.huggingface.hub import UploadReport, send
from merger.huggingface.lora_export import CONFIG_NAME as ADAPTER_CONFIG
from merger.huggingface.lora_export import FOLDER as ADAPTER_FOLDER
from merger.plan import VALUE_HEAD_FILE
from merger.sources import read_reference


def upload(
    output: str | os.PathLike[str],
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    show_progress: bool = False,
) -> UploadReport:
    """Uploads the model directory `output` to the repository `repo` of the Hub, which is made if it is not there.

    Args:
        output: The model directory; its headers are read before anything is sent.
        repo: "namespace/name", or a name in the namespace of the token's owner.
        private: Make the repository private. One that is there and public is refused.
        revision: The branch, which is made from main if it is not there; main without one.
        show_progress: Whether huggingface_hub shows its bars on the terminal.

    Files of weights in the repository that are not in `output` are deleted in the same upload, unless `output` is an
    adapter. What was sent before is not sent again, so that an interrupted upload goes on when it is called again.

    Raises:
        NotACheckpointError, ArchiveError: `output` is no whole model directory, or holds an adapter in a folder below.
        UploadError: The Hub cannot be reached, does not let the token write, or refuses; `output` is left as it is.
    """
    folder = Path(output)
    if (folder / ADAPTER_CONFIG).is_file() and {path.name for path in folder.glob("*.safetensors")} <= {
        VALUE_HEAD_FILE
    }:
        message = (
            "holds an adapter and no model; peft looks for it at the top of a repository, so upload its folder: "
            f"{shlex.join(['merger', 'upload', str(folder / ADAPTER_FOLDER), repo])}"
        )
        raise NotACheckpointError(Problem("adapter-alone", str(folder), message))
    read_reference(folder)
    return send(folder, repo, private=private, revision=revision, show_progress=show_progress)
