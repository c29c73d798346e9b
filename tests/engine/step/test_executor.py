"""The executor of a rank's program: order, saved and restored state, and what a step leaves behind."""

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan
from meshwright.comm.backends.threads import single_rank_world
from meshwright.engine.optim.make_optimizers import OptimizerFactory
from meshwright.engine.runtime.build_module import make_trained_module
from meshwright.engine.runtime.rank_state import Metrics, RankState
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import LRScheduleConfig, OptimizerConfig, PrecisionConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.testing.ranks import run_on_threads
from tests.engine.one_device import Custom, bits, job_of, pair, sample_range
from tests.tiny_model import Tiny, token_samples

BATCH = token_samples(12)


def chain(model: Custom, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x).tanh() + x
    return model.head(x)


def test_metrics_describe_the_step():
    job = job_of(
        steps=10, lr_schedule=LRScheduleConfig("cosine", warmup=1), optimizer=OptimizerConfig("sgd", lr=0.5)
    )
    done = pair(job=job, micro_batch=4)
    first, second = (done.executor.step(BATCH) for _ in range(2))
    assert (first.step, second.step, done.executor.steps_done) == (1, 2, 2)
    assert (first.lr, second.lr) == (0.25, 0.5)
    assert first.tokens == second.tokens == (BATCH["labels"] != -100).sum()
    assert (first.stop_requested, first.is_skipped) == (False, False)
    assert first.loss == pytest.approx(done.loss_alone(BATCH).item(), rel=1e-13)


def test_every_group_follows_the_schedule_from_its_own_rate():
    job = job_of(steps=4, lr_schedule=LRScheduleConfig("wsd", decay=4))
    done = pair(job=job, optimizer=lambda groups: torch.optim.SGD([{**groups[0], "lr": 0.4}, *groups[1:]]))
    rates = []
    for _ in range(4):
        done.executor.step(BATCH)
        rates.append([group["lr"] for group in done.executor.state.optimizers[0].param_groups])
    assert [pytest.approx(rate) for rate in rates] == [[0.3], [0.2], [0.1], [0.0]]


def test_a_stop_request_of_one_rank_reaches_all():
    analyzed = analyze(Tiny, token_samples(2))
    plan = make_plan(analyzed, job_of(), Mesh(dp_replicate=3))

    def play(world) -> list[Metrics]:
        subject = make_trained_module(analyzed, world.device, torch.float64)
        executor = StepExecutor(plan.for_rank(world.rank), RankState(subject, world, token_cross_entropy()))
        mine = sample_range(BATCH, 4 * world.rank, 4 * world.rank + 4)
        return [
            executor.step(None if world.rank == 2 else mine, stop=step == world.rank == 1)
            for step in range(3)
        ]

    played = run_on_threads(play, plan.mesh)
    assert [metrics.stop_requested for metrics in played[0]] == [False, True, False]
    assert played[0] == played[1] == played[2]


def test_a_step_with_too_many_or_unequal_samples_is_refused():
    done = pair(micro_batch=4)
    with pytest.raises(
        PlanError,
        match=r"13 samples and this rank takes 12 in a step\n.*trainer\.local_batch.*raise train\.batch",
    ):
        done.executor.step(token_samples(13))
    needed = "the batch holds input_ids 12, labels 11; needed are as many samples in every tensor"
    with pytest.raises(PlanError, match=needed):
        done.executor.step({**BATCH, "labels": BATCH["labels"][:11]})
    with pytest.raises(PlanError, match=r"the batch holds no tensors(?s:.*)pass None when"):
        done.executor.step({})
    assert done.executor.steps_done == 0


def reordered(order: Callable[[torch.Tensor], list[int]]) -> type[Custom]:
    class Reordered(Custom):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            for i in order(input_ids):
                x = self.layers[i](x).tanh()
            return self.head(x)

    return Reordered


def test_blocks_in_another_order_than_the_plan_knows_are_refused_with_the_order():
    build = reordered(lambda ids: [0, 1, 2] if len(ids) == 3 else [0, 2, 1])
    with pytest.raises(PlanError) as caught:
        pair(lambda: build(chain)).executor.step(BATCH)
    assert (
        "the model reached block 'layers.1' out of the order of the plan: embed layers.0 layers.1 "
        "layers.2 head" in str(caught.value)
    )
    assert "repair: a forward may leave blocks out; let it call them in the order of the trial" in str(
        caught.value
    )


def test_a_block_called_more_often_than_the_plan_knows_is_refused_and_less_often_is_not():
    more = reordered(lambda ids: [0, 1, 2] if len(ids) == 3 else [0, 1, 1, 2])
    with pytest.raises(
        PlanError, match=r"reached block 'layers\.1#2' more often than in the order of the plan"
    ):
        pair(lambda: more(chain)).executor.step(BATCH)
    less = reordered(lambda ids: [0, 0, 1, 2, 2] if len(ids) == 3 else [0, 2])
    done = pair(lambda: less(chain))
    metrics = done.executor.step(BATCH)
    assert metrics.loss == pytest.approx(
        done.step_alone(torch.optim.SGD(done.model.parameters(), lr=0.1), BATCH)[0], rel=1e-14
    )
    assert done.error < 1e-14


def test_an_action_without_a_handler_is_refused():
    analyzed = analyze(Tiny, token_samples(2))
    plan = make_plan(analyzed, job_of())
    strange = replace(
        plan, program=plan.program.edit(lambda actions: [*actions, Action("EVICT"), Action("FETCH")])
    )
    state = RankState(
        make_trained_module(analyzed, torch.device("cpu"), torch.float64),
        single_rank_world(torch.device("cpu")),
        token_cross_entropy(),
    )
    with pytest.raises(PlanError, match=r"^program: no handler for EVICT, FETCH(?s:.*)`bind`"):
        StepExecutor(strange.for_rank(0), state)


class Buffered(Custom):
    """With a persistent buffer that the forward writes, one shared by two modules,
    and one that is not saved.
    """

    def __init__(self) -> None:
        super().__init__(chain)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.layers[0].register_buffer("mean", torch.zeros(6))
        self.layers[1].register_buffer("mean", self.layers[0].mean)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        self.steps += 1
        self.layers[0].mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return self.rule(self, x + self.layers[1].mean)


MAKERS: dict[str, OptimizerFactory | None] = {
    "the job's own": None,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_a_restored_run_goes_on_bitwise(maker: str):
    job = job_of(
        precision=PrecisionConfig(),
        clip=0.1,
        optimizer=OptimizerConfig(lr=0.01),
        lr_schedule=LRScheduleConfig("cosine", warmup=2),
        steps=8,
    )
    batches = [sample_range(token_samples(60), 10 * step, 10 * step + 10) for step in range(6)]

    def fresh() -> StepExecutor:
        return pair(Buffered, job=job, micro_batch=4, optimizer=MAKERS[maker]).executor

    straight = fresh()
    expected = [straight.step(batch) for batch in batches]
    first, second = fresh(), fresh()
    for batch in batches[:3]:
        first.step(batch)
    saved = copy.deepcopy(first.state_dict())
    second.step(batches[5])
    second.load_state_dict(first.state_dict(), 3)
    assert [second.step(batch) for batch in batches[3:]] == expected[3:]
    assert bits(second.state_dict()) == bits(straight.state_dict())
    assert bits(first.state_dict()) == bits(saved)  # the restored player holds copies
    assert {name for name in saved if name.startswith("buffer/")} == {
        "buffer/steps",
        "buffer/layers.0.mean",
        "buffer/layers.1.mean",
    }


def test_resetting_clears_the_optimizer_states():
    job = job_of(optimizer=OptimizerConfig(lr=0.01))
    done = pair(job=job)
    begin = copy.deepcopy(done.executor.state_dict())
    first = [done.executor.step(BATCH) for _ in range(3)]
    done.executor.load_state_dict(begin, 0)
    assert [done.executor.step(BATCH) for _ in range(3)] == first


def live() -> tuple[int, int]:
    """Returns how many plain tensors there are, and the bytes of their storages.

    Other tests leave readings, and tensors of a rank that failed: subclasses, which answer a question by a
    collective.
    """
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter)]
    return len(tensors), sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


@pytest.mark.parametrize("build", [Tiny, lambda: Tiny(p=0.5), lambda: Tiny(tied=True), lambda: Custom(chain)])
def test_live_memory_between_steps_does_not_grow(build: Callable[[], nn.Module]):
    done = pair(build, job=job_of(optimizer=OptimizerConfig(lr=0.01), clip=0.1), micro_batch=4)
    for _ in range(3):
        done.executor.step(BATCH)
    third = live()
    for _ in range(5):
        done.executor.step(BATCH)
    assert live() == third
    assert all(parameter.grad is None for parameter in done.parameters.values())


def test_activations_and_gradients_are_gone_without_the_garbage_collector():
    kept: list[weakref.ref] = []

    def keeping(model: Custom, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x).exp() * 0.1 + x
            kept.append(weakref.ref(x.untyped_storage()))
        return model.head(x)

    done = pair(lambda: Custom(keeping), micro_batch=4)
    done.executor.step(BATCH)
    kept.clear()
    gc.disable()
    try:
        done.executor.step(BATCH)
        assert len(kept) == 9
        assert not [ref for ref in kept if ref() is not None]
    finally:
        gc.enable()


def test_a_batch_is_freed_after_its_step():
    done = pair(micro_batch=4)
    batch = token_samples(12)
    kept = [weakref.ref(value.untyped_storage()) for value in batch.values()]
    done.executor.step(batch)
    del batch
    assert [ref() for ref in kept] == [None, None]


def test_micro_batches_do_not_keep_each_others_activations():
    alive: list[int] = []
    kept: list[weakref.ref] = []

    def keeping(model: Custom, x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(ref() is not None for ref in kept))
        for layer in model.layers:
            x = layer(x * 2).exp() * 0.1
            kept.append(weakref.ref(x.untyped_storage()))
        return model.head(x)

    done = pair(lambda: Custom(keeping), micro_batch=3)
    done.executor.step(BATCH)
    kept.clear()
    alive.clear()
    done.executor.step(BATCH)
    assert alive == [0, 0, 0, 0]


def test_a_closed_executor_restores_the_users_module():
    done = pair()
    module = done.executor.state.trained_module.module
    done.executor.step(BATCH)
    done.executor.close()
    done.executor.close()
    blocks = done.executor.state.trained_module.blocks.values()
    assert not [
        name for name, inner in module.named_modules() if inner in blocks and "forward" in vars(inner)
    ]
    module(BATCH["input_ids"]).sum().backward()
    assert module.head.weight.grad is not None


def test_the_module_can_be_evaluated_between_steps():
    done = pair(micro_batch=4)
    module = done.executor.state.trained_module.module
    done.executor.step(BATCH)
    with torch.no_grad():
        before = module.eval()(BATCH["input_ids"])
    module.train()
    assert torch.isfinite(before).all()
    twin = pair(micro_batch=4)
    twin.executor.step(BATCH)
    assert done.executor.step(BATCH) == twin.executor.step(BATCH)


def test_the_graph_is_cut_only_where_an_action_is_between_two_backwards():
    whole, cut = pair(), pair(micro_batch=4)
    handed: dict[str, list[bool]] = {"whole": [], "cut": []}
    for name, done in (("whole", whole), ("cut", cut)):
        first = next(iter(done.executor.state.trained_module.blocks.values()))
        first.register_forward_hook(lambda block, args, out, seen=handed[name]: seen.append(out.is_leaf))
        done.executor.step(BATCH)
    assert handed == {"whole": [False], "cut": [True] * 3}


def test_what_the_cpu_steps_moves_to_huge_pages_once(monkeypatch: pytest.MonkeyPatch):
    moved = list[list[int]]()
    monkeypatch.setattr(
        "meshwright.engine.step.executor.use_huge_pages",
        lambda tensors: moved.append([each.data_ptr() for each in tensors]),
    )
    executor = pair(job=job_of(steps=4, optimizer=OptimizerConfig("adamw"))).executor
    for _ in range(4):
        executor.step(BATCH)
    (places,) = moved
    for parameter, states in executor.state.optimizers[0].state.items():
        assert {each.data_ptr() for each in (parameter, states["exp_avg"], states["exp_avg_sq"])} <= set(
            places
        )
