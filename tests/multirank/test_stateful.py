"""A folder of rank files to which anything may happen, and merges of it at any time: the target never lies."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import event, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from hypothesis.strategies import integers, sampled_from
from safetensors.torch import load_file

import merger
from fixtures.layouts import TensorSpec, save_dtensors
from fixtures.ranks import RankPool
from merger.errors import MergerError
from tests.unit.archives import bits

WORLD_SIZE = 3
STEPS = (0, 1)
RANKS = range(WORLD_SIZE)


class Interrupted(BaseException):
    """What stands for Ctrl-C: it is no error that anybody may catch."""


def specs(step: int) -> list[TensorSpec]:
    """Two sharded tensors, and a buffer that tells the steps apart."""
    ranks = tuple(RANKS)
    return [
        TensorSpec("layers.0.w", (7, 3), "float32", 10 + step, (WORLD_SIZE,), ranks, (0,)),
        TensorSpec("layers.1.w", (4, 5), "bfloat16", 20 + step, (WORLD_SIZE,), ranks, (1,)),
        TensorSpec("step", (2,), "int64", 30 + step, kind="plain"),
    ]


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"model_world_size_{WORLD_SIZE}_rank_{rank}.pt"


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the ranks saved at each step, and beside it what they held."""
    folder = tmp_path_factory.mktemp("steps")
    for step in STEPS:
        (folder / str(step)).mkdir()
        truth = pool.run(WORLD_SIZE, save_dtensors, specs(step), str(folder / str(step)))[0]
        torch.save(truth, folder / f"truth_{step}.pt")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.hypothesis
def test_whatever_happens_to_the_files_a_merge_is_exact_or_refused(saved: Path) -> None:  # noqa: C901 - one machine
    """S8, S16, L1, L2, L9: and a target is never half-made, nor lost."""
    truths = {
        step: {name: bits(tensor) for name, tensor in torch.load(saved / f"truth_{step}.pt", weights_only=True).items()}
        for step in STEPS
    }

    class Checkpoint(RuleBasedStateMachine):
        """The model: which step and rank every file is of, None where it is broken; and what the target holds."""

        def __init__(self) -> None:
            super().__init__()
            self.root = Path(tempfile.mkdtemp(prefix="stateful-"))
            self.folder, self.target = self.root / "checkpoint", self.root / "target" / "out"
            self.folder.mkdir()
            self.files: dict[int, tuple[int, int] | None] = {}
            self.published: int | None = None

        def teardown(self) -> None:
            shutil.rmtree(self.root)

        @initialize(step=sampled_from(STEPS))
        def save(self, step: int) -> None:
            for rank in RANKS:
                shutil.copyfile(file_of(saved / str(step), rank), file_of(self.folder, rank))
                self.files[rank] = (step, rank)

        @rule(step=sampled_from(STEPS))
        def save_a_step(self, step: int) -> None:
            self.save(step)

        @rule(rank=integers(0, WORLD_SIZE - 1), step=sampled_from(STEPS))
        def save_one_rank_only(self, rank: int, step: int) -> None:
            shutil.copyfile(file_of(saved / str(step), rank), file_of(self.folder, rank))
            self.files[rank] = (step, rank)

        @rule(rank=integers(0, WORLD_SIZE - 1))
        def delete(self, rank: int) -> None:
            file_of(self.folder, rank).unlink(missing_ok=True)
            self.files.pop(rank, None)

        @rule(rank=integers(0, WORLD_SIZE - 1), size=integers(0, 3000))
        def truncate(self, rank: int, size: int) -> None:
            path = file_of(self.folder, rank)
            if path.exists():
                path.write_bytes(path.read_bytes()[: min(size, path.stat().st_size - 1)])
                self.files[rank] = None

        @precondition(lambda self: len(self.files) > 1)
        @rule(source=integers(0, WORLD_SIZE - 1), over=integers(0, WORLD_SIZE - 1))
        def copy_over(self, source: int, over: int) -> None:
            if source in self.files and source != over:
                shutil.copyfile(file_of(self.folder, source), file_of(self.folder, over))
                self.files[over] = self.files[source]

        @rule(workers=integers(1, 3))
        def merge(self, workers: int) -> None:
            self.merge_with(workers, overwrite=False)

        @rule(workers=integers(1, 3))
        def merge_over_what_is_there(self, workers: int) -> None:
            self.merge_with(workers, overwrite=True)

        @rule(rank=integers(0, WORLD_SIZE - 1), step=sampled_from(STEPS))
        def save_one_rank_and_merge(self, rank: int, step: int) -> None:
            self.save_one_rank_only(rank, step)
            self.merge_with(1, overwrite=True)

        @rule(num_blocks=integers(1, 4), overwrite=sampled_from([True, False]))
        def interrupt_a_merge(self, num_blocks: int, overwrite: bool) -> None:  # noqa: FBT001 - drawn
            """Ctrl-C once so many blocks are written; a merge with fewer gets through."""
            calls = iter(range(1, num_blocks))

            def interrupt(_done: int, _total: int) -> None:
                if next(calls, None) is None:
                    raise Interrupted

            self.merge_with(1, overwrite=overwrite, progress=interrupt)

        def merge_with(
            self, workers: int, *, overwrite: bool, progress: Callable[[int, int], None] | None = None
        ) -> None:
            step = self.whole_step()
            allowed = step is not None and (overwrite or self.published is None)
            try:
                merger.merge(
                    self.folder,
                    self.target,
                    weights_only=True,
                    overwrite=overwrite,
                    workers=workers,
                    progress=progress,
                )
            except MergerError:
                event("merge: refused")
                assert not allowed
            except Interrupted:
                event("merge: interrupted")
                assert allowed
            else:
                event("merge: done over what was there" if self.published is not None else "merge: done")
                assert allowed
                self.published = step

        @invariant()
        def the_target_is_absent_or_whole(self) -> None:
            beside = sorted(path.name for path in self.target.parent.glob("*")) if self.target.parent.exists() else []
            if self.published is None:
                assert beside == []
                return
            assert beside == ["out"]
            found = load_file(self.target / "model.safetensors")
            assert {name: bits(tensor) for name, tensor in found.items()} == truths[self.published]

        def whole_step(self) -> int | None:
            """The step of which every rank's own file is there, if there is one."""
            for step in STEPS:
                if self.files == {rank: (step, rank) for rank in RANKS}:
                    return step
            return None

    run_state_machine_as_test(
        Checkpoint, settings=settings(stateful_step_count=20, max_examples=settings().max_examples)
    )
