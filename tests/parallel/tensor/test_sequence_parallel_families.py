"""Unmodified models of nine families with sequence parallelism: every number as on one device."""

import pytest

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from tests.parallel.tensor.exactness import assert_exact
from tests.parallel.tensor.model_families import FAMILIES, analyze_family, batches, loss_of, planned

LENGTH = 12
DROPPED = {"gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.2}, "bert": {"hidden_dropout_prob": 0.2}}


def trains(family: str, mesh: Mesh, strategies: tuple[Strategy, ...], micro: int = 0, **more: object) -> None:
    analyzed = analyze_family(family, LENGTH, **more)
    plan = planned(analyzed, mesh, strategies, micro)
    assert_exact(
        analyzed, plan, batches(family, 2, length=LENGTH), loss_of(family), fake=family == "falcon, new"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_it_equals_one_device(family: str):
    ranks = 5 if family == "vit" else 3  # five tokens
    trains(family, Mesh(tp=ranks), (TensorParallel(), SequenceParallel(regather=ranks == 3)), 2)


@pytest.mark.parametrize("family", ["falcon", "qwen3", "t5"])
def test_it_equals_one_device_with_grouped_keys_zero_and_activation_checkpointing(family: str):
    ranks = 2 if family == "t5" else 4
    strategies = (
        TensorParallel(),
        SequenceParallel(),
        BatchSplit(axis="dp_shard"),
        ZeRO(),
        ActivationCheckpointing(),
    )
    trains(family, Mesh(dp_shard=2, tp=ranks), strategies, 1)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_it_equals_one_device_with_vocab_parallel_behind_glue_and_other_layers(family: str):
    trains(family, Mesh(tp=2), (TensorParallel(), SequenceParallel(), VocabParallel()))


@pytest.mark.parametrize("family", DROPPED)
def test_dropout_masks_of_slices_equal_those_of_the_whole_stream(family: str):
    trains(family, Mesh(tp=3), (TensorParallel(), SequenceParallel()), 2, **DROPPED[family])
