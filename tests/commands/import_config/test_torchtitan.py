"""torchtitan TOML: the job config with its defaults."""

from pathlib import Path

import pytest

from tests.commands.import_config.imported import imported, planned, row, strategies

JOB = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 20
[training]
local_batch_size = 2
seq_len = 16
steps = 100
compile = true
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[checkpoint]
enable_checkpoint = true
interval = 50
[activation_checkpoint]
mode = "full"
"""


def test_a_job_becomes_a_plan_with_the_defaults_of_torchtitan(tmp_path: Path):
    plan = planned(tmp_path, "job.toml", JOB, devices=4)
    job = plan.job
    assert str(plan.mesh) == "dp_shard 2 x tp 2"
    assert (job.train.batch, plan.micro_batch, job.train.steps) == (4, 2, 100)
    assert (job.lr_schedule.name, job.lr_schedule.warmup, job.lr_schedule.decay) == ("wsd", 20, 80)
    assert (job.precision.parameters, job.precision.reduce) == ("bfloat16", "float32")
    assert job.optimizer.groups[0].weight_decay == 0.1
    names = [each.name for each in plan.strategies]
    assert {"tensor_parallel", "sequence_parallel", "vocab_parallel", "activation_checkpointing"} <= set(
        names
    )


def test_the_model_and_the_data_are_refused_until_they_are_named(tmp_path: Path):
    result = imported(tmp_path, "job.toml", JOB, devices=4)
    assert row(result, "model.flavor").endswith("-> name a transformers model: --model SOURCE")
    assert row(result, "training.dataset").startswith("refused: torchtitan's datasets are its own code")
    assert row(result, "training.compile").startswith("dropped: torch.compile is not used")


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("1F1B", "1f1b"), ("GPipe", "gpipe"), ("Interleaved1F1B", "interleaved"), ("ZBVZeroBubble", "zb_v")],
)
def test_schedules_have_their_names_here(tmp_path: Path, name: str, schedule: str):
    text = f'[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "{name}"\n'
    pipeline = imported(tmp_path, "job.toml", text, devices=4).document["strategies"][0]
    assert (pipeline["name"], pipeline["schedule"]) == ("pipeline", schedule)


PIPELINE = '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "Nope"'
BY_OPERATION = '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"'


@pytest.mark.parametrize(("degree", "save"), [(1, ["matmul", "attention"]), (2, ["matmul"])])
def test_selective_checkpointing_by_operation_keeps_what_ranks_have_whole(
    tmp_path: Path, degree: int, save: list[str]
):
    text = f"{BY_OPERATION}\n[parallelism]\ncontext_parallel_degree = {degree}\n"
    found = imported(tmp_path, "job.toml", text, devices=2).document["strategies"]
    assert [each["save"] for each in found if each["name"] == "activation_checkpointing"] == [save]


@pytest.mark.parametrize(
    ("text", "option", "message"),
    [
        (PIPELINE, "parallelism.pipeline_parallel_schedule", "refused: the schedule Nope is not there"),
        (
            BY_OPERATION,
            "activation_checkpoint.selective_ac_option",
            "refused: written is save = ['matmul', 'attention']",
        ),
        (
            '[parallelism]\npipeline_parallel_split_points = ["layers.2"]',
            "parallelism.pipeline_parallel_split_points",
            "refused: names of torchtitan's own modules",
        ),
        (
            "[parallelism]\nexpert_parallel_degree = 2",
            "parallelism.expert_parallel_degree",
            "refused: experts",
        ),
        ("[parallelism]\nexpert_parallel_degree = 1", "parallelism.expert_parallel_degree", "dropped: this"),
        ('[model]\nconverters = ["float8"]', "model.converters", "refused: float8 products"),
        ("[training]\nenable_cpu_offload = true", "training.enable_cpu_offload", "mapped: offload.what"),
        ("[training]\nenable_cpu_offload = false", "training.enable_cpu_offload", "dropped: this value"),
        ('[lr_scheduler]\ndecay_type = "sqrt"', "lr_scheduler.decay_type", "refused: a sqrt decay"),
        ("[training]\nlocal_batch = 3", "training.local_batch", "unknown: "),
        ('[checkpoint]\ninitial_load_path = "x"', "checkpoint.initial_load_path", "refused: torch DCP"),
    ],
)
def test_other_options_are_refused_with_the_repair(tmp_path: Path, text: str, option: str, message: str):
    assert row(imported(tmp_path, "job.toml", text, devices=4), option).startswith(message)


def test_cpu_offload_is_everything_on_the_host_where_there_is_fsdp(tmp_path: Path):
    """CPUOffloadPolicy of FSDP2; torchtitan applies it with FSDP alone."""
    text = JOB.replace("seq_len = 16", "seq_len = 16\nenable_cpu_offload = true")
    plan = planned(tmp_path, "job.toml", text.replace("tensor_parallel_degree = 2", ""), devices=4)
    tiers = plan.sharding.tiers
    assert (tiers.optimizer_states, tiers.gradients, tiers.weights, tiers.step) == ("host",) * 4
    one = imported(tmp_path, "one.toml", "[training]\nenable_cpu_offload = true", devices=1)
    assert row(one, "training.enable_cpu_offload") == "dropped: only with FSDP, as there"
    assert "offload" not in strategies(one)


def test_a_batch_that_depends_on_the_ranks_asks_for_them(tmp_path: Path):
    assert "give --devices N" in row(imported(tmp_path, "job.toml", JOB), "training.global_batch_size")


def test_ddp_computes_in_autocast_and_hsdp_replicates_shards(tmp_path: Path):
    ddp = "[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1\n"
    result = imported(tmp_path, "job.toml", ddp, devices=4)
    assert strategies(result) == ["activation_checkpointing", "batch_split", "ddp"]
    assert result.document["precision"] == {"compute": "bfloat16"}
    hsdp = imported(tmp_path, "job.toml", "[parallelism]\ndata_parallel_replicate_degree = 2\n", devices=4)
    assert hsdp.document["mesh"] == {"dp_replicate": 2, "dp_shard": 2}
    assert hsdp.document["strategies"][-1]["replicate_axis"] == "dp_replicate"


def test_deterministic_kernels_are_taken_over(tmp_path: Path):
    asked = JOB + "[debug]\ndeterministic = true\n"
    assert planned(tmp_path, "job.toml", asked, devices=4).run.deterministic
