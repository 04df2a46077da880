"""Where the shards that a rank holds of a ShardedTensor lie, and whether they are those that its metadata promise."""

from __future__ import annotations

from merger.checks import ranges_text, shape_text
from merger.errors import Problem
from merger.sources.sharded_tensor import ShardedTensor
from merger.tensors import Chunk, SourceFile


def shard_chunks(fqn: str, entry: ShardedTensor, file: SourceFile) -> tuple[Chunk, ...] | Problem:
    """The rectangles of a ShardedTensor that the file of a rank holds, or why they are not the ones it should."""
    where = f"rank {file.rank}: {fqn}"
    found = sorted((shard.offsets, shard.sizes) for shard in entry.shards)
    promised = sorted(
        rectangle
        for rectangle, rank in zip(entry.cut.rectangles, entry.cut.ranks, strict=True)
        # Where ranks are not told, any of the rectangles may be this file's; that none is missing is seen in the whole.
        if rank == file.rank or (rank is None and rectangle in found)
    )
    if found != promised:
        return Problem(
            "wrong-shards",
            where,
            f"its file holds {_shards_text(found)}, but by the metadata of the ShardedTensor this rank has "
            f"{_shards_text(promised)}; the files are not of one run, or are damaged: save the checkpoint again",
        )
    for shard in entry.shards:
        shown = ranges_text([(shard.offsets, shard.sizes)])
        if shard.local.sizes != shard.sizes:
            message = f"its shard {shown} is a tensor of shape {shape_text(shard.local.sizes)}; the file is damaged"
            return Problem("local-size", where, message)
        if shard.local.dtype != entry.dtype:
            message = f"its shard {shown} is {shard.local.dtype}, the ShardedTensor {entry.dtype}; the file is damaged"
            return Problem("dtype-mismatch", where, message)
    return tuple(
        Chunk(shard.offsets, shard.sizes, file, shard.local.byte_offset, shard.local.strides, shard.local.record)
        for shard in entry.shards
        if 0 not in shard.sizes
    )


def _shards_text(rectangles: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    return ranges_text(rectangles) or "no shard"
