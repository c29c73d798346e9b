"""The shard alignment of an optimizer, and which shardings are refused for it."""

import pytest
import torch
from torch import nn

from meshwright.engine.optim.abstract_optimizer import (
    ELEMENTWISE_OPTIMIZERS,
    check_shard_alignments,
    get_blockwise_state_keys,
    required_shard_alignment,
)
from meshwright.engine.optim.adamw_8bit import AdamW8bit
from meshwright.engine.optim.muon import Muon
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.flat_param import ShardAlignment


class Own(torch.optim.SGD):
    """Some other step: being derived from an elementwise one says nothing."""


class Declared(Own):
    """Says that it steps each element by itself."""

    shard_alignment = "element"


class Wrong(Own):
    """Declares what is no grain."""

    shard_alignment = "rows"


def of(kind: type[torch.optim.Optimizer]) -> tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]:
    parameters = {"a": nn.Parameter(torch.zeros(3, 4))}
    return kind(parameters.values(), lr=0.1), parameters


@pytest.mark.parametrize(
    ("kind", "grain"),
    [
        *((kind, "element") for kind in ELEMENTWISE_OPTIMIZERS),
        (Own, None),
        (Declared, "element"),
        (AdamW8bit, "block"),
        (Muon, "matrix"),
    ],
)
def test_alignments_are_declared_or_known(kind: type[torch.optim.Optimizer], grain: ShardAlignment | None):
    assert required_shard_alignment(of(kind)[0]) == grain


def test_an_unknown_alignment_is_refused():
    with pytest.raises(
        PlanError,
        match=(
            r"Wrong declares shard_alignment = 'rows'(?s:.*)declare one of " r"element, " r"block, matrix"
        ),
    ):
        required_shard_alignment(of(Wrong)[0])


@pytest.mark.parametrize(
    ("kind", "cut", "message"),
    [
        (
            Own,
            "element",
            r"Own does not say whether it accepts a part of a weight, and the plan cuts a by element",
        ),
        (
            Own,
            "block",
            (
                r"cuts a by block(?s:.*)repair: if it computes every .* class Own: shard_alignment "
                r"= "
                r"\"element\"; otherwise keep full"
            ),
        ),
        (AdamW8bit, "element", r"AdamW8bit needs shard_alignment = 'block', and the plan cuts a by element"),
        (
            Muon,
            "block",
            (
                r"Muon needs shard_alignment = 'matrix', and the plan cuts a by "
                r"block(?s:.*)optimizer\.name = "
                r"\"adafactor\""
            ),
        ),
    ],
)
def test_shards_that_are_too_fine_are_refused(
    kind: type[torch.optim.Optimizer], cut: ShardAlignment, message: str
):
    optimizer, parameters = of(kind)
    with pytest.raises(PlanError, match=message):
        check_shard_alignments([optimizer], parameters, {"a": cut})


@pytest.mark.parametrize(
    ("kind", "cut"),
    [(Declared, "element"), (Declared, "matrix"), (AdamW8bit, "block"), (Muon, "matrix"), (Own, "matrix")],
)
def test_coarser_shards_are_accepted(kind: type[torch.optim.Optimizer], cut: ShardAlignment):
    optimizer, parameters = of(kind)
    check_shard_alignments([optimizer], parameters, {"a": cut})


def test_without_shards_any_optimizer_is_accepted():
    optimizer, parameters = of(Own)
    check_shard_alignments([optimizer], parameters, {})


def test_only_declared_optimizers_have_states_per_block():
    assert get_blockwise_state_keys(of(AdamW8bit)[0]) == {"exp_avg_scale", "exp_avg_sq_scale"}
    assert get_blockwise_state_keys(of(Own)[0]) == frozenset()
