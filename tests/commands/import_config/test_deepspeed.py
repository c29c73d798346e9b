"""DeepSpeed JSON: options become keys, defaults of DeepSpeed are written, the rest is said."""

from pathlib import Path
from typing import Any

import pytest

from tests.commands.import_config.imported import imported, planned, row, strategies, verdicts

ZERO_3: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_max_live_parameters": 1e9},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.98], "weight_decay": 0.05}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 10, "total_num_steps": 100, "warmup_type": "linear"},
    },
    "steps_per_print": 10,
}


def test_a_zero_3_config_becomes_a_plan_of_the_same_batch_precision_and_optimizer(tmp_path: Path):
    plan = planned(tmp_path, "ds.json", ZERO_3, devices=2)
    job = plan.job
    assert str(plan.mesh) == "dp_shard 2"
    assert (job.train.batch, plan.micro_batch, job.train.clip, job.train.steps) == (16, 2, 0.5, 100)
    assert (job.optimizer.lr, job.optimizer.betas, job.optimizer.weight_decay) == (3e-4, (0.9, 0.98), 0.05)
    assert (job.lr_schedule.name, job.lr_schedule.warmup) == ("linear", 10)
    assert (job.precision.parameters, job.precision.master, job.precision.reduce) == (
        *("bfloat16", "float32"),
        "bfloat16",
    )
    zero = next(each for each in plan.strategies if each.name == "zero")
    assert zero.as_dict()["stage"] == 3


def test_every_option_of_the_file_has_a_verdict_and_nothing_is_left_to_do(tmp_path: Path):
    result = imported(tmp_path, "ds.json", ZERO_3, devices=2)
    assert result.is_complete
    assert len([each for each in result.options if "(default)" not in each.option]) == 17
    assert row(result, "zero_optimization.stage") == "mapped: mesh.dp_shard = 2; zero.stage = 3"
    assert row(result, "steps_per_print").startswith("dropped: changes what is logged")
    assert result.missing == ("model.source", "data.source", "data.sequence")


def test_what_deepspeed_does_without_being_told_is_written(tmp_path: Path):
    result = imported(tmp_path, "ds.json", {"train_batch_size": 4, "optimizer": {"type": "Adam"}}, devices=2)
    assert result.document["train"]["clip"] == 0.0
    assert result.document["optimizer"] == {
        **{"name": "adamw", "lr": 1e-3},
        **{"betas": [0.9, 0.999], "weight_decay": 0.0},
    }
    assert row(result, "gradient_clipping (default)") == "mapped: train.clip = 0.0"
    assert strategies(result) == ["batch_split", "ddp"]


def test_weight_decay_applies_to_norms_and_biases_as_in_one_parameter_group(tmp_path: Path):
    result = imported(tmp_path, "ds.json", ZERO_3, devices=2)
    assert result.document["optimizer"]["groups"] == [{"pattern": "*", "weight_decay": 0.05}]


@pytest.mark.parametrize(
    ("change", "option", "message"),
    [
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.nvme_path",
            "refused: states on NVMe have no folder",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param.device",
            "refused: weights rest where the optimizer states that step them rest",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}},
            "zero_optimization.offload_optimizer.ratio",
            "refused: optimizer states rest on the host all together or not at all",
        ),
        (
            {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
            "zero_optimization.zenflow",
            "refused: every gradient is stepped in its own step",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}},
            "zero_optimization.offload_param.device",
            "dropped: this value turns nothing on",
        ),
        (
            {"zero_optimization": {"stage": 3, "stag": 1}},
            "zero_optimization.stag",
            "unknown: this importer does not",
        ),
        (
            {"optimizer": {"type": "OneBitAdam"}},
            "optimizer.type",
            "refused: the optimizer OneBitAdam is not there",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
            "optimizer.params.lr",
            "refused: transformers'",
        ),
        (
            {"scheduler": {"type": "OneCycle"}},
            "scheduler.type",
            "refused: the scheduler OneCycle is not there",
        ),
        (
            {"scheduler": {"type": "WarmupLR"}},
            "scheduler.params.warmup_type",
            "refused: the warm-up is logarithmic",
        ),
        ({"pipeline": {"stages": 4}}, "pipeline.stages", "refused: the stages of a pipeline are those of"),
        (
            {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5e8}},
            "zero_optimization.stage3_prefetch_bucket_size",
            "dropped: weights are gathered one block ahead",
        ),
        ({"amp": {"enabled": False}}, "amp", "dropped: this value turns nothing on"),
        ({"amp": {"enabled": True}}, "amp", "refused: apex amp is not there"),
        (
            {"fp16": {"enabled": True, "loss_scale": 128}},
            "fp16.loss_scale",
            "refused: the loss scale is always",
        ),
        (
            {"bf16": {"enabled": True}},
            "data_types.grad_accum_dtype",
            "refused: gradients of parameters that are not",
        ),
    ],
)
def test_an_option_that_changes_results_is_refused_with_the_repair(
    tmp_path: Path, change: dict[str, Any], option: str, message: str
):
    result = imported(tmp_path, "ds.json", {"train_batch_size": 4, **change}, devices=2)
    assert row(result, option).startswith(message)


def test_a_batch_that_depends_on_the_number_of_ranks_asks_for_it(tmp_path: Path):
    given = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    result = imported(tmp_path, "ds.json", given)
    assert "give --devices N" in row(result, "train_batch_size")
    known = imported(tmp_path, "ds.json", given, devices=4)
    assert known.document["train"]["batch"] == 24
    assert "train_batch_size" not in verdicts(known)


def test_float16_has_the_loss_scale_of_the_file(tmp_path: Path):
    given = {
        "train_batch_size": 4,
        "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500},
    }
    plan = planned(tmp_path, "ds.json", {**given, "zero_optimization": {"stage": 1}}, devices=2)
    precision = plan.job.precision
    assert (precision.parameters, precision.loss_scale, precision.loss_scale_window) == (
        "float16",
        4096.0,
        500,
    )


def test_mics_and_ulysses_and_autotp_become_axes(tmp_path: Path):
    zero = {"zero_optimization": {"stage": 3, "mics_shard_size": 2}, "train_batch_size": 8}
    result = imported(tmp_path, "ds.json", zero, devices=8)
    assert result.document["mesh"] == {"dp_replicate": 4, "dp_shard": 2}
    assert result.document["strategies"][-1]["replicate_axis"] == "dp_replicate"
    ulysses = {"train_batch_size": 8, "sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}}
    result = imported(tmp_path, "ds.json", ulysses, devices=8)
    assert result.document["mesh"] == {"dp_replicate": 2, "cp": 2, "tp": 2}
    assert "ulysses" in strategies(result)


STATES, GRADIENTS, WEIGHTS = "optimizer_states", "gradients", "weights"
CPU = {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize(
    ("zero", "what"),
    [
        ({"stage": 1, "offload_optimizer": CPU}, [STATES]),
        ({"stage": 2, "offload_optimizer": CPU}, [STATES, GRADIENTS]),
        ({"stage": 2, "cpu_offload": True}, [STATES, GRADIENTS]),
        ({"stage": 2, "offload_optimizer": CPU, "offload_param": CPU}, [STATES, GRADIENTS]),
        ({"stage": 3, "offload_optimizer": CPU}, [STATES, GRADIENTS]),
        ({"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}, [STATES, GRADIENTS, WEIGHTS]),
        ({"stage": 3, "offload_optimizer": CPU, "mics_shard_size": 2}, [STATES]),
    ],
)
def test_offload_to_the_cpu_rests_and_steps_the_same_on_the_host(
    tmp_path: Path, zero: dict[str, Any], what: list[str]
):
    given = {**ZERO_3, "zero_optimization": zero}
    result = imported(tmp_path, "ds.json", given, devices=4)
    assert result.is_complete
    assert result.document["strategies"][-1] == {"name": "offload", "what": what, "step_on": "host"}
    plan = planned(tmp_path, "ds.json", {**given, "train_batch_size": 32}, devices=4)
    assert [each.name for each in plan.strategies if each.name == "offload"]
    assert plan.sharding.tiers.step == "host"


def test_every_option_of_deepspeeds_offload_has_a_verdict(tmp_path: Path):
    """Those of deepspeed/runtime/zero/offload_config.py, DeepSpeed 0.19."""
    optimizer = {
        **{"device": "cpu", "nvme_path": "/nvme", "buffer_count": 4, "pin_memory": True, "ratio": 1.0},
        **{"pipeline_read": False, "pipeline_write": False, "fast_init": False, "super_offload": True},
        **{"convert_grad_on_cpu": True, "cpuadam_cores_perc": 0.8},
    }
    param = {
        **{"device": "cpu", "nvme_path": "/nvme", "buffer_count": 5, "buffer_size": 1e8},
        **{"max_in_cpu": 1e9, "pin_memory": True},
    }
    zero = {"stage": 3, "offload_optimizer": optimizer, "offload_param": param}
    result = imported(tmp_path, "ds.json", {**ZERO_3, "zero_optimization": zero}, devices=2)
    assert result.is_complete
    name = "zero_optimization.offload_optimizer."
    assert row(result, f"{name}device") == (
        "mapped: offload.what = ['optimizer_states', 'gradients', 'weights']; offload.step_on = 'host'; "
        "the host steps; replicas of shards sum gradients on the device"
    )
    assert row(result, f"{name}buffer_count") == "dropped: only with offload to NVMe"
    assert row(result, f"{name}pin_memory") == "dropped: host memory is pinned on accelerators"
    assert row(result, f"{name}super_offload").startswith("dropped: how the host steps")


@pytest.mark.parametrize("table", [None, {}, {"device": "none"}])
def test_a_table_of_offload_without_a_device_does_nothing(tmp_path: Path, table: object):
    zero = {"stage": 2, "offload_optimizer": table}
    result = imported(tmp_path, "ds.json", {**ZERO_3, "zero_optimization": zero}, devices=2)
    assert row(result, "zero_optimization.offload_optimizer.device") == "dropped: this value turns nothing on"
    assert strategies(result) == ["batch_split", "zero"]


def test_offload_without_a_stage_that_has_it_is_dropped_as_there(tmp_path: Path):
    zero = {"stage": 1, "offload_optimizer": CPU, "offload_param": CPU}
    result = imported(tmp_path, "ds.json", {**ZERO_3, "zero_optimization": zero}, devices=2)
    assert row(result, "zero_optimization.offload_param.device").startswith("dropped: only with ZeRO stage 3")


def test_one_device_offloads_the_shards_of_a_zero_that_it_has_alone(tmp_path: Path):
    zero = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}
    plan = planned(
        tmp_path, "ds.json", {**ZERO_3, "zero_optimization": zero, "train_batch_size": 8}, devices=1
    )
    assert [each.name for each in plan.strategies] == ["batch_split", "zero", "offload"]
    assert plan.sharding.tiers.weights == "host"
