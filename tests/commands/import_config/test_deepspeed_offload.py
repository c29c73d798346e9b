"""Offload of DeepSpeed to NVMe is translated, and so is where it keeps checkpointed activations."""

from pathlib import Path
from typing import Any

import pytest

from tests.commands.import_config.test_deepspeed import ZERO_3, imported, planned, row

NAME = "zero_optimization.offload_optimizer."
NVME = {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 8}
CPU = {"device": "cpu"}


def zero(**tables: object) -> dict[str, Any]:
    return {**ZERO_3, "zero_optimization": {"stage": 3, **tables}}


@pytest.mark.parametrize(
    ("more", "num_buffers"),
    [
        ({}, None),
        ({"pipeline_read": False, "pipeline_write": False}, 1),
        ({"pipeline_read": True}, 2),
        ({"pipeline_read": True, "pipeline_write": True}, 3),
        ({"pipeline": True}, 3),
    ],
)
def test_states_on_nvme_rest_in_its_folder(tmp_path: Path, more: dict[str, bool], num_buffers: int | None):
    result = imported(tmp_path, "ds.json", zero(offload_optimizer={**NVME, **more}), devices=2)
    assert result.is_complete
    buffers = {} if num_buffers is None else {"num_buffers": num_buffers}
    written = {"name": "disk_offload", "folder": "/local_nvme", **buffers}
    assert result.document["strategies"][-1] == written
    assert row(result, f"{NAME}nvme_path") == "mapped: disk_offload.folder = '/local_nvme'"
    assert row(result, f"{NAME}buffer_count").startswith("dropped: a buffer of DeepSpeed holds one state")


def test_its_plan_keeps_states_on_disk(tmp_path: Path):
    given = {**zero(offload_optimizer=NVME), "train_batch_size": 32}
    plan = planned(tmp_path, "ds.json", given, devices=2)
    assert (plan.sharding.tiers.optimizer_states, plan.sharding.tiers.disk_folder) == ("disk", "/local_nvme")


def test_weights_on_nvme_rest_beside_the_states(tmp_path: Path):
    param = {"device": "nvme", "nvme_path": "/elsewhere", "buffer_count": 4}
    given = {**zero(offload_optimizer=NVME, offload_param=param), "train_batch_size": 32}
    result = imported(tmp_path, "ds.json", given, devices=2)
    assert result.is_complete
    written = {"name": "disk_offload", "folder": "/local_nvme", "what": ["optimizer_states", "weights"]}
    assert result.document["strategies"][-1] == written
    path = row(result, "zero_optimization.offload_param.nvme_path")
    assert path == "dropped: weights on NVMe rest in the folder of the optimizer states (offload_optimizer)"
    tiers = planned(tmp_path, "ds.json", given, devices=2).sharding.tiers
    assert (tiers.optimizer_states, tiers.weights) == ("disk", "disk")


@pytest.mark.parametrize(("optimizer", "param"), [(CPU, "nvme"), (NVME, "cpu"), ({"device": "none"}, "nvme")])
def test_weights_elsewhere_than_their_states_are_refused(
    tmp_path: Path, optimizer: dict[str, Any], param: str
):
    given = zero(offload_optimizer=optimizer, offload_param={"device": param, "nvme_path": "/a"})
    result = imported(tmp_path, "ds.json", given, devices=2)
    message = "refused: weights rest where the optimizer states that step them rest"
    assert row(result, "zero_optimization.offload_param.device").startswith(message)
    assert "weights" not in str(result.document["strategies"])


@pytest.mark.parametrize(
    ("options", "tp", "strategies"),
    [
        (("partition_activations",), 2, ("activation_checkpointing", "partitioned_activations")),
        (("cpu_checkpointing",), 1, ("activation_checkpointing", "activation_offload")),
        (
            ("partition_activations", "cpu_checkpointing"),
            2,
            ("activation_checkpointing", "partitioned_activations", "activation_offload"),
        ),
        (("partition_activations",), 1, ()),
    ],
)
def test_what_checkpointed_blocks_keep_rests_elsewhere(
    tmp_path: Path, options: tuple[str, ...], tp: int, strategies: tuple[str, ...]
):
    given = {
        **ZERO_3,
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": tp},
        "activation_checkpointing": dict.fromkeys(options, True),
    }
    result = imported(tmp_path, "ds.json", given, devices=2 * tp)
    names = [each["name"] for each in result.document["strategies"]]
    assert tuple(name for name in names if "activation" in name) == strategies
    for option in options:
        fate = row(result, f"activation_checkpointing.{option}")
        assert fate.startswith(
            "mapped: activation_checkpointing" if strategies else "dropped: only with tensor"
        )
