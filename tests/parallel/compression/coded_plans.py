"""Plans of the tiny model whose gradients are summed as codes, and what every codec of blocks must hold."""

from collections.abc import Iterator
from itertools import accumulate
from math import prod

import torch

import meshwright as mw
from meshwright.parallel.compression.codecs.block_codes import BlockCodec
from meshwright.parallel.compression.codecs.topk import TopKCompression
from meshwright.parallel.compression.coded_sum import CodedPart, CodedSum
from meshwright.parallel.compression.gradient_compression import GradientCompression
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Transfer
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.static_checks import static_checks
from tests.tiny_model import analyzed_model, case_of, tiny_job, verdict_of

ANALYZED = analyzed_model()
SIZES = (1, 2, 7, 255, 256, 257, 1000)
DDP3 = (mw.BatchSplit(), mw.DDP()), mw.Mesh(dp_replicate=3)


def zero3(stage: int) -> tuple[tuple[Strategy, ...], mw.Mesh]:
    """ZeRO over three ranks."""
    return (mw.BatchSplit("dp_shard"), mw.ZeRO(stage=stage)), mw.Mesh(dp_shard=3)


def hybrid(stage: int) -> tuple[tuple[Strategy, ...], mw.Mesh]:
    """Shards over two ranks, and three replicas of them."""
    split = mw.BatchSplit("dp_shard"), mw.BatchSplit()
    zero = mw.ZeRO(stage=stage, replicate_axis="dp_replicate")
    return (*split, zero), mw.Mesh(dp_shard=2, dp_replicate=3)


ARRANGEMENTS = {
    "ddp": DDP3,
    **{f"zero {stage}": zero3(stage) for stage in (1, 2, 3)},
    "hybrid": hybrid(2),
}


def job_of(codec: GradientCompression, **job: object) -> mw.Job:
    """A tiny job, whose optimizer has no momentum if `codec` has one."""
    if isinstance(codec, TopKCompression) and codec.momentum:
        job.setdefault("optimizer", mw.OptimizerConfig("sgd", lr=0.1))
    return tiny_job(**job)


def coded_plan(
    codec: GradientCompression, arrangement: str = "ddp", micro_batch: int = 2, **job: object
) -> Plan:
    """The plan of an arrangement whose sums `codec` carries."""
    strategies, mesh = ARRANGEMENTS[arrangement]
    return mw.make_plan(ANALYZED, job_of(codec, **job), mesh, (*strategies, codec), micro_batch)


def check_plan(codec: GradientCompression, arrangement: str) -> None:
    """Fails unless the plan passes static checks, and ranks as threads compute what its codes say."""
    plan = coded_plan(codec, arrangement)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(ANALYZED, plan), steps=2)
    assert verdict.passed, verdict


def decoded(codec: BlockCodec, values: torch.Tensor, key: int = 1) -> torch.Tensor:
    """What the codes of `values` say."""
    return codec.defined_sum(coded_sum(values, collective="reduce_scatter"), [values], [key], {})


def coded_sum(
    values: torch.Tensor, size: int = 1, collective: str = "all_reduce", **shapes: tuple[int, ...]
) -> CodedSum:
    """The sum of flat `values` over `size` ranks; with `shapes`, of parameters that lie one after another."""
    dtype = str(values.dtype).removeprefix("torch.")
    transfer = Transfer(collective, ("dp_replicate",), values.nbytes, dtype=dtype)
    ends = (0, *accumulate(prod(shape) for shape in shapes.values()))
    places = zip(shapes.items(), ends, strict=False)
    parts = tuple(CodedPart(name, shape, 0, prod(shape), at) for (name, shape), at in places)
    return CodedSum(transfer, size, (parts,))


def samples(dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    """Gradients of many sizes and magnitudes."""
    generator = torch.Generator().manual_seed(3)
    for numel in SIZES:
        for magnitude in (1e-6, 1.0, 1e3):
            yield torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) * magnitude


def check_codes(codec: BlockCodec, nbytes: dict[int, int]) -> None:
    """Fails unless codes have the bytes they should, and hold zeros, one huge element and no finite one."""
    for numel, expected in nbytes.items():
        draws = torch.full((numel,), 0.5) if codec.draws_numbers() else None
        codes = codec.encode(torch.randn(numel), draws)
        assert codes.dtype == torch.uint8
        assert codes.numel() == codec.code_nbytes(numel) == expected
        assert codec.decode(codes, numel, torch.float32).shape == (numel,)
    assert not decoded(codec, torch.zeros(300)).any()
    huge = torch.full((300,), 1e-3)
    huge[7] = 1e30
    lost = huge - decoded(codec, huge)
    assert lost.isfinite().all()
    assert lost.norm() <= huge.norm() * (1 + 1e-6)
    for bad in (float("inf"), float("-inf"), float("nan")):
        values = torch.ones(300)
        values[299] = bad
        assert not decoded(codec, values).isfinite().all(), bad
