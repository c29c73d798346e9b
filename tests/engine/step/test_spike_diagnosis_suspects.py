"""Spike diagnosis: the rank, the block and the parameter in which a value first went wrong."""

from collections.abc import Sequence
from math import inf

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan
from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.loss_guard import LossSpike
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import LossGuard
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.engine.one_device import sample_range
from tests.tiny_model import Tiny, executor_of, tiny_job, token_samples

DATA = token_samples(uneven=False)
MARK = 12  # a token; the first of each row that goes wrong


class Burst(torch.autograd.Function):
    """Whatever comes in; the gradient of rows that are marked is infinite."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(marked)
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (marked,) = ctx.saved_tensors
        return torch.where(marked[:, None, None], grad * inf, grad), None


class Faulty(Tiny):
    """One of whose layers goes wrong on marked rows, in the way that `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers[1] = Wrong(self.layers[1].norm, self.layers[1].linear, how)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        marked = input_ids[:, 0] == MARK
        x = self.layers[0](self.embed(input_ids))
        return self.head(self.layers[2](self.layers[1](x, marked)))


class Wrong(nn.Module):
    def __init__(self, norm: nn.Module, linear: nn.Module, how: str) -> None:
        super().__init__()
        self.norm, self.linear, self.how = norm, linear, how

    def forward(self, x: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(self.norm(x)))
        if self.how == "forward":
            return x + torch.where(marked[:, None, None], torch.full_like(y, inf), y)
        if self.how == "backward":
            return x + Burst.apply(y, marked)
        return x + torch.where(marked[:, None, None], 1e6 * y, y)


def spike_of(
    how: str,
    bad_rows: tuple[int, ...],
    ranks: int = 3,
    micro_batch: int = 2,
    stage: int = 0,
    rows_of_last: int | None = None,
) -> list[LossSpike]:
    """Returns what each rank says of the third of four steps, the only one in which rows are marked; the
    fourth is a good one again.

    From `stage` 1 on, what is kept is cut into shards. In the third step the last rank has `rows_of_last`
    rows, if that is said.
    """
    mesh, shards = Mesh(dp_shard=ranks), (BatchSplit(axis="dp_shard"), ZeRO(stage=stage or 1))
    mesh, strategies = (mesh, shards) if stage else (Mesh(dp_replicate=ranks), None)
    return spikes(how, mesh, strategies, bad_rows, rows_of_last, micro_batch=micro_batch)


def spikes(
    how: str,
    mesh: Mesh,
    strategies: Sequence[Strategy] | None,
    bad_rows: Sequence[int] = (9,),
    rows_of_last: int | None = None,
    model: type[Faulty] = Faulty,
    micro_batch: int = 2,
) -> list[LossSpike]:
    """The same under any plan: the last of those with rows of their own has `rows_of_last` in the third step,
    if that is said.
    """
    clean = {**DATA, "input_ids": DATA["input_ids"].clamp(max=MARK - 1)}
    ids = clean["input_ids"].clone()
    ids[list(bad_rows), 0] = MARK
    analyzed = analyze(lambda: model(how), sample_range(clean, 0, 2))
    plan = make_plan(
        analyzed, tiny_job(guard=LossGuard("skip", factor=50.0, window=2)), mesh, strategies, micro_batch
    )
    share = 12 // plan.num_data

    def rank(world: World) -> LossSpike:
        executor, index = executor_of(analyzed, plan, world), plan.data_index(world.rank)
        batches = (clean, clean, {**clean, "input_ids": ids}, clean)
        mine = [sample_range(batch, share * index, share * (index + 1)) for batch in batches]
        if index == plan.num_data - 1 and rows_of_last is not None:
            mine[2] = sample_range(mine[2], 0, rows_of_last) if rows_of_last else None
        metrics = [executor.step(batch) for batch in mine]
        executor.close()
        assert [each.spike is None for each in metrics] == [True, True, False, True]
        assert metrics[3].loss < metrics[0].loss
        return metrics[2].spike

    return run_on_threads(rank, plan.mesh)


@pytest.mark.parametrize(("row", "rank"), [(0, 0), (6, 1), (11, 2)])
def test_an_activation_that_is_not_finite_is_traced_to_its_rank_and_block(row: int, rank: int):
    found = spike_of("forward", (row,))
    assert repr(found[0]) == repr(found[1]) == repr(found[2])
    culprit = found[0].culprit
    assert (culprit.rank, culprit.phase, culprit.block) == (rank, "forward", "layers.1")
    assert [suspect.phase for suspect in found[0].rank_reports].count("") == 2


@pytest.mark.parametrize("how", ["forward", "backward"])
def test_one_device_whose_graph_is_whole_names_the_block_too(how: str):
    culprit = spike_of(how, (7,), ranks=1, micro_batch=0)[0].culprit
    assert (culprit.phase, culprit.block) == (how, "layers.1")


def test_a_gradient_that_is_not_finite_is_traced_to_its_rank_block_and_parameter():
    culprit = spike_of("backward", (9,))[1].culprit
    assert (culprit.rank, culprit.phase, culprit.block) == (2, "backward", "layers.1")
    assert culprit.parameter.startswith("layers.1.")
    assert f"the gradient of {culprit.parameter} of block layers.1 is the first that is not finite" in str(
        culprit
    )


@pytest.mark.parametrize("micro_batch", [0, 2])
@pytest.mark.parametrize("how", ["forward", "backward", "large"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_weights_are_gathered_and_the_same_is_found(stage: int, how: str, micro_batch: int):
    mine, expected = (spike_of(how, (9,), micro_batch=micro_batch, stage=each) for each in (stage, 0))
    assert repr(mine[0]) == repr(mine[1]) == repr(mine[2])
    for found, truth in zip(mine[0].rank_reports, expected[0].rank_reports, strict=True):
        assert (found.rank, found.phase, found.block, found.parameter) == (
            truth.rank,
            truth.phase,
            truth.block,
            truth.parameter,
        )
        assert (found.loss, found.grad_norm) == pytest.approx(
            (truth.loss, truth.grad_norm), rel=1e-9, nan_ok=True
        )


@pytest.mark.parametrize("rows_of_last", [0, 1])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_without_data_takes_part_and_is_not_suspected(stage: int, rows_of_last: int):
    for found in spike_of("backward", (1,), stage=stage, rows_of_last=rows_of_last):
        assert (found.culprit.rank, found.culprit.block) == (0, "layers.1")
        idle = found.rank_reports[2]
        assert (idle.loss != 0, bool(idle.parameter)) == (bool(rows_of_last), bool(rows_of_last))


def test_a_finite_spike_is_traced_to_the_rank_with_the_largest_gradient():
    spike = spike_of("large", (5,))[0]
    assert spike.culprit.rank == 1
    assert spike.culprit.phase == ""
    assert spike.culprit.parameter == "head.weight", "it takes in what the layer gave out"
    assert spike.culprit.grad_norm > 10 * max(
        suspect.grad_norm for suspect in spike.rank_reports if suspect.rank != 1
    )
    assert sum(suspect.loss for suspect in spike.rank_reports) == pytest.approx(spike.loss, rel=1e-12), (
        "shares of one loss"
    )


def test_the_first_of_several_ranks_is_named():
    spike = spike_of("forward", (3, 7, 8))[2]
    assert [suspect.phase for suspect in spike.rank_reports] == ["forward", "forward", "forward"]
    assert spike.culprit.rank == 0


def test_an_overflowing_sum_is_traced_to_no_rank():
    spike = spike_of("large", (5,), ranks=2)[0]
    overflown = LossSpike(spike.step, spike.loss, inf, ("the gradient norm is inf",), spike.rank_reports)
    assert overflown.culprit is None
    assert (
        str(overflown) == "the gradient norm is inf; every rank's own gradients are finite: their sum is not"
    )
