"""Saved activations of a block call: each storage counts once, and only where it was made."""

import torch
from torch import nn

from meshwright.api import analyze
from meshwright.model.blocks.saved_activations import SavedActivations
from meshwright.model.recording.forward_recording import SavedTensor
from tests.model.block_backward import Block, Chain
from tests.model.blocks.test_block_forward_backward import X
from tests.model.recording.recorded_functions import record_function


def inside_of(block, glue=None) -> dict[str, int]:
    chain = glue or (lambda model, x: model.head(model.layers[1](model.layers[0](x))))
    analyzed = analyze(lambda: Chain(chain, block), X)
    return dict(zip(analyzed.model_spec.block_calls, analyzed.model_spec.saved_numel, strict=True))


def test_what_a_block_takes_in_and_hands_on_and_its_weights_do_not_count():
    assert inside_of(None) == {
        "layers.0": 0,
        "layers.1": 0,
        "head": 0,
    }  # tanh saves what it gives, a linear what it takes


def test_what_is_saved_within_counts_once_however_often_it_is_saved():
    def block(block: Block, x: torch.Tensor) -> torch.Tensor:
        y = block.linear(x).exp()
        return y * y.view(-1, 3, 2).view(-1, 6)  # exp and the product save the same memory

    assert inside_of(block) == {"layers.0": 6, "layers.1": 6, "head": 0}


def test_a_mask_counts_by_its_bytes_and_one_that_is_given_not_at_all():
    def block(block: Block, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return block.linear(x).masked_fill(mask, 0.0).masked_fill(x.repeat(1, 4)[:, :6] > 0, 0.0)

    def glue(model: Chain, x: torch.Tensor) -> torch.Tensor:
        mask = x > 1
        return model.layers[1](model.layers[0](x, mask), mask)

    found = inside_of(block, glue)
    assert found == {"layers.0": 6 // 4, "layers.1": 6 // 4}


def test_what_two_block_calls_save_was_made_by_neither():
    def block(block: Block, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return block.linear(x).sin() + shared.sin()

    def glue(model: Chain, x: torch.Tensor) -> torch.Tensor:
        return model.layers[1](model.layers[0](x, x.exp()), x.exp())

    assert inside_of(block, glue) == {"layers.0": 6, "layers.1": 6}  # what its own sine takes


def test_kept_memory_does_not_count():
    def run() -> torch.Tensor:
        return torch.ones(7, requires_grad=True).cos().sin()

    recording = record_function(run)
    kept = [event.tensor.storage for event in recording.events if isinstance(event, SavedTensor)]
    assert len(kept) == 2
    assert SavedActivations(recording, kept[:1]).numel([""]) == [7]
    assert SavedActivations(recording, kept).numel([""]) == [0]


def test_a_module_without_blocks_is_one_block_call():
    analyzed = analyze(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), {"input": X["x"]})
    assert sum(analyzed.model_spec.saved_numel) >= 0
    assert len(analyzed.model_spec.saved_numel) == len(analyzed.model_spec.block_calls)
