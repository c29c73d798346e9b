"""What is stored of a model is known before any value is read: names, shapes and dtypes."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from meshwright.model.loading.deferred_init import defer_init
from meshwright.model.loading.safetensors_reader import SINGLE_FILE
from meshwright.run.export.stored_tensors import StoredTensors
from tests.model.published_models import load_published, published
from tests.run.export.test_hf_export import TiedNet


def test_names_shapes_and_order_are_those_of_the_values_that_are_converted(tmp_path: Path):
    published(tmp_path, "mixtral")
    deferred_init, asked = load_published(tmp_path).deferred_init, []

    def read_dtype(name: str) -> torch.dtype:
        asked.append(name)
        return torch.float32

    stored = StoredTensors.of_model(deferred_init, read_dtype, torch.bfloat16)
    assert len(asked) == 1  # all floating-point parameters have the dtype of the first, or the given one
    described = stored.without_values()
    theirs = load_file(tmp_path / SINGLE_FILE)
    assert {name: tuple(each.shape) for name, each in described.items()} == {
        name: tuple(each.shape) for name, each in theirs.items()
    }
    made = dict[str, torch.Tensor]()
    for conversion in stored.conversions:
        made |= stored.convert(conversion, deferred_init.initial_value)
    assert list(made) == list(described)
    assert {each.dtype for each in (*described.values(), *made.values())} == {torch.bfloat16}


def test_a_tie_is_stored_once_and_buffers_keep_their_dtype():
    stored = StoredTensors.of_model(defer_init(TiedNet, 0), lambda name: torch.float32, torch.bfloat16)
    dtypes = {name: each.dtype for name, each in stored.without_values().items()}
    assert "head.weight" not in dtypes
    assert dtypes["embed.weight"] == torch.bfloat16
    assert dtypes["norm.running_mean"] == torch.float32
    assert dtypes["norm.num_batches_tracked"] == torch.int64
