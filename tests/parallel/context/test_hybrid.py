"""Hybrid context parallelism: Ulysses in groups of neighbours and a ring across groups; equals one device,
and sends what the program states.
"""

import pytest
import torch

from meshwright.comm.backends.threads import ThreadGroup
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from tests.parallel.context.attention_answers import (
    NUM_SAMPLES,
    case,
    issued_transfers,
    largest_error,
    planned_transfers,
    run_on_ranks,
    sharding_of,
)
from tests.parallel.context.dense_attention import mask_of
from tests.parallel.context.test_ulysses import masked
from tests.parallel.tensor.odd_llama import analyzed_llama, planned

WORST = 1e-12
SHAPES = [
    (4, 2, 4, 4),
    (4, 2, 4, 1),
    (4, 2, 6, 3),
    (6, 2, 4, 2),
    (6, 3, 6, 2),
    (6, 3, 6, 6),
]  # ranks, inner, heads, groups


@pytest.mark.parametrize(("ranks", "inner", "heads", "groups"), SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_that_of_one_device(
    ranks: int, inner: int, heads: int, groups: int, causal: bool
) -> None:
    assert (
        largest_error(
            case(heads, groups, 13, causal=causal),
            HybridContextParallel(ulysses_degree=inner),
            Mesh(cp=ranks),
        )
        < WORST
    )


@pytest.mark.parametrize("length", [1, 3, 5])
def test_there_may_be_more_ranks_than_tokens(length: int) -> None:
    assert largest_error(case(4, 2, length, causal=True), HybridContextParallel(), Mesh(cp=6)) < WORST


@pytest.mark.parametrize(
    "mask", ["window", "documents", "bias", "learned", "one learned", "keys", "learned keys"]
)
@pytest.mark.parametrize("length", [3, 9])
def test_masks_are_those_of_one_device(mask: str, length: int) -> None:
    assert (
        largest_error(case(4, 2, length, mask=masked(mask, length)), HybridContextParallel(), Mesh(cp=4))
        < WORST
    )


@pytest.mark.parametrize("balance", ["contiguous", "striped"])
@pytest.mark.parametrize("mask", [None, "documents", "bias", "learned", "keys"])
def test_other_load_balances_equal_one_device(balance: str, mask: str | None) -> None:
    given = case(4, 2, 11, mask=None if mask is None else masked(mask, 11), causal=mask is None)
    assert largest_error(given, HybridContextParallel(load_balance=balance), Mesh(cp=4)) < WORST


@pytest.mark.parametrize(("ranks", "inner", "heads", "groups"), SHAPES)
@pytest.mark.parametrize("mask", [None, "window", "learned"])
def test_what_is_issued_is_what_the_program_states(
    ranks: int, inner: int, heads: int, groups: int, mask: str | None
) -> None:
    given = case(
        heads, groups, 13, widths=(4, 2), mask=None if mask is None or heads != 4 else masked(mask, 13)
    )
    strategy, mesh = HybridContextParallel(ulysses_degree=inner), Mesh(cp=ranks)
    expected = planned_transfers(strategy, given, mesh)
    assert {size for _, size, *_ in expected["F"]} == {inner, ranks}
    assert all(
        issued_transfers(entries) == expected for entries in run_on_ranks(strategy, given, mesh).entries
    )


def test_bytes_are_those_of_the_formula() -> None:
    ranks, inner, heads, groups, width, length = 6, 2, 4, 2, 4, 24
    entries = run_on_ranks(
        HybridContextParallel(ulysses_degree=inner), case(heads, groups, length), Mesh(cp=ranks)
    ).entries[0]
    share = NUM_SAMPLES * length * heads * width / ranks
    exchange = (2 + 2 * groups / heads) * share * (inner - 1) / inner
    ring = 2 * share * groups / heads * (ranks // inner - 1)
    assert sum(entry.sent_nbytes for entry in entries if entry.action == "F") == 8 * (exchange + ring)
    assert sum(entry.sent_nbytes for entry in entries if entry.action == "B") == 8 * (exchange + 2 * ring)


def test_the_extreme_group_sizes_are_a_ring_and_ulysses() -> None:
    given, mesh = case(4, 2, 13, causal=True), Mesh(cp=4)
    for inner, same in ((1, RingAttention()), (4, Ulysses())):
        hybrid, other = (
            run_on_ranks(strategy, given, mesh)
            for strategy in (HybridContextParallel(ulysses_degree=inner), same)
        )
        assert [issued_transfers(each) for each in hybrid.entries] == [
            issued_transfers(each) for each in other.entries
        ]
        assert (
            max(float((one - two).abs().max()) for one, two in zip(hybrid.found, other.found, strict=True))
            < WORST
        )


def test_a_ring_of_the_wrong_neighbours_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    shift = ThreadGroup.shift
    monkeypatch.setattr(
        ThreadGroup, "shift", lambda *args, offset=1, **more: shift(*args, offset=offset // 2, **more)
    )
    assert largest_error(case(4, 4, 12), HybridContextParallel(), Mesh(cp=4)) > 0.01


def test_invalid_options_are_refused() -> None:
    space = sharding_of(Mesh(cp=4), [case(3, 3, 8).attend])
    with pytest.raises(PlanError) as raised:
        HybridContextParallel(load_balance="folded")
    strange = HybridContextParallel(ulysses_degree=3)
    assert [str(fault) for fault in (*strange.check(None, space), *raised.value.diagnostics)] == [
        "strategies.hybrid_context_parallel.ulysses_degree: ulysses_degree = 3, and cp has 4 "
        "ranks, which are to be groups of so many "
        "neighbours\n"
        "  repair: set ulysses_degree to 1 or 2 or 4",
        (
            "strategies.hybrid_context_parallel.load_balance: load_balance = 'folded'; needed is 'zigzag', "
            "'contiguous' or 'striped'\n  repair: choose one of: contiguous, striped, zigzag"
        ),
    ]
    (fault,) = HybridContextParallel().check_combined(HybridContextParallel().place(space))
    assert str(fault) == (
        "strategies.hybrid_context_parallel: layers.0: attention has 3 heads on a rank, and they "
        "go to 2 ranks in equal number\n"
        "  repair: use ring, which does not shard heads; or set ulysses_degree to 1"
    )


def test_queries_that_attend_to_nothing_are_zero() -> None:
    given = case(4, 2, 12, mask=mask_of("padding", 12))
    found = run_on_ranks(HybridContextParallel(), given, Mesh(cp=4)).found[0]
    blind = ~given.mask.expand(NUM_SAMPLES, 4, 12, 12).any(-1)
    assert torch.equal(found[blind], torch.zeros_like(found[blind]))


@pytest.mark.parametrize("inner", [0, 4, 5, 12])
def test_groups_that_do_not_divide_the_ranks_are_reported(inner: int) -> None:
    with pytest.raises(
        PlanError,
        match=(f"ulysses_degree = {inner}, and cp has 6 ranks.*\n.*set ulysses_degree to 1 or 2 or 3 or 6"),
    ):
        planned(analyzed_llama(), Mesh(cp=6), (HybridContextParallel(ulysses_degree=inner), DDP(axis="cp")))
