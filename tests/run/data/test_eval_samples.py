"""The evaluation split: which samples are evaluated, which are trained on, and early stopping by the
results.
"""

from math import inf, nan

import pytest
import torch

from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.data_config import MixturePart as Share
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import EvalConfig, Job
from meshwright.plan.job.model_config import ModelConfig
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.run.data.eval_samples import EvalHistory, EvalSamples, eval_source, split_held_out
from meshwright.run.data.mixture import Mixture
from tests.tiny_model import analyzed_model, plan_of, tiny_job, token_samples

ANALYZED = analyzed_model()
DATA = ExampleDataset({**token_samples(31), "id": torch.arange(31)})


def plan(ranks: int, micro_batch: int = 0, batch: int = 12, **spec: int):
    return plan_of(ANALYZED, ranks, micro_batch=micro_batch, job=tiny_job(batch, evaluate=EvalConfig(**spec)))


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 0), (2, 0), (2, 3), (3, 0), (3, 2), (4, 1)])
@pytest.mark.parametrize("samples", [0, 1, 12, 14])
def test_every_sample_is_evaluated_once_and_all_ranks_have_as_many_batches(
    ranks: int, micro_batch: int, samples: int
):
    made = plan(ranks, micro_batch, hold_out=31, samples=samples)
    listed = [list(EvalSamples(DATA, made, index).batches()) for index in range(ranks)]
    assert len({len(batches) for batches in listed}) == 1
    ids = [i for batches in listed for batch in batches if batch is not None for i in batch["id"].tolist()]
    assert sorted(ids) == list(range(samples or 31))
    assert all(
        len(batch["id"]) <= made.local_batch for batches in listed for batch in batches if batch is not None
    )


def test_held_out_samples_are_never_trained_on():
    made = plan(2, hold_out=7)
    training, held = split_held_out(DATA, made.job.evaluate)
    assert (len(training), len(held)) == (24, 7)
    assert held.batch([0, -1, 6])["id"].tolist() == [24, 30]
    batches_by_rank = [open_local_batches(training, made, rank) for rank in range(2)]
    seen = {
        i
        for step in range(20)
        for local_batches in batches_by_rank
        for i in local_batches.batch(step)["id"].tolist()
    }
    assert seen == set(range(24))


def test_nothing_is_held_out_unasked():
    assert split_held_out(DATA, EvalConfig("val.txt")) == (DATA, None)


def test_holding_out_everything_or_of_a_mixture_is_refused():
    with pytest.raises(
        PlanError, match=r"evaluate\.hold_out: 31 samples are held out of 31, and none is left to train on"
    ):
        split_held_out(DATA, EvalConfig(hold_out=31))
    with pytest.raises(PlanError, match=r"the last 3 samples of a mixture(?s:.*)evaluate\.source"):
        split_held_out(Mixture.__new__(Mixture), EvalConfig(hold_out=3))


def test_another_source_is_read_as_the_training_data_is():
    data = DataConfig("train.jsonl", sequence=64, epochs=3, tokenizer="tok", split="train")
    job = Job(ModelConfig("m"), data)
    assert eval_source(job) is None
    found = eval_source(Job(ModelConfig("m"), data, evaluate=EvalConfig("val.jsonl")))
    assert (found.source, found.sequence, found.tokenizer, found.split, found.epochs) == (
        "val.jsonl",
        64,
        "tok",
        "train",
        0,
    )
    found = eval_source(Job(ModelConfig("m"), data, evaluate=EvalConfig(split="dev")))
    assert (found.source, found.split) == ("train.jsonl", "dev")
    mixed = DataConfig(mixture=(Share("a.txt"), Share("b.txt")))
    assert eval_source(Job(ModelConfig("m"), mixed, evaluate=EvalConfig("c.txt"))).mixture == ()


def test_results_on_other_samples_are_not_compared():
    done = EvalHistory().for_samples(EvalSamples(DATA, plan(2, hold_out=7), 0)).with_evaluation(1.0, 5, 0.0)
    assert done.for_samples(EvalSamples(DATA, plan(3, hold_out=7, every=3), 1)) == done, (
        "ranks and cadence do not matter"
    )
    for other in (
        EvalSamples(DATA, plan(2, hold_out=8), 0),
        EvalSamples(DATA, plan(2, hold_out=7, samples=3), 0),
    ):
        assert done.for_samples(other).best_loss is None
    assert (
        done.for_samples(EvalSamples(ExampleDataset(token_samples(31)), plan(2, hold_out=7), 0)).best_loss
        is None
    )


def after(*losses: float, min_delta: float = 0.0) -> EvalHistory:
    found = EvalHistory()
    for step, loss in enumerate(losses, start=1):
        found = found.with_evaluation(loss, step, min_delta)
    return found


def test_the_best_is_the_lowest_and_the_earliest_of_equals():
    assert (after(3.0, 2.0, 2.0, 2.5).best_loss, after(3.0, 2.0, 2.0, 2.5).best_step) == (2.0, 2)
    assert after(nan, inf).best_loss is None
    assert after(nan, 2.0, nan).best_step == 2


@pytest.mark.parametrize(
    ("losses", "min_delta", "waited"),
    [
        ((3.0, 2.0, 1.0), 0.0, 0),
        ((3.0, 3.0, 3.0), 0.0, 2),
        ((3.0, 2.9, 2.8), 0.5, 2),
        ((3.0, 2.8, 2.6, 2.4), 0.5, 0),
        ((3.0, nan, nan), 0.0, 2),
        ((3.0, 4.0, 2.0, 4.0), 0.0, 1),
    ],
)
def test_an_evaluation_is_a_gain_only_below_the_last_gain(
    losses: tuple[float, ...], min_delta: float, waited: int
):
    assert after(*losses, min_delta=min_delta).num_without_gain == waited


def test_patience_ends_the_run_with_the_reason():
    stale = after(3.0, 2.5, 2.6, 2.7)
    assert stale.stop_reason(EvalConfig("v", patience=3)) == ""
    assert stale.stop_reason(EvalConfig("v")) == ""
    assert stale.stop_reason(EvalConfig("v", patience=2)) == (
        "2 evaluations did not improve by more than 0 (the best was 2.5000 at step 2); evaluate.patience = 2"
    )
    assert "none was finite" in after(nan).stop_reason(EvalConfig("v", patience=1))


def test_what_was_found_is_saved_as_it_is():
    done = after(1 / 3, 0.1)
    assert EvalHistory(**done.as_dict()) == done
