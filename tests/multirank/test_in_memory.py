"""From the hub back into memory: what `save_pretrained` wrote, as the model has it. S19."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from fixtures import architectures
from merger.huggingface.expected import expected_architecture
from merger.huggingface.in_memory import in_memory
from merger.reading import SourceReader, read_bands
from merger.sources import read_reference
from tests.unit.stored import elements


@pytest.mark.parametrize("name", architectures.available())
def test_each_tensor_in_memory_is_made_of_those_on_the_hub(name: str, tmp_path: Path) -> None:
    model = architectures.build(name)
    model.save_pretrained(tmp_path)
    architecture = expected_architecture(tmp_path)
    if architecture.hub is None:
        pytest.skip("is the same on the hub")
    saved = read_reference(tmp_path).tensors
    found = in_memory(architecture.hub, architecture.shapes, saved)
    state = model.state_dict()
    assert len(load_file(tmp_path / "model.safetensors")) == len(saved)
    # Aliases of ties are not written, and buffers may not be.
    missing = state.keys() - found.keys()
    assert missing <= {alias for _, *aliases in architecture.ties for alias in aliases}
    with SourceReader() as reader:
        for key, tensor in found.items():
            assert tensor.shape == tuple(state[key].shape), key
            data = b"".join(band.tobytes() for _, band in read_bands(reader, tensor, 1 << 20))
            assert data == elements(state[key]).tobytes(), key
