"""The loss guard under tensor parallelism: all ranks skip a harmful step and trace it to the samples, the
block and the weight.
"""

import pytest
import torch

from meshwright.api import analyze, make_plan
from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.loss_guard import LossSpike
from meshwright.engine.step import spike_diagnosis
from meshwright.model.loading.loader import Model
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.job import LossGuard
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.engine.one_device import sample_range
from tests.engine.step.test_spike_diagnosis_suspects import DATA, MARK, Burst
from tests.parallel.tensor.declared_pairs import SOCKETS, Pair, Pairs
from tests.tiny_model import executor_of, tiny_job


class Wrong(Pair):
    """Goes wrong on marked rows, between columns and rows, in the way that `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(self.norm(x)))
        if self.how == "forward":
            inner = torch.where(marked[:, None, None], torch.full_like(inner, torch.inf), inner)
        elif self.how == "backward":
            inner = Burst.apply(inner, marked)
        else:
            inner = torch.where(marked[:, None, None], 1e6 * inner, inner)
        return x + self.down(inner)


class Faulty(Pairs):
    """Of three pairs, the second goes wrong."""

    def __init__(self, how: str) -> None:
        super().__init__(layers=3)
        self.layers[1] = Wrong(how)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(input_ids))
        return self.head(self.layers[2](self.layers[1](x, input_ids[:, 0] == MARK)))


def spike_of(how: str, ranks: int, stage: int = 0) -> list[LossSpike]:
    """Returns what each rank says of the third of four steps, in which rows 7 and 8 of twelve are marked; the
    others are good ones.
    """
    guard = LossGuard("skip", factor=50.0, window=2)
    clean = {**DATA, "input_ids": DATA["input_ids"].clamp(max=MARK - 1)}
    ids = clean["input_ids"].clone()
    ids[7:9, 0] = MARK
    analyzed = analyze(lambda: Model(Faulty(how), layer_roles=SOCKETS), sample_range(clean, 0, 2))
    pairs = (TensorParallel(),) if ranks > 1 else ()
    mesh, strategies = Mesh(dp_replicate=2, tp=ranks), None
    if stage:
        mesh, strategies = (
            Mesh(dp_shard=2, tp=ranks),
            (*pairs, BatchSplit(axis="dp_shard"), ZeRO(stage=stage)),
        )
    plan = make_plan(analyzed, tiny_job(guard=guard), mesh, strategies, 3)

    def rank(world: World) -> LossSpike:
        executor, index = executor_of(analyzed, plan, world), plan.data_index(world.rank)
        steps = (clean, clean, {**clean, "input_ids": ids}, clean)
        metrics = [executor.step(sample_range(batch, 6 * index, 6 * (index + 1))) for batch in steps]
        assert [each.is_skipped for each in metrics] == [False, False, True, False]
        assert metrics[2].spike is not None
        return metrics[2].spike

    return run_on_threads(rank, plan.mesh)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("how", ["forward", "backward", "loud"])
def test_every_tensor_rank_reports_what_one_rank_with_whole_weights_would(how: str, ranks: int):
    expected, found = spike_of(how, 1)[0], spike_of(how, ranks)
    assert all(repr(spike) == repr(found[0]) for spike in found)
    for rank, suspect in enumerate(found[0].rank_reports):
        other = expected.rank_reports[rank // ranks]
        assert (suspect.phase, suspect.block, suspect.parameter) == (
            other.phase,
            other.block,
            other.parameter,
        )
        assert suspect.grad_norm == pytest.approx(other.grad_norm, rel=1e-8, nan_ok=True)
        assert suspect.loss == pytest.approx(other.loss, rel=1e-8, nan_ok=True)


@pytest.mark.parametrize("stage", [1, 3])
def test_shards_of_slices_are_gathered_once_more(stage: int):
    expected, found = spike_of("backward", 1)[0], spike_of("backward", 2, stage)[0]
    assert [each.block for each in found.rank_reports] == [
        each.block for each in expected.rank_reports for _ in range(2)
    ]


def test_a_slice_alone_would_report_less(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        spike_diagnosis, "_merge_findings", lambda state, seen: (seen.loss, seen.sqnorms, "", "")
    )
    expected, found = spike_of("loud", 1)[0], spike_of("loud", 2)[0]
    assert found.rank_reports[2].grad_norm != pytest.approx(expected.rank_reports[1].grad_norm, rel=1e-3)
