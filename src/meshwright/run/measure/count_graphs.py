"""Counts the graphs that torch.compile makes of the blocks of a plan, before a run: the forwards of one rank
of each role on fake tensors, in which Dynamo traces blocks and no backend compiles them.

    steps 1 to 3     the example                  graphs of a kind of block; another one in step 2 or 3 is
                                                  for what changes, such as a count kept in Python
    steps 4 and 5    sequences of other lengths   graphs for a second, and for a third length

A strategy's layers and exchanges are in place, so graphs end there as in the run. A rank has one microbatch.
Of blocks that compute the same, with the same collectives and slices of parameters, the first two and the
last one run; the others return what the second one has returned. If the last one needs a graph of its own,
all run. A role whose blocks are of the kinds of another role is not run. Backwards are not run: a block that
is recomputed runs the graph of its forward.

What the backend makes of a graph (Inductor's errors and memory) is not tried, and its seconds are estimated
by the number of operations; run/measure/compile_ahead.py compiles. A model that reads values of tensors runs
on real ones, if it is small; else its graphs are not known.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map

from meshwright.engine.runtime.build_module import make_trained_module
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import Batch, Loss
from meshwright.model.tensors.function_modes import calls_are_intercepted
from meshwright.parallel.memory import block_compiler
from meshwright.parallel.memory.block_compiler import NEW_BRANCH
from meshwright.parallel.memory.compiled_blocks import CompiledBlocks, graphs_only
from meshwright.plan.compiled_graphs import BlockKindGraphs, CompiledGraph, CompiledGraphs, PlannedGraphs
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.plan import Plan, RankPlan
from meshwright.plan.step.single_device_program import FORWARD_KINDS
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase
from meshwright.verifier.message_trace import NeedsRealTensorsError, lone_executor, rank_batch

NUM_EQUAL_STEPS = 3
NUM_RUN = 3  # of equal blocks
MAX_REAL_NUMEL = 10**8  # parameters of a model that runs on real tensors here
OTHER_TYPE = "to be a tensor type, "
# torch finds that all guards hold: what failed was of that moment, such as a fake tensor set free
GUARDS_HOLD = "runtime guards failed even though they passed"
DYNAMO_LOGGER = "torch._dynamo"
CPU = torch.device("cpu")


def count_graphs(analyzed: AnalyzedModel, plan: Plan, loss: Loss) -> PlannedGraphs:
    """Returns the graphs of the blocks of `plan`; what cannot be tried is said there, and not raised."""
    is_planned = any(isinstance(each, CompiledBlocks) for each in plan.strategies)
    try:
        traced = _with_one_microbatch(plan).with_strategies(graphs_only(plan.strategies), plan.micro_batch)
    except PlanError as error:
        problem = error.diagnostics[0].problem
        return PlannedGraphs((), (), (), is_planned, (f"blocks do not compile under this plan: {problem}",))
    unknown = []
    others = _other_lengths(analyzed.example)
    if not others:
        unknown.append("other lengths were not tried: the inputs are no sequences of one length")
    try:
        try:
            by_rank = _graphs_by_rank(analyzed, traced, loss, others)
        except PlanError as error:
            if not others or isinstance(error, NeedsRealTensorsError):
                raise
            unknown.append(f"other lengths cannot run under this plan: {error.diagnostics[0].problem}")
            others = []
            by_rank = _graphs_by_rank(analyzed, traced, loss, others)
    except PlanError as error:
        return PlannedGraphs(
            (), (), (), is_planned, (f"graphs are not known: {error.diagnostics[0].problem}",)
        )
    kinds, compiled = _kinds(by_rank, len(others)), {name for each in by_rank for name in each.classes}
    names = dict.fromkeys(map(block_of, plan.model_spec.block_calls))
    lengths = [_length(each) for each in (analyzed.example, *others)] if others else []
    as_written = tuple(name for name in names if name not in compiled)
    by_rank_s = [sum(graph.cpu_seconds for graph in _of_first_step(each.graphs)) for each in by_rank]
    return PlannedGraphs(
        kinds, as_written, tuple(lengths), is_planned, tuple(unknown), max(by_rank_s, default=0.0)
    )


def _with_one_microbatch(plan: Plan) -> Plan:
    batch = plan.micro_batch * plan.num_data
    return replace(plan, job=replace(plan.job, train=replace(plan.job.train, batch=batch)))


def _graphs_by_rank(
    analyzed: AnalyzedModel, plan: Plan, loss: Loss, others: Sequence[Batch]
) -> list[CompiledGraphs]:
    """Returns the graphs of the first rank of each role that runs blocks, but for roles of equal blocks."""
    few = FewOfEqualBlocks(analyzed.equal_block_calls)
    fewer = plan.with_strategies((*plan.strategies, few), plan.micro_batch)
    found, seen = [], set[frozenset[object]]()
    for role in plan.program.roles:
        groups = equal_blocks(plan.for_rank(role.ranks[0]), analyzed.equal_block_calls)
        if (kinds := frozenset(groups)) in seen:
            continue
        seen.add(kinds)
        graphs = _graphs_of_rank(analyzed, fewer, role.ranks[0], loss, others)
        last = {block_of(calls[-1]) for calls in groups.values() if len(calls) > NUM_RUN}
        if graphs is not None and last & set(graphs.blocks):
            graphs = _graphs_of_rank(analyzed, plan, role.ranks[0], loss, others)
        if graphs is not None and graphs.classes:
            found.append(graphs)
    return found


def _graphs_of_rank(
    analyzed: AnalyzedModel, plan: Plan, rank: int, loss: Loss, others: Sequence[Batch]
) -> CompiledGraphs | None:
    dtype = getattr(torch, plan.job.precision.parameters)

    def trace(*, fake: bool) -> CompiledGraphs | None:
        with lone_executor(
            *(plan, rank, loss, partial(make_trained_module, analyzed, CPU, dtype)),
            fake=fake,
            compiles=True,
        ) as executor:
            for sample in (*[analyzed.example] * NUM_EQUAL_STEPS, *others):
                executor.run_forwards(rank_batch(sample, plan, rank))
            return executor.state.compiled_graphs

    with _without_warnings():
        try:
            graphs = trace(fake=True)
        except NeedsRealTensorsError:
            if plan.model_spec.numel > MAX_REAL_NUMEL:
                raise
            graphs = trace(fake=False)
    if graphs is not None:
        # a stage receives real tensors here, and its blocks return fake ones: no run has both
        graphs.graphs = [
            each
            for each in graphs.graphs
            if OTHER_TYPE not in each.recompiled and GUARDS_HOLD not in each.recompiled
        ]
    return graphs


def equal_blocks(plan: RankPlan, equal_calls: Mapping[str, str]) -> dict[object, list[str]]:
    """Returns the block calls of a rank, in order, by what tells their graphs apart: the first block call
    that computes the same (`equal_calls`), whether it is compiled, its collectives and its parameters.
    """
    params = defaultdict[str, list[object]](list)
    for each in plan.sharding.param_shardings:
        for call in each.param.block_calls:
            name = each.param.name.removeprefix(f"{block_of(call)}.")
            params[call].append((name, each.layout, each.param.trainable))
    (compiled,) = (each for each in plan.strategies if isinstance(each, CompiledBlocks))
    groups = defaultdict[object, list[str]](list)
    for action in plan.actions:
        if action.kind in FORWARD_KINDS:
            call = action.subject
            like = equal_calls.get(call, call), compiled.is_selected(call)
            groups[(*like, action.inner_transfers, *params[call])].append(call)
    return groups


@dataclass(frozen=True)
class FewOfEqualBlocks(Strategy):
    """Runs the first two and the last of equal blocks; each other one returns what the second has returned.

    `equal_calls` is that of `equal_blocks`.
    """

    name: ClassVar[str] = "few_of_equal_blocks"
    phase: ClassVar[StrategyPhase] = "comm"
    equal_calls: Mapping[str, str] = field(hash=False)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        for calls in equal_blocks(runtime.state.plan, self.equal_calls).values():
            names = list(dict.fromkeys(map(block_of, calls)))
            if NUM_RUN < len(names) == len(calls):
                returned: list[Any] = []
                runtime.state.patches.wrap_forward(names[1], partial(_note_outputs, returned))
                for name in names[NUM_RUN - 1 : -1]:
                    runtime.state.patches.wrap_forward(name, partial(_repeat_outputs, returned))
        return {}


def _note_outputs(returned: list[Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    returned[:] = [forward(*args, **kwargs)]
    return returned[0]


def _repeat_outputs(returned: list[Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if calls_are_intercepted():  # a pipeline stage looks, once, at what its blocks compute with
        return forward(*args, **kwargs)
    return tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, returned[0])


def _kinds(by_rank: Sequence[CompiledGraphs], num_lengths: int) -> tuple[BlockKindGraphs, ...]:
    kinds: dict[str, BlockKindGraphs] = {}
    for rank_graphs in by_rank:
        for class_name in dict.fromkeys(rank_graphs.classes.values()):
            kind = kinds.setdefault(class_name, BlockKindGraphs(class_name, by_length=[0] * num_lengths))
            names = [name for name, each in rank_graphs.classes.items() if each == class_name]
            _add_rank(kind, names, [each for each in rank_graphs.graphs if each.block in names])
            kind.uncompiled = _merge(
                kind.uncompiled, [why for name, why in rank_graphs.uncompiled.items() if name in names]
            )
    return tuple(kinds.values())


def _add_rank(kind: BlockKindGraphs, names: Sequence[str], graphs: Sequence[CompiledGraph]) -> None:
    first = _of_first_step(graphs)
    begins = {graph.block: graph.step for graph in first}
    equal = [graph for graph in graphs if graph.step < NUM_EQUAL_STEPS]
    kind.blocks = _merge(kind.blocks, names)
    kind.num_graphs = max(kind.num_graphs, len(first))
    kind.differences = _merge(
        kind.differences, [f"{graph.block}: {graph.recompiled}" for graph in first if graph.recompiled]
    )
    kind.breaks = _merge(kind.breaks, [graph.broken for graph in graphs if graph.broken])
    for graph in equal:
        if graph.step > begins[graph.block]:
            kind.late.setdefault(graph.step, f"{graph.block}: {graph.recompiled or NEW_BRANCH}")
    counts = Counter(graph.step - NUM_EQUAL_STEPS for graph in graphs)
    kind.by_length = [max(before, counts[index]) for index, before in enumerate(kind.by_length)]


def _of_first_step(graphs: Sequence[CompiledGraph]) -> list[CompiledGraph]:
    """Returns the graphs of each block of the first step that has any: a pipeline stage looks first."""
    equal = [graph for graph in graphs if graph.step < NUM_EQUAL_STEPS]
    begins = {graph.block: graph.step for graph in reversed(equal)}
    return [graph for graph in equal if graph.step == begins[graph.block]]


def _merge(before: Sequence[str], more: Sequence[str]) -> list[str]:
    return list(dict.fromkeys((*before, *more)))


def _other_lengths(example: Batch) -> list[Batch]:
    """Returns the example with two shorter lengths; none if its tensors are no sequences of one length."""
    sizes = {value.shape[1] if value.ndim > 1 else 0 for value in example.values()}
    length = sizes.pop() if len(sizes) == 1 else 0
    shorter = [] if length < 4 else [length // 2, length - length // 4]
    return [{key: value[:, :each] for key, value in example.items()} for each in shorter]


def _length(sample: Mapping[str, torch.Tensor]) -> int:
    return next(iter(sample.values())).shape[1]


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keeps a run's warnings of graphs off the terminal: they are what is counted."""
    loggers = [logging.getLogger(name) for name in (DYNAMO_LOGGER, block_compiler.__name__)]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
