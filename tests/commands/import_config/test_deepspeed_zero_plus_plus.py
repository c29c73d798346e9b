"""ZeRO++ of DeepSpeed: each of its keys becomes a strategy, or is said."""

from pathlib import Path
from typing import Any

import pytest

from tests.commands.import_config.imported import imported, planned, row, strategies
from tests.commands.import_config.test_deepspeed import ZERO_3

HPZ = "zero_optimization.zero_hpz_partition_size"


def zero_plus_plus(**options: Any) -> dict[str, Any]:
    return {**ZERO_3, "zero_optimization": {"stage": 3, **options}}


def test_the_partition_size_of_hpz_becomes_the_strategy(tmp_path: Path):
    config = zero_plus_plus(zero_hpz_partition_size=2)
    result = imported(tmp_path, "ds.json", config, devices=8)
    assert result.is_complete
    assert row(result, HPZ) == "mapped: hpz.partition_size = 2"
    plan = planned(tmp_path, "ds.json", {**config, "train_batch_size": 32}, devices=8)
    (hpz,) = (each for each in plan.strategies if each.name == "hpz")
    assert hpz.as_dict()["partition_size"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_hpz_partition_size": 1}, "dropped: this value turns nothing on"),
        ({"zero_hpz_partition_size": 8}, "dropped: all ranks that share the weights are one partition"),
        ({"zero_hpz_partition_size": 2, "stage": 2}, "dropped: only with ZeRO stage 3"),
        (
            {
                "zero_hpz_partition_size": 2,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
            "refused: shards of weights rest off the device",
        ),
        (
            {
                "zero_hpz_partition_size": 2,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
                "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
            },
            "refused: shards of weights rest off the device",
        ),
    ],
)
def test_a_partition_that_changes_nothing_or_cannot_be_is_said(
    tmp_path: Path, options: dict[str, Any], message: str
):
    result = imported(tmp_path, "ds.json", zero_plus_plus(**options), devices=8)
    assert row(result, HPZ).startswith(message)
    assert "hpz" not in strategies(result)


QGZ = "zero_optimization.zero_quantized_gradients"


def test_quantized_gradients_become_codes_in_two_levels(tmp_path: Path):
    config = zero_plus_plus(zero_quantized_gradients=True, zero_hpz_partition_size=2)
    result = imported(tmp_path, "ds.json", config, devices=8)
    assert result.is_complete
    assert row(result, QGZ).startswith("mapped: compress.ranks_per_host = 2")
    plan = planned(tmp_path, "ds.json", {**config, "train_batch_size": 32}, devices=8)
    (codec,) = (each for each in plan.strategies if each.name == "compress")
    assert (codec.mode, codec.as_dict()["ranks_per_host"]) == ("qgz", 2)


@pytest.mark.parametrize(
    ("options", "devices", "message"),
    [
        ({"zero_quantized_gradients": False}, 8, "dropped: this value turns nothing on"),
        ({"stage": 2}, 8, "dropped: only with ZeRO stage 3"),
        ({}, 1, "dropped: one rank sums nothing"),
        ({}, 8, "refused: the ranks of a host are not known"),
        ({"zero_hpz_partition_size": 8}, 8, "refused: 8 ranks are not several hosts of 8"),
        ({"zero_hpz_partition_size": 4}, 6, "refused: 6 ranks are not several hosts of 4"),
        ({"mics_shard_size": 2}, 8, "refused: shards of MiCS are summed within hosts first"),
    ],
)
def test_gradients_that_have_no_two_levels_are_said(
    tmp_path: Path, options: dict[str, Any], devices: int, message: str
):
    config = zero_plus_plus(**({"zero_quantized_gradients": True} | options))
    result = imported(tmp_path, "ds.json", config, devices=devices)
    assert row(result, QGZ).startswith(message)
    assert "compress" not in strategies(result)


QWZ = "zero_optimization.zero_quantized_weights"


def test_quantized_weights_become_the_strategy(tmp_path: Path):
    result = imported(tmp_path, "ds.json", zero_plus_plus(zero_quantized_weights=True), devices=2)
    assert result.is_complete
    told = row(result, QWZ)
    assert told.startswith("mapped: strategies batch_split, zero, quantized_weights; quantized_weights: int8")
    plan = planned(tmp_path, "ds.json", zero_plus_plus(zero_quantized_weights=True), devices=2)
    assert "quantized_weights" in [each.name for each in plan.strategies]


@pytest.mark.parametrize(
    ("options", "devices", "message"),
    [
        ({"zero_quantized_weights": False}, 2, "dropped: this value turns nothing on"),
        ({"zero_quantized_weights": True, "stage": 1}, 2, "dropped: only with ZeRO stage 3"),
        ({"zero_quantized_weights": True}, 1, "dropped: one rank gathers nothing"),
    ],
)
def test_codes_that_nothing_gathers_are_said(
    tmp_path: Path, options: dict[str, Any], devices: int, message: str
):
    result = imported(tmp_path, "ds.json", zero_plus_plus(**options), devices=devices)
    assert row(result, QWZ).startswith(message)
    assert "quantized_weights" not in strategies(result)
