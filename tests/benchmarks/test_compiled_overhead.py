"""Both sides of each row take what the row passes, and compile what they run."""

import inspect

import pytest
from torch import nn

from benchmarks import compiled_overhead
from benchmarks.compiled_overhead import ROWS
from benchmarks.models.llama_steps import WORKLOADS, compile_layers


@pytest.mark.parametrize("name", ROWS)
def test_both_sides_take_the_arguments_of_their_row(name: str):
    row = ROWS[name]
    store = {"store": ""} if row.num_ranks > 1 else {}
    for build, own in ((row.ours, row.of_ours), (row.peer, {})):
        bound = inspect.signature(build).bind(0, row.num_ranks, **store, **row.arguments, **own)
        assert bound.arguments.get("compiled", False) == (name != "toy")


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_each_layer_is_compiled():
    model = compile_layers(WORKLOADS["toy"].model())
    layers = list(model.get_submodule("model.layers").children())
    assert len(layers) == WORKLOADS["toy"].layers
    assert all(isinstance(each, nn.Module) and each._compiled_call_impl is not None for each in layers)
    assert model._compiled_call_impl is None


def test_a_row_compares_our_step_with_that_of_the_peer():
    window = compiled_overhead.Window(2, 2, warmup=0, threshold=99.0, window_s=0.0)
    row = compiled_overhead.Row(one_step, one_step, 1.0, {"number": 7}, num_ranks=1, window=window)
    rounds, cpu, wall = row.measured()
    assert [costs["ours"].notes for costs in rounds.clean] == [(7,), (7,)]
    assert (cpu.name, cpu.base, wall.bar) == ("ours", "peer", 1.0)


def one_step(rank: int, size: int, number: int):
    """A step of a rank that is alone."""
    assert (rank, size) == (0, 1)
    return lambda: number
