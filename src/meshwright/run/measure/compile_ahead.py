"""Compiles the graphs of a plan's blocks into the cache folder of torch.compile, before a run.

    plan --compile   fake forward of one rank of each role -> graphs -> backend -> cache folder
    train            forward of every rank -> graphs -> found in the folder, and loaded

A large job waits for the compiler once, on one host without its peers, and not on all of them at its start.
Ranks on other hosts need the same folder (TORCHINDUCTOR_CACHE_DIR on a shared file system, or a copy of it),
and the same device, torch and compiler: torch compiles anew where something differs.

Parameters have no memory here, whatever the size of the model; on a GPU, kernels are compiled for the current
one. Compiled are the graphs of a training step, forward and backward, and those of an evaluation if the plan
has one; of inputs as long as the example.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import fx

from meshwright.engine.runtime.build_module import make_trained_module
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import Loss
from meshwright.parallel.memory.block_compiler import LOCATION
from meshwright.parallel.memory.compiled_blocks import CompiledBlocks
from meshwright.plan.compiled_graphs import GraphAhead
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.message_trace import lone_executor, rank_batch


def compile_ahead(analyzed: AnalyzedModel, plan: Plan, loss: Loss, device: torch.device) -> list[GraphAhead]:
    """Returns the graphs of `plan` that are now in the cache folder, those of the first rank of each role.

    Raises PlanError for a plan that compiles no block, or not by Inductor, the backend with a cache; and for
    a model whose forward reads values of parameters, which have none here.
    """
    compiled = [each for each in plan.strategies if isinstance(each, CompiledBlocks)]
    if not any(each.has_cache for each in compiled):
        why = f"the backend '{compiled[0].backend}' keeps nothing" if compiled else "it compiles no block"
        text = f"nothing of this plan can be compiled before a run: {why}"
        fix = 'add the strategy "compile", with its default backend, or leave --compile out'
        raise PlanError(text, fix=fix, location=LOCATION)
    dtype, found = getattr(torch, plan.job.precision.parameters), dict[object, GraphAhead]()
    make = partial(make_trained_module, analyzed, device, dtype)
    for role in plan.program.roles:
        rank = role.ranks[0]
        strategies = tuple(_compiled_ahead(each, rank, found) for each in plan.strategies)
        ahead = plan.with_strategies(strategies, plan.micro_batch)
        batch = rank_batch(analyzed.example, plan, rank)
        with lone_executor(ahead, rank, loss, make, compiles=True, device=device) as executor:
            executor.run_forwards(batch)
            if plan.job.evaluate.is_enabled:
                executor.run_evaluation_forwards(batch)
    return list(found.values())


@dataclass(frozen=True)
class _BlocksCompiledAhead(CompiledBlocks):
    """Blocks of `rank` whose graphs are compiled, and run as they were traced: no kernel runs on fakes.

    They are added to `found`, by rank and what is compiled: a guard may fail on fakes that holds in a run,
    and the same graph come again.
    """

    rank: int = 0
    found: dict[object, GraphAhead] = field(default_factory=dict, hash=False, compare=False)

    def make_backend(self) -> Callable[..., Any]:
        return partial(self._compile, super().make_backend())

    def _compile(
        self, compile_graph: Callable[..., Any], graph: fx.GraphModule, inputs: Sequence[Any]
    ) -> Any:
        key = self.rank, torch.is_grad_enabled(), graph.code, *map(_describe_input, inputs)
        if key not in self.found:
            begun, misses = perf_counter(), _num_misses()
            compile_graph(graph, inputs)
            self.found[key] = GraphAhead(self.rank, perf_counter() - begun, _num_misses() == misses)
        return graph.forward


def _describe_input(value: Any) -> object:
    """Returns what a compiled graph depends on of one input: its type and sizes, not its values."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    return value.dtype, str(value.shape), str(value.stride()), value.requires_grad


def _num_misses() -> int:
    counters = torch._dynamo.utils.counters["inductor"]  # torch replaces it
    return counters["fxgraph_cache_miss"] + counters["fxgraph_cache_bypass"]


def _compiled_ahead(strategy: Strategy, rank: int, found: dict[object, GraphAhead]) -> Strategy:
    if not isinstance(strategy, CompiledBlocks):
        return strategy
    given = {each.name: vars(strategy)[each.name] for each in fields(CompiledBlocks)}
    return _BlocksCompiledAhead(**given, rank=rank, found=found)
