"""Evaluation equals one device over any number of ranks, and leaves the state of training unchanged."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from meshwright.comm.collectives.group import World
from meshwright.engine.forward_backward.evaluation import Evaluation, preserve_module_state
from meshwright.model.loss.loss_definition import Loss
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import PrecisionConfig
from meshwright.testing.ranks import run_on_threads
from tests.engine.one_device import Batch, Custom, bits, ignored, job_of, pair, sample_range
from tests.tiny_model import Tiny, analyzed_model, executor_of, plan_of, tiny_job, token_samples

DATA = token_samples(31)


def rank_batches(data: Batch, ranks: int, size: int) -> list[list[Batch | None]]:
    """The rows of `data` sharded to `ranks` in batches of `size` rows each; the last ranks run out first."""
    total = len(data["labels"])
    starts = range(0, total, ranks * size)
    mine = [
        [sample_range(data, min(s + r * size, total), min(s + (r + 1) * size, total)) for s in starts]
        for r in range(ranks)
    ]
    return [[each if len(each["labels"]) else None for each in listed] for listed in mine]


def single_device_loss(done: object, data: Batch) -> float:
    """The loss of the copy on all of `data` at once."""
    done.model.eval()
    with torch.no_grad():
        return done.loss_alone(data).item()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_every_rank_finds_the_loss_that_one_device_finds(ranks: int, micro_batch: int):
    analyzed = analyzed_model(p=0.3)
    plan = plan_of(analyzed, ranks, micro_batch=micro_batch)
    sharded = rank_batches(DATA, ranks, plan.local_batch)
    assert (
        ranks == 1
        or any(batch is None for batch in sharded[-1])
        or len(sharded[-1][-1]["labels"]) < plan.local_batch
    )

    def rank(world: World) -> Evaluation:
        executor = executor_of(analyzed, plan, world)
        found = executor.evaluate(sharded[world.rank])
        executor.close()
        return found

    found = run_on_threads(rank, plan.mesh)
    whole = pair(lambda: Tiny(p=0.3), job=tiny_job())
    expected = single_device_loss(whole, DATA)
    assert len({(each.loss, each.tokens) for each in found}) == 1
    assert found[0].loss == pytest.approx(expected, rel=1e-12)
    assert found[0].tokens == int((DATA["labels"] != -100).sum())
    assert found[0].perplexity == pytest.approx(
        torch.tensor(expected, dtype=torch.float64).exp().item(), rel=1e-12
    )


def test_a_rank_may_have_no_batch_at_all():
    analyzed = analyzed_model()
    plan = plan_of(analyzed, 3)

    def rank(world: World) -> Evaluation:
        executor = executor_of(analyzed, plan, world)
        found = executor.evaluate([sample_range(DATA, 0, 4)] if world.rank == 1 else [])
        executor.close()
        return found

    found = run_on_threads(rank, plan.mesh)
    assert [each.loss for each in found] == [
        pytest.approx(single_device_loss(pair(job=tiny_job()), sample_range(DATA, 0, 4)), rel=1e-12)
    ] * 3


class Busy(nn.Module):
    """Writes a buffer and replaces another in every forward, whatever the mode;
    one part stays in eval mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 6), nn.Linear(6, 13)
        self.drop, self.still = nn.Dropout(0.5), nn.Dropout(0.5)
        self.still.eval()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.table = self.table * 2
        return self.head(self.still(self.drop(self.embed(input_ids))))


@pytest.mark.parametrize("build", [lambda: Tiny(p=0.3), Busy])
def test_a_run_with_evaluations_trains_the_same_numbers_as_one_without(build: Callable[[], nn.Module]):
    def trained(*, evaluated: bool) -> tuple[dict[str, bytes], list[float]]:
        done, losses = pair(build, job=job_of()), []
        for step in range(4):
            losses.append(done.executor.step(sample_range(DATA, 6 * step, 6 * step + 6)).loss)
            if evaluated:
                modes = [each.training for each in done.executor.state.trained_module.module.modules()]
                torch.manual_seed(step)
                before = torch.get_rng_state()
                done.executor.evaluate([sample_range(DATA, 0, 12), sample_range(DATA, 12, 19)])
                assert torch.equal(before, torch.get_rng_state())
                assert modes == [
                    each.training for each in done.executor.state.trained_module.module.modules()
                ]
                assert all(p.grad is None for p in done.parameters.values())
        return bits(
            dict(done.executor.state.trained_module.module.named_buffers()) | done.executor.state_dict()
        ), losses

    assert trained(evaluated=True) == trained(evaluated=False)


def test_modes_and_buffers_come_back_after_a_failure():
    model = Busy()

    def fail() -> None:
        with preserve_module_state(model):
            model.eval()
            model(torch.zeros(1, 2, dtype=torch.long))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (model.training, model.still.training, model.drop.training) == (True, False, True)
    assert (model.count.item(), model.table.tolist()) == (0.0, [1.0, 1.0])


def test_evaluation_runs_in_the_compute_dtype():
    low = pair(job=job_of(precision=PrecisionConfig("float32", "bfloat16", "float32")))
    whole = pair(job=job_of(precision=PrecisionConfig("float32", "float32", "float32")))
    mine, theirs = (
        low.executor.evaluate([sample_range(DATA, 0, 12)]).loss,
        whole.executor.evaluate([sample_range(DATA, 0, 12)]).loss,
    )
    assert mine != theirs
    assert mine == pytest.approx(theirs, rel=0.02)


def test_samples_of_which_nothing_counts_are_refused():
    with pytest.raises(
        PlanError,
        match=r"evaluate: no token of the evaluation counts(?s:.*)point evaluate\.source at samples",
    ):
        pair().executor.evaluate([ignored(sample_range(DATA, 0, 4))])


def test_a_forward_that_draws_in_eval_mode_is_refused_by_name():
    always = pair(lambda: Custom(lambda model, x: model.head(F.dropout(model.layers[0](x), 0.5))))
    always.executor.step(sample_range(DATA, 0, 12))
    with pytest.raises(PlanError, match=r"pass training=self\.training to F\.dropout"):
        always.executor.evaluate([sample_range(DATA, 0, 12)])


def test_a_loss_that_is_not_one_per_token_has_no_perplexity():
    squares = Loss(
        lambda outputs, batch: (outputs**2).sum(), lambda batch: torch.tensor(len(batch["labels"]))
    )
    found = pair(loss=squares).executor.evaluate([sample_range(DATA, 0, 12)])
    assert found.perplexity is None
    assert found.as_dict().keys() == {"loss", "tokens"}
    assert found.tokens == 12


def test_a_loss_of_the_whole_batch_is_refused():
    whole = Loss(
        lambda outputs, batch: outputs.sum(),
        lambda batch: torch.tensor(len(batch["labels"])),
        whole_batch=True,
    )
    done = pair()
    done.executor.state.loss = whole
    with pytest.raises(
        PlanError, match=r"no loss over the batches of an evaluation(?s:.*)evaluate in a callback"
    ):
        done.executor.evaluate([sample_range(DATA, 0, 12)])
