"""The table of element types, against torch and against the installed safetensors."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save
from torch.storage import _dtype_to_storage_type_map

from merger.dtypes import BY_NAME, BY_SAFETENSORS, BY_STORAGE, DType

ALL = [pytest.param(dtype, id=dtype.name) for dtype in BY_NAME.values()]


def torch_dtype(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.name)
    assert isinstance(found, torch.dtype)
    return found


@pytest.mark.parametrize("dtype", ALL)
def test_name_and_size_are_those_of_torch(dtype: DType) -> None:
    assert torch_dtype(dtype).itemsize == dtype.itemsize
    assert str(torch_dtype(dtype)) == f"torch.{dtype}"


@pytest.mark.parametrize("dtype", ALL)
def test_floating_is_what_torch_calls_floating(dtype: DType) -> None:
    assert dtype.is_floating == torch_dtype(dtype).is_floating_point


@pytest.mark.parametrize("dtype", ALL)
def test_the_storage_class_is_the_one_that_torch_pickles(dtype: DType) -> None:
    assert _dtype_to_storage_type_map().get(torch_dtype(dtype)) == dtype.storage


@pytest.mark.parametrize("dtype", ALL)
def test_the_safetensors_tag_is_the_one_that_safetensors_writes(dtype: DType) -> None:
    tensor = torch.empty(2, dtype=torch_dtype(dtype))
    if dtype.safetensors is None:
        with pytest.raises(KeyError, match=dtype.name):
            save({"x": tensor})
        return
    data = save({"x": tensor})
    length = int.from_bytes(data[:8], "little")
    assert json.loads(data[8 : 8 + length])["x"]["dtype"] == dtype.safetensors


def test_every_type_that_torch_pickles_by_a_storage_class_is_there_but_quantised_ones() -> None:
    named = {
        str(dtype).removeprefix("torch.")
        for dtype in _dtype_to_storage_type_map()
        if not str(dtype).startswith(("torch.q", "torch.quint"))
    }
    assert named <= set(BY_NAME)


def test_every_key_of_an_index_leads_to_its_type() -> None:
    assert BY_NAME["bfloat16"] is BY_STORAGE["BFloat16Storage"] is BY_SAFETENSORS["BF16"]
    assert len(BY_NAME) == 20
    assert len(BY_STORAGE) == 12
    assert len(BY_SAFETENSORS) == 19
