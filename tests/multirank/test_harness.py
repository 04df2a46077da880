"""The harness keeps its promises: it judges every rank, ends what hangs, leaves nothing behind; its cases are true."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file

from fixtures import models
from fixtures.__main__ import main
from fixtures.cases import CASES
from fixtures.conformance.loading import own_dtype
from fixtures.fault_states import load_state
from fixtures.layouts import TensorSpec, full_value, save_dtensors
from fixtures.ranks import RankFailure, RankPool

ROOT = Path(__file__).parents[2]


def describe(rank: int, world_size: int, greeting: str) -> tuple[int, int, int, int, str]:
    return rank, world_size, dist.get_rank(), dist.get_world_size(), greeting


def sum_of_ranks(rank: int, _world_size: int) -> float:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return total.item()


def sum_on_a_mesh(_rank: int, _world_size: int, groups_before: int) -> float:
    """Of a DTensor that came out of an operation; groups made before give those of the mesh other names."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    for _ in range(groups_before):
        dist.new_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))["tp"]
    result = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).detach()
    assert isinstance(result, DTensor)
    return float(result.full_tensor().sum())


def redistribute(_rank: int, _world_size: int, axes: tuple[str, str]) -> None:
    """What fills every cache of torch that holds meshes: operations, plans of redistributions, fully_shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    tensor = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0), Shard(1)])
    tensor.redistribute(mesh, [Replicate(), Shard(0)]).full_tensor()
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=mesh[axes[0]])
    (model(torch.ones(2, 4)) * 2).sum().backward()


def num_threads(_rank: int, _world_size: int) -> int:
    return torch.get_num_threads()


def echo(_rank: int, _world_size: int, value: torch.Tensor) -> torch.Tensor:
    return value


def raise_on_rank_1(rank: int, _world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 was told to fail")


def raise_everywhere(rank: int, _world_size: int) -> None:
    raise ValueError(f"rank {rank} was told to fail")


def raise_while_peers_wait(rank: int, _world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 was told to fail")
    time.sleep(600)


def exit_on_rank_1(rank: int, _world_size: int) -> None:
    if rank == 1:
        os._exit(3)


def exit_while_peers_wait(rank: int, _world_size: int) -> None:
    if rank == 1:
        os._exit(3)
    time.sleep(600)


def kill_on_rank_0(rank: int, _world_size: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def hang_on_rank_1(rank: int, _world_size: int) -> None:
    if rank == 1:
        time.sleep(600)


def hang_at_the_end_on_rank_1(rank: int, _world_size: int) -> int:
    if rank == 1:
        setattr(dist, "destroy_process_group", functools.partial(time.sleep, 600))  # noqa: B010 - it is not of that type
    return rank


def exit_at_the_end_on_rank_1(rank: int, _world_size: int) -> int:
    if rank == 1:
        setattr(dist, "destroy_process_group", functools.partial(os._exit, 3))  # noqa: B010 - it is not of that type
    return rank


def unpicklable(_rank: int, _world_size: int) -> Callable[[], None]:
    return lambda: None


@pytest.fixture(scope="module")
def small_pool() -> Iterator[RankPool]:
    """A pool of the tests that break it, so that the shared one need not start again."""
    with RankPool(limit=15.0) as ranks:
        yield ranks


@pytest.fixture
def pids(small_pool: RankPool) -> tuple[int, ...]:
    """The processes that the next job will run in; two ranks are up."""
    assert small_pool.run(2, sum_of_ranks) == [1.0, 1.0]
    return small_pool.pids


def still_there(pids: tuple[int, ...]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid)]


def assert_gone_and_replaced(small_pool: RankPool, pids: tuple[int, ...]) -> None:
    assert still_there(pids) == []
    assert small_pool.pids == ()
    assert small_pool.run(2, sum_of_ranks) == [1.0, 1.0]


def test_results_come_in_rank_order_from_a_group_of_exactly_the_world_asked_for(pool: RankPool) -> None:
    for world_size in (1, 4, 2, 3):
        expected = [(rank, world_size, rank, world_size, "hello") for rank in range(world_size)]
        assert pool.run(world_size, describe, "hello") == expected


def test_collectives_work_in_worlds_of_each_size_in_one_pool(pool: RankPool) -> None:
    assert [pool.run(world_size, sum_of_ranks)[0] for world_size in (3, 1, 4, 2)] == [3.0, 0.0, 6.0, 1.0]


def test_a_job_does_not_meet_the_meshes_of_the_job_before(pool: RankPool) -> None:
    """Torch remembers operations by their meshes, and equal meshes have other groups in another job."""
    assert [pool.run(4, sum_on_a_mesh, groups_before) for groups_before in (5, 0)] == [[6.0] * 4] * 2


def test_no_thread_of_a_group_outlives_its_job(pool: RankPool) -> None:
    """They wake up all the time, and after some hundred jobs a rank would do little else."""
    pool.run(4, redistribute, ("fsdp", "tp"))
    before = [psutil.Process(pid).num_threads() for pid in pool.pids[:4]]
    for axes in (("dp", "tp"), ("dp", "cp"), ("dp", "ep")):  # of equal meshes torch would keep the first alone
        pool.run(4, redistribute, axes)
    assert [psutil.Process(pid).num_threads() for pid in pool.pids[:4]] == before


def test_ranks_start_once_and_only_as_many_as_the_largest_world() -> None:
    with RankPool() as ranks:
        assert ranks.pids == ()
        ranks.run(1, sum_of_ranks)
        first = ranks.pids
        ranks.run(2, sum_of_ranks)
        both = ranks.pids
        ranks.run(1, sum_of_ranks)
        assert (len(first), len(both)) == (1, 2)
        assert both[:1] == first
        assert ranks.pids == both
    assert still_there(both) == []


def test_a_rank_uses_one_thread(pool: RankPool) -> None:
    assert pool.run(1, num_threads) == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.float8_e4m3fn, torch.bool])
def test_tensors_of_any_dtype_come_back_by_value(pool: RankPool, dtype: torch.dtype) -> None:
    value = torch.tensor([[0, 1], [1, 0]], dtype=torch.uint8).to(dtype)
    (result,) = pool.run(1, echo, value.clone())
    assert result.dtype == dtype
    assert result.view(torch.uint8).tolist() == value.view(torch.uint8).tolist()


def test_an_exception_on_one_rank_is_reported_with_its_traceback(small_pool: RankPool, pids: tuple[int, ...]) -> None:
    with pytest.raises(RankFailure) as caught:
        small_pool.run(2, raise_on_rank_1)
    (report,) = caught.value.reports
    assert (report.rank, report.state) == (1, "raised")
    assert report.detail.startswith("Traceback (most recent call last):\n")
    assert report.detail.endswith("ValueError: rank 1 was told to fail\n")
    assert "in raise_on_rank_1" in report.detail
    assert_gone_and_replaced(small_pool, pids)


def test_exceptions_on_all_ranks_are_all_reported(small_pool: RankPool, pids: tuple[int, ...]) -> None:
    with pytest.raises(RankFailure) as caught:
        small_pool.run(2, raise_everywhere)
    endings = [report.detail.rstrip().rpartition("\n")[2] for report in caught.value.reports]
    assert endings == ["ValueError: rank 0 was told to fail", "ValueError: rank 1 was told to fail"]
    assert_gone_and_replaced(small_pool, pids)


def test_peers_that_wait_for_a_failed_rank_are_reported_with_their_stacks(
    small_pool: RankPool, pids: tuple[int, ...]
) -> None:
    with pytest.raises(RankFailure) as caught:
        small_pool.run(2, raise_while_peers_wait)
    first, second = caught.value.reports
    assert [(first.rank, first.state), (second.rank, second.state)] == [(0, "hung"), (1, "raised")]
    assert first.detail.startswith("had not returned 5 s after a peer failed; its stacks:\n")
    assert "in raise_while_peers_wait" in first.detail
    assert_gone_and_replaced(small_pool, pids)


def test_a_rank_that_exits_is_reported_as_dead_with_its_exit_code(small_pool: RankPool, pids: tuple[int, ...]) -> None:
    with pytest.raises(RankFailure) as caught:
        small_pool.run(2, exit_on_rank_1)
    assert str(caught.value) == f"1 of 2 ranks failed in {__name__}.exit_on_rank_1\nrank 1 died: exit code 3"
    assert_gone_and_replaced(small_pool, pids)


def test_a_death_is_reported_as_one_and_not_as_a_hang_of_its_peers() -> None:
    # Were the limit waited for, this test would not end.
    with RankPool(limit=3600.0) as ranks, pytest.raises(RankFailure) as caught:
        ranks.run(2, exit_while_peers_wait)
    assert [(report.rank, report.state) for report in caught.value.reports] == [(0, "hung"), (1, "died")]


def test_a_rank_that_is_killed_is_reported_with_the_signal(small_pool: RankPool, pids: tuple[int, ...]) -> None:
    with pytest.raises(RankFailure) as caught:
        small_pool.run(2, kill_on_rank_0)
    assert str(caught.value) == f"1 of 2 ranks failed in {__name__}.kill_on_rank_0\nrank 0 died: killed by SIGKILL"
    assert_gone_and_replaced(small_pool, pids)


def test_a_rank_that_is_killed_between_two_jobs_is_replaced(small_pool: RankPool, pids: tuple[int, ...]) -> None:
    os.kill(pids[1], signal.SIGKILL)
    os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)  # the pool is to find out by itself
    assert small_pool.run(2, sum_of_ranks) == [1.0, 1.0]
    assert still_there(pids) == []


def test_a_hang_ends_within_the_limit_with_the_stacks_of_the_rank(small_pool: RankPool, pids: tuple[int, ...]) -> None:
    with pytest.raises(RankFailure) as caught:
        small_pool.run(2, hang_on_rank_1)
    (report,) = caught.value.reports
    assert (report.rank, report.state) == (1, "hung")
    assert report.detail.startswith("ran for 15 s; its stacks:\n")
    assert "in hang_on_rank_1" in report.detail
    assert_gone_and_replaced(small_pool, pids)


def test_ranks_that_hang_after_a_job_are_replaced_and_what_it_returned_counts(
    small_pool: RankPool, pids: tuple[int, ...]
) -> None:
    assert small_pool.run(2, hang_at_the_end_on_rank_1) == [0, 1]
    assert_gone_and_replaced(small_pool, pids)


def test_a_rank_that_dies_after_a_job_is_reported(small_pool: RankPool, pids: tuple[int, ...]) -> None:
    with pytest.raises(RankFailure) as caught:
        small_pool.run(2, exit_at_the_end_on_rank_1)
    assert str(caught.value) == (
        f"1 of 2 ranks failed in the end of {__name__}.exit_at_the_end_on_rank_1\nrank 1 died: exit code 3"
    )
    assert_gone_and_replaced(small_pool, pids)


def test_a_result_that_cannot_be_pickled_is_a_failure_of_its_rank(small_pool: RankPool, pids: tuple[int, ...]) -> None:
    with pytest.raises(RankFailure) as caught:
        small_pool.run(2, unpicklable)
    assert [(report.rank, report.state) for report in caught.value.reports] == [(0, "raised"), (1, "raised")]
    assert_gone_and_replaced(small_pool, pids)


def test_ranks_that_show_bars_leave_nothing_behind(tmp_path: Path) -> None:
    script = tmp_path / "bars.py"
    script.write_text(
        "from fixtures.ranks import RankPool\n"
        "def bar(rank, world_size):\n"
        "    from tqdm import tqdm\n"
        "    return sum(tqdm(range(3)))\n"
        "if __name__ == '__main__':\n"
        "    with RankPool() as pool:\n"
        "        print(pool.run(1, bar))\n"
    )
    ran = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert ran.stdout == "[3]\n"
    assert "3/3" in ran.stderr
    assert "leaked" not in ran.stderr


def test_ranks_die_with_a_parent_that_is_killed_even_amid_a_job(tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(
        "import operator, os, signal, threading, time\n"
        "from fixtures.ranks import RankPool\n"
        "def hang(rank, world_size):\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    pool = RankPool()\n"
        "    pool.run(2, operator.add)\n"
        "    print(*pool.pids, flush=True)\n"
        "    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "    pool.run(2, hang)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}  # a killed parent cannot tidy up
    output, errors = tmp_path / "output", tmp_path / "errors"
    with output.open("w") as stdout, errors.open("w") as stderr:  # not pipes: orphans would hold them open
        done = subprocess.run([sys.executable, script], env=environment, stdout=stdout, stderr=stderr, check=False)
    assert done.returncode == -signal.SIGKILL, errors.read_text()
    orphans = [psutil.Process(pid) for pid in map(int, output.read_text().split()) if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(orphans, timeout=60)
    survivors = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for process in survivors:
        process.kill()
    assert survivors == []


def expected_files(world_size: int) -> set[str]:
    kinds = ("model", "optim", "extra_state")
    ranks = {f"{kind}_world_size_{world_size}_rank_{rank}.pt" for kind in kinds for rank in range(world_size)}
    return {*ranks, "fsdp_config.json"}


SIDE_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.mark.parametrize("name", ["qwen2-fp32-w4", "llama-bf16-ddp2xfsdp2", "plain-fp32-w3", "llama-fp32-unsharded"])
def test_a_made_case_has_the_files_of_a_trainer(checkpoint: Callable[[str], Path], name: str) -> None:
    folder = checkpoint(name) / "checkpoint"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    side_files = set() if CASES[name].model == "plain" else {f"huggingface/{file}" for file in SIDE_FILES}
    assert found == expected_files(CASES[name].world_size) | side_files


@pytest.mark.parametrize("name", ["qwen2-fp32-w4", "llama-bf16-ddp2xfsdp2", "llama-fp32-unsharded"])
def test_the_truth_of_a_made_case_is_not_what_training_began_with(checkpoint: Callable[[str], Path], name: str) -> None:
    truth = load_file(checkpoint(name) / "truth/truth.safetensors")
    untrained = [
        fqn for fqn, value in truth.items() if torch.equal(value, models.initial(fqn, value.shape, value.dtype))
    ]
    assert untrained == []


@pytest.mark.parametrize("name", ["qwen2-fp32-w3", "plain-bf16-w4", "plain-fp32-w12"])
def test_the_truth_of_a_made_case_is_its_local_pieces_joined(checkpoint: Callable[[str], Path], name: str) -> None:
    world_size = CASES[name].world_size
    folder = checkpoint(name)
    paths = [folder / f"checkpoint/model_world_size_{world_size}_rank_{rank}.pt" for rank in range(world_size)]
    states = [load_state(path) for path in paths]
    truth = load_file(folder / "truth/truth.safetensors")
    assert sorted(truth) == sorted(states[0])
    for fqn, value in truth.items():
        pieces = [state[fqn] for state in states]
        is_sharded = hasattr(pieces[0], "to_local")
        joined = torch.cat([piece.to_local() for piece in pieces]) if is_sharded else pieces[0]
        assert joined.dtype == value.dtype
        assert torch.equal(torch.nan_to_num(joined), torch.nan_to_num(value)), fqn


@pytest.mark.parametrize("name", ["qwen2-fp32-w4", "llama-bf16-ddp2xfsdp2"])
def test_transformers_loads_the_truth_and_computes_its_logits(
    checkpoint: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    from transformers import AutoModelForCausalLM

    made = checkpoint(name)
    merged = tmp_path / "merged"
    shutil.copytree(made / "checkpoint/huggingface", merged)
    shutil.copyfile(made / "truth/truth.safetensors", merged / "model.safetensors")
    model, report = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True, **own_dtype())
    assert (set(report["missing_keys"]), set(report["unexpected_keys"])) == (set(), set())
    expected = load_file(made / "truth/truth_logits.safetensors")
    with torch.no_grad():
        logits = model(input_ids=expected["input_ids"]).logits
    torch.testing.assert_close(logits, expected["logits"])


def test_transformers_loads_the_tokenizer_with_its_chat_template(checkpoint: Callable[[str], Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint("qwen2-fp32-w4") / "checkpoint/huggingface")
    ids = tokenizer("The last rank").input_ids
    assert 0 < max(ids) < 101
    assert tokenizer.decode(ids).replace(" ", "") == "Thelastrank"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<|user|>hello</s>\n"


def test_plain_cases_hold_the_buffers_that_mergers_get_wrong(checkpoint: Callable[[str], Path]) -> None:
    with safe_open(checkpoint("plain-bf16-w4") / "truth/truth.safetensors", framework="pt") as truth:
        counts = truth.get_tensor("a_buffers.counts")
        assert counts.tolist() == [255, 256, 257, 1023]
        assert truth.get_tensor("a_buffers.steps").item() == 9007199254740993
        assert truth.get_tensor("a_buffers.scalar").dtype == torch.float32
        assert truth.get_tensor("a_buffers.mask").tolist() == [True, False, True, True, False]
        assert truth.get_tensor("a_buffers.transposed")[:, 1].tolist() == [4.0, 5.0, 6.0, 7.0]
        assert truth.get_tensor("a_buffers.not_a_number").isnan().tolist() == [False, True, False, False]
        assert set(truth.get_tensor("blocks.0.ones").flatten().tolist()) == {1.0}


def test_tensors_on_any_mesh_are_saved_by_the_ranks_that_have_them(pool: RankPool, tmp_path: Path) -> None:
    specs = [
        TensorSpec("crossed", (7, 5), "float32", 1, (2, 2), (0, 2, 1, 3), (None, 0)),
        TensorSpec("both", (7, 5), "float32", 2, (2, 2), (0, 2, 1, 3), (0, 1), axis_names=("dp_shard", "tp")),
        TensorSpec("two", (5,), "int16", 3, (2,), (1, 3), (0,)),
        TensorSpec("plain", (), "bfloat16", 4, kind="plain"),
    ]
    fulls = pool.run(4, save_dtensors, specs, str(tmp_path))
    names = [sorted(full) for full in fulls]
    assert names == [["both", "crossed", "plain"], ["both", "crossed", "plain", "two"]] * 2
    for spec in specs:
        full = fulls[1][spec.name]
        assert full.reshape(-1).view(torch.uint8).tolist() == full_value(spec).reshape(-1).view(torch.uint8).tolist()
    states = [load_state(tmp_path / f"model_world_size_4_rank_{rank}.pt") for rank in range(4)]
    assert [state["crossed"].to_local().shape[0] for state in states] == [4, 4, 3, 3]
    assert [tuple(state["both"].to_local().shape) for state in states] == [(4, 3), (3, 3), (4, 2), (3, 2)]


def test_pieces_on_a_mesh_in_descending_order_follow_the_mesh_coordinate(pool: RankPool, tmp_path: Path) -> None:
    """S22."""
    spec = TensorSpec("a", (4,), "int64", 1, mesh_shape=(4,), mesh_ranks=(2, 0, 3, 1), placements=(0,))
    pool.run(4, save_dtensors, [spec], str(tmp_path))
    paths = [tmp_path / f"model_world_size_4_rank_{rank}.pt" for rank in (2, 0, 3, 1)]
    pieces = [load_state(path)["a"].to_local() for path in paths]
    assert torch.cat(pieces).tolist() == full_value(spec).tolist()


def test_list_names_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(CASES)


def test_make_refuses_an_unknown_case_and_says_what_is_near(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["make", "qwen-fp32-w4", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "error: there is no case named qwen-fp32-w4. Did you mean qwen2-fp32-w4 or qwen2-fp32-w8 or qwen2-fp32-w3?\n"
    )
    assert main(["make", "zzz", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "error: there is no case named zzz. `python -m fixtures list` shows all names.\n"
    )


def test_make_refuses_a_folder_that_holds_something(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    assert main(["make", "qwen2-fp32-w4", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path} exists and is not an empty folder. Name a new one, or remove it first.\n"
    )
