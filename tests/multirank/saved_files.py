"""What `save_pretrained` wrote, for a merge to be held against, whatever release of transformers is installed."""

from __future__ import annotations

import json
from pathlib import Path

import transformers

IS_4 = transformers.__version__.startswith("4.")


def content(path: Path) -> object:
    """The bytes of a file, save for an index that transformers 4 writes: it does not count the parameters."""
    if path.suffix != ".json" or not IS_4:
        return path.read_bytes()
    index = json.loads(path.read_text())
    index["metadata"].pop("total_parameters", None)
    return index
