"""Notes of a plan on sequence sharding: which rank has which tokens, and the balance of attention."""

from dataclasses import replace

import pytest

from meshwright.api import make_plan
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.model_spec.sequence_info import GlueGather
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.sequence_sharding import SequenceSharding
from meshwright.plan.strategy_interface import Strategy
from meshwright.report.terminal.dtype_balance_staleness_notes import (
    max_over_mean_attention,
    sequence_sharding_text,
)
from tests.parallel.tensor.odd_llama import analyzed_llama

JOB = Job(ModelConfig("llama"), DataConfig("random", sequence=9), TrainConfig(batch=4))


def words(mesh: Mesh, *strategies: Strategy) -> dict[str, str]:
    return sequence_sharding_text(make_plan(analyzed_llama(), JOB, mesh, strategies))


def test_without_sequence_sharding_there_is_no_note():
    assert words(Mesh()) == {}


def test_counts_and_balance_are_shown():
    assert words(Mesh(cp=2), RingAttention(), DDP(axis="cp"))["tokens"] == (
        "9 of each sample, sharded over 2 ranks: 4 to 5 each; "
        "causal attention: the busiest rank has 1.11 x the mean"
    )


@pytest.mark.parametrize("looks", [False, True])
def test_gathers_of_glue_are_shown(looks: bool):
    plan = make_plan(analyzed_llama(), JOB, Mesh(cp=2), (RingAttention(), DDP(axis="cp")))
    changed_spec = replace(
        plan.model_spec,
        sequence_info=replace(
            plan.model_spec.sequence_info, gathers=(GlueGather("model.norm", 432),), reads_values=looks
        ),
    )
    told = sequence_sharding_text(replace(plan, sharding=replace(plan.sharding, model_spec=changed_spec)))[
        "tokens"
    ]
    said = "; glue after model.norm needs the tokens of other ranks: 432 elements per sample are gathered"
    assert told.endswith(
        said
        + (
            " for a batch like the example (the forward reads values: another batch may need others)"
            if looks
            else ""
        )
    )


@pytest.mark.parametrize(
    ("sharding", "share"),
    [
        (SequenceSharding(4), 1.0),
        (SequenceSharding(4, zigzag=False), 1.75),
        (SequenceSharding(4, 4, zigzag=False), 1.0),
        (SequenceSharding(6, 2), 1.0),
    ],
    ids=str,
)
def test_zigzag_is_balanced_and_contiguous_is_not(sharding: SequenceSharding, share: float):
    assert max_over_mean_attention(sharding, 4080) == pytest.approx(share, abs=1e-3)


@pytest.mark.parametrize(
    "sharding",
    [
        SequenceSharding(4),
        SequenceSharding(4, zigzag=False),
        SequenceSharding(4, striped=True),
        SequenceSharding(6, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("ends", [(), (1 / 3,), (1 / 6, 1 / 2)], ids=str)
def test_pairs_in_documents_are_counted_one_by_one(sharding: SequenceSharding, ends: tuple[float, ...]):
    firsts = range(0, sharding.num_ranks, sharding.num_inner_ranks)
    spans = [sharding.inner_group_ranges(1024, first) for first in firsts]
    starts = [0, *(int(1024 * end) for end in ends)]
    looks = [at - max(start for start in starts if start <= at) + 1 for at in range(1024)]
    work = [sum(looks[at] for begin, end in mine for at in range(begin, end)) for mine in spans]
    assert max_over_mean_attention(sharding, 1024, ends) == pytest.approx(
        max(work) * len(work) / sum(work), abs=1e-12
    )


def planned(balance: str, length: int, **more: bool) -> str:
    plan = make_plan(analyzed_llama(), JOB, Mesh(cp=4), (RingAttention(load_balance=balance), DDP(axis="cp")))
    attends = tuple(replace(attend, **more) for attend in plan.model_spec.sequence_info.attention_calls)
    changed_spec = replace(
        plan.model_spec,
        sequence_info=replace(plan.model_spec.sequence_info, length=length, attention_calls=attends),
    )
    return sequence_sharding_text(replace(plan, sharding=replace(plan.sharding, model_spec=changed_spec)))[
        "tokens"
    ]


def test_imbalance_is_shown_with_the_better_load_balance():
    mask = (
        "attention under a mask, such as documents of a sixth, a third and a half of a sequence: "
        "the busiest rank has"
    )
    assert 'has 1.75 x the mean (load_balance = "zigzag": 1.00)' in planned("contiguous", 4096)
    assert planned("zigzag", 4096).endswith("causal attention: the busiest rank has 1.00 x the mean")
    uneven = planned("zigzag", 4096, has_mask=True, is_causal=False)
    assert uneven.endswith(f'{mask} 1.29 x the mean (load_balance = "striped": 1.00)')
    assert planned("striped", 4096, has_mask=True).endswith(f"1.00 x the mean; {mask} 1.00 x the mean")
