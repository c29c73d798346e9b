"""Counts the graphs that torch.compile makes of the blocks of a plan, before a run: the steps of one rank of
each role on fake tensors, in which Dynamo traces blocks and no backend compiles them.

    steps 1 to 3     the example                  graphs of a kind of block; another one in step 2 or 3 is
                                                  for what changes, such as a count kept in Python
    steps 4 and 5    sequences of other lengths   graphs for a second, and for a third length

A strategy's layers and exchanges are in place, so graphs end there as in the run. A rank has one microbatch.
What the backend makes of a graph (Inductor's errors, memory and seconds) is not tried. A model that reads
values of tensors runs on real ones, if it is small; else its graphs are not known.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from meshwright.engine.runtime.build_module import make_trained_module
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import Batch, Loss
from meshwright.parallel.memory import block_compiler
from meshwright.parallel.memory.block_compiler import NEW_BRANCH
from meshwright.parallel.memory.compiled_blocks import CompiledBlocks, graphs_only
from meshwright.plan.compiled_graphs import BlockKindGraphs, CompiledGraph, CompiledGraphs, PlannedGraphs
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.plan import Plan
from meshwright.verifier.message_trace import NeedsRealTensorsError, trace_rank

NUM_EQUAL_STEPS = 3
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
    return PlannedGraphs(kinds, as_written, tuple(lengths), is_planned, tuple(unknown))


def _with_one_microbatch(plan: Plan) -> Plan:
    batch = plan.micro_batch * plan.num_data
    return replace(plan, job=replace(plan.job, train=replace(plan.job.train, batch=batch)))


def _graphs_by_rank(
    analyzed: AnalyzedModel, plan: Plan, loss: Loss, others: Sequence[Batch]
) -> list[CompiledGraphs]:
    """Returns the graphs of the first rank of each role that runs blocks."""
    dtype, samples = getattr(torch, plan.job.precision.parameters), [analyzed.example] * NUM_EQUAL_STEPS
    found = []
    for role in plan.program.roles:
        rank = role.ranks[0]

        def trace(*, fake: bool, rank: int = rank) -> CompiledGraphs | None:
            return trace_rank(
                plan,
                rank,
                loss,
                lambda mode: make_trained_module(analyzed, CPU, dtype, mode),
                NUM_EQUAL_STEPS + len(others),
                fake=fake,
                samples=[*samples, *others],
                compiles=True,
            ).compiled_graphs

        with _without_warnings():
            try:
                graphs = trace(fake=True)
            except NeedsRealTensorsError:
                if plan.model_spec.numel > MAX_REAL_NUMEL:
                    raise
                graphs = trace(fake=False)
        if graphs is not None and graphs.classes:
            # a stage receives real tensors here, and its blocks return fake ones: no run has both
            graphs.graphs = [
                each
                for each in graphs.graphs
                if OTHER_TYPE not in each.recompiled and GUARDS_HOLD not in each.recompiled
            ]
            found.append(graphs)
    return found


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
    equal = [graph for graph in graphs if graph.step < NUM_EQUAL_STEPS]
    begins = {graph.block: graph.step for graph in reversed(equal)}  # a pipeline stage looks first
    first = [graph for graph in equal if graph.step == begins[graph.block]]
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
