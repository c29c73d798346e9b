"""Keys and values that travel round a ring as codes, and their gradients back: results, bytes, faults."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.api import trace
from meshwright.parallel.compression.activation_compression import ActivationCompression, FlatCodec
from meshwright.parallel.context import ring_attention
from meshwright.parallel.context.ring_geometry import AttentionRing, RingCodes
from meshwright.plan.strategy_interface import Strategy
from tests.parallel.compression.test_activation_compression_context import (
    HEAD,
    INT8,
    LENGTH,
    REPLICAS,
    analyzed,
    check,
    found_by_verify,
    planned,
    sent_by_attention,
)
from tests.tiny_model import first_of

RING, HYBRID = mw.RingAttention(), mw.HybridContextParallel()


@pytest.mark.parametrize(
    ("mesh", "strategies", "codec", "options"),
    [
        (mw.Mesh(cp=2), (RING, REPLICAS), "int8", {}),
        (mw.Mesh(cp=3), (mw.RingAttention(load_balance="striped"), REPLICAS), "bfloat16", {"groups": 2}),
        (mw.Mesh(cp=3), (RING, REPLICAS, mw.ActivationCheckpointing()), "float8", {"p": 0.2}),
        (mw.Mesh(pp=2, cp=2), (RING, REPLICAS, mw.Pipeline()), "int8", {"groups": 2}),
        (mw.Mesh(cp=4), (HYBRID, REPLICAS), "int8", {"groups": 1}),
        (mw.Mesh(cp=6), (mw.HybridContextParallel(ulysses_degree=3), REPLICAS), "int8", {"groups": 2}),
        (mw.Mesh(cp=3), (mw.HybridContextParallel(ulysses_degree=1), REPLICAS), "float16", {}),
    ],
    ids=[
        "2 ranks",
        "striped",
        "recomputed, dropout",
        "stages",
        "hybrid",
        "hybrid, uneven heads",
        "groups of 1",
    ],
)
def test_keys_and_values_equal_one_device_that_loses_what_codes_lose(
    mesh: mw.Mesh, strategies: tuple[Strategy, ...], codec: str, options: dict[str, Any]
):
    check(planned(mesh, *strategies, ActivationCompression(axis="cp", codec=codec), **options), **options)


@pytest.mark.parametrize(("ranks", "groups"), [(2, 6), (3, 3), (4, 2)])
def test_a_ring_sends_the_bytes_of_the_law(ranks: int, groups: int):
    plan = planned(mw.Mesh(cp=ranks), RING, REPLICAS, INT8, groups=groups)
    most = max(mw.RingAttention().sequence_sharding(ranks).num_tokens_by_rank(LENGTH))
    numel = 2 * most * 2 * HEAD  # of the keys and values of one head in two samples
    head = numel + 4 * -(-numel // 256)
    sent = sent_by_attention(plan, groups)
    assert {name[0]: nbytes for name, nbytes in sent.items()} == {
        "F": (ranks - 1) * groups * head,
        "B": 2 * (ranks - 1) * groups * head,
    }
    stated = {
        action.name: sum(each.nbytes for move in action.inner_transfers for each in move.messages)
        for action in plan.for_rank(0).actions
        if action.name in sent
    }
    assert stated == sent


def test_the_tolerance_counts_the_codes_of_keys_and_values():
    ring, hybrid = (planned(mw.Mesh(cp=4), each, REPLICAS, INT8) for each in (RING, HYBRID))
    assert (ring.exact, hybrid.exact) == (False, False)
    assert INT8.loss_tolerance(ring.sharding) == pytest.approx(2 * 4 / 254)
    assert INT8.loss_tolerance(hybrid.sharding) == pytest.approx(2 * 12 / 254)


def test_coding_passes_of_a_ring_are_counted():
    plan = planned(mw.Mesh(cp=3), RING, REPLICAS, INT8)
    actions = {action.kind: action for action in plan.for_rank(0).actions if action.subject == "layers.0"}
    message = 2 * 3 * 3 * 2 * HEAD  # samples, key heads, tokens
    passes = [INT8.coding_passes(actions[kind], plan.rank_view(0)) for kind in ("F", "B")]
    assert passes == [
        {"encode int8": message, "decode int8": 3 * message},
        {"encode int8": 3 * message, "decode int8": 5 * message},
    ]


def test_first_steps_and_small_messages_travel_as_they_are():
    late = ActivationCompression(axis="cp", codec="int8", exact_steps=1)
    found = found_by_verify(planned(mw.Mesh(cp=3), RING, REPLICAS, late))
    assert found.passed, found
    small = ActivationCompression(axis="cp", codec="int8", min_numel=500)
    plan = planned(mw.Mesh(cp=3), RING, REPLICAS, small)
    assert not any(move.carried_by for act in plan.for_rank(0).actions for move in act.inner_transfers)


blocks, unpack, send = ring_attention._blocks, RingCodes.unpack, ring_attention._SummandsAsCodes.send
decode = FlatCodec.decode


def own_keys_exact(ring: AttentionRing, key: torch.Tensor, value: torch.Tensor, *args: Any, **more: Any):
    def found() -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for rank, keys, values in blocks(ring, key, value, *args, **more):
            yield (rank, key, value) if rank == ring.index else (rank, keys, values)

    return found()


def halved(codec: FlatCodec, codes: torch.Tensor, values: torch.Tensor) -> None:
    decode(codec, codes, values)
    values.mul_(0.5)


def heads_in_another_order(codes: RingCodes, message: torch.Tensor, *args: Any):
    return unpack(codes, message.roll(1, 0), *args)


def summand_twice(summands: Any, rank: int, step: int, summand: torch.Tensor) -> None:
    send(summands, rank, step, summand)
    summands.of_own.add_(summand)


def to_the_next_rank(summands: Any, rank: int, step: int, summand: torch.Tensor) -> None:
    send(summands, rank, 1, summand)


FAULTS = {
    "a rank computes with its exact keys": (ring_attention, "_blocks", own_keys_exact),
    "codes are decoded at half their size": (FlatCodec, "decode", halved),
    "heads of another order": (RingCodes, "unpack", heads_in_another_order),
    "a summand counts twice": (ring_attention._SummandsAsCodes, "send", summand_twice),
    "gradients for another rank": (ring_attention._SummandsAsCodes, "send", to_the_next_rank),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(*FAULTS[fault])
    found = found_by_verify(planned(mw.Mesh(cp=3), RING, REPLICAS, INT8), steps=1)
    assert not found.passed
    assert first_of(found)[1] in ("loss", "gradient", "sum of codes")


def test_messages_of_a_step_are_those_of_the_program():
    traced = trace(analyzed(), planned(mw.Mesh(cp=3), RING, REPLICAS, INT8), fake=False)
    assert traced.passed, str(traced)
