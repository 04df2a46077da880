"""What the pickled tensor classes of torch 2.4 to 2.15 mean: where a rank's bytes lie, and which part of what they are.

From the inert records of the unpickler to typed ones. No tensor data is read, only the ranks of meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from merger.dtypes import DType
from merger.sharding import Mesh, Placement
from merger.sources import fields
from merger.sources.device_mesh import SavedMesh, decode_mesh
from merger.sources.fields import MalformedError
from merger.sources.inert import TENSOR_CALLS, Call, Global, Inert, Instance
from merger.sources.local_tensor import REBUILD, LocalTensor, LocalTensors, is_local
from merger.sources.placements import decode_placements, decode_shard_order
from merger.sources.plain import PlainValues
from merger.sources.sharded_tensor import ShardedTensor, ShardedTensorDecoder
from merger.tensors import Record

_SPEC = frozenset(
    {
        "torch.distributed._tensor.placement_types.DTensorSpec",
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    }
)
_TENSOR_META = frozenset(
    {
        "torch.distributed._tensor.placement_types.TensorMeta",
        "torch.distributed.tensor._dtensor_spec.TensorMeta",
    }
)
_DTENSOR = frozenset({"torch.distributed._tensor.api.DTensor", "torch.distributed.tensor.DTensor"})
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_PLAIN_TYPES = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})

_REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
_REBUILD_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_REBUILD_TYPE = "torch._tensor._rebuild_from_type_v2"

# The ranks of a million as int64; what is read of a file as integers is never more.
_MAX_MESH_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor that is no DTensor: a full copy on every rank that has it."""

    local: LocalTensor


@dataclass(frozen=True, slots=True)
class DTensor:
    """The piece `local` of a global tensor of `shape`, by `placements` over the axes of `mesh`.

    `rank` saved it, None where that is not recorded. `shard_order` has one pair (tensor dim, mesh axes) per sharded
    dim, None where it is not recorded (up to torch 2.9, or where strided shards say it).
    """

    local: LocalTensor
    shape: tuple[int, ...]
    dtype: DType
    mesh: Mesh
    placements: tuple[Placement, ...]
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] | None
    rank: int | None


class Decoder:
    """Turns the inert entries of one file into typed ones; keeps the meshes, which repeat.

    `records` by name ("data/3"); `read_record` returns the checked bytes of a small one; `file_rank` is the rank in the
    file's name, used only where the pickle does not say which rank saved it.
    """

    __slots__ = ("_file_rank", "_local", "_meshes", "_plain", "_read_record", "_sharded_tensors")

    def __init__(
        self, records: Mapping[str, Record], *, read_record: Callable[[Record], bytes], file_rank: int | None
    ) -> None:
        self._read_record = read_record
        self._file_rank = file_rank
        # By the id of inert records, which live as long as the pickle's value does.
        self._meshes: dict[int, SavedMesh] = {}
        self._plain = PlainValues()
        self._local = LocalTensors(records).decode
        self._sharded_tensors = ShardedTensorDecoder(self._local)

    def entry(self, value: Inert) -> object:
        """The typed form of one entry of a state dict: a tensor of one of the classes above, or a plain Python value.

        Raises:
            MalformedError: it is not as torch writes it, or does not fit into its record.
        """
        if value.__class__ is Call and value.func == _REBUILD_PARAMETER:
            value = value.args[0] if value.args else None
            if value.__class__ is not Call or value.func not in TENSOR_CALLS:
                raise MalformedError("is a Parameter without a tensor")
        if value.__class__ is not Call or value.func not in TENSOR_CALLS:
            return self._plain.decode(value)
        if value.func in REBUILD:
            return PlainTensor(self._local(value.func, value.args))
        if value.func != _REBUILD_TYPE or len(value.args) != 4:  # noqa: PLR2004  function, class, arguments, state
            raise MalformedError("is not made as torch makes tensors")
        func, cls, args, state = value.args
        if func.__class__ is not Global or cls.__class__ is not Global or args.__class__ is not tuple:
            raise MalformedError("is not made as torch makes tensors")
        if func.name in REBUILD and cls.name in _PLAIN_TYPES:
            return PlainTensor(self._local(func.name, args))
        if func.name == _REBUILD_WRAPPER and cls.name in _DTENSOR:
            return self._dtensor(args, state)
        if func.name == _REBUILD_WRAPPER and cls.name == _SHARDED_TENSOR:
            return self._sharded_tensor(args, state)
        raise MalformedError(f"is a {cls.name} made by {func.name}")

    def _dtensor(self, args: tuple[Inert, ...], state: Inert) -> DTensor:
        shape, dtype = _wrapper(args)
        holder = Instance("torch.distributed.tensor.DTensor", ())
        holder.state = state
        attributes = fields.state(holder)
        local = attributes.get("_local_tensor")
        if not is_local(local):
            raise MalformedError(f"its local tensor is {fields.shown(local)}")
        spec = fields.state(fields.instance(attributes.get("_spec"), _SPEC, "spec"))
        meta = spec.get("tensor_meta")
        if meta is not None and fields.instance(meta, _TENSOR_META, "tensor meta").args[:1] != (shape,):
            raise MalformedError(f"its global shape is {shape}, but its spec says otherwise")
        saved = self._mesh(spec.get("mesh"))
        placements = decode_placements(spec.get("placements"), len(shape))
        if len(placements) != len(saved.mesh.shape):
            raise MalformedError(f"it has {len(placements)} placements on a mesh of {len(saved.mesh.shape)} axes")
        return DTensor(
            local=self._local(local.func, local.args),
            shape=shape,
            dtype=dtype,
            mesh=saved.mesh,
            placements=placements,
            shard_order=decode_shard_order(spec.get("shard_order")),
            rank=saved.rank,
        )

    def _mesh(self, value: Inert) -> SavedMesh:
        found = self._meshes.get(id(value))
        if found is None:
            found = self._meshes[id(value)] = decode_mesh(value, self._read_ints, self._file_rank)
        return found

    def _sharded_tensor(self, args: tuple[Inert, ...], state: Inert) -> ShardedTensor:
        shape, dtype = _wrapper(args)
        return self._sharded_tensors.decode(shape, dtype, state)

    def _read_ints(self, value: Inert) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and values, in row-major order, of a small tensor of integers: the only data that is read."""
        if not is_local(value):
            raise MalformedError(f"the ranks of its mesh are {fields.shown(value)}")
        local = self._local(value.func, value.args)
        if local.dtype.name not in ("int32", "int64") or local.record.num_bytes > _MAX_MESH_BYTES:
            raise MalformedError(f"the ranks of its mesh are {local.record.num_bytes} bytes of {local.dtype}")
        size = local.dtype.itemsize
        if prod(local.sizes) * size > local.record.num_bytes:
            raise MalformedError("its mesh holds a rank twice")
        data = self._read_record(local.record)
        positions = [local.byte_offset - local.record.byte_offset]
        for n, stride in zip(local.sizes, local.strides, strict=True):
            positions = [start + i * stride * size for start in positions for i in range(n)]
        values = tuple(int.from_bytes(data[at : at + size], "little", signed=True) for at in positions)
        return local.sizes, fields.naturals(values, "mesh")


def _wrapper(args: tuple[Inert, ...]) -> tuple[tuple[int, ...], DType]:
    """Global shape and element type, from the arguments (class, dtype, size, stride, offset, ...) of the wrapper."""
    if len(args) < 4 or args[1].__class__ is not Global or args[1].dtype is None:  # noqa: PLR2004
        raise MalformedError("is not made as torch makes tensors")
    return fields.naturals(args[2], "global shape"), args[1].dtype
