"""Block calls are equal if they compute the same; then one of them stands for all."""

from collections.abc import Callable

import torch
from torch import nn

import meshwright
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.blocks.block_forward_backward import ForwardDriver
from meshwright.model.blocks.recorded_block_calls import EqualBlocksOnce, MadeTensors, RecordedBlockCalls
from meshwright.model.recording.model_operations import block_operations
from tests.model.two_block_model import Net

IDS = {"input_ids": torch.tensor([[1, 2, 3, 4]] * 6), "labels": torch.tensor([[2, 3, 4, 5]] * 6)}


class Scaled(nn.Module):
    """Multiplies by a number, and may know its place in the model."""

    def __init__(self, scale: float = 2.0, layer_idx: int = 0) -> None:
        super().__init__()
        self.proj, self.scale, self.layer_idx = nn.Linear(8, 8), scale, layer_idx

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(x) * self.scale


class Branching(Scaled):
    """Computes something else by its place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.layer_idx else super().forward(x.tanh())


class Keeping(Scaled):
    """Keeps a tensor that the next block reads."""

    kept: list[torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x + self.kept.pop() if self.kept else x
        self.kept.append(x.detach() * 2)
        return super().forward(total)


def analyze(block: Callable[[int], nn.Module]) -> AnalyzedModel:
    numbers = iter(range(100))

    def build() -> meshwright.Model:
        net = Net(lambda: block(next(numbers) % 2))
        return meshwright.Model(net, blocks=["layers.0", "layers.1"])

    return meshwright.analyze(build, IDS, loss=meshwright.token_cross_entropy())


def test_blocks_that_differ_by_their_number_are_equal():
    assert analyze(lambda number: Scaled(layer_idx=number)).equal_block_calls == {"layers.1": "layers.0"}


def test_blocks_with_other_constants_or_other_code_are_not_equal():
    assert not analyze(lambda number: Scaled(2.0 + number)).equal_block_calls
    assert not analyze(lambda number: Branching(layer_idx=number)).equal_block_calls


def test_a_block_that_keeps_tensors_for_others_equals_none():
    kept: list[torch.Tensor] = []

    def block(number: int) -> nn.Module:
        kept.clear()
        made = Keeping(layer_idx=number)
        made.kept = kept
        return made

    assert not analyze(block).equal_block_calls


def test_of_equal_blocks_one_runs_and_the_other_gets_outputs_like_its_own():
    module, ran, repeated = Net(Scaled), list[int](), list[tuple[str, str]]()
    blocks = {name: module.get_submodule(name) for name in ("layers.0", "layers.1")}
    for number, block in enumerate(blocks.values()):
        block.get_submodule("proj").register_forward_hook(lambda *args, number=number: ran.append(number))
    driver = ForwardDriver(blocks)
    once = EqualBlocksOnce({"layers.1": "layers.0"}, lambda *names: repeated.append(names))
    with driver.use_interceptor(once):
        outputs, _, _ = driver.forward(lambda block_call: None, lambda: module(IDS["input_ids"]))
    driver.detach()
    assert ran == [0]
    assert once.repeated == {"layers.1"}
    assert repeated == [("layers.1", "layers.0")]
    assert outputs.shape == (6, 4, 11)
    assert outputs.requires_grad


def test_inputs_are_like_the_recorded_ones_and_those_of_other_blocks_are_their_outputs():
    analyzed = analyze(lambda number: Scaled(2.0 + number))
    recording, module = analyzed.record_forward(), Net(Scaled)
    blocks = {name: module.get_submodule(name) for name in recording.blocks}
    found = RecordedBlockCalls.read(recording, block_operations(recording), blocks)
    made, first, second = MadeTensors(), found.calls["layers.0"], found.calls["layers.1"]
    (given,), _ = first.make_inputs(made)
    assert (given.shape, given.requires_grad) == (torch.Size([3, 4, 8]), True)
    outputs = blocks["layers.0"](given)
    made.add_outputs(first.outputs, outputs)
    (passed_on,), _ = second.make_inputs(made)
    assert passed_on is outputs


def test_a_model_may_write_in_place_into_what_equal_blocks_return():
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout())]
    loss = meshwright.Loss(total=lambda outputs, batch: outputs.square().sum(), count=lambda batch: 4)
    analyzed = meshwright.analyze(nn.Sequential(*layers), {"input": torch.zeros(2, 4)}, loss=loss)
    assert analyzed.model_spec.block_calls == ("0", "3", "6")
    assert analyzed.model_spec.writes_in_place
