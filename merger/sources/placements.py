"""The placements of a DTensor, and the order in which mesh axes cut it, from the inert records of its spec."""

from __future__ import annotations

from functools import lru_cache

from merger.sharding import Placement
from merger.sources import fields
from merger.sources.fields import MalformedError
from merger.sources.inert import Inert, Instance

_MODULES = ("torch.distributed._tensor.placement_types", "torch.distributed.tensor.placement_types")
_SHARD_ORDER_ENTRY = frozenset({"torch.distributed.tensor._dtensor_spec.ShardOrderEntry"})
_REPLICATE = Placement("replicate")
# There are a handful of different placements in a checkpoint, and thousands of tensors with them.
_shared = lru_cache(maxsize=1024)(Placement)


def decode_shard_order(value: Inert) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """Pairs of tensor dim and the mesh axes that cut it, in this order; None where it is not recorded."""
    if value is None:
        return None
    if value.__class__ is not tuple and value.__class__ is not list:
        raise MalformedError(f"its shard order is {fields.shown(value)}")
    pairs = []
    for item in value:
        args = fields.instance(item, _SHARD_ORDER_ENTRY, "shard order").args
        if len(args) != 2:  # noqa: PLR2004  tensor dim, mesh axes
            raise MalformedError("its shard order has an entry that is no pair")
        pairs.append((fields.natural(args[0], "shard order"), fields.naturals(args[1], "shard order")))
    return tuple(pairs)


def decode_placements(value: Inert, num_dims: int) -> tuple[Placement, ...]:
    """The placements of a tensor of `num_dims`, one per mesh axis."""
    if value.__class__ is not tuple and value.__class__ is not list:
        raise MalformedError(f"its placements are {fields.shown(value)}")
    return tuple(_placement(item, num_dims) for item in value)


def _placement(value: Inert, num_dims: int) -> Placement:
    module, _, name = value.cls.rpartition(".") if value.__class__ is Instance else ("", "", "")
    if module not in _MODULES or name not in ("Shard", "_StridedShard", "Replicate", "Partial"):
        raise MalformedError(f"one of its placements is {fields.shown(value)}")
    if name == "Replicate":
        return _REPLICATE
    state = fields.state(value)
    if name == "Partial":
        return _shared("partial", None, None, fields.text(state.get("reduce_op"), "reduction"))
    dim = state.get("dim")
    if dim.__class__ is not int or not -num_dims <= dim < num_dims:
        raise MalformedError(f"it is sharded on dim {fields.shown(dim)} of {num_dims}")
    if name == "Shard":
        return _shared("shard", dim % num_dims, None, None)
    factor = fields.natural(state.get("split_factor"), "split factor")
    if factor == 0:
        raise MalformedError("its split factor is 0")
    return _shared("strided_shard", dim % num_dims, factor, None)
