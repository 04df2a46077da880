"""Compares what a planned merge would write with what lies in an output, bit for bit, in bands."""

from __future__ import annotations

from collections.abc import Callable

from merger.casting import cast_block
from merger.checkpoint import Checkpoint
from merger.checks import shape_text
from merger.comparing import element_texts, position_in
from merger.plan import OutputTensor
from merger.planning import PlannedMerge
from merger.reading import SourceReader, element_type, read_bands
from merger.tensors import StoredTensor, bands
from merger.verify import TensorComparison

# Elements compared at a time: at most 8 MB on either side, and as much again where they are cast.
_BAND_ELEMENTS = 1 << 20


def compare_all(
    planned: PlannedMerge, found: Checkpoint, progress: Callable[[int, int], None] | None
) -> list[TensorComparison]:
    """Every tensor that is planned, then those in `found` that are not; `progress` is told bytes done and in all."""
    comparisons = []
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, planned.plan.total_size)

    with SourceReader() as reader:
        for expected in planned.tensors:
            there = found.tensors.get(expected.name)
            if there is None:
                detail = f"{shape_text(expected.source.shape)}, not in the output"
                comparisons.append(TensorComparison(expected.name, "missing", None, expected.dtype.name, None, detail))
            else:
                comparisons.append(compare(reader, expected, there, count))
    names = {tensor.name for tensor in planned.tensors}
    for name, tensor in found.tensors.items():
        if name not in names:
            detail = f"{shape_text(tensor.shape)}, which the merge does not write"
            comparisons.append(TensorComparison(name, "unexpected", tensor.dtype.name, None, None, detail))
    return comparisons


def compare(
    reader: SourceReader, expected: OutputTensor, found: StoredTensor, count: Callable[[int], None]
) -> TensorComparison:
    """One tensor, equal only if every bit is; `count` is told the bytes of each band."""
    dtypes = found.dtype.name, expected.dtype.name
    shape = expected.source.shape
    if found.shape != shape:
        detail = f"shape {shape_text(found.shape)}, the merge gives {shape_text(shape)}"
        return TensorComparison(expected.name, "shape", *dtypes, None, detail)
    if found.dtype != expected.dtype:
        detail = f"is {dtypes[0]}, the merge gives {dtypes[1]}"
        return TensorComparison(expected.name, "differs", *dtypes, None, detail)
    unequal, total, first = _unequal_elements(reader, expected, found, count)
    if not unequal:
        return TensorComparison(expected.name, "equal", *dtypes, 0.0, "equal")
    detail = f"{unequal:,} of {total:,} elements differ, the first at {first}"
    return TensorComparison(expected.name, "differs", *dtypes, None, detail)


def _unequal_elements(
    reader: SourceReader, expected: OutputTensor, found: StoredTensor, count: Callable[[int], None]
) -> tuple[int, int, str]:
    """How many elements differ, of how many, and the first of them for people."""
    import numpy as np

    source, target = expected.source.dtype, expected.dtype
    elements = element_type(target.itemsize)
    unequal, total, first = 0, 0, ""
    for (offsets, sizes), (_, saved), (_, written) in zip(
        bands(found.shape, _BAND_ELEMENTS),
        read_bands(reader, expected.source, _BAND_ELEMENTS * source.itemsize),
        read_bands(reader, found, _BAND_ELEMENTS * target.itemsize),
        strict=True,
    ):
        ours = memoryview(bytearray(saved.tobytes()))
        if source != target:
            ours, _ = cast_block(ours, source, target)
        theirs = written.tobytes()
        total += written.size
        if ours != theirs:
            places = np.flatnonzero(np.frombuffer(ours, elements) != np.frombuffer(theirs, elements))
            if not unequal:
                place = int(places[0])
                span = slice(place * target.itemsize, (place + 1) * target.itemsize)
                values = element_texts(theirs[span], bytes(ours[span]), target)
                index = ", ".join(map(str, position_in(place, offsets, sizes)))
                first = f"[{index}]: {values[0]}, the merge gives {values[1]}"
            unequal += len(places)
        count(len(theirs))
    return unequal, total, first
