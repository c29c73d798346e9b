"""The Python API: the user's own loop, module, loss and optimizer, on one rank, on threads and on
processes.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.run.checkpoint.manifest import CheckpointError
from meshwright.testing.ranks import ProcessPool, run_on_threads

BATCH, STEPS = 6, 5
JOB = mw.Job(
    ModelConfig("mine"),
    DataConfig("mine"),
    TrainConfig(steps=STEPS, batch=BATCH),
    OptimizerConfig(lr=0.05, weight_decay=0.0),
)


class Regression(nn.Module):
    """Two layers and a buffer, for inputs that are no tokens."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, width), nn.Linear(width, 2)
        self.register_buffer("offset", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)) + self.offset)


def squares() -> mw.Loss:
    """Squared errors, summed; rows of weight 0 do not count."""
    return mw.Loss(
        total=lambda outputs, batch: (((outputs - batch["y"]) ** 2).sum(1) * batch["weight"]).sum(),
        count=lambda batch: batch["weight"].sum(),
        targets=("y", "weight"),
    )


def batch(step: int, count: int = BATCH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(count, 3, generator=generator)
    return {"x": x, "y": torch.stack([x.sum(1), x.prod(1)], 1), "weight": torch.arange(count) % 3 / 2}


def module() -> Regression:
    made = Regression()
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(torch.linspace(-0.5, 0.6, parameter.numel()).view_as(parameter) * (i + 1))
    return made


def plan_for(ranks: int, micro_batch: int = 0) -> tuple[mw.AnalyzedModel, mw.Plan]:
    analyzed = mw.analyze(module(), batch(0), loss=squares())
    return analyzed, mw.make_plan(analyzed, JOB, mw.Mesh(dp_replicate=ranks), micro_batch=micro_batch)


def by_hand(steps: int = STEPS, count: int = BATCH) -> tuple[Regression, list[float]]:
    """The same training as an ordinary PyTorch loop."""
    mine, loss, losses = module(), squares(), []
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        samples = batch(step, count)
        value = loss.total(mine(samples["x"]), samples) / loss.count(samples)
        value.backward()
        nn.utils.clip_grad_norm_(mine.parameters(), JOB.train.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return mine, losses


def train(
    world: World | None, ranks: int, folder: str = "", stop_at: int = STEPS, micro_batch: int = 0
) -> tuple[list[float], dict]:
    """The user's loop on one rank: its losses, and the parameters that it ends with; it goes on from `folder`
    if that exists.
    """
    analyzed, plan = plan_for(ranks, micro_batch)
    losses = []
    with mw.parallelize(analyzed, plan, optimizer=heavy_ball, loss=squares(), world=world) as trainer:
        if folder and Path(folder).exists():
            trainer.load(folder)
        while trainer.steps_done < stop_at:
            losses.append(trainer.step(trainer.local_batch(batch(trainer.steps_done))).loss)
        if folder and not Path(folder).exists():
            trainer.save(Path(folder).parent)
        return losses, {name: value.detach().clone() for name, value in trainer.module.state_dict().items()}


def heavy_ball(groups: list[dict]) -> torch.optim.Optimizer:
    """The user's own optimizer; the learning rate stands in the groups, because it stands in the plan."""
    return torch.optim.SGD(groups, lr=9.9, momentum=0.9)


def test_every_public_name_is_there():
    names = {name: getattr(mw, name).__name__ for name in mw.__all__ if name != "__version__"}
    assert names == {name: name for name in names} | {"nn": "meshwright.nn"}
    assert all(getattr(mw.nn, name).__name__ == name for name in mw.nn.__all__)
    assert sorted(mw.__all__) == dir(mw)
    with pytest.raises(
        AttributeError,
        match="has no attribute 'Motor'; it has ActivationCheckpointing, ActivationCompr",
    ):
        mw.Motor  # noqa: B018


def test_one_rank_is_the_ordinary_loop_with_the_users_own_module_loss_and_optimizer():
    losses, state = train(None, 1)
    wanted, expected = by_hand()
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 0), (3, 1), (6, 0)])
def test_ranks_share_a_global_batch_and_compute_the_same(ranks, micro_batch):
    wanted, expected = by_hand()
    results = run_on_threads(
        lambda world: train(world, ranks, micro_batch=micro_batch), mw.Mesh(dp_replicate=ranks)
    )
    for losses, state in results:
        assert losses == results[0][0] == pytest.approx(expected, rel=1e-5)
        assert all(torch.equal(state[name], value) for name, value in results[0][1].items())
        torch.testing.assert_close(state["first.weight"], wanted.first.weight.detach(), rtol=1e-4, atol=1e-5)


def on_processes(world: World, folder: str) -> tuple[list[float], list[float], dict[str, bool], str]:
    torch.set_num_threads(1)
    whole, state = train(None, 2)  # torch.distributed is joined here, so nobody has to say where this rank is
    first, _ = train(world, 2, folder, stop_at=3)
    then, resumed = train(world, 2, folder)
    same = {name: torch.equal(value, resumed[name]) for name, value in state.items()}
    try:
        train(None, 3)
    except mw.PlanError as error:
        return whole, first + then, same, str(error)
    return whole, first + then, same, ""


def test_on_two_processes_a_saved_and_loaded_engine_goes_on_bit_for_bit(process_pool: ProcessPool, tmp_path):
    results = process_pool.run(on_processes, mw.Mesh(dp_replicate=2), str(tmp_path / "step-00000003"))
    for rank, (whole, parts, same, refusal) in enumerate(results):
        assert whole == parts == results[0][0]
        assert same == dict.fromkeys(module().state_dict(), True)
        assert (
            f"this process is rank {rank} of 2; the plan has it as rank {rank} of 3\n  repair: "
            f"start 3 processes"
        ) in refusal
    assert results[0][0] == pytest.approx(by_hand()[1], rel=1e-5)


def test_the_users_module_is_left_untouched():
    mine = module()
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    analyzed = mw.analyze(mine, batch(0), loss=squares())
    plan = mw.make_plan(analyzed, JOB)
    with mw.parallelize(analyzed, plan, loss=squares()) as trainer:
        trainer.step(trainer.local_batch(batch(0)))
        assert trainer.module is not mine
        assert not torch.equal(trainer.module.state_dict()["first.weight"], before["first.weight"])
    assert all(torch.equal(value, before[name]) for name, value in mine.state_dict().items())
    assert all(parameter.grad is None for parameter in mine.parameters())
    assert mine(batch(0)["x"]).requires_grad


def test_after_close_the_trained_module_runs_by_itself():
    analyzed, plan = plan_for(1)
    trainer = mw.parallelize(analyzed, plan, loss=squares())
    trainer.step(trainer.local_batch(batch(0)))
    trainer.close()
    trained = trainer.module
    copy = module()
    copy.load_state_dict(trained.state_dict())
    assert torch.equal(trained.eval()(batch(1)["x"]), copy(batch(1)["x"]))


def test_a_short_batch_and_none_at_all_are_steps_too():
    results = run_on_threads(lambda world: short(world), mw.Mesh(dp_replicate=3))
    assert results[0] == results[1] == results[2]
    (loss, tokens, _), (nothing, none, skipped) = results[0]
    mine, samples = module(), batch(0, 4)
    assert loss == pytest.approx(
        (squares().total(mine(samples["x"]), samples) / samples["weight"].sum()).item(), rel=1e-5
    )
    assert tokens == int(samples["weight"].sum())
    assert (nothing, none, skipped) == (0.0, 0, True)


def short(world: World) -> list[tuple[float, int, bool]]:
    analyzed, plan = plan_for(3)
    with mw.parallelize(analyzed, plan, loss=squares(), world=world) as trainer:
        found = [trainer.step(trainer.local_batch(batch(0, 4))), trainer.step(None)]
    return [(metrics.loss, metrics.tokens, metrics.is_skipped) for metrics in found]


def test_verify_says_whether_a_plan_equals_one_device():
    analyzed, plan = plan_for(3, micro_batch=1)
    verdict = mw.verify(analyzed, plan, [batch(step) for step in range(3)], loss=squares())
    assert verdict.passed, str(verdict)
    assert (verdict.plan, verdict.num_steps) == (plan.hash, 3)


def test_verify_notices_a_loss_that_is_a_mean():
    loss = squares()
    mean = mw.Loss(
        lambda outputs, samples: loss.total(outputs, samples) / len(samples["y"]), loss.count, loss.targets
    )
    analyzed, plan = plan_for(2)
    verdict = mw.verify(analyzed, plan, [batch(0)], loss=mean)
    assert not verdict.passed
    assert verdict.cause == "loss"


def build_with(world: World | None = None, **options: object) -> mw.Trainer:
    analyzed, plan = plan_for(2)
    return mw.parallelize(options.pop("model", analyzed), plan, loss=squares(), world=world, **options)


def test_a_plan_for_more_ranks_than_there_are_is_refused():
    with pytest.raises(mw.PlanError) as caught:
        build_with()
    (fault,) = caught.value.diagnostics
    assert fault.problem == "the plan is for dp_replicate 2 (2 ranks) and the world is one device (1)"
    assert fault.fix == "start 2 ranks (torchrun --nproc-per-node 2), or make a plan for this world"


def test_a_plan_for_another_model_is_refused():
    with pytest.raises(
        mw.PlanError, match=r"with other blocks or parameters(.|\n)*make the plan again from this model"
    ):
        build_with(model=Regression(7), example=batch(0))


def test_a_model_without_an_example_is_refused():
    with pytest.raises(mw.PlanError, match=r"no example batch(.|\n)*pass example=batch"):
        build_with(model=module())


def test_a_batch_larger_than_the_plans_is_refused_not_cut():
    analyzed, plan = plan_for(1)
    with mw.parallelize(analyzed, plan, loss=squares()) as trainer, pytest.raises(mw.PlanError) as caught:
        trainer.local_batch(batch(0, BATCH + 1))
    (fault,) = caught.value.diagnostics
    assert fault.problem == f"a batch of {BATCH + 1} samples; the plan's global batch is {BATCH}"


def test_a_checkpoint_is_found_by_its_contents_not_by_the_name_of_its_folder(tmp_path):
    analyzed, plan = plan_for(1)
    with mw.parallelize(analyzed, plan, loss=squares()) as trainer:
        trainer.step(trainer.local_batch(batch(0)))
        place = trainer.save(tmp_path)
    best = place.rename(tmp_path / "best")
    with mw.parallelize(analyzed, plan, loss=squares()) as trainer:
        assert trainer.load(best) == trainer.steps_done == 1
        assert trainer.load(str(best)) == 1


@pytest.mark.parametrize("damage", ["folder above", "another model", "truncated"])
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, damage):
    other = mw.analyze(Regression(7) if damage == "another model" else module(), batch(0), loss=squares())
    with mw.parallelize(other, mw.make_plan(other, JOB), loss=squares()) as trainer:
        place = trainer.save(tmp_path)
    if damage == "truncated":
        shard = place / "rank-00000.safetensors"
        shard.write_bytes(shard.read_bytes()[:-4])
    analyzed, plan = plan_for(1)
    with mw.parallelize(analyzed, plan, loss=squares()) as trainer:
        before = {name: value.clone() for name, value in trainer.module.state_dict().items()}
        with pytest.raises(CheckpointError) as caught:
            trainer.load(tmp_path if damage == "folder above" else place)
        assert all(torch.equal(value, before[name]) for name, value in trainer.module.state_dict().items())
    words = {
        "folder above": "manifest.json",
        "another model": "first.bias: (7,) saved, (5,) here",
        "truncated": "truncated",
    }
    assert words[damage] in str(caught.value)


def test_saving_the_same_step_of_another_course_keeps_what_was_saved_last(tmp_path):
    analyzed, plan = plan_for(1)
    for seed in (1, 2):
        with mw.parallelize(analyzed, plan, loss=squares()) as trainer:
            trainer.step(trainer.local_batch(batch(seed)))
            place = trainer.save(tmp_path)
            last = trainer.module.state_dict()["first.weight"].clone()
    with mw.parallelize(analyzed, plan, loss=squares()) as trainer:
        trainer.load(place)
        assert torch.equal(trainer.module.state_dict()["first.weight"], last)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, p: mw.make_plan(module(), JOB), "analyzed: analyzed is a Regression"),
        (lambda a, p: mw.make_plan(a, JOB.train), "job: job is a TrainConfig"),
        (lambda a, p: mw.make_plan(a, JOB, {"dp_shard": 2}), "mesh: mesh is a dict"),
        (lambda a, p: mw.make_plan(a, JOB, mw.Mesh(), mw.ZeRO()), "strategies: strategies is a ZeRO"),
        (lambda a, p: mw.make_plan(a, JOB, mw.Mesh(), ["zero"]), "strategies: strategies is a str"),
        (lambda a, p: mw.make_plan(a, mw.Job(train=mw.TrainConfig(batch="8"))), "train.batch: batch = '8'"),
        (lambda a, p: mw.verify(module(), p, [batch(0)]), "analyzed: analyzed is a Regression"),
        (lambda a, p: mw.verify(a, p, batch(0)), "batches: batches is a dict"),
        (lambda a, p: mw.parallelize(a, JOB), "plan: plan is a Job"),
        (lambda a, p: mw.parallelize(a, p, optimizer="adamw"), "optimizer: 'adamw' makes no optimizer"),
        (lambda a, p: mw.analyze("gpt2", batch(0)), "model: the model is the text 'gpt2'"),
        (lambda a, p: mw.analyze(nn.DataParallel(module()), batch(0)), "DataParallel: a DataParallel"),
    ],
)
def test_an_argument_of_another_type_is_refused_with_what_is_needed(call, message: str):
    analyzed = mw.analyze(module, batch(0), loss=squares())
    with pytest.raises(mw.PlanError) as caught:
        call(analyzed, mw.make_plan(analyzed, JOB))
    assert message in str(caught.value)
    assert all("pass " in each.fix or "write " in each.fix for each in caught.value.diagnostics)
