"""On real ranks: whatever `distribute_tensor` dealt out comes back, and no damage to a file goes through unnoticed."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import merger
from fixtures.layouts import full_value, save_dtensors
from fixtures.ranks import RankPool
from tests.strategies import Layout, fresh_folder, layouts
from tests.unit.archives import bits

_PAGE = 4096
# Flipped bits are what most places of a file have to be tried with.
_KINDS = ("flip", "flip", "flip", "cut", "page", "scribble", "append", "delete", "rename", "copy", "swap")


def values(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: bits(value) for name, value in tensors.items()}


def is_ascending(ranks: tuple[int, ...]) -> bool:
    return list(ranks) == sorted(ranks)


def merged_as_gathered(pool: RankPool, layout: Layout) -> None:
    """Saves the tensors on real ranks and merges the files; the truth is what `full_tensor()` gave on the ranks."""
    with fresh_folder() as path:
        checkpoint = path / "checkpoint"
        checkpoint.mkdir()
        fulls = pool.run(layout.world_size, save_dtensors, layout.specs, str(checkpoint))
        merger.merge(checkpoint, path / "out", weights_only=True, shard_order=layout.shard_order)
        merged = values(load_file(path / "out" / "model.safetensors"))
    gathered = {name: value for full in fulls for name, value in full.items()}
    # Where ranks do not ascend, torch gathers in another order than it deals, and what was dealt is the truth.
    truth = {s.name: gathered[s.name] if is_ascending(s.mesh_ranks) else full_value(s) for s in layout.specs}
    assert merged == values(truth)


# Mostly four, the fewest for two axes that both cut. In branches, since Hypothesis likes to repeat a value it drew.
_UP_TO_FOUR = st.one_of(st.sampled_from([1, 2, 3]), st.just(4), st.just(4), st.just(4))


@settings(max_examples=25)
@given(layouts(world_sizes=_UP_TO_FOUR, orders=(None, "coordinate"), max_tensors=10))
def test_what_torch_dealt_out_on_real_ranks_comes_back_bit_for_bit(pool: RankPool, layout: Layout) -> None:
    """S1, S2, S3, S4, S10, S13, S22."""
    merged_as_gathered(pool, layout)


# Each takes seconds: eight processes make the groups of every mesh. They are the fewest for three axes that all cut.
@settings(max_examples=5)
@given(layouts(world_sizes=st.just(8), orders=(None, "coordinate"), max_tensors=5))
def test_what_torch_dealt_out_on_eight_ranks_comes_back_bit_for_bit(pool: RankPool, layout: Layout) -> None:
    """S1, S2, S3, S4, S10, S13, S22."""
    merged_as_gathered(pool, layout)


def damaged(data_of_test: st.DataObject, files: dict[str, bytes]) -> tuple[str, dict[str, bytes]]:
    """What one accident makes of `files`: what it was, for the reader of a failure, and the files after it.

    It is no strategy, for then Hypothesis would print the files.
    """
    draw = data_of_test.draw
    after = dict(files)
    name = draw(st.sampled_from(sorted(files)))
    data = files[name]
    kind = draw(st.sampled_from(_KINDS))
    if kind == "flip":
        offset, bit = draw(_offsets(data)), draw(st.integers(0, 7))
        after[name] = data[:offset] + bytes([data[offset] ^ (1 << bit)]) + data[offset + 1 :]
        return f"bit {bit} of byte {offset} of {name} flipped", after
    if kind == "cut":
        offset = draw(_offsets(data))
        after[name] = data[:offset]
        return f"{name} cut to {offset} bytes", after
    if kind == "page":
        start = draw(_offsets(data)) // _PAGE * _PAGE
        after[name] = data[:start] + bytes(len(data[start : start + _PAGE])) + data[start + _PAGE :]
        return f"4 KiB of {name} zeroed from byte {start}", after
    if kind == "scribble":
        offset, written = draw(_offsets(data)), draw(st.binary(min_size=1, max_size=8))
        after[name] = data[:offset] + written + data[offset + len(written) :]
        return f"{written!r} written over byte {offset} of {name}", after
    if kind == "append":
        more = draw(st.binary(min_size=1, max_size=100)) * draw(st.sampled_from([1, 100]))
        after[name] += more
        return f"{len(more)} bytes appended to {name}", after
    if kind == "delete":
        del after[name]
        return f"{name} deleted", after
    world_size, rank = draw(st.integers(1, 6)), draw(st.integers(0, 6))
    other = draw(st.sampled_from([*sorted(files), f"model_world_size_{world_size}_rank_{rank}.pt", f"{name}.tmp"]))
    if kind == "copy":
        after[other] = data
        return f"{name} copied to {other}", after
    del after[name]
    if kind == "swap" and other in files:
        after[name] = files[other]
    after[other] = data
    return f"{name} and {other} {kind}ped" if kind == "swap" else f"{name} renamed to {other}", after


def _offsets(data: bytes) -> st.SearchStrategy[int]:
    """Offsets of bytes; of an archive, in tensor data, in its pickle, in its directory and anywhere alike."""
    anywhere = st.integers(0, len(data) - 1)
    if not data.startswith(b"PK"):
        return anywhere
    tensors, pickles, end = _parts(data)
    within = (st.sampled_from(part).flatmap(lambda span: st.integers(*span)) for part in (tensors, pickles))
    return st.one_of(*within, st.integers(end, len(data) - 1), anywhere)


@cache
def _parts(data: bytes) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int]:
    """The first and last byte of each record with tensor data, the same of the pickle, and where the directory begins.

    They are those of the record's own data, which lies right before the descriptor of 16 bytes that ends a record.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        # Where the next record begins.
        stops = [info.header_offset for info in infos[1:]] + [archive.start_dir]
        spans = {
            info.filename.partition("/")[2]: (stop - 16 - info.file_size, stop - 17)
            for info, stop in zip(infos, stops, strict=True)
            if info.file_size
        }
        first, last = spans["data.pkl"]
        assert (data[first : first + 2], data[last : last + 1]) == (b"\x80\x02", b"."), "it is no pickle"
        tensors = [span for name, span in spans.items() if name.startswith("data/")]
        return tensors, [spans["data.pkl"]], archive.start_dir


def sound_files(made: Path) -> dict[str, bytes]:
    """The files of a checkpoint that are merged, and the one that says what they are."""
    paths = (made / "checkpoint").iterdir()
    return {path.name: path.read_bytes() for path in paths if path.name.startswith(("model_", "fsdp_config"))}


def merged_or_refused(files: dict[str, bytes]) -> tuple[dict[str, torch.Tensor] | None, str, str]:
    """What comes of merging the files: the tensors, or None and the message; and the folder they lay in."""
    with fresh_folder() as path:
        checkpoint = path / "checkpoint"
        checkpoint.mkdir()
        for name, data in files.items():
            (checkpoint / name).write_bytes(data)
        with suppress(merger.MergerError):
            merger.inspect(checkpoint)
        try:
            merger.merge(checkpoint, path / "out", weights_only=True)
        except merger.MergerError as error:
            assert sorted(entry.name for entry in path.iterdir()) == ["checkpoint"]
            return None, str(error), str(checkpoint)
        return load_file(path / "out" / "model.safetensors"), "", str(checkpoint)


@pytest.fixture(scope="module", params=["qwen2-fp32-w4", "qwen2-fp32-ddp2xfsdp2", "plain-fp32-w4"])
def made(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Path:
    """A sound case; made here, so that no example has to wait for it."""
    return checkpoint(request.param)


@pytest.fixture(scope="module")
def made_without_checksums(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen2-fp32-w4+checksums_off")


@given(data=st.data())
def test_damage_to_one_file_is_refused_by_name_or_leaves_the_result_exact(made: Path, data: st.DataObject) -> None:
    """S8, S21, L1, L2, L3: never silently wrong, and never an error of another kind."""
    files = sound_files(made)
    what, after = damaged(data, files)
    tensors, message, where = merged_or_refused(after)
    if tensors is None:
        event("refused")
        touched = [name for name in {*files, *after} if files.get(name) != after.get(name)]
        of_the_set = where in message and re.search(r"\brank|world size", message)
        assert any(name in message for name in touched) or of_the_set, f"{what}: {message}"
    else:
        event("exact")
        assert values(tensors) == values(load_file(made / "truth/truth.safetensors")), what


@given(data=st.data())
def test_damage_to_files_saved_without_checksums_is_refused_or_merged_but_crashes_nothing(
    made_without_checksums: Path, data: st.DataObject
) -> None:
    """L14: nobody can tell then whether the data is what was saved."""
    _, after = damaged(data, sound_files(made_without_checksums))
    tensors, _, _ = merged_or_refused(after)
    event("refused" if tensors is None else "merged")
