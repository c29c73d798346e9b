"""Convolutions over tokens on several ranks: the numbers of one device, the bytes of the formula, and what is refused."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.comm.collectives.group import Entry, World
from meshwright.model.sequence_parallel.conv_call import Convolution, Convolved
from meshwright.model.sequence_parallel.token_shard import Share
from meshwright.parallel.context import conv_halo
from meshwright.parallel.context.hybrid import Hybrid
from meshwright.parallel.context.ring import Ring
from meshwright.parallel.context.sequence_sharding import Deals
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.ddp import Replicate
from meshwright.plan.job.data_source import DataSource, ModelSource
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, Train
from meshwright.plan.job.precision import Precision
from meshwright.plan.model_spec.model_spec import Anatomy
from meshwright.plan.model_spec.sequence_info import Attend, Convolve, Passing, Tokens, count_of
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Program
from meshwright.plan.step.single_device import ROLE
from meshwright.testing.ranks import on_threads
from tests.parallel.context.attention_answers import Rank
from tests.parallel.tensor.odd_llama import known

ROWS, WIDTH, VISIT = 2, 4, "layers.0"
WAYS = [(Ring(), 2), (Ring(), 3), (Ring(), 4), (Ring(balance="contiguous"), 3), (Ulysses(), 2), (Hybrid(), 4), (Hybrid(), 6)]
KERNELS = [(3, 1, 2), (3, 1, 1), (4, 1, 3), (4, 1, 2), (7, 1, 3), (3, 2, 4), (3, 2, 2), (7, 1, 0)]  # size, dilation, left


@dataclass(frozen=True)
class Case:
    """A convolution of all tokens of `ROWS` samples, and the gradient of what comes out."""

    known: Convolve
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
        """What one device makes of it: the output, then gradients."""
        leaves = [each.detach().requires_grad_() for each in self.inputs]
        padded = F.pad(leaves[0], (self.known.left, self.known.right))
        out = F.conv1d(padded, *leaves[1:], dilation=self.dilation, groups=self.groups)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad)]


def case(kernel: tuple[int, int, int], length: int, groups: int = 1) -> Case:
    size, dilation, left = kernel
    noise = torch.Generator().manual_seed(size * 100 + length)
    shapes = [(ROWS, WIDTH, length), (2 * WIDTH, WIDTH // groups, size), (2 * WIDTH,), (ROWS, 2 * WIDTH, length)]
    drawn = [torch.randn(shape, generator=noise, dtype=torch.float64) for shape in shapes]
    reach = (size - 1) * dilation
    return Case(Convolve(VISIT, VISIT, length, WIDTH, left, reach - left, needed=True), *drawn, dilation, groups)


def space_of(mesh: Mesh, convolve: Convolve) -> Space:
    tokens = Tokens(convolve.tokens, ("input_ids",), ("labels",), (Passing(VISIT, ((1,),), ((1,),)),), convolves=(convolve,))
    return Space.one_device(mesh, Anatomy("tiny", (VISIT,), (), (convolve.tokens,), (1,), tokens=tokens))


def played(world: World, space: Space, strategy: Deals, given: Case) -> tuple[list[torch.Tensor], list[Entry]]:
    rank, length = Rank(world, space), given.known.tokens
    spans = space.deal.spans(length, world.rank)
    share = Share(length, spans)
    strategy.bind(rank)
    assert rank.beside is not None
    world.ledger.recording = True
    leaves = [each.detach().clone().requires_grad_() for each in (share.of(given.input, 2), given.weight, given.bias)]
    asked = Convolution(*leaves, padding=99, dilation=given.dilation, groups=given.groups)
    out = rank.beside(Convolved(leaves[0], asked, given.known, share))
    rank.act("B")
    own = share.own(given.grad, 2)
    found = torch.autograd.grad(out, leaves, F.pad(own, (0, out.shape[2] - own.shape[2])))
    return [out.detach()[..., : count_of(spans)], found[0][..., : count_of(spans)], *found[1:]], world.ledger.entries


def answered(strategy: Deals, given: Case, ranks: int) -> tuple[list[torch.Tensor], list[list[Entry]]]:
    """What all ranks together have given, as one device would; and what each has issued."""
    mesh = Mesh(cp=ranks)
    space = strategy.place(space_of(mesh, given.known))
    results = on_threads(lambda world: played(world, space, strategy, given), mesh)
    found = [torch.zeros_like(each) for each in (given.grad, *given.inputs)]
    for rank, (locals_, _) in enumerate(results):
        at = 0
        for begin, end in space.deal.spans(given.known.tokens, rank):
            for whole, local in zip(found[:2], locals_[:2], strict=True):
                whole[..., begin:end] = local[..., at : at + end - begin]
            at += end - begin
        for whole, local in zip(found[2:], locals_[2:], strict=True):
            whole += local
    return found, [entries for _, entries in results]


def worst(strategy: Deals, given: Case, ranks: int) -> float:
    found, _ = answered(strategy, given, ranks)
    return max(float((one - other).abs().max()) for one, other in zip(given.dense(), found, strict=True))


@pytest.mark.parametrize(("strategy", "ranks"), WAYS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_numbers_are_those_of_one_device(strategy: Deals, ranks: int, kernel: tuple[int, int, int]) -> None:
    assert worst(strategy, case(kernel, 13), ranks) < 1e-12


@pytest.mark.parametrize(("strategy", "ranks"), WAYS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
def test_kernels_may_reach_over_several_ranks_and_ranks_may_be_more_than_tokens(strategy: Deals, ranks: int, length: int) -> None:
    assert worst(strategy, case((7, 1, 3), length), ranks) < 1e-12
    assert worst(strategy, case((3, 2, 4), length, groups=WIDTH), ranks) < 1e-12


@pytest.mark.parametrize(("strategy", "ranks"), WAYS, ids=str)
@pytest.mark.parametrize("length", [3, 12])
def test_bytes_are_those_of_the_formula_on_every_rank(strategy: Deals, ranks: int, length: int) -> None:
    given = case((4, 2, 4), length)
    spans = 2 if strategy.deal(ranks).folded and strategy.deal(ranks).inner < ranks else 1
    formula = spans * ROWS * WIDTH * (4 - 1) * 2 * (ranks - 1) * 8
    for entries in answered(strategy, given, ranks)[1]:
        assert [(each.action, each.collective, each.sent) for each in entries] == [
            ("F", "all_gather", formula),
            ("B", "reduce_scatter", formula),
        ]
        assert [(each.collective, each.nbytes, each.dtype) for each in entries] == stated(strategy, given.known, ranks)


def stated(strategy: Deals, convolve: Convolve, ranks: int) -> list[tuple[str, int, str]]:
    """What the program of `strategy` says of it."""
    mesh = Mesh(cp=ranks)
    space = strategy.place(space_of(mesh, convolve)).at(mesh.coordinate(0))
    job = Job(ModelSource("tiny"), DataSource("random"), Train(batch=ROWS), precision=Precision("float64", "float64"))
    program = Program.of({ROLE: [Action("F", VISIT, 0), Action("B", VISIT, 0)]})
    actions = strategy.rewrite(program, space, job).actions(ROLE)
    return [(move.collective, move.nbytes, move.dtype) for action in actions for move in action.inner]


def test_what_nobody_asks_the_gradient_of_sends_none_back() -> None:
    convolve = replace(case((3, 1, 2), 12).known, needed=False)
    assert [act for act, *_ in stated(Ring(), convolve, 3)] == ["all_gather"]
    assert stated(Ring(), convolve, 1) == []
    assert stated(Ring(), replace(convolve, left=0), 3) == []


def planned(strategy: Deals, *convolves: Convolve, attends: tuple[Attend, ...] = (), ranks: int = 3, **job: Any) -> Plan:
    tokens = Tokens(12, ("input_ids",), ("labels",), attends=attends, convolves=convolves)
    anatomy = replace(known().anatomy, tokens=tokens)
    said = Job(ModelSource("llama"), DataSource("random", sequence=12), Train(batch=4), **job)
    return Plan.make(said, Mesh(cp=ranks), anatomy, (strategy, Replicate("cp")), 0)


LAYER = "model.layers.0"
SHORT = Convolve(LAYER, f"{LAYER}.conv", 12, 8, 2, 0, needed=True)


def test_moves_stand_in_the_order_of_the_forward_and_backwards_the_other_way_round() -> None:
    attend = Attend(LAYER, heads=6, groups=3, width=8, values=8, queries=12, keys=12)
    late = replace(SHORT, left=1, right=1, attended=1)
    plan = planned(Ring(), SHORT, late, attends=(attend,))
    inner = {action.kind: action.inner for action in plan.actions if action.subject == LAYER}
    assert [each.collective for each in inner["F"]] == ["all_gather", "shift", "shift", "all_gather"]
    assert [each.collective for each in inner["B"]] == ["reduce_scatter", *["shift"] * 4, "reduce_scatter"]


def test_edges_travel_as_products_take_them() -> None:
    plan = planned(Ring(), SHORT, precision=Precision(compute="bfloat16"))
    moves = [move for action in plan.actions if action.subject == LAYER for move in action.inner]
    assert {(move.dtype, move.nbytes) for move in moves} == {("bfloat16", 2 * 4 * 8 * 2 * 2), ("bfloat16", 3 * 2 * 4 * 8 * 2 * 2)}


def test_a_kernel_that_reaches_far_beyond_a_share_is_refused() -> None:
    far = [replace(SHORT, module=f"model.layers.{i}.conv", left=conv_halo.LONG + 1) for i in range(2)]
    with pytest.raises(PlanError, match=r"model.layers.\*.conv convolves tokens with a kernel that reaches over 257") as told:
        planned(Ring(), *far)
    (fault,) = told.value.faults
    assert fault.what.endswith("and a rank has 4 (and 1 more)")
    assert fault.fix == "deal tokens to fewer ranks; or mesh.cp = 1 and mesh.dp_shard = 3 are as many ranks"
    planned(Ring(), *far, ranks=1)
    planned(Ring(), replace(SHORT, left=conv_halo.LONG))


def test_tokens_that_are_dealt_one_by_one_have_no_neighbours() -> None:
    with pytest.raises(PlanError, match="a rank that gets them one by one has no neighbours") as told:
        planned(Ring(balance="striped"), SHORT)
    assert "without 'striped'" in told.value.faults[0].fix
    planned(Ring(balance="striped"), replace(SHORT, left=0))


def test_edges_of_a_wrong_side_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = conv_halo._columns
    monkeypatch.setattr(conv_halo, "_columns", lambda *given: columns(*given)[::-1])
    assert worst(Ring(), case((3, 1, 1), 13), 3) > 0.1
