"""Time and memory of reading, checking and planning checkpoints of many ranks with many tensors.

    python benchmarks/scale.py FOLDER       # the table in the README
    python benchmarks/scale.py FOLDER --sizes 512x1000 --workers 1 4 --layout tp --commands merge inspect --keep

The checkpoints are synthetic, but their files are those of `torch.save`: DTensors on a mesh of that many ranks, which
torch's fake process group makes in one process, with names like a model's and two to eight elements a rank. So there is
no data to speak of, and what is measured is what grows with ranks and tensors. Each size is made in FOLDER (0.6 kB for
each tensor of each rank, a minute for 512 x 1000), measured, and removed again unless `--keep`.

Every measurement is a fresh process: "merge" is `merger merge --dry-run --weights-only`, which reads and checks all
headers and plans the output, "inspect" `merger inspect`, and "library" the same as "merge" called from Python. CPU
seconds are those of a process with its children; the peak is that of the largest process, and "all" is the sum over
parent and children at the moment when it was largest.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SIZES = ("64x1000", "128x1000", "256x1000", "512x1000", "512x250", "512x500")
COMMANDS = ("merge", "inspect", "library")

# Names of the parameters of one layer: name, and whether it is a matrix.
_LAYER = (
    ("self_attn.q_proj.weight", True),
    ("self_attn.q_proj.bias", False),
    ("self_attn.k_proj.weight", True),
    ("self_attn.v_proj.weight", True),
    ("self_attn.o_proj.weight", True),
    ("mlp.gate_proj.weight", True),
    ("mlp.up_proj.weight", True),
    ("mlp.down_proj.weight", True),
    ("input_layernorm.weight", False),
    ("post_attention_layernorm.weight", False),
)
_LIBRARY = (
    "import sys, merger; "
    "merger.merge(sys.argv[1], sys.argv[2], dry_run=True, weights_only=True, workers=int(sys.argv[3]))"
)


def main() -> None:
    """Makes the checkpoints, measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where checkpoints are made")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="RANKSxTENSORS")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--layout", choices=["fsdp", "hsdp", "tp"], default="fsdp", help="how tensors are spread")
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=["merge"])
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints, and use those that are there")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, layout {options.layout}\n")
    print("| ranks x tensors | command | workers | seconds | CPU s | us per tensor of a rank | peak MB | all MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for size in options.sizes:
        num_ranks, num_tensors = map(int, size.split("x"))
        checkpoint = options.folder / f"{options.layout}-{size}"
        made = checkpoint / "complete"
        if not made.exists():
            shutil.rmtree(checkpoint, ignore_errors=True)
            _make_elsewhere(checkpoint, num_ranks, num_tensors, options.layout)
            made.touch()
        for workers in options.workers:
            commands = _commands(checkpoint, workers)
            for name in options.commands:
                cost = _run(commands[name])
                each = cost.cpu_seconds / num_ranks / num_tensors * 1e6
                print(
                    f"| {num_ranks} x {num_tensors:,} | {name} | {workers} | {cost.seconds:.1f} | "
                    f"{cost.cpu_seconds:.1f} | {each:.0f} | {cost.peak_bytes / 1e6:.0f} | {cost.all_bytes / 1e6:.0f} |",
                    flush=True,
                )
        if not options.keep:
            shutil.rmtree(checkpoint)


def _commands(checkpoint: Path, workers: int) -> dict[str, list[str]]:
    out, count = str(checkpoint / "out"), ["--workers", str(workers)]
    merger = [sys.executable, "-m", "merger"]
    merge = [*merger, "merge", str(checkpoint), out, "--dry-run", "--weights-only", "--quiet", *count]
    return {
        "merge": merge,
        "library": [sys.executable, "-c", _LIBRARY, str(checkpoint), out, str(workers)],
        "inspect": [*merger, "inspect", str(checkpoint), *count],
    }


@dataclass(frozen=True, slots=True)
class _Cost:
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    all_bytes: int


def _run(command: list[str]) -> _Cost:
    """Runs a command and tells what it took; memory of children is watched from outside."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    largest = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            largest[0] = max(largest[0], _resident_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"failed: {command}")
    peak = int(usage.ru_maxrss) * (1 if sys.platform == "darwin" else 1024)
    return _Cost(seconds, usage.ru_utime + usage.ru_stime, peak, max(peak, largest[0]))


def _resident_bytes(pid: int) -> int:
    """The resident sets of a process and its children, in bytes."""
    import psutil

    try:
        parent = psutil.Process(pid)
        return sum(int(process.memory_info().rss) for process in (parent, *parent.children(recursive=True)))
    except psutil.Error:
        return 0  # it has just ended


def _make_elsewhere(checkpoint: Path, num_ranks: int, num_tensors: int, layout: str) -> None:
    """Makes a checkpoint in another process, so that torch is not in the one that measures."""
    call = f"scale.make(Path({str(checkpoint)!r}), {num_ranks}, {num_tensors}, {layout!r})"
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from pathlib import Path; import scale; "
    subprocess.run([sys.executable, "-c", script + call], check=True)


def make(checkpoint: Path, num_ranks: int, num_tensors: int, layout: str) -> None:
    """Saves the file of every rank, each as that rank would.

    Layouts: "fsdp" shards dim 0 over all ranks, "hsdp" over pairs of replicas, "tp" in addition dim 1 over 8 ranks.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    checkpoint.mkdir(parents=True)
    mesh_shape, axis_names, matrix, vector = {
        "fsdp": ((num_ranks,), ("fsdp",), (Shard(0),), (Shard(0),)),
        "hsdp": ((2, num_ranks // 2), ("ddp", "fsdp"), (Replicate(), Shard(0)), (Replicate(), Shard(0))),
        "tp": ((num_ranks // 8, 8), ("fsdp", "tp"), (Shard(0), Shard(1)), (Shard(0), Replicate())),
    }[layout]
    num_shards = mesh_shape[1] if layout == "hsdp" else mesh_shape[0]
    shapes = {True: (2 * num_shards, 8), False: (2 * num_shards,)}
    for rank in range(num_ranks):
        dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=axis_names)
        state_dict: dict[str, torch.Tensor] = {}
        for number in range(num_tensors):
            name, is_matrix = _LAYER[number % len(_LAYER)]
            shape = shapes[is_matrix]
            local = torch.full((2, *shape[1:]), number % 100, dtype=torch.bfloat16)
            if is_matrix and layout == "tp":
                local = local[:, :1].contiguous()
            state_dict[f"model.layers.{number // len(_LAYER)}.{name}"] = DTensor.from_local(
                local,
                mesh,
                matrix if is_matrix else vector,
                run_check=False,
                shape=torch.Size(shape),
                stride=(8, 1) if is_matrix else (1,),
            )
        torch.save(state_dict, checkpoint / f"model_world_size_{num_ranks}_rank_{rank}.pt")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
