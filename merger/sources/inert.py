"""What a pickle of `torch.save` may name, and the inert records that stand for it.

Nothing here is ever called or instantiated on behalf of a file: a known global becomes a `Global`, a call of it a
`Call`, an object an `Instance`. A global that is not in `KNOWN` is refused by the unpickler. The list is that of the
classes which torch 2.4 to 2.15 put into state dicts (plain, DTensor and ShardedTensor); it has nothing on it that
would be dangerous even to name.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from merger.dtypes import BY_NAME, BY_STORAGE, DType

# "call": a function that may be called; "class": may be made with NEWOBJ; "type": only named, as an argument;
# "special": the unpickler knows what to do with a call of it (see unpickler._special_call).
Kind: TypeAlias = Literal["call", "class", "type", "storage", "special"]

# A value that the unpickler made: a scalar, tuple, list or dict of such values, or one of the records below.
Inert: TypeAlias = Any


class Global:
    """A name that a pickle imports. `dtype` where it stands for an element type or a typed storage."""

    __slots__ = ("dtype", "kind", "name")

    def __init__(self, name: str, kind: Kind, dtype: DType | None = None) -> None:
        self.name = name
        self.kind = kind
        self.dtype = dtype


class Call:
    """A call of the function or class `func` that was not made."""

    __slots__ = ("args", "func")

    def __init__(self, func: str, args: tuple[Inert, ...]) -> None:
        self.func = func
        self.args = args


class Instance:
    """An object of the class `cls` that was not made: the arguments of `__new__`, and the state where one was given."""

    __slots__ = ("args", "cls", "state")

    def __init__(self, cls: str, args: tuple[Inert, ...]) -> None:
        self.cls = cls
        self.args = args
        self.state: Inert = None


class StorageRef:
    """A persistent id: the storage in record `data/<key>`, of `num_elements` of `dtype` (of bytes if that is None).

    `view` is the part of it that is meant, as (offset, number of elements); None for all of it.
    """

    __slots__ = ("dtype", "key", "location", "num_elements", "view")

    def __init__(
        self, dtype: DType | None, key: str, location: str, num_elements: int, view: tuple[int, int] | None = None
    ) -> None:
        self.dtype = dtype
        self.key = key
        self.location = location
        self.num_elements = num_elements
        self.view = view


_PLACEMENTS = ("Shard", "_StridedShard", "Replicate", "Partial")
_SHARDED = "torch.distributed._shard"

_CALLS = (
    ("torch", "device"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_wrapper_subclass"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch.serialization", "_get_layout"),
    (f"{_SHARDED}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    # How protocol 2 writes a bytes object. `__builtin__` is its name for builtins.
    ("_codecs", "encode"),
    ("__builtin__", "bytes"),
    ("builtins", "bytes"),
)
_CLASSES = (
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed._mesh_layout", "_MeshLayout"),
    ("torch.distributed._mesh_layout", "_FlatLayout"),
    # torch 2.4
    ("torch.distributed._tensor.placement_types", "DTensorSpec"),
    ("torch.distributed._tensor.placement_types", "TensorMeta"),
    *(("torch.distributed._tensor.placement_types", name) for name in _PLACEMENTS),
    # from torch 2.5
    ("torch.distributed.tensor._dtensor_spec", "DTensorSpec"),
    ("torch.distributed.tensor._dtensor_spec", "TensorMeta"),
    ("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry"),
    *(("torch.distributed.tensor.placement_types", name) for name in _PLACEMENTS),
    # ShardedTensor, all versions
    (f"{_SHARDED}.metadata", "ShardMetadata"),
    (f"{_SHARDED}.sharded_tensor.shard", "Shard"),
    (f"{_SHARDED}.sharded_tensor.metadata", "ShardedTensorMetadata"),
    (f"{_SHARDED}.sharded_tensor.metadata", "TensorProperties"),
    (f"{_SHARDED}.sharded_tensor.api", "ShardedTensor.ProcessGroupState"),
    (f"{_SHARDED}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"),
    (f"{_SHARDED}.sharding_spec.api", "EnumerableShardingSpec"),
    ("torch.distributed.remote_device", "_remote_device"),
    # What `get_extra_state` of some modules returns.
    ("_io", "BytesIO"),
)
_TYPES = (
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.distributed._tensor.api", "DTensor"),
    ("torch.distributed.tensor", "DTensor"),
    (f"{_SHARDED}.sharded_tensor.api", "ShardedTensor"),
)
# `getattr` stands for nothing but the nested class ShardedTensor.ProcessGroupState, which pickle protocol 2 cannot name
# otherwise, and the members of the enum MEM_FORMAT_ENCODING, which early releases of Python 3.11 pickle so, as 3.11.2.
_SPECIALS = (
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("__builtin__", "getattr"),
    ("builtins", "getattr"),
)


def _known() -> dict[bytes, Global]:
    named: tuple[tuple[Kind, tuple[tuple[str, str], ...]], ...] = (
        ("call", _CALLS),
        ("class", _CLASSES),
        ("type", _TYPES),
        ("special", _SPECIALS),
    )
    known = {
        f"{module}\n{name}".encode(): Global(f"{module}.{name}", kind)
        for kind, names in named
        for module, name in names
    }
    for name, dtype in BY_NAME.items():
        known[f"torch\n{name}".encode()] = Global(f"torch.{name}", "type", dtype)
    for storage, dtype in BY_STORAGE.items():
        known[f"torch\n{storage}".encode()] = Global(f"torch.{storage}", "storage", dtype)
    known[b"torch.storage\nUntypedStorage"] = Global("torch.storage.UntypedStorage", "storage")
    return known


# Keyed by b"module\nname", which is what stands in the pickle.
KNOWN: dict[bytes, Global] = _known()
ORDERED_DICT = KNOWN[b"collections\nOrderedDict"]
SHARDED_TENSOR = KNOWN[f"{_SHARDED}.sharded_tensor.api\nShardedTensor".encode()]
PROCESS_GROUP_STATE = KNOWN[f"{_SHARDED}.sharded_tensor.api\nShardedTensor.ProcessGroupState".encode()]
MEM_FORMAT = KNOWN[f"{_SHARDED}.sharded_tensor.metadata\nMEM_FORMAT_ENCODING".encode()]
MEM_FORMATS = frozenset({"TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT"})
# Calls that stand for a tensor, of whatever class.
TENSOR_CALLS = frozenset(
    {
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "torch._tensor._rebuild_from_type_v2",
    }
)
