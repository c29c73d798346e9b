"""The program of ring attention: bytes by the formula, each message as the ring sends it, and refusals."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.parallel import STRATEGIES
from meshwright.parallel.context.context_parallel_strategy import local_heads
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.model_spec.sequence_info import AttentionSpec, BlockSequenceInfo, SequenceInfo
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.sequence_sharding import SequenceSharding
from meshwright.plan.step.program import Action, Transfer
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.config.strategy_tables import strategies_from_tables
from tests.parallel.context.dense_attention import sample
from tests.parallel.context.test_ring_attention import run, shifting
from tests.parallel.tensor.odd_llama import analyzed_llama

NUM_SAMPLES, LENGTH, WIDTH = 4, 12, 48
LAYERS = ("model.layers.0", "model.layers.1")
SHAPE = {
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 8,
    "value_head_dim": 8,
    "query_len": LENGTH,
    "key_len": LENGTH,
    "is_causal": True,
}
TOKENS = SequenceInfo(
    LENGTH,
    ("input_ids",),
    ("labels",),
    attention_calls=tuple(AttentionSpec(layer, **SHAPE) for layer in LAYERS),
)


def plan(
    ranks: int,
    *strategies: Strategy,
    tokens: SequenceInfo | None = TOKENS,
    tp: int = 1,
    micro: int = 0,
    compute: str = "float32",
    **more: Any,
) -> Plan:
    """A plan of a Llama whose tokens are known."""
    job = Job(ModelConfig("llama"), DataConfig("random", sequence=LENGTH), TrainConfig(batch=NUM_SAMPLES))
    job = replace(job, precision=PrecisionConfig(compute=compute))
    model_spec = replace(analyzed_llama().model_spec, sequence_info=tokens, **more)
    return Plan.make(
        job, Mesh(cp=ranks, tp=tp), model_spec, strategies or (RingAttention(), DDP("cp")), micro
    )


def first_transfers(actions: Sequence[Action], kind: str, subject: str = LAYERS[0]) -> tuple[Transfer, ...]:
    """Returns what moves in the first such action."""
    return next(
        action.inner_transfers for action in actions if action.kind == kind and action.subject == subject
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bytes_follow_the_formula(ranks: int) -> None:
    actions = plan(ranks).for_rank(0).actions
    each = (
        2 * NUM_SAMPLES * LENGTH // ranks * WIDTH * 3 // 6 * (ranks - 1) * 4
    )  # 2 b (N/P) h (k/a) (P-1) elements of float32
    for layer in LAYERS:
        forward, backward = first_transfers(actions, "F", layer), first_transfers(actions, "B", layer)
        assert sum(move.nbytes for move in forward) == each
        assert sum(move.nbytes for move in backward) == 2 * each
        assert {move.collective for move in forward + backward} <= {"shift"}
    assert all(not action.inner_transfers for action in actions if action.subject not in LAYERS)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("balance", ["zigzag", "contiguous", "striped"])
def test_the_program_states_what_the_rounds_send(ranks: int, balance: Any) -> None:
    length, sent = 13, dict[int, list[tuple[int, str]]]()
    given = sample(length)
    attend = AttentionSpec(
        "x",
        num_heads=4,
        num_kv_heads=2,
        head_dim=given[1].shape[-1],
        value_head_dim=given[2].shape[-1],
        query_len=length,
        key_len=length,
    )

    def noting(group: Any) -> Any:
        shift = shifting(group)

        def noted(output: torch.Tensor, tensor: torch.Tensor) -> Any:
            sent.setdefault(group.index, []).append((tensor.nbytes, str(tensor.dtype).removeprefix("torch.")))
            return shift(output, tensor)

        return noted

    given = [each.float() for each in given]
    run(given, ranks, balance=balance, shift=noting)
    ring, said = RingAttention(load_balance=balance), plan(ranks)
    moves = [
        *ring._forward_transfers(said.rank_view(0), said.job, attend, 2),
        *ring._backward_transfers(said.rank_view(0), said.job, attend, 2),
    ]
    booked = [(move.nbytes, move.dtype) for move in moves]
    assert len(booked) == 3 * (ranks - 1)
    assert all(sent.get(rank, []) == booked for rank in range(ranks))


def test_gradients_are_sent_in_float32_where_keys_are_in_bfloat16() -> None:
    actions = plan(3, compute="bfloat16").for_rank(0).actions
    assert [move.dtype for move in first_transfers(actions, "F")] == ["bfloat16"] * 2
    assert [move.dtype for move in first_transfers(actions, "B")] == [
        "bfloat16",
        "bfloat16",
        "float32",
        "float32",
    ]


def test_a_length_that_does_not_divide_sends_the_longest_shard() -> None:
    tokens = SequenceInfo(
        11,
        ("input_ids",),
        ("labels",),
        attention_calls=(AttentionSpec(LAYERS[0], **(SHAPE | {"query_len": 11, "key_len": 11})),),
    )
    most = max(SequenceSharding(3).num_tokens(11, index) for index in range(3))
    assert most == 4
    assert [move.nbytes for move in first_transfers(plan(3, tokens=tokens).for_rank(0).actions, "F")] == [
        NUM_SAMPLES * 3 * most * 16 * 4
    ] * 2


def test_no_gradient_is_sent_back_where_none_is_needed() -> None:
    tokens = replace(
        TOKENS,
        attention_calls=(replace(TOKENS.attention_calls[0], needs_grad=False), TOKENS.attention_calls[1]),
    )
    actions = plan(3, tokens=tokens).for_rank(0).actions
    assert len(first_transfers(actions, "F")) == 2
    assert first_transfers(actions, "B") == ()
    assert len(first_transfers(actions, "B", LAYERS[1])) == 4


def test_a_recomputed_forward_shifts_again() -> None:
    actions = (
        plan(3, RingAttention(), DDP("cp"), ActivationCheckpointing(blocks=("model.layers.*",)))
        .for_rank(0)
        .actions
    )
    assert [len(first_transfers(actions, kind)) for kind in ("F_CHECKPOINTED", "RECOMPUTE", "B")] == [2, 2, 4]


def test_every_micro_batch_shifts_its_own_samples() -> None:
    whole, halves = plan(3).for_rank(0).actions, plan(3, micro=2).for_rank(0).actions
    assert [2 * move.nbytes for move in first_transfers(halves, "B")] == [
        move.nbytes for move in first_transfers(whole, "B")
    ]
    assert sum(action.kind == "B" and action.subject == LAYERS[0] for action in halves) == 2


def test_a_backward_holds_what_travels_in_it() -> None:
    def scratch(ranks: int) -> int:
        (backward,) = [
            each for each in plan(ranks).for_rank(0).actions if each.kind == "B" and each.subject == LAYERS[0]
        ]
        return next(hold.nbytes for hold in backward.allocations if hold.name == "scratch")

    message = [2 * NUM_SAMPLES * LENGTH // ranks * WIDTH * 3 // 6 * 4 for ranks in (1, 2, 3)]
    assert [scratch(ranks) - scratch(1) for ranks in (2, 3)] == [(2 + 3) * message[1], (2 + 4) * message[2]]


def test_the_numbers_of_a_step_are_summed_along_the_ring() -> None:
    found = {
        action.kind: action.transfer
        for action in plan(3).for_rank(0).actions
        if action.kind in ("TOKEN_COUNT", "LOSS_SUM")
    }
    assert {
        kind: (move.collective, move.axes, move.nbytes) for kind, move in found.items() if move is not None
    } == {
        "TOKEN_COUNT": ("all_reduce", ("cp",), 32),
        "LOSS_SUM": ("all_reduce", ("cp",), 8),
    }


@pytest.mark.parametrize(
    "order",
    [(RingAttention(), TensorParallel()), (TensorParallel(), RingAttention())],
    ids=["ring first", "tensor_parallel first"],
)
def test_with_tensor_parallelism_a_rank_shifts_its_own_heads(
    order: tuple[Strategy, ...],
) -> None:
    whole = plan(3, *order, DDP("cp"), tp=2)
    for rank, groups in ((0, 2), (1, 1)):  # three groups of heads on two ranks
        mine = whole.for_rank(rank)
        assert local_heads(mine.view, TOKENS.attention_calls[0]) == (2 * groups, groups)
        assert local_heads(mine.view, replace(TOKENS.attention_calls[0], num_kv_heads=6)) == (
            2 * groups,
            2 * groups,
        )  # repeated by the model
        assert [move.nbytes for move in first_transfers(mine.actions, "F") if move.collective == "shift"] == [
            NUM_SAMPLES * groups * 4 * 16 * 4
        ] * 2
        moved = [move.collective for move in first_transfers(mine.actions, "F")]
        assert moved == ["shift", "shift", "all_reduce", "all_reduce"]
        back = [move.collective for move in first_transfers(mine.actions, "B")]
        assert back == ["all_reduce", *["shift"] * 4, "all_reduce"]


@pytest.mark.parametrize(("rank", "heads"), [(0, 2), (1, 2), (2, 1), (3, 1)])
def test_with_more_ranks_than_key_heads_each_has_those_of_its_queries(rank: int, heads: int) -> None:
    mine = plan(1, RingAttention(), TensorParallel(), DDP("cp"), tp=4).for_rank(
        rank
    )  # two query heads share a key: one key for two, if both are here
    assert local_heads(mine.view, TOKENS.attention_calls[0]) == (heads, 1)
    assert local_heads(mine.view, replace(TOKENS.attention_calls[0], num_kv_heads=6)) == (heads, heads)


def refusal(ranks: int, *strategies: Strategy, **more: Any) -> str:
    with pytest.raises(PlanError) as caught:
        plan(ranks, *strategies, **more)
    return str(caught.value)


def test_an_axis_of_another_purpose_is_refused() -> None:
    with pytest.raises(PlanError) as raised:
        RingAttention("dp_shard")
    said = str(raised.value)
    assert "strategies.ring.axis: axis = 'dp_shard'; needed is 'cp'\n  repair: write axis = \"cp\"" in said


def test_unknown_option_values_are_all_refused_at_once() -> None:
    with pytest.raises(PlanError) as raised:
        RingAttention("tp", load_balance="zigzak")  # type: ignore[arg-type]  # that is the point
    said = str(raised.value)
    assert (
        "strategies.ring.load_balance: load_balance = 'zigzak'; needed is 'zigzag', 'contiguous' or "
        "'striped'\n  repair: did you mean 'zigzag'?"
    ) in said
    assert "strategies.ring.axis: axis = 'tp'; needed is 'cp'" in said


@pytest.mark.parametrize("name", ["ring", "hybrid_context_parallel"])
def test_a_config_of_an_earlier_version_learns_what_sends_codes_now(name: str) -> None:
    with pytest.raises(PlanError) as raised:
        strategies_from_tables([{"name": name, "comm_dtype": "bfloat16"}], STRATEGIES)
    (fault,) = raised.value.diagnostics
    assert f"'{name}' has no key 'comm_dtype' any more" in fault.problem
    assert 'name = "compress_activations", axis = "cp", codec = "bfloat16"' in fault.fix


def test_a_model_without_tokens_is_refused_with_a_mesh_of_as_many_ranks() -> None:
    said = refusal(3, tokens=None)
    assert "nothing is known of tokens in LlamaForCausalLM" in said
    assert "mesh.cp = 1 and mesh.dp_shard = 3 are as many ranks" in said


def test_blocks_that_mix_tokens_are_refused_by_name() -> None:
    why = "mixer.{0}.conv moves elements between tokens (conv1d)"
    visits = tuple(
        BlockSequenceInfo(f"mixer.{number}", not_sequence_parallel=why.format(number)) for number in range(5)
    )
    said = refusal(2, tokens=replace(TOKENS, block_calls=visits))
    assert (
        f"strategies.ring: a block cannot run on some of the tokens: {why.format('*')} (and so in 4 more "
        f"blocks)"
    ) in said
    assert (
        "  repair: compute what needs all tokens between blocks, or by "
        "F.scaled_dot_product_attention; "
        "or mesh.cp = 1"
    ) in said


def test_a_loss_of_the_whole_batch_and_a_second_sequence_sharding_are_refused() -> None:
    assert "the loss takes the samples of the whole batch at once" in refusal(2, needs_global_batch=True)
    said = refusal(2, RingAttention(), RingAttention(load_balance="contiguous"), DDP("cp"))
    assert (
        "the tokens of each sample are sharded along cp already\n  repair: keep one of the "
        "strategies that shard them"
    ) in said
