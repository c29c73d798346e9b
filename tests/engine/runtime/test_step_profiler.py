"""Spans of a profiled step: every action once, on its stream, inside the step; the step computes the same."""

from dataclasses import replace

import pytest
import torch

from meshwright.api import make_plan
from meshwright.comm.backends.fake import CompletedWork
from meshwright.engine.runtime.step_profiler import (
    GLUE,
    ISSUE,
    WAIT,
    ProfilerSpan,
    StepProfiler,
    wrap_with_profiler,
)
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.testing.ranks import run_on_threads
from tests.paper_model import FIRST_ROLE
from tests.tiny_model import analyzed_model, executor_of, plan_of, tiny_job, token_samples

ANALYZED = analyzed_model()
CPU = torch.device("cpu")


def seen(plan: Plan) -> list[tuple[list[ProfilerSpan], list]]:
    """The spans of the second step on each rank, and the metrics of two steps."""

    def rank(world):
        executor, local_batches, watch = (
            executor_of(ANALYZED, plan, world),
            open_local_batches(ExampleDataset(token_samples()), plan, world.rank),
            StepProfiler(world.device),
        )
        metrics = [
            executor.step(local_batches.batch(0)),
            executor.step(local_batches.batch(1), profiler=watch),
        ]
        metrics.append(executor.step(local_batches.batch(2)))
        executor.close()
        return watch.spans(), metrics

    return run_on_threads(rank, plan.mesh)


@pytest.fixture(scope="module", params=[1, 3])
def plan(request) -> Plan:
    return plan_of(ANALYZED, request.param, micro_batch=2)


@pytest.fixture(scope="module")
def spans(plan) -> list[ProfilerSpan]:
    return seen(plan)[-1][0]


def test_every_action_of_the_program_is_recorded_once_on_its_stream(plan, spans):
    told = [(span.name, span.stream, span.action) for span in spans if span.kind not in (GLUE, ISSUE, WAIT)]
    assert sorted(told, key=str) == sorted(
        ((a.name, a.stream, a) for a in plan.program.actions(FIRST_ROLE)), key=str
    )


def test_spans_of_the_compute_stream_are_nested_or_disjoint(spans):
    lane = [span for span in spans if span.stream == "compute"]
    assert all(span.begin <= span.end for span in spans)
    for one in lane:
        for other in lane:
            apart = one.end <= other.begin or other.end <= one.begin
            inside = (
                one.begin <= other.begin <= other.end <= one.end
                or other.begin <= one.begin <= one.end <= other.end
            )
            assert apart or inside, f"{one.name} and {other.name} overlap"


def test_forwards_lie_inside_the_models_own_forward(plan, spans):
    glue = {span.name: span for span in spans if span.kind == GLUE}
    assert set(glue) == {f"forward({micro})" for micro in range(plan.num_microbatches)}
    for span in spans:
        if span.kind == "F":
            around = glue[f"forward({span.action.microbatch})"]
            assert around.begin <= span.begin <= span.end <= around.end


def test_a_wait_of_the_compute_stream_ends_no_earlier_than_the_message(plan, spans):
    waits = [span for span in spans if span.kind == WAIT]
    sent = [action.name for action in plan.program.actions(FIRST_ROLE) if action.transfer is not None]
    assert sorted(span.name for span in waits) == sorted(f"wait {name}" for name in sent)
    ends = {span.name: span.end for span in spans if span.stream == "comm"}
    assert all(ends[span.name.removeprefix("wait ")] <= span.end for span in waits)


def test_a_profiled_step_computes_the_same(plan):
    def unwatched(world):
        executor, local_batches = (
            executor_of(ANALYZED, plan, world),
            open_local_batches(ExampleDataset(token_samples()), plan, world.rank),
        )
        return [executor.step(local_batches.batch(step)) for step in range(3)]

    assert [metrics for _, metrics in seen(plan)] == run_on_threads(unwatched, plan.mesh)


def test_a_message_that_arrives_before_its_wait_has_ended_there():
    """The result comes while the compute lane is busy elsewhere: the wire's span ends then,
    not at the wait.
    """
    watch, send, late = StepProfiler(CPU), Action("SEND", stream="comm"), Action("LATE", waits=("SEND()",))
    works: dict[str, CompletedWork] = {}
    entries = [
        (send, lambda action: works.update({action.name: CompletedWork()}), ()),
        (late, lambda action: None, ("SEND()",)),
    ]
    for action, handler, _ in wrap_with_profiler(entries, works, watch):
        handler(action)
    found = {span.name: span for span in watch.spans()}
    assert found["SEND()"].end <= found["wait SEND()"].begin


def test_a_span_that_never_ends_is_left_out():
    watch = StepProfiler(CPU)
    watch.begin_span("F(a)", "F")
    watch.begin_span("REDUCE", "REDUCE", "comm")
    watch.begin_span("inner", "B")
    watch.end_span()
    assert [span.name for span in watch.spans()] == ["inner"]


def test_sizes_are_those_of_the_tensors():
    plan = plan_of(ANALYZED, 3)

    def rank(world):
        executor, local_batches = (
            executor_of(ANALYZED, plan, world),
            open_local_batches(ExampleDataset(token_samples()), plan, world.rank),
        )
        before = executor.memory_by_category()
        executor.step(local_batches.batch(0))
        return before, executor.memory_by_category()

    (before, after), *_ = run_on_threads(rank, plan.mesh)
    nbytes = ANALYZED.model_spec.numel * 8
    assert before == {"parameters": nbytes, "gradients": nbytes, "optimizer_states": 0, "buckets": 0}
    # momentum
    assert after == {"parameters": nbytes, "gradients": 0, "optimizer_states": nbytes, "buckets": nbytes}
    alone = plan_of(ANALYZED, 1, job=replace(plan.job))
    assert (
        run_on_threads(lambda world: executor_of(ANALYZED, alone, world).memory_by_category(), alone.mesh)[0][
            "gradients"
        ]
        == nbytes
    )


def test_messages_between_ranks_have_streams_of_their_own_and_are_awaited_before_they_are_needed():
    plan = make_plan(ANALYZED, tiny_job(), Mesh(pp=2), (Pipeline(),), 4)
    both = seen(plan)
    for rank, (spans, _) in enumerate(both):
        told = sorted((span.name, span.stream) for span in spans if span.action is not None)
        assert told == sorted((action.name, action.stream) for action in plan.for_rank(rank).actions)
    second = {span.name: span for span in both[1][0]}
    for action in plan.for_rank(1).actions:
        if action.stream == "recv":
            assert second[f"wait {action.name}"].end <= second[f"forward({action.microbatch})"].begin
