"""What lies beside the weights: config, tokenizer, processor, templates, remote code. Copied byte for byte.

Only `copy_side_files` writes. The one file that may have to change is config.json, and it is changed as JSON, in as
few places as the new weights ask for; where they ask for nothing it stays the bytes it was.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merger.errors import Problem

# Weights in the formats that model folders hold them in, and their indexes. Not every .bin holds weights.
_WEIGHT_FILE = re.compile(
    r".*\.(safetensors|pt|pth|ckpt|gguf|ggml|h5|msgpack|onnx|onnx_data|ot|tflite|distcp|index\.json)"
    r"|((pytorch|diffusion_pytorch|adapter|openvino|flax|tf)_)?(model|consolidated).*\.bin"
)
# What `merge` itself writes beside the weights: one that lies there already is of another merge.
REPORT_NAME = "merger_report.json"
_CACHES = frozenset({".git", ".cache", "__pycache__", ".ipynb_checkpoints"})

# A tokenizer needs at least one of these; tokenizer_config.json alone only describes it.
_VOCABULARY = re.compile(
    r"tokenizer\.(json|model)|vocab\.(json|txt)|spiece\.model|sentencepiece.*\.model|source\.spm|tekken\.json"
    r"|.*\.tiktoken|tokenization_.*\.py"
)


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file to copy: its place in the folder with forward slashes, where its bytes are, and how many they are."""

    relative_path: str
    source: Path
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SideFiles:
    """All there is to copy, sorted by place; what is left out; whether there is a tokenizer; links that lead nowhere.

    `skipped` are places too; a folder among them ends in a slash and stands for all it holds.
    """

    files: tuple[SideFile, ...]
    skipped: tuple[str, ...]
    has_tokenizer: bool
    problems: tuple[Problem, ...]

    @property
    def num_bytes(self) -> int:
        """How many bytes there are to copy."""
        return sum(file.num_bytes for file in self.files)


def plan_side_files(config_dir: Path) -> SideFiles:
    """Lists what to copy from a folder and its subfolders: everything but weights, caches and the report of a merge.

    Symbolic links are followed, so that what is copied is files; one that leads nowhere is a problem.
    """
    files: list[SideFile] = []
    skipped: list[str] = []
    problems: list[Problem] = []

    def visit(folder: Path, prefix: str, above: frozenset[Path]) -> None:
        for entry in sorted(folder.iterdir()):
            place = prefix + entry.name
            if entry.is_dir():
                if entry.name in _CACHES or entry.resolve() in above:  # a link to a folder above would never end
                    skipped.append(f"{place}/")
                else:
                    visit(entry, f"{place}/", above | {entry.resolve()})
            elif entry.is_symlink() and not entry.exists():
                message = (
                    f"the link leads to {entry.readlink()}, which is not there. Restore that file or remove the link."
                )
                problems.append(Problem("dangling-link", str(entry), message))
            elif entry.is_file() and not os.access(entry, os.R_OK):
                problems.append(Problem("unreadable-file", str(entry), "it may not be read. Change its permissions."))
            elif entry.is_file() and not _WEIGHT_FILE.fullmatch(entry.name) and place != REPORT_NAME:
                files.append(SideFile(place, entry.resolve(), entry.stat().st_size))
            else:
                skipped.append(place)

    visit(config_dir, "", frozenset({config_dir.resolve()}))
    has_tokenizer = any(_VOCABULARY.fullmatch(file.relative_path) for file in files)
    return SideFiles(tuple(files), tuple(skipped), has_tokenizer, tuple(problems))


def copy_side_files(plan: SideFiles, target: Path, *, replaced: Mapping[str, bytes]) -> None:
    """Copies the files into `target`, which exists; those named in `replaced` get the bytes given there instead."""
    for file in plan.files:
        path = target / file.relative_path
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.relative_path in replaced:
            path.write_bytes(replaced[file.relative_path])
        else:
            shutil.copyfile(file.source, path)


def output_config(config: Mapping[str, Any], *, dtype: str | None, tied: bool | None) -> dict[str, Any]:
    """A config that is true of the output: the same but for what has to change.

    `dtype` is what the floating tensors now are, None where that is not one dtype: every `dtype` and `torch_dtype` at
    the top and in the parts of a composed model then says so, and where there is none at the top or in `text_config`,
    `dtype` is added. `tied=False` says that ties were broken; True and None leave `tie_word_embeddings` alone. An
    `FSDP` before the class names in `architectures` goes.

    >>> output_config({"torch_dtype": "float32"}, dtype="bfloat16", tied=None)
    {'torch_dtype': 'bfloat16'}
    """
    result = dict(config)
    names = result.get("architectures")
    if isinstance(names, list):
        result["architectures"] = [name.removeprefix("FSDP") if isinstance(name, str) else name for name in names]
    if dtype is not None:
        result = _with_dtype(result, dtype)
        text = result.get("text_config")
        if not any(key in part for part in (result, text if isinstance(text, dict) else {}) for key in _DTYPE_KEYS):
            result["dtype"] = dtype
    if tied is False:
        result["tie_word_embeddings"] = False
        text = result.get("text_config")
        if isinstance(text, dict) and "tie_word_embeddings" in text:
            result["text_config"] = {**text, "tie_word_embeddings": False}
    return result


def config_bytes(original: bytes, config: Mapping[str, Any]) -> bytes:
    """`config` as a file: the `original` bytes if that is what they say, else JSON in the style of the original.

    The style: order of keys, indentation, escaping of what is not ASCII, and the newline at the end.
    """
    if json.loads(original) == config:
        return original
    text = original.decode()
    indented = re.search(r"\n([ \t]+)\S", text)
    dumped = json.dumps(config, indent=indented[1] if indented else None, ensure_ascii=text.isascii())
    return (dumped + ("\n" if text.endswith("\n") else "")).encode()


_DTYPE_KEYS = ("dtype", "torch_dtype")


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config and its parts (`text_config`, `vision_config`, ...) with every stated dtype replaced.

    `quantization_config` is no part of the model: a dtype in it is that of a computation.
    """
    return {
        key: dtype
        if key in _DTYPE_KEYS
        else _with_dtype(value, dtype)
        if key.endswith("_config") and key != "quantization_config" and isinstance(value, dict)
        else value
        for key, value in config.items()
    }
