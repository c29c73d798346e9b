"""Factors of gradient matrices: the bytes of the law, projections, what is kept, and every arrangement."""

from collections.abc import Callable, Sequence
from math import prod

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import ExchangedMessage, Rounds, World
from meshwright.parallel.compression.codecs import powersgd
from meshwright.parallel.compression.codecs.powersgd import (
    FACTOR,
    FactorLayout,
    PowerSGDCompression,
    matrix_sides,
    orthonormal_rows,
)
from meshwright.parallel.compression.coded_sum import CodedSum
from meshwright.parallel.compression.residuals import CodedOperand
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.parallel.compression.coded_plans import (
    ANALYZED,
    ARRANGEMENTS,
    DDP3,
    check_plan,
    coded_plan,
    coded_sum,
    hybrid,
)
from tests.tiny_model import case_of, tiny_job, verdict_of

AXIS = ("dp_replicate",)
SHAPES = {"wide": (6, 20), "bias": (7,), "tall": (30, 6), "conv": (8, 3, 3), "small": (2, 2), "scalar": ()}
ROWS_AND_COLUMNS = 6 + 20 + 30 + 6 + 8 + 9
EXACT = 7 + 4 + 1


def first_states(codec: PowerSGDCompression, summed: CodedSum, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = {
        each.state_key: (codec.rank, each.columns)
        for each in FactorLayout.of(summed.parts, codec.rank).matrices
    }
    wide = torch.float64
    return {key: torch.randn(*size, generator=generator, dtype=wide).to(dtype) for key, size in sizes.items()}


def gradient(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numel = sum(map(prod, SHAPES.values()))
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def operand_of(world: World, codec: PowerSGDCompression, summed: CodedSum) -> CodedOperand:
    values = gradient(world.rank)
    parts = {each.name: values[each.offset : each.offset + each.numel] for each in summed.parts}
    states = first_states(codec, summed, values.dtype)
    begin = world.rank * len(values) // summed.num_ranks
    output = values[begin : begin + len(values) // summed.num_ranks] if summed.is_scattered else values
    return CodedOperand(summed, values, parts, output, world.rank, 0, before=states, after=states)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_a_rank_sends_the_bytes_of_the_law_and_ends_with_the_bits_of_all(size: int, collective: str):
    codec = PowerSGDCompression(rank=2)
    numel = sum(map(prod, SHAPES.values()))
    assert numel % 6 == 0
    summed = coded_sum(torch.empty(numel), size, collective, **SHAPES)
    messages = codec.messages(summed)

    def exchange(world: World) -> tuple[float, CodedOperand]:
        operand = operand_of(world, codec, summed)
        sent = [ExchangedMessage(each.collective, each.nbytes, each.dtype) for each in messages]
        world.group(AXIS).exchange(codec.sum_rounds(operand), sent, action="REDUCE").wait()
        return world.ledger.sent_nbytes["REDUCE"], operand

    found = run_on_threads(exchange, Mesh(dp_replicate=size))
    first = 2 * (6 + 30 + 8) + EXACT
    padding = -first % size + -2 * (20 + 6 + 9) % size
    law = 2 * (size - 1) * 4 * (2 * ROWS_AND_COLUMNS + EXACT + padding) // size
    assert [sent for sent, _ in found] == [law] * size
    states = first_states(codec, summed, torch.float64)
    inputs = [gradient(rank, torch.float64) for rank in range(size)]
    expected = codec.defined_sum(summed, inputs, (), states)
    for rank, (_, operand) in enumerate(found):
        mine = expected if collective == "all_reduce" else expected.chunk(size)[rank]
        torch.testing.assert_close(operand.output, mine.float(), rtol=1e-4, atol=1e-4)
        assert collective == "reduce_scatter" or torch.equal(operand.output, found[0][1].output)
        for key, each in operand.after.items():
            assert torch.equal(each, found[0][1].after[key]), "the same Q on every rank"


def projected(
    matrix: torch.Tensor, codec: PowerSGDCompression, states: dict[str, torch.Tensor]
) -> torch.Tensor:
    """What one rank sends of `matrix`; its Q is in `states`."""
    summed = coded_sum(matrix.view(-1), m=tuple(matrix.shape))
    return codec.defined_sum(summed, [matrix.reshape(-1)], (), states).view(matrix.shape)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_what_is_sent_is_a_projection_that_finds_the_strongest_directions(rank: int):
    codec, generator = PowerSGDCompression(rank=rank), torch.Generator().manual_seed(rank)
    matrix = torch.randn(24, 18, generator=generator, dtype=torch.float64)
    states = {f"{FACTOR}/m": torch.randn(rank, 18, generator=generator, dtype=torch.float64)}
    sent = projected(matrix, codec, states)
    lost = matrix - sent
    torch.testing.assert_close((lost * sent).sum() / matrix.norm() ** 2, torch.zeros((), dtype=torch.float64))
    assert lost.norm() < matrix.norm()
    for _ in range(400):
        lost = matrix - projected(matrix, codec, states)
    best = torch.linalg.svdvals(matrix)[rank:].square().sum().sqrt()
    torch.testing.assert_close(lost.norm(), best, rtol=1e-3, atol=0.0)


def test_a_matrix_of_the_rank_arrives_whole_and_zeros_change_nothing():
    codec = PowerSGDCompression(rank=2)
    left, right = torch.randn(9, 2, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    for matrix in (left @ right, left[:, :1] @ right[:1]):
        states = {f"{FACTOR}/m": torch.randn(2, 8, dtype=torch.float64)}
        torch.testing.assert_close(projected(matrix, codec, states), matrix)
        before = states[f"{FACTOR}/m"].clone()
        assert not projected(torch.zeros_like(matrix), codec, states).any()
        assert torch.equal(states[f"{FACTOR}/m"], before)


def test_a_rank_with_a_narrow_slice_uses_the_first_columns_of_its_factor():
    codec, matrix = PowerSGDCompression(rank=1), torch.randn(5, 4)
    values = matrix.clone().view(-1)
    summed = coded_sum(values, m=(5, 4))
    before, after = {f"{FACTOR}/m": torch.randn(1, 6)}, {f"{FACTOR}/m": torch.zeros(1, 6)}
    operand = CodedOperand(summed, values, {"m": values}, values, 0, 0, before=before, after=after)
    for sent, received in codec.sum_rounds(operand):
        assert sent == received == [], "a rank alone"
    states = {key: each[:, :4].double() for key, each in before.items()}
    torch.testing.assert_close(values.view(5, 4), projected(matrix.double(), codec, states).float())
    ((_, kept), (_, defined)) = *after.items(), *states.items()
    torch.testing.assert_close(kept[:, :4], (defined / defined.abs().max()).float())
    assert torch.equal(kept[:, 4:], before[f"{FACTOR}/m"][:, 4:])


@pytest.mark.parametrize("scale", [1.0, 8.0, 3.0])
@pytest.mark.parametrize("is_kept_apart", [False, True])  # as where the step may be left out
def test_gradients_are_added_where_residuals_lie_and_no_bit_depends_on_it(scale: float, is_kept_apart: bool):
    codec, found = PowerSGDCompression(rank=1), []
    summed = coded_sum(torch.empty(47), a=(5, 8), b=(7,))
    owed = {"a": torch.randn(5, 8), "b": torch.randn(7)}
    gradients, q = torch.randn(47), torch.randn(1, 8)
    for in_residuals in (False, True):
        values, before = gradients.clone(), {name: each.clone() for name, each in owed.items()}
        parts = {each.name: values[each.offset : each.offset + each.numel] for each in summed.parts}
        kept = {name: torch.empty_like(each) for name, each in owed.items()} if is_kept_apart else before
        states = {f"{FACTOR}/a": q.clone()}
        operand = CodedOperand(
            summed,
            values,
            parts,
            torch.empty(47),
            0,
            0,
            scale,
            owed=before,
            kept=kept,
            before=states,
            after=states,
            in_residuals=in_residuals,
        )
        operand.add_owed()
        assert torch.equal(values, gradients) == in_residuals, "the pass that is saved"
        for sent, received in codec.sum_rounds(operand):
            assert sent == received == [], "a rank alone"
        assert is_kept_apart == all(torch.equal(before[name], each) for name, each in owed.items())
        found.append((operand.output, *kept.values(), *states.values()))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert found[0][1].any()


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_rows_are_orthonormal_at_any_magnitude_and_0_if_explained(magnitude: float):
    factors = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(2)) * magnitude
    factors[1, 2] = factors[1, 0] * 3 - factors[1, 1]
    factors[2] = 0.0
    found = orthonormal_rows(factors)
    products = found @ found.transpose(1, 2)
    expected = torch.stack([torch.eye(4), torch.diag(torch.tensor([1.0, 1, 0, 1])), torch.zeros(4, 4)])
    torch.testing.assert_close(products, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_seen(bad: float):
    factors = torch.ones(1, 2, 5)
    factors[0, 1, 3] = bad
    assert not orthonormal_rows(factors).isfinite().all()


def test_a_parameter_of_more_dims_is_cut_where_its_sides_are_least():
    assert matrix_sides((64, 32, 3, 3)) == (64, 288)
    assert matrix_sides((8, 64, 128)) == (512, 128)
    assert matrix_sides((5,)) == (5, 1)
    assert matrix_sides(()) == (1, 1)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_ranks_compute_what_their_factors_say(arrangement: str):
    check_plan(PowerSGDCompression(rank=2 if arrangement == "ddp" else 1), arrangement)


def test_states_are_in_the_plan_to_the_byte():
    plan = coded_plan(PowerSGDCompression(rank=2)).for_rank(0)
    (specs,) = plan.states.values()
    shapes = {each.name: each.shape for each in ANALYZED.model_spec.trainable}
    factors = {each.key.removeprefix(f"{FACTOR}/"): each.shape for each in specs if not each.param}
    assert factors == {name: (2, shape[1]) for name, shape in shapes.items() if len(shape) == 2}
    assert {each.param for each in specs if each.param} == shapes.keys()


def test_messages_fit_the_shard_that_needs_most():
    codec = PowerSGDCompression(rank=1)
    strategies, mesh = hybrid(2)
    plan = mw.make_plan(ANALYZED, tiny_job(), mesh, (*strategies, codec), 2)
    sums = {
        (rank, action.name): CodedSum.of(action, action.transfer, plan.for_rank(rank).view)
        for rank in range(mesh.world_size)
        for action in plan.for_rank(rank).actions
        if action.transfer is not None and action.transfer.carried_by
    }
    needed = {}
    for (_, name), each in sums.items():
        layout = FactorLayout.of(each.parts, 1)
        sent = [-(-numel // 3) for numel in (layout.first_numel, layout.second_numel)]
        needed[name] = [max(pair) for pair in zip(needed.get(name, sent), sent, strict=True)]
    for (_, name), each in sums.items():
        gathered = [m.nbytes // 8 for m in each.transfer.messages if m.collective == "all_gather"]
        assert gathered == [numel for numel in needed[name] if numel], name
    assert len({each.parts for each in sums.values()}) > len(needed), "shards differ"


@pytest.mark.parametrize(
    ("options", "told", "fix"),
    [
        ({"rank": 0}, "rank = 0", "at least 1"),
        ({"rank": 9}, "rank = 9, and factors of no matrix are smaller", "use rank = 4 or less"),
        ({"params": ("*.bias",)}, "factors of no matrix", "choose matrices with params"),
        ({"error_feedback": False}, "directions that are never sent would be lost", 'use mode = "int8"'),
    ],
)
def test_what_cannot_be_is_refused_with_a_repair(options: dict[str, object], told: str, fix: str):
    strategies, mesh = DDP3
    with pytest.raises(PlanError) as refused:
        mw.make_plan(ANALYZED, tiny_job(), mesh, (*strategies, PowerSGDCompression(**options)))
    assert told in str(refused.value)
    assert fix in str(refused.value)


def stale_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PowerSGDCompression, "_keep_factors", staticmethod(lambda *args: None))


def factors_of_the_next_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = PowerSGDCompression._keep_factors

    def faulty(operand: CodedOperand, layout: FactorLayout, factors: Sequence[torch.Tensor]) -> None:
        keep(operand, layout, [each.roll(1, 1) for each in factors])

    monkeypatch.setattr(PowerSGDCompression, "_keep_factors", staticmethod(faulty))


def factors_that_drift_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = PowerSGDCompression._keep_factors

    def faulty(operand: CodedOperand, layout: FactorLayout, factors: Sequence[torch.Tensor]) -> None:
        keep(operand, layout, factors)
        for key, each in operand.after.items() if operand.index == 1 else ():
            each.view(-1)[:1] += 0.1 * key.startswith(FACTOR)

    monkeypatch.setattr(PowerSGDCompression, "_keep_factors", staticmethod(faulty))


def rows_of_norm_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(powersgd, "orthonormal_rows", lambda rows: rows / rows.norm(dim=-1, keepdim=True))


def mean_for_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    summed = powersgd.summed_in_order

    def faulty(values: torch.Tensor, index: int, num_ranks: int) -> Rounds:
        yield from summed(values, index, num_ranks)
        values /= num_ranks

    monkeypatch.setattr(powersgd, "summed_in_order", faulty)


def rank_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    summed = powersgd.summed_in_order

    def faulty(values: torch.Tensor, index: int, num_ranks: int) -> Rounds:
        values *= index != 1
        yield from summed(values, index, num_ranks)

    monkeypatch.setattr(powersgd, "summed_in_order", faulty)


def factors_swapped_between_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    split = FactorLayout.second_factors
    monkeypatch.setattr(
        FactorLayout, "second_factors", lambda self, message: [each.flip(0) for each in split(self, message)]
    )


def residual(factor: float) -> Callable[[pytest.MonkeyPatch], None]:
    keep = CodedOperand.keep_residual

    def faulty(operand: CodedOperand) -> None:
        keep(operand)
        for each in operand.kept.values():
            each.mul_(factor)

    return lambda monkeypatch: monkeypatch.setattr(CodedOperand, "keep_residual", faulty)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "residual dropped": residual(0.0),
    "residual doubled": residual(2.0),
    "residual of the wrong sign": residual(-1.0),
    "stale Q": stale_factors,
    "Q of another column": factors_of_the_next_matrix,
    "Q drifts on one rank": factors_that_drift_on_one_rank,
    "rows are not orthogonal": rows_of_norm_one_only,
    "mean for sum": mean_for_sum,
    "a rank is left out": rank_left_out,
    "Q in another order than U": factors_swapped_between_rows,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("arrangement", ["ddp", "hybrid"])
def test_a_planted_fault_is_found(fault: str, arrangement: str, monkeypatch: pytest.MonkeyPatch):
    FAULTS[fault](monkeypatch)
    plan = coded_plan(PowerSGDCompression(rank=2, params=("embed.*", "head.*")), arrangement)
    verdict = verdict_of(case_of(ANALYZED, plan), steps=2)
    assert not verdict.passed, fault
