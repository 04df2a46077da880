"""ShardedTensor, which FSDP1 saves without a device mesh: read from its metadata, without a process group.

Each rank saves its own shards, and the metadata of the shards of all ranks: a list of rectangles, each with the rank
that holds it. A rank may hold none: of a tensor of one row, all but one do.

Source: torch/distributed/_shard/sharded_tensor/api.py (`ShardedTensor.__getstate__`), _shard/metadata.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from merger.dtypes import DType
from merger.sharding import Cut
from merger.sources import fields
from merger.sources.fields import MalformedError
from merger.sources.inert import Inert, Instance
from merger.sources.local_tensor import LocalTensor, is_local

_SHARD = frozenset({"torch.distributed._shard.sharded_tensor.shard.Shard"})
_SHARD_METADATA = frozenset({"torch.distributed._shard.metadata.ShardMetadata"})
_METADATA = frozenset({"torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata"})
_GROUP = frozenset({"torch.distributed._shard.sharded_tensor.api.ShardedTensor.ProcessGroupState"})
_REMOTE_DEVICE = frozenset({"torch.distributed.remote_device._remote_device"})
_NUM_STATE_PARTS = 5

# The shards of all tensors in one file: 1,024 ranks with 4,000 tensors have as many. A pickle of a few bytes can name
# one long list again and again.
_MAX_SHARDS = 1 << 22


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The rectangle [offsets, offsets + sizes) of a global tensor, and the tensor that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: LocalTensor


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A global tensor of `shape`, of which this file holds `shards`; `cut` says who holds what.

    `rank` of a run of `world_size` ranks saved it.
    """

    shape: tuple[int, ...]
    dtype: DType
    cut: Cut
    shards: tuple[LocalShard, ...]
    rank: int
    world_size: int


class ShardedTensorDecoder:
    """Decodes the ShardedTensors of one file, and counts their shards. `read_local` decodes the tensor of a shard."""

    __slots__ = ("_read_local", "_shards_left")

    def __init__(self, read_local: Callable[[str, tuple[Inert, ...]], LocalTensor]) -> None:
        self._read_local = read_local
        self._shards_left = _MAX_SHARDS

    def decode(self, shape: tuple[int, ...], dtype: DType, state: Inert) -> ShardedTensor:
        """The ShardedTensor of global `shape` with the inert `state`.

        Raises:
            MalformedError: it is not as torch writes it, or a shard leaves the tensor or its record.
        """
        if state.__class__ is not tuple or len(state) != _NUM_STATE_PARTS:
            raise MalformedError("its state is not that of a ShardedTensor")
        # The sharding spec is left aside: the metadata say the same in full.
        shards, metadata, group, _, _ = state
        meta = fields.state(fields.instance(metadata, _METADATA, "metadata"))
        if fields.naturals(meta.get("size"), "size") != shape:
            raise MalformedError(f"its global shape is {shape}, but its metadata say otherwise")
        saved_by = fields.state(fields.instance(group, _GROUP, "process group"))
        return ShardedTensor(
            shape=shape,
            dtype=dtype,
            cut=self._cut(meta.get("shards_metadata"), shape),
            shards=tuple(self._local_shard(shard, shape) for shard in self._listed(shards)),
            rank=fields.natural(saved_by.get("global_rank"), "rank"),
            world_size=fields.natural(saved_by.get("global_world_size"), "world size"),
        )

    def _cut(self, value: Inert, shape: tuple[int, ...]) -> Cut:
        metadata = [fields.state(fields.instance(item, _SHARD_METADATA, "shard")) for item in self._listed(value)]
        return shared_cut(
            tuple(_rectangle(item, shape) for item in metadata),
            tuple(_rank(item.get("placement")) for item in metadata),
        )

    def _local_shard(self, value: Inert, shape: tuple[int, ...]) -> LocalShard:
        state = fields.state(fields.instance(value, _SHARD, "local shard"))
        tensor = state.get("tensor")
        if not is_local(tensor):
            raise MalformedError(f"the tensor of its local shard is {fields.shown(tensor)}")
        metadata = fields.state(fields.instance(state.get("metadata"), _SHARD_METADATA, "local shard's metadata"))
        offsets, sizes = _rectangle(metadata, shape)
        return LocalShard(offsets, sizes, self._read_local(tensor.func, tensor.args))

    def _listed(self, value: Inert) -> list[Inert]:
        if value.__class__ is not list:
            raise MalformedError(f"its shards are {fields.shown(value)}")
        self._shards_left -= len(value)
        if self._shards_left < 0:
            raise MalformedError(f"has more shards than any run has ranks: the file lists over {_MAX_SHARDS:,}")
        found: list[Inert] = value
        return found


def _rectangle(metadata: dict[str, Inert], shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    offsets = fields.naturals(metadata.get("shard_offsets"), "shard offsets")
    sizes = fields.naturals(metadata.get("shard_sizes"), "shard sizes")
    # An empty shard lies where the next one would begin, which may be beyond the end.
    if not len(offsets) == len(sizes) == len(shape) or (
        0 not in sizes and any(offset + size > full for offset, size, full in zip(offsets, sizes, shape, strict=True))
    ):
        raise MalformedError(f"its shard at {offsets} of shape {sizes} leaves the tensor of shape {shape}")
    return offsets, sizes


def _rank(placement: Inert) -> int | None:
    """The rank in a placement such as "rank:3/cuda:1"; None where it names a worker of an RPC group, or nothing."""
    if placement is None:
        return None
    device: Instance = fields.instance(placement, _REMOTE_DEVICE, "shard's placement")
    rank = fields.state(device).get("_rank")
    return None if rank is None else fields.natural(rank, "shard's rank")


# Tensors of one shape are cut alike, on every rank that reads them: one object for all of them.
shared_cut = lru_cache(maxsize=1 << 14)(Cut)
