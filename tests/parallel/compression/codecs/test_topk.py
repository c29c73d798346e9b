"""The largest elements: which they are, their bytes, their contraction, and sums of them everywhere."""

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import ExchangedMessage, World
from meshwright.parallel.compression.codecs.topk import SAMPLE, TopKCompression, largest, magnitudes
from meshwright.parallel.compression.coded_sum import CodedSum
from meshwright.parallel.compression.residuals import CodedOperand
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import OptimizerConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.parallel.compression.coded_plans import (
    ANALYZED,
    ARRANGEMENTS,
    check_plan,
    coded_plan,
    coded_sum,
    decoded,
    job_of,
    samples,
)
from tests.tiny_model import case_of, verdict_of

AXIS = ("dp_replicate",)
CASES = {
    "random": lambda values: values,
    "with ties": torch.round,
    "equal": torch.ones_like,
    "zeros": torch.zeros_like,
    "few that are not zero": lambda values: values.where(values > 3.5, 0),
    "huge": lambda values: values.where(values < 3, 1e30),
}


def first_largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """What `largest` defines, by a stable sort of all magnitudes."""
    return magnitudes(values).sort(descending=True, stable=True).indices[:count].sort().values


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("numel", [1, 300, SAMPLE + 1, 90_000])
def test_selection_is_exact_and_the_first_of_ties_are_taken(case: str, numel: int):
    generator = torch.Generator().manual_seed(numel)
    for dtype in (torch.float32, torch.float64):
        values = CASES[case](torch.randn(numel, generator=generator, dtype=dtype))
        for density in (1e-5, 0.01, 0.4):
            count = max(1, round(density * numel))
            found = largest(values, count, key=7)
            assert torch.equal(found.sort().values, first_largest(values, count)), density


def test_the_sample_does_not_change_what_is_chosen():
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    chosen = {tuple(largest(values, 500, key).sort().values.tolist()) for key in range(5)}
    assert len(chosen) == 1


def test_what_is_not_finite_is_sent_and_not_owed():
    for bad in (float("inf"), float("-inf"), float("nan")):
        values = torch.ones(300)
        values[299] = bad
        codec = TopKCompression()
        codes = torch.zeros(codec.slice_nbytes(300), dtype=torch.uint8)
        codec.encode_slice(values, codes, key=1)
        assert values.isfinite().all(), bad
        total = torch.empty(300)
        codec.add_slices(codes.unsqueeze(0), total)
        assert not total.isfinite().all(), bad


@pytest.mark.parametrize("density", [0.001, 0.1, 0.49])
def test_what_is_lost_has_shrunk_as_the_essay_says(density: float):
    codec = TopKCompression(density=density)
    for dtype in (torch.float32, torch.float64):
        for values in samples(dtype):
            kept, numel = codec.num_kept(len(values)), len(values)
            lost = values - decoded(codec, values)
            bound = (1 - kept / numel) * values.norm() ** 2
            assert lost.norm() ** 2 <= bound * (1 + 1e-6) + 1e-12 * values.norm() ** 2
            assert (lost == 0).sum() >= kept or dtype == torch.float64


def test_slices_have_pairs_and_sums_pairs_or_values():
    codec = TopKCompression(density=0.01)
    assert [codec.num_kept(numel) for numel in (0, 1, 49, 250, 1000)] == [0, 1, 1, 2, 10]
    assert codec.slice_nbytes(1000) == 80
    assert [codec.sum_nbytes(1000, ranks) for ranks in (2, 3, 49, 50, 99)] == [160, 240, 3920, 4000, 4000]


@pytest.mark.parametrize(("size", "density"), [(2, 0.01), (3, 0.01), (3, 0.3)])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_a_rank_sends_the_bytes_of_the_law(size: int, density: float, collective: str):
    codec, numel = TopKCompression(density=density), 6000
    summed = coded_sum(torch.empty(numel), size, collective)
    messages = codec.messages(summed)
    inputs = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    scatters, part = collective == "reduce_scatter", numel // size

    def exchange(world: World) -> tuple[float, torch.Tensor, torch.Tensor]:
        values = inputs[world.rank].clone()
        output = torch.empty(part) if scatters else values.clone()
        operand = CodedOperand(summed, values, {}, output, world.rank, key=world.rank)
        sent = [ExchangedMessage(each.collective, each.nbytes, each.dtype) for each in messages]
        world.group(AXIS).exchange(codec.sum_rounds(operand), sent, action="REDUCE").wait()
        return world.ledger.sent_nbytes["REDUCE"], output, values

    found = run_on_threads(exchange, Mesh(dp_replicate=size))
    kept = size * round(density * part)  # of all slices
    law = 8 * kept * (size - 1) // size
    law += 0 if scatters else min(8 * kept, 4 * part) * (size - 1)
    assert [sent for sent, _, _ in found] == [law] * size
    total, owed = sum(inputs), sum(lost for _, _, lost in found)
    applied = torch.cat([out for _, out, _ in found]) if scatters else found[0][1]
    torch.testing.assert_close(applied + owed, total, rtol=1e-5, atol=1e-5)
    if not scatters:
        assert all(torch.equal(out, applied) for _, out, _ in found), "the same bits on every rank"


@pytest.mark.parametrize("size", [2, 3])
def test_slices_may_be_shorter_than_others_or_empty(size: int):
    codec = TopKCompression(density=0.3)
    for numel in (1, size + 1, 2 * size + 1):
        inputs = [torch.randn(numel, dtype=torch.float64).float().double() for _ in range(size)]
        summed = coded_sum(inputs[0], size)
        expected = codec.defined_sum(summed, inputs, range(size), {})

        def exchange(world: World, inputs: list = inputs, summed: CodedSum = summed) -> torch.Tensor:
            output = torch.empty_like(inputs[0])
            values = inputs[world.rank].clone()
            operand = CodedOperand(summed, values, {}, output, world.rank, key=world.rank)
            messages = codec.messages(summed)
            sent = [ExchangedMessage(each.collective, each.nbytes, each.dtype) for each in messages]
            world.group(AXIS).exchange(codec.sum_rounds(operand), sent, action="REDUCE").wait()
            return output

        for output in run_on_threads(exchange, Mesh(dp_replicate=size)):
            torch.testing.assert_close(output, expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("density", [0.01, 0.05, 0.3])  # with 0.01 nothing of some blocks is sent
def test_ranks_compute_what_their_codes_say(arrangement: str, density: float):
    check_plan(TopKCompression(density=density), arrangement)


@pytest.mark.parametrize("density", [0.0, 0.5, 1.0, -0.1, float("nan")])
def test_none_or_half_of_the_elements_are_refused(density: float):
    with pytest.raises(PlanError, match=r"needed is a number above 0 and below 0.5(?s:.*)write 0.01"):
        TopKCompression(density=density)


def test_without_error_feedback_it_is_refused():
    with pytest.raises(PlanError, match=r"would never be applied(?s:.*)use mode = \"int8\""):
        coded_plan(TopKCompression(error_feedback=False))


def test_the_first_steps_are_exact():
    check_plan(TopKCompression(exact_steps=1), "zero 2")


def test_a_plan_says_its_bytes():
    plan = coded_plan(TopKCompression(density=0.1))
    sums = [a.transfer for a in plan.for_rank(0).actions if a.transfer and a.transfer.carried_by]
    assert sums
    for transfer in sums:
        part = -(-transfer.nbytes // 8 // 3)  # float64
        kept = max(1, round(0.1 * part))
        assert [each.nbytes for each in transfer.messages] == [3 * 8 * kept, min(3 * 8 * kept, 4 * part)]


def paper_step(
    gradients: list[torch.Tensor],
    momenta: list[torch.Tensor],
    residuals: list[torch.Tensor],
    codec: TopKCompression,
    *,
    begins: bool,
) -> torch.Tensor:
    """What Deep Gradient Compression sums (algorithms 1 and 4), rank by rank, in place."""
    total = torch.zeros_like(gradients[0])
    for gradient, u, v in zip(gradients, momenta, residuals, strict=True):
        norm, limit = gradient.norm(), codec.local_clip / len(gradients) ** 0.5
        clipped = gradient * min(1.0, limit / norm.item())
        u.mul_(codec.momentum if begins else 1.0).add_(clipped)
        v.add_(u if begins else clipped)
        for begin, part in zip((0, 20, 40), v.split(20), strict=True):
            sent = first_largest(part, codec.num_kept(20)) + begin
            total[sent] += v[sent]
            v[sent] = u[sent] = 0.0
    return total


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_momentum_and_clipping_are_those_of_the_paper(scale: float):
    size, numel, codec = 3, 60, TopKCompression(density=0.1, momentum=0.9, local_clip=2.0)
    steps = [
        [torch.randn(numel, generator=torch.Generator().manual_seed(10 * i + r)) for r in range(size)]
        for i in range(6)
    ]
    summed = coded_sum(torch.empty(numel), size, w=(numel,))

    def play(world: World) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        momentum, residual, found = torch.zeros(numel), torch.zeros(numel), []
        for i, gradients in enumerate(steps):
            values = gradients[world.rank] * scale
            states = {"momentum/w": momentum}
            operand = CodedOperand(
                summed,
                values,
                {"w": values},
                values,
                world.rank,
                i,
                scale,
                owed={"w": residual},
                kept={"w": residual},
                before=states,
                after=states,
                begins=frozenset("w" if i % 2 == 0 else ""),
            )
            codec.prepare(operand)
            operand.add_owed()
            messages = codec.messages(summed)
            sent = [ExchangedMessage(each.collective, each.nbytes, each.dtype) for each in messages]
            world.group(AXIS).exchange(codec.sum_rounds(operand), sent, action="REDUCE").wait()
            found.append(values / scale)
        return found, momentum, residual

    played = run_on_threads(play, Mesh(dp_replicate=size))
    momenta, residuals = ([torch.zeros(numel) for _ in range(size)] for _ in range(2))
    for i, gradients in enumerate(steps):
        total = paper_step(gradients, momenta, residuals, codec, begins=i % 2 == 0)
        for found, _, _ in played:
            torch.testing.assert_close(found[i], total, rtol=1e-5, atol=1e-6)
    for rank, (_, momentum, residual) in enumerate(played):
        torch.testing.assert_close(momentum, momenta[rank], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(residual, residuals[rank], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arrangement", ["ddp", "zero 2", "hybrid"])
def test_ranks_add_momentum_and_clip_as_one_device_is_told(arrangement: str):
    check_plan(TopKCompression(density=0.2, momentum=0.7, local_clip=0.05), arrangement)


def end_elsewhere(codec: TopKCompression, operand: CodedOperand, codes: torch.Tensor) -> None:
    for key, each in operand.after.items():
        if key.startswith("momentum/") and each.numel():
            each.view(-1)[0] = 0


def add_twice(codec: TopKCompression, operand: CodedOperand, name: str, gradient: torch.Tensor) -> None:
    add_momentum(codec, operand, name, gradient)
    operand.after[f"momentum/{name}"].mul_(2)


def add_always(codec: TopKCompression, operand: CodedOperand, name: str, gradient: torch.Tensor) -> None:
    operand.begins = frozenset(operand.by_param)
    add_momentum(codec, operand, name, gradient)


add_momentum = TopKCompression._add_momentum
FAULTS = {
    "momentum never ends": ("end_momenta", lambda codec, operand, codes: None),
    "momentum of another element ends": ("end_momenta", end_elsewhere),
    "momentum is doubled": ("_add_momentum", add_twice),
    "momentum decays with each microbatch": ("_add_momentum", add_always),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_momentum_is_found(fault: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TopKCompression, *FAULTS[fault])
    plan = coded_plan(TopKCompression(density=0.2, momentum=0.7), "zero 2")
    assert not verdict_of(case_of(ANALYZED, plan), steps=2).passed


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"exact_steps": 2}, "the first 2 steps have no codes"),
        ({"params": ("layers.*",)}, r"parameters are summed exactly \(embed.weight"),
        ({"optimizer": OptimizerConfig("adamw")}, "adamw has its own averages"),
        ({"optimizer": OptimizerConfig("sgd", momentum=0.9)}, "the optimizer has 0.9 behind them"),
    ],
)
def test_momentum_that_cannot_be_exact_is_refused(options: dict, told: str):
    job = {key: options.pop(key) for key in ("optimizer",) if key in options}
    with pytest.raises(PlanError, match=told) as refused:
        coded_plan(TopKCompression(momentum=0.5, **options), **job)
    assert all(each.fix for each in refused.value.diagnostics)


def test_momentum_on_one_rank_is_refused_with_the_repair():
    codec = TopKCompression(momentum=0.5)
    with pytest.raises(PlanError, match="one rank along dp_replicate codes nothing") as refused:
        mw.make_plan(ANALYZED, job_of(codec), mw.Mesh(), (mw.BatchSplit(), mw.DDP(), codec))
    assert "two ranks or more" in str(refused.value)
