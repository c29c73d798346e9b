"""Accelerate YAML: DDP, FSDP, DeepSpeed inside, ParallelismConfig."""

import json
from pathlib import Path

import pytest

from tests.commands.import_config.imported import imported, planned, row, strategies

FSDP_2 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: false
"""


def test_fsdp_becomes_zero_3_with_bfloat16_and_float32_masters(tmp_path: Path):
    plan = planned(tmp_path, "fsdp.yaml", FSDP_2)
    assert str(plan.mesh) == "dp_shard 2"
    assert [each.name for each in plan.strategies] == ["batch_split", "activation_checkpointing", "zero"]
    assert (plan.job.precision.parameters, plan.job.precision.master) == ("bfloat16", "float32")
    assert plan.job.train.clip == 0.0


def test_nothing_of_a_usual_config_is_refused_and_the_script_is_named_as_missing(tmp_path: Path):
    result = imported(tmp_path, "fsdp.yaml", FSDP_2)
    assert result.is_complete
    assert "optimizer" in result.missing
    assert row(result, "fsdp_config.fsdp_offload_params") == "dropped: this value turns nothing on"


@pytest.mark.parametrize(
    ("line", "stage", "gather"),
    [
        ("fsdp_sharding_strategy: FULL_SHARD", 3, None),
        ("fsdp_sharding_strategy: SHARD_GRAD_OP", 3, "microbatch"),
        ("fsdp_sharding_strategy: 2", 3, "microbatch"),
        ("fsdp_reshard_after_forward: false", 3, "microbatch"),
        ("fsdp_reshard_after_forward: FULL_SHARD", 3, None),
    ],
)
def test_the_sharding_strategy_says_how_long_weights_stay_gathered(
    tmp_path: Path, line: str, stage: int, gather: str | None
):
    text = f"distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n  {line}\n"
    zero = imported(tmp_path, "a.yaml", text).document["strategies"][-1]
    assert (zero["stage"], zero.get("gather")) == (stage, gather)


def test_no_shard_is_ddp_and_multi_gpu_computes_in_autocast(tmp_path: Path):
    text = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n  fsdp_sharding_strategy: NO_SHARD\n"
    assert strategies(imported(tmp_path, "a.yaml", text)) == ["batch_split", "ddp"]
    plan = planned(
        tmp_path, "b.yaml", "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\n"
    )
    assert str(plan.mesh) == "dp_replicate 2"
    assert (plan.job.precision.parameters, plan.job.precision.compute) == ("float32", "bfloat16")


OFFLOADED = {"name": "offload", "what": ["optimizer_states", "gradients", "weights"], "step_on": "host"}


def test_offloaded_parameters_rest_and_are_stepped_on_the_host(tmp_path: Path):
    """CPUOffloadPolicy of FSDP2: parameters, gradients and optimizer states."""
    text = FSDP_2.replace("fsdp_offload_params: false", "fsdp_offload_params: true")
    result = imported(tmp_path, "a.yaml", text)
    assert result.is_complete
    assert result.document["strategies"][-1] == OFFLOADED
    assert row(result, "fsdp_config.fsdp_offload_params").startswith(
        "mapped: offload.what = ['optimizer_states'"
    )
    assert planned(tmp_path, "b.yaml", text).sharding.tiers.weights == "host"


@pytest.mark.parametrize("checkpoints", [True, False])
def test_checkpointed_activations_are_offloaded(checkpoints: bool, tmp_path: Path):
    text = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n"
    text += "  fsdp_activation_checkpointing_offload: true\n"
    text += f"  fsdp_activation_checkpointing: {str(checkpoints).lower()}\n"
    result = imported(tmp_path, "a.yaml", text)
    names = [each["name"] for each in result.document["strategies"]]
    assert ("activation_offload" in names) == checkpoints
    fate = row(result, "fsdp_config.fsdp_activation_checkpointing_offload")
    assert fate.startswith("mapped: activation_offload" if checkpoints else "dropped: only with fsdp_activ")


def test_hybrid_sharding_is_refused_with_the_repair(tmp_path: Path):
    text = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n"
    result = imported(tmp_path, "a.yaml", text + "  fsdp_sharding_strategy: HYBRID_SHARD\n")
    assert "mesh.dp_replicate to the hosts" in row(result, "fsdp_config.fsdp_sharding_strategy")


def test_a_parallelism_config_becomes_the_mesh(tmp_path: Path):
    sizes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "cp": 2}
    lines = "".join(f"  parallelism_config_{name}_size: {size}\n" for name, size in sizes.items())
    text = f"distributed_type: FSDP\nnum_processes: 16\nparallelism_config:\n{lines}"
    result = imported(tmp_path, "a.yaml", text)
    assert result.document["mesh"] == sizes
    assert strategies(result) == ["tensor_parallel", "ring", "batch_split", "batch_split", "zero"]
    assert result.document["strategies"][-1]["replicate_axis"] == "dp_replicate"


def test_a_deepspeed_file_that_is_named_is_read_with_it(tmp_path: Path):
    inner = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "ds.json").write_text(json.dumps(inner))
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    )
    result = imported(tmp_path, "a.yaml", text)
    assert result.document["mesh"] == {"dp_shard": 2}
    assert result.document["train"]["batch"] == 8
    assert result.document["strategies"][-1] == {**OFFLOADED, "what": ["optimizer_states", "gradients"]}
    assert row(result, "zero_optimization.offload_optimizer.device").startswith("mapped: offload.what")


@pytest.mark.parametrize(
    ("stage", "devices", "what"),
    [
        (3, ("cpu", "cpu"), ["optimizer_states", "gradients", "weights"]),
        (3, ("cpu", "none"), ["optimizer_states", "gradients"]),
        (2, ("cpu", "none"), ["optimizer_states", "gradients"]),
        (3, ("nvme", "none"), None),
        (2, ("none", "none"), None),
    ],
)
def test_the_devices_of_the_deepspeed_plugin_are_mapped_or_refused(
    tmp_path: Path, stage: int, devices: tuple[str, str], what: list[str] | None
):
    text = (
        f"distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\ndeepspeed_config:\n"
        f"  gradient_clipping: 1.0\n  offload_optimizer_device: {devices[0]}\n"
        f"  offload_param_device: {devices[1]}\n  offload_optimizer_nvme_path: /nvme\n  zero_stage: {stage}\n"
    )
    result = imported(tmp_path, "a.yaml", text)
    assert result.is_complete
    expected = {"name": "zero", "stage": stage, "axis": "dp_shard"}
    if what:
        expected = {**OFFLOADED, "what": what}
    elif devices[0] == "nvme":
        expected = {"name": "disk_offload", "folder": "/nvme"}
    assert result.document["strategies"][-1] == expected


def test_deepspeed_inside_the_file_sets_stage_and_clipping(tmp_path: Path):
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\ndeepspeed_config:\n"
        "  gradient_accumulation_steps: 1\n  gradient_clipping: 1.0\n  offload_optimizer_device: none\n"
        "  zero3_init_flag: true\n  zero_stage: 1\n"
    )
    result = imported(tmp_path, "a.yaml", text)
    assert result.is_complete
    assert result.document["strategies"][-1] == {"name": "zero", "stage": 1, "axis": "dp_shard"}
    assert result.document["train"]["clip"] == 1.0
