"""The set of per-rank files in a folder: which world size, which ranks, what the names alone show to be wrong."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from merger.checks import ranks_text
from merger.errors import Problem

RANK_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
# No run has had a tenth of this many ranks; a name that claims more would have millions of missing ranks listed.
_MAX_WORLD_SIZE = 1_000_000
# Faults of a file of which the sizes of its siblings tell more.
_KINDS_OF_SIZE = frozenset({"empty-file", "truncated", "not-an-archive", "damaged-archive"})


@dataclass(frozen=True, slots=True)
class RankSet:
    """The files of one run by rank, and what is wrong with the set as far as their names tell."""

    world_size: int
    paths: dict[int, Path]
    problems: tuple[Problem, ...]


def world_sizes(folder: Path) -> list[int]:
    """The world sizes of which `folder` holds rank files, ascending; empty where it holds none."""
    return sorted({int(match[1]) for path in folder.iterdir() if (match := RANK_FILE.fullmatch(path.name))})


def find_rank_set(folder: Path, world_size: int | None) -> RankSet:
    """The rank files in `folder`, which has some; `world_size` picks a set where there are several (FAULTS L1, L3)."""
    by_size: dict[int, dict[int, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.iterdir()):
        if match := RANK_FILE.fullmatch(path.name):
            by_size[int(match[1])][int(match[2])].append(path)
    sizes = sorted(by_size)
    if world_size is None and len(sizes) > 1:
        counts = " and ".join(f"{len(by_size[size])} of world size {size}" for size in sizes)
        problem = Problem(
            "several-world-sizes",
            str(folder),
            f"holds rank files of {len(sizes)} runs ({counts}); say which with --world-size",
        )
        return RankSet(sizes[-1], {}, (problem,))
    size = sizes[0] if world_size is None else world_size
    if size not in by_size:
        found = ", ".join(map(str, sizes))
        problem = Problem(
            "no-such-world-size", str(folder), f"holds no rank files of world size {size}, only of {found}"
        )
        return RankSet(size, {}, (problem,))
    problems = [
        Problem(
            "duplicate-rank",
            str(folder),
            f"rank {rank} has {len(paths)} files ({', '.join(path.name for path in paths)}); keep the right one",
        )
        for rank, paths in by_size[size].items()
        if len(paths) > 1
    ]
    foreign = sorted(rank for rank in by_size[size] if rank >= size)
    if foreign:
        problems.append(
            Problem(
                "foreign-rank",
                str(folder),
                f"has files of {ranks_text(foreign)}, but a run of world size {size} has ranks 0 to {size - 1} only",
            )
        )
    if size > _MAX_WORLD_SIZE:
        problem = Problem(
            "absurd-world-size",
            str(folder),
            f"has rank files named for {size:,} ranks; the names are not those of a run",
        )
        return RankSet(size, {}, (problem,))
    missing = sorted(set(range(size)) - set(by_size[size]))
    if missing:
        problems.append(
            Problem(
                "missing-ranks",
                str(folder),
                f"{ranks_text(missing)} of {size} {'is' if len(missing) == 1 else 'are'} missing "
                f"(found {ranks_text(by_size[size])}); each node of a run writes the files of its own ranks to its own "
                f"disk: copy model_world_size_{size}_rank_*.pt from the other nodes into this folder",
            )
        )
    problems += _check_fsdp_config(folder, size, chosen=world_size is not None)
    return RankSet(size, {rank: paths[0] for rank, paths in by_size[size].items() if rank < size}, tuple(problems))


def _check_fsdp_config(folder: Path, size: int, *, chosen: bool) -> list[Problem]:
    """fsdp_config.json, where there is one, must agree with the names (FAULTS L3); not if a set was chosen by hand."""
    path = folder / "fsdp_config.json"
    if chosen or not path.is_file():
        return []
    try:
        config = json.loads(path.read_bytes())
        stated = config["world_size"]
    except (ValueError, KeyError, TypeError):
        message = 'is not JSON with a "world_size"; restore it or delete it, the names of the files suffice'
        return [Problem("fsdp-config", path.name, message)]
    if stated == size:
        return []
    return [
        Problem(
            "fsdp-config",
            path.name,
            f"says world size {stated}, but the rank files are those of world size {size}; delete it if it is stale, "
            f"or confirm the files with --world-size {size}",
        )
    ]


def beside_siblings(problems: Sequence[Problem], paths: dict[int, Path]) -> list[Problem]:
    """Adds the size that the other ranks' files have, which tells a broken copy at once (FAULTS L2)."""
    extended = []
    for problem in problems:
        if problem.kind not in _KINDS_OF_SIZE:
            extended.append(problem)
            continue
        sizes = sorted(path.stat().st_size for path in paths.values() if path.name != problem.where)
        if not sizes:
            extended.append(problem)
            continue
        span = f"{sizes[0]:,}" if sizes[0] == sizes[-1] else f"{sizes[0]:,} to {sizes[-1]:,}"
        message = f"{problem.message.removesuffix('.')} (the files of the other ranks have {span} bytes)"
        extended.append(replace(problem, message=message))
    return extended
