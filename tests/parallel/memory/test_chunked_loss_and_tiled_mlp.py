"""The programs of the chunked loss and the tiled MLP, and refusals before anything runs."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, trace
from meshwright.model.loading.loader import Model
from meshwright.model.loss.loss_definition import Loss
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.chunked_loss_cost import chunk_sizes
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import peak_nbytes
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import FIRST_ROLE
from tests.parallel.tensor.odd_llama import analyzed_llama
from tests.tiny_model import TOKENS, VOCABULARY, WIDTH, analyzed_model, tiny_job, token_samples

LAST = "head"


def planned(*strategies: Strategy, mesh: Mesh | None = None, micro_batch: int = 0, **options: bool) -> Plan:
    return make_plan(analyzed_model(**options), tiny_job(), mesh or Mesh(), strategies, micro_batch)


def held(plan: Plan, kind: str, subject: str = "") -> dict[str, int]:
    found = next(
        action
        for action in plan.program.actions(FIRST_ROLE)
        if (action.kind, action.subject) == (kind, subject)
    )
    return {hold.name.partition("(")[0]: hold.nbytes for hold in found.allocations}


def flops(plan: Plan, *kinds: str) -> int:
    return sum(action.flops for action in plan.program.actions(FIRST_ROLE) if action.kind in kinds)


@pytest.mark.parametrize(
    ("count", "pieces", "expected"),
    [(9, 4, [3, 2, 2, 2]), (2, 5, [1, 1]), (0, 3, [0]), (6, 1, [6]), (6, 3, [2, 2, 2])],
)
def test_chunks_are_as_even_as_possible_and_none_is_empty(count: int, pieces: int, expected: list[int]):
    assert chunk_sizes(count, pieces) == expected


def test_the_head_saves_nothing_and_the_loss_holds_three_chunks():
    usual, tiled = planned(), planned(ChunkedLoss(num_chunks=3))
    assert static_checks(tiled) == []
    assert held(usual, "F", LAST)["output"] == 12 * TOKENS * VOCABULARY * 8
    assert held(tiled, "F", LAST)["output"] == 0
    tile, taken, head = (
        2 * 12 * VOCABULARY,
        2 * 12 * WIDTH,
        VOCABULARY * WIDTH + VOCABULARY,
    )  # two of five tokens
    assert held(tiled, "LOSS") == {
        "output gradient": 12 * TOKENS * WIDTH * 8,
        "scratch": (3 * tile + taken + head) * 8,
    }


def test_the_loss_computes_the_products_of_the_head_and_nothing_twice():
    usual, tiled = planned(), planned(ChunkedLoss(num_chunks=3))
    assert flops(usual, "F", "B", "LOSS") == flops(tiled, "F", "B", "LOSS")
    assert flops(tiled, "LOSS") == 3 * (2 * TOKENS * WIDTH * VOCABULARY) * 12
    assert flops(usual, "LOSS") == 0


def test_an_existing_gradient_of_the_head_is_no_scratch_memory_of_its_backward():
    later = [
        a
        for a in planned(ChunkedLoss(), micro_batch=4).program.actions(FIRST_ROLE)
        if (a.kind, a.subject) == ("B", LAST)
    ][1]
    assert {hold.name: hold.nbytes for hold in later.allocations}["scratch"] == 0


@pytest.mark.parametrize("micro_batch", [0, 2])
def test_the_head_is_unsharded_while_the_loss_uses_it(micro_batch: int):
    plan = planned(
        BatchSplit(axis="dp_shard"), ZeRO(), ChunkedLoss(), mesh=Mesh(dp_shard=3), micro_batch=micro_batch
    )
    assert static_checks(plan) == []
    losses = [action for action in plan.program.actions(FIRST_ROLE) if action.kind == "LOSS"]
    assert all(any(wait.startswith("UNSHARD(head") for wait in action.waits) for action in losses)
    assert all({"head.weight", "head.bias"} == set(action.tensors) for action in losses)


def test_vocab_parallel_ranks_exchange_statistics_of_one_chunk_at_a_time():
    found = analyzed_llama()
    plan = make_plan(
        found, tiny_job(4), Mesh(tp=2), (TensorParallel(), VocabParallel(), ChunkedLoss(num_chunks=4))
    )
    told = next(
        action for action in plan.program.actions(FIRST_ROLE) if action.kind == "LOSS"
    ).inner_transfers
    assert [each.nbytes for each in told] == [4 * tokens * 2 * 8 for tokens in (3, 2, 2, 2)]
    traced = trace(found, plan)
    assert traced.passed, traced


def test_tiled_mlps_save_nothing_and_hold_one_tile_in_their_backward():
    plans = [
        make_plan(analyzed_llama(), tiny_job(4), Mesh(), (TiledMLP(num_tiles=mlp),) if mlp > 1 else ())
        for mlp in (1, 3)
    ]
    usual, tiled = (held(plan, "F", "model.layers.1")["saved activations"] for plan in plans)
    between = next(
        call.saved_numel
        for call in analyzed_llama().model_spec.layer_calls
        if call.name == "model.layers.1.mlp.down_proj"
    )
    assert usual - tiled == between * 4 * 8
    added = [held(plan, "B", "model.layers.1")["scratch"] for plan in plans]
    assert added[1] - added[0] == between // 3 * 4 * 8
    again = sum(call.flops for call in analyzed_llama().model_spec.layer_calls if ".mlp." in call.name) * 4
    assert flops(plans[1], "B") - flops(plans[0], "B") == again
    assert peak_nbytes(plans[1], 0) < peak_nbytes(plans[0], 0)


def test_a_recomputed_block_is_tiled_too():
    plan = make_plan(
        analyzed_llama(), tiny_job(4), Mesh(), (ActivationCheckpointing(), TiledMLP(num_tiles=3))
    )
    alone = make_plan(analyzed_llama(), tiny_job(4), Mesh(), (TiledMLP(num_tiles=3),))
    assert static_checks(plan) == []
    assert (
        held(plan, "RECOMPUTE", "model.layers.1")["saved activations"]
        == held(alone, "F", "model.layers.1")["saved activations"]
    )


class Scaled(nn.Module):
    """A model that scales what its head gives out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(input_ids)) * 0.5


class Shorter(Scaled):
    """A model that leaves out a token behind its head."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.embed(input_ids)] * 2, 1))[:, : input_ids.shape[1]]


class Softened(Scaled):
    """A model whose head is followed by a softmax."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(input_ids)).softmax(-1)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Scaled, r"the model changes the logits between the LM head head and the loss \(mul\)"),
        (Shorter, r"the model changes the logits between the LM head head and the loss \(slice\)"),
        (
            Softened,
            r"no LM head whose logits go to the loss unchanged \(head.weight: _softmax needs all logits",
        ),
    ],
)
def test_logits_that_the_model_changes_are_refused(model: type[nn.Module], text: str):
    with pytest.raises(PlanError, match=f"{text}(?s:.*)remove the strategy chunked_loss"):
        make_plan(analyze(model(), token_samples(2)), tiny_job(), Mesh(), (ChunkedLoss(),))


def test_a_loss_of_the_whole_batch_is_refused():
    loss = Loss(lambda outputs, batch: outputs.sum(), lambda batch: torch.tensor(1.0), whole_batch=True)
    with pytest.raises(PlanError, match="the loss compares all samples of a batch"):
        make_plan(analyzed_model(loss=loss), tiny_job(), Mesh(), (ChunkedLoss(),))


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (
            lambda: ChunkedLoss(num_chunks=1),
            r"num_chunks = 1; needed is a whole number of at least 2(?s:.*)remove the strategy",
        ),
        (lambda: ChunkedLoss(num_chunks=0), r"num_chunks = 0"),
        (
            lambda: TiledMLP(num_tiles=1),
            r"num_tiles = 1; needed is a whole number of at least 2(?s:.*)remove the strategy",
        ),
        (
            lambda: TiledMLP(num_tiles=2),
            r"no module between colwise and rowwise(?s:.*)remove the strategy tiled_mlp",
        ),
    ],
)
def test_invalid_numbers_of_chunks_and_tiles_are_refused(strategy: Callable[[], Strategy], text: str):
    with pytest.raises(PlanError, match=text):
        planned(strategy())


def test_tensor_parallel_mlps_and_heads_in_2d_are_refused():
    with pytest.raises(PlanError, match=r"gate_proj\.weight is sharded(?s:.*)remove the strategy tiled_mlp"):
        make_plan(analyzed_llama(), tiny_job(4), Mesh(tp=2), (TensorParallel(), TiledMLP(num_tiles=2)))
    with pytest.raises(
        PlanError,
        match=(r"the LM head lm_head\.weight is sharded along (?s:.*)remove the strategy chunked_loss"),
    ):
        make_plan(analyzed_llama(), tiny_job(4), Mesh(dp_shard=2, tp=2), (TensorParallel2D(), ChunkedLoss()))


def test_a_loss_computed_by_one_rank_for_all_is_refused():
    with pytest.raises(
        PlanError,
        match=r"one rank along dp_replicate computes the loss of all ranks(?s:.*)remove chunked_loss",
    ):
        planned(DataParallelMaster(), BatchSplit(), ChunkedLoss(num_chunks=2), mesh=Mesh(dp_replicate=2))


def test_mlps_of_a_model_that_draws_dropout_are_refused():
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop, self.down = nn.Linear(WIDTH, 8), nn.Dropout(0.1), nn.Linear(8, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.drop(self.up(x).relu()))

    class Whole(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Dropping()

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.mlp(self.embed(input_ids)))

    analyzed = analyze(
        lambda: Model(Whole(), layer_roles={"mlp.up": "colwise", "mlp.down": "rowwise"}), token_samples(2)
    )
    with pytest.raises(PlanError, match="the model draws dropout"):
        make_plan(analyzed, tiny_job(), Mesh(), (TiledMLP(num_tiles=2),))


def test_a_program_without_chunks_is_unchanged():
    def said(plan: Plan) -> list[Action]:
        return [action for action in plan.program.actions(FIRST_ROLE) if action.kind == "LOSS"]

    assert [action.tensors for action in said(planned())] == [()]
    assert planned().sharding.num_loss_chunks == 1
