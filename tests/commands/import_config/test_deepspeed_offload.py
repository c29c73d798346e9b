"""Offload of DeepSpeed to NVMe: states on disk are translated, weights on disk are refused."""

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


@pytest.mark.parametrize(
    ("optimizer", "param", "message"),
    [
        (NVME, {"device": "nvme", "nvme_path": "/a"}, "refused: weights rest on the device or on the host"),
        (CPU, {"device": "nvme", "nvme_path": "/a"}, "refused: weights rest on the device or on the host"),
        (NVME, CPU, "refused: weights rest in host memory with the optimizer states"),
    ],
)
def test_weights_on_nvme_are_refused(
    tmp_path: Path, optimizer: dict[str, Any], param: dict[str, Any], message: str
):
    given = zero(offload_optimizer=optimizer, offload_param=param)
    result = imported(tmp_path, "ds.json", given, devices=2)
    assert row(result, "zero_optimization.offload_param.device").startswith(message)
