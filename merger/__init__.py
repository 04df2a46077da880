"""Turns the sharded checkpoint of a distributed training run into a Hugging Face model directory.

`merge` writes the model, `inspect` says what a checkpoint is, `verify` compares one with a model, and `verify_merge` a
model with the checkpoint that it was merged from. All raise `MergerError`, or one of its kinds, with everything that is
wrong.
"""

from merger.starting import guard_start

guard_start()  # before all other imports, which take their time

# ruff: noqa: E402 - the guard comes first
from merger.errors import (
    ArchiveError,
    CheckpointError,
    ChecksumError,
    MergerError,
    ModelError,
    NotACheckpointError,
    Problem,
    TargetError,
    UnsafePickleError,
    UploadError,
)
from merger.huggingface.hub import UploadReport, check_upload
from merger.inspect import InspectReport, inspect
from merger.merge import merge
from merger.replay import verify_merge
from merger.report import MergeReport
from merger.upload import upload
from merger.verify import VerifyReport, verify
from merger.version import __version__ as __version__

__all__ = [
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
]
