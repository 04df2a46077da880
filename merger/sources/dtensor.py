"""What the pickled tensor classes of torch 2.4 to 2.14 mean: where a rank's bytes lie, and which part of what they are.

From the inert records of the unpickler to typed ones. Every size, stride and offset is checked against the record it
points into, so that nothing after this can read outside of it. No tensor data is read, only the ranks of meshes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from sys import intern

from merger.dtypes import DType
from merger.sharding import Mesh, Placement
from merger.sources import fields
from merger.sources.device_mesh import SavedMesh, decode_mesh
from merger.sources.fields import MalformedError
from merger.sources.inert import TENSOR_CALLS, Call, Global, Inert, Instance, StorageRef
from merger.sources.placements import decode_placements, decode_shard_order
from merger.sources.plain import PlainValues
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

_REBUILD = frozenset({"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"})
_REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
_REBUILD_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_REBUILD_TYPE = "torch._tensor._rebuild_from_type_v2"

# The ranks of a million as int64; what is read of a file as integers is never more.
_MAX_MESH_BYTES = 8 << 20
# torch allows 64 dims in a view, and no model comes near it.
_MAX_DIMS = 64


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """The tensor that one rank holds: `sizes` and `strides` in elements, and where the first of them lies.

    `byte_offset` is from the start of the file. All elements lie within `record`; an empty tensor may lie in a record
    of no bytes, or of padding. `device` is where the tensor was when it was saved.
    """

    dtype: DType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    record: Record
    byte_offset: int
    device: str


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor that is no DTensor: a full copy on every rank that has it."""

    local: LocalTensor


@dataclass(frozen=True, slots=True)
class DTensor:
    """The piece `local` of a global tensor of `shape`, by `placements` over the axes of `mesh`.

    `rank` saved it and lies at `coordinate` of the mesh, None where that is not recorded. `shard_order` has one pair
    (tensor dim, mesh axes) per sharded dim, None where it is not recorded (up to torch 2.9, or where strided shards
    say it). `strided_as_shard_order` says that `strided_shard` placements stand for a shard order (from torch 2.13).
    """

    local: LocalTensor
    shape: tuple[int, ...]
    dtype: DType
    mesh: Mesh
    placements: tuple[Placement, ...]
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] | None
    rank: int | None
    coordinate: tuple[int, ...] | None
    strided_as_shard_order: bool


@dataclass(frozen=True, slots=True)
class ShardedTensorEntry:
    """A ShardedTensor (FSDP1 without a mesh), of which only the outline is read so far."""

    shape: tuple[int, ...]
    dtype: DType


class Decoder:
    """Turns the inert entries of one file into typed ones; keeps the meshes, which repeat.

    `records` by name ("data/3"); `read_record` returns the checked bytes of a small one; `file_rank` is the rank in the
    file's name, used only where the pickle does not say which rank saved it.
    """

    __slots__ = ("_file_rank", "_meshes", "_plain", "_read_record", "_records")

    def __init__(
        self, records: dict[str, Record], *, read_record: Callable[[Record], bytes], file_rank: int | None
    ) -> None:
        self._records = records
        self._read_record = read_record
        self._file_rank = file_rank
        # By the id of inert records, which live as long as the pickle's value does.
        self._meshes: dict[int, SavedMesh] = {}
        self._plain = PlainValues()

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
        if value.func in _REBUILD:
            return PlainTensor(self._local(value.func, value.args))
        if value.func != _REBUILD_TYPE or len(value.args) != 4:  # noqa: PLR2004  function, class, arguments, state
            raise MalformedError("is not made as torch makes tensors")
        func, cls, args, state = value.args
        if func.__class__ is not Global or cls.__class__ is not Global or args.__class__ is not tuple:
            raise MalformedError("is not made as torch makes tensors")
        if func.name in _REBUILD and cls.name in _PLAIN_TYPES:
            return PlainTensor(self._local(func.name, args))
        if func.name == _REBUILD_WRAPPER and cls.name in _DTENSOR:
            return self._dtensor(args, state)
        if func.name == _REBUILD_WRAPPER and cls.name == _SHARDED_TENSOR:
            shape, dtype = _wrapper(args)
            return ShardedTensorEntry(shape, dtype)
        raise MalformedError(f"is a {cls.name} made by {func.name}")

    def _dtensor(self, args: tuple[Inert, ...], state: Inert) -> DTensor:
        shape, dtype = _wrapper(args)
        holder = Instance("torch.distributed.tensor.DTensor", ())
        holder.state = state
        attributes = fields.state(holder)
        local = attributes.get("_local_tensor")
        if local.__class__ is not Call or local.func not in _REBUILD:
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
            coordinate=saved.coordinate,
            strided_as_shard_order=spec.get("use_strided_shard_as_shard_order") is True,
        )

    def _mesh(self, value: Inert) -> SavedMesh:
        found = self._meshes.get(id(value))
        if found is None:
            found = self._meshes[id(value)] = decode_mesh(value, self._read_ints, self._file_rank)
        return found

    def _local(self, func: str, args: tuple[Inert, ...]) -> LocalTensor:
        """Source: torch/_utils.py, `_rebuild_tensor_v2` and `_v3`."""
        own_dtype = func.endswith("_v3")
        num_args = 7 if own_dtype else 6
        if not num_args <= len(args) <= num_args + 1 or args[0].__class__ is not StorageRef:
            raise MalformedError("is not made as torch makes tensors")
        # The optional last argument says that the values are to be conjugated or negated on reading.
        if len(args) > num_args and args[num_args]:
            raise MalformedError("is a lazily conjugated or negated view; save it with .resolve_conj().resolve_neg()")
        storage: StorageRef = args[0]
        dtype = args[6].dtype if own_dtype and args[6].__class__ is Global else storage.dtype
        if dtype is None:
            raise MalformedError("has no element type")
        record = self._records.get(f"data/{storage.key}")
        if record is None:
            raise MalformedError(f"its storage data/{storage.key} is not in the file")
        num_bytes = storage.num_elements * (storage.dtype.itemsize if storage.dtype else 1)
        if num_bytes > record.num_bytes:
            raise MalformedError(f"its storage claims {num_bytes} bytes, {record.name} has {record.num_bytes}")
        offset = fields.natural(args[1], "storage offset")
        sizes = fields.naturals(args[2], "shape")
        strides = fields.naturals(args[3], "stride")
        _check_bounds(sizes, strides, offset, num_bytes // dtype.itemsize)
        # The same integer object where it can be: half a million of these are kept for a large checkpoint.
        byte_offset = record.byte_offset + offset * dtype.itemsize if offset else record.byte_offset
        return LocalTensor(dtype, sizes, strides, record, byte_offset, intern(storage.location))

    def _read_ints(self, value: Inert) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and values, in row-major order, of a small tensor of integers: the only data that is read."""
        if value.__class__ is not Call or value.func not in _REBUILD:
            raise MalformedError(f"the ranks of its mesh are {fields.shown(value)}")
        local = self._local(value.func, value.args)
        if local.dtype.name not in ("int32", "int64") or local.record.num_bytes > _MAX_MESH_BYTES:
            raise MalformedError(f"the ranks of its mesh are {local.record.num_bytes} bytes of {local.dtype}")
        data = self._read_record(local.record)
        size = local.dtype.itemsize
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


def _check_bounds(sizes: tuple[int, ...], strides: tuple[int, ...], offset: int, num_elements: int) -> None:
    """That all elements of a tensor lie in a storage of `num_elements`, and are not more than these."""
    if len(sizes) != len(strides) or len(sizes) > _MAX_DIMS:
        raise MalformedError(f"it has {len(sizes)} sizes and {len(strides)} strides")
    empty = 0 in sizes
    last = offset - 1 if empty else offset + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    if last >= num_elements:
        raise MalformedError(
            f"its shape {sizes}, stride {strides} and offset {offset} leave its storage of {num_elements} elements"
        )
    if not empty and prod(sizes) > num_elements:
        raise MalformedError(
            f"its shape {sizes} has more elements than its storage of {num_elements}; if it is an expanded view, save "
            "it with .contiguous()"
        )
