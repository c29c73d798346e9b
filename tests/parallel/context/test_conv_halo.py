"""Convolutions over sharded tokens: results of one device, bytes of the formula, and refusals."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.comm.collectives.group import World
from meshwright.comm.collectives.ledger import LedgerEntry
from meshwright.model.context_parallel.conv_call import Conv1dArguments, ShardedConv1dCall
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.parallel.context import conv_halo
from meshwright.parallel.context.context_parallel_strategy import ContextParallel
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.model_spec.sequence_info import AttentionSpec, BlockSequenceInfo, ConvSpec, SequenceInfo
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sequence_sharding import num_positions
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action
from meshwright.testing.ranks import run_on_threads
from tests.paper_model import FIRST_ROLE, program_of
from tests.parallel.context.attention_answers import Rank
from tests.parallel.tensor.odd_llama import analyzed_llama

NUM_SAMPLES, WIDTH, BLOCK_CALL = 2, 4, "layers.0"
WAYS = [
    (RingAttention(), 2),
    (RingAttention(), 3),
    (RingAttention(), 4),
    (RingAttention(load_balance="contiguous"), 3),
    (Ulysses(), 2),
    (HybridContextParallel(), 4),
    (HybridContextParallel(), 6),
]
KERNELS = [
    (3, 1, 2),
    (3, 1, 1),
    (4, 1, 3),
    (4, 1, 2),
    (7, 1, 3),
    (3, 2, 4),
    (3, 2, 2),
    (7, 1, 0),
]  # size, dilation, left


@dataclass(frozen=True)
class Case:
    """A convolution of all tokens of `NUM_SAMPLES` samples, and the gradient of what comes out."""

    known: ConvSpec
    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    grad: torch.Tensor
    dilation: int
    groups: int

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [self.input, self.weight, self.bias]

    def dense(self) -> list[torch.Tensor]:
        """Returns what one device makes of it: the output, then gradients."""
        leaves = [each.detach().requires_grad_() for each in self.inputs]
        padded = F.pad(leaves[0], (self.known.left_halo, self.known.right_halo))
        out = F.conv1d(padded, *leaves[1:], dilation=self.dilation, groups=self.groups)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad)]


def case(kernel: tuple[int, int, int], length: int, groups: int = 1) -> Case:
    size, dilation, left = kernel
    noise = torch.Generator().manual_seed(size * 100 + length)
    shapes = [
        (NUM_SAMPLES, WIDTH, length),
        (2 * WIDTH, WIDTH // groups, size),
        (2 * WIDTH,),
        (NUM_SAMPLES, 2 * WIDTH, length),
    ]
    drawn = [torch.randn(shape, generator=noise, dtype=torch.float64) for shape in shapes]
    reach = (size - 1) * dilation
    return Case(
        ConvSpec(BLOCK_CALL, BLOCK_CALL, length, WIDTH, left, reach - left, needs_grad=True),
        *drawn,
        dilation,
        groups,
    )


def sharding_of(mesh: Mesh, convolve: ConvSpec) -> ShardingPlan:
    tokens = SequenceInfo(
        convolve.num_tokens,
        ("input_ids",),
        ("labels",),
        (BlockSequenceInfo(BLOCK_CALL, ((1,),), ((1,),)),),
        conv_calls=(convolve,),
    )
    return ShardingPlan.one_device(
        mesh, ModelSpec("tiny", (BLOCK_CALL,), (), (convolve.num_tokens,), (1,), sequence_info=tokens)
    )


def played(
    world: World, space: ShardingPlan, strategy: ContextParallel, given: Case
) -> tuple[list[torch.Tensor], list[LedgerEntry]]:
    rank, length = Rank(world, space), given.known.num_tokens
    spans = space.sequence_sharding.token_ranges(length, world.rank)
    share = TokenShard(length, spans)
    strategy.bind(rank)
    assert rank.beside is not None
    world.ledger.is_recording = True
    leaves = [
        each.detach().clone().requires_grad_()
        for each in (share.take_padded(given.input, 2), given.weight, given.bias)
    ]
    asked = Conv1dArguments(*leaves, padding=99, dilation=given.dilation, groups=given.groups)
    out = rank.beside(ShardedConv1dCall(leaves[0], asked, given.known, share))
    rank.act("B")
    own = share.take_local(given.grad, 2)
    found = torch.autograd.grad(out, leaves, F.pad(own, (0, out.shape[2] - own.shape[2])))
    return [
        out.detach()[..., : num_positions(spans)],
        found[0][..., : num_positions(spans)],
        *found[1:],
    ], world.ledger.entries


def run_on_ranks(
    strategy: ContextParallel, given: Case, ranks: int
) -> tuple[list[torch.Tensor], list[list[LedgerEntry]]]:
    """Returns what all ranks together have given, as one device would; and what each has issued."""
    mesh = Mesh(cp=ranks)
    space = strategy.place(sharding_of(mesh, given.known))
    results = run_on_threads(lambda world: played(world, space, strategy, given), mesh)
    found = [torch.zeros_like(each) for each in (given.grad, *given.inputs)]
    for rank, (locals_, _) in enumerate(results):
        at = 0
        for begin, end in space.sequence_sharding.token_ranges(given.known.num_tokens, rank):
            for whole, local in zip(found[:2], locals_[:2], strict=True):
                whole[..., begin:end] = local[..., at : at + end - begin]
            at += end - begin
        for whole, local in zip(found[2:], locals_[2:], strict=True):
            whole += local
    return found, [entries for _, entries in results]


def largest_error(strategy: ContextParallel, given: Case, ranks: int) -> float:
    found, _ = run_on_ranks(strategy, given, ranks)
    return max(float((one - other).abs().max()) for one, other in zip(given.dense(), found, strict=True))


@pytest.mark.parametrize(("strategy", "ranks"), WAYS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_numbers_are_those_of_one_device(
    strategy: ContextParallel, ranks: int, kernel: tuple[int, int, int]
) -> None:
    assert largest_error(strategy, case(kernel, 13), ranks) < 1e-12


@pytest.mark.parametrize(("strategy", "ranks"), WAYS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
def test_kernels_may_span_several_ranks_and_there_may_be_more_ranks_than_tokens(
    strategy: ContextParallel, ranks: int, length: int
) -> None:
    assert largest_error(strategy, case((7, 1, 3), length), ranks) < 1e-12
    assert largest_error(strategy, case((3, 2, 4), length, groups=WIDTH), ranks) < 1e-12


@pytest.mark.parametrize(("strategy", "ranks"), WAYS, ids=str)
@pytest.mark.parametrize("length", [3, 12])
def test_bytes_are_those_of_the_formula_on_every_rank(
    strategy: ContextParallel, ranks: int, length: int
) -> None:
    given = case((4, 2, 4), length)
    spans = (
        2
        if strategy.sequence_sharding(ranks).zigzag
        and strategy.sequence_sharding(ranks).num_inner_ranks < ranks
        else 1
    )
    formula = spans * NUM_SAMPLES * WIDTH * (4 - 1) * 2 * (ranks - 1) * 8
    for entries in run_on_ranks(strategy, given, ranks)[1]:
        assert [(each.action, each.collective, each.sent_nbytes) for each in entries] == [
            ("F", "all_gather", formula),
            ("B", "reduce_scatter", formula),
        ]
        assert [(each.collective, each.nbytes, each.dtype) for each in entries] == planned_transfers(
            strategy, given.known, ranks
        )


def planned_transfers(
    strategy: ContextParallel, convolve: ConvSpec, ranks: int
) -> list[tuple[str, int, str]]:
    """Returns what the program of `strategy` says of it."""
    mesh = Mesh(cp=ranks)
    view = RankView(strategy.place(sharding_of(mesh, convolve)), mesh.coordinate(0))
    job = Job(
        ModelConfig("tiny"),
        DataConfig("random"),
        TrainConfig(batch=NUM_SAMPLES),
        precision=PrecisionConfig("float64", "float64"),
    )
    program = program_of({FIRST_ROLE: [Action("F", BLOCK_CALL, 0), Action("B", BLOCK_CALL, 0)]})
    actions = strategy.rewrite(program, view, job).actions(FIRST_ROLE)
    return [
        (move.collective, move.nbytes, move.dtype) for action in actions for move in action.inner_transfers
    ]


def test_no_gradient_is_sent_back_where_none_is_needed() -> None:
    convolve = replace(case((3, 1, 2), 12).known, needs_grad=False)
    assert [act for act, *_ in planned_transfers(RingAttention(), convolve, 3)] == ["all_gather"]
    assert planned_transfers(RingAttention(), convolve, 1) == []
    assert planned_transfers(RingAttention(), replace(convolve, left_halo=0), 3) == []


def planned(
    strategy: ContextParallel,
    *convolves: ConvSpec,
    attends: tuple[AttentionSpec, ...] = (),
    ranks: int = 3,
    **job: Any,
) -> Plan:
    tokens = SequenceInfo(12, ("input_ids",), ("labels",), attention_calls=attends, conv_calls=convolves)
    model_spec = replace(analyzed_llama().model_spec, sequence_info=tokens)
    said = Job(ModelConfig("llama"), DataConfig("random", sequence=12), TrainConfig(batch=4), **job)
    return Plan.make(said, Mesh(cp=ranks), model_spec, (strategy, DDP("cp")), 0)


LAYER = "model.layers.0"
SHORT = ConvSpec(LAYER, f"{LAYER}.conv", 12, 8, 2, 0, needs_grad=True)


def test_transfers_are_in_forward_order_and_reversed_in_backward() -> None:
    attend = AttentionSpec(
        LAYER, num_heads=6, num_kv_heads=3, head_dim=8, value_head_dim=8, query_len=12, key_len=12
    )
    late = replace(SHORT, left_halo=1, right_halo=1, num_prior_attention_calls=1)
    plan = planned(RingAttention(), SHORT, late, attends=(attend,))
    inner = {
        action.kind: action.inner_transfers for action in plan.for_rank(0).actions if action.subject == LAYER
    }
    assert [each.collective for each in inner["F"]] == ["all_gather", "shift", "shift", "all_gather"]
    assert [each.collective for each in inner["B"]] == ["reduce_scatter", *["shift"] * 4, "reduce_scatter"]


def test_halos_are_sent_in_the_compute_dtype() -> None:
    plan = planned(RingAttention(), SHORT, precision=PrecisionConfig(compute="bfloat16"))
    moves = [
        move
        for action in plan.for_rank(0).actions
        if action.subject == LAYER
        for move in action.inner_transfers
    ]
    assert {(move.dtype, move.nbytes) for move in moves} == {
        ("bfloat16", 2 * 4 * 8 * 2 * 2),
        ("bfloat16", 3 * 2 * 4 * 8 * 2 * 2),
    }


def test_a_kernel_that_reaches_far_beyond_a_shard_is_refused() -> None:
    far = [
        replace(SHORT, module=f"model.layers.{i}.conv", left_halo=conv_halo.MAX_KERNEL_REACH + 1)
        for i in range(2)
    ]
    with pytest.raises(
        PlanError, match=r"model.layers.\*.conv convolves tokens with a kernel that reaches over 257"
    ) as told:
        planned(RingAttention(), *far)
    (fault,) = told.value.diagnostics
    assert fault.problem.endswith("and a rank has 4 (and 1 more)")
    assert (
        fault.fix == "shard tokens over fewer ranks; or mesh.cp = 1 and mesh.dp_shard = 3 are as many ranks"
    )
    planned(RingAttention(), *far, ranks=1)
    planned(RingAttention(), replace(SHORT, left_halo=conv_halo.MAX_KERNEL_REACH))


def test_striped_tokens_have_no_neighbours() -> None:
    with pytest.raises(PlanError, match="a rank that gets them one by one has no neighbours") as told:
        planned(RingAttention(load_balance="striped"), SHORT)
    assert "than 'striped'" in told.value.diagnostics[0].fix
    planned(RingAttention(load_balance="striped"), replace(SHORT, left_halo=0))


def test_halos_of_the_wrong_side_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = conv_halo._halo_columns
    monkeypatch.setattr(conv_halo, "_halo_columns", lambda *given: columns(*given)[::-1])
    assert largest_error(RingAttention(), case((3, 1, 1), 13), 3) > 0.1
