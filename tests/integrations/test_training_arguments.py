"""From TrainingArguments to a job; what cannot hold is refused by name, all at once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from torch import nn

import meshwright as mw
from meshwright.integrations.training_arguments import (
    argument_diagnostics,
    job_for,
    loss_for,
    plan_diagnostics,
)
from meshwright.integrations.transformers import MeshwrightTrainer
from meshwright.plan.job.errors import PlanError, raise_diagnostics
from tests.integrations.small_llama import arguments, llama, samples


def problems(args: Any, trainer: type = MeshwrightTrainer, *, has_optimizer: bool = False) -> list[str]:
    return [
        f"{each.problem} | {each.fix}"
        for each in argument_diagnostics(args, llama(), trainer, has_optimizer=has_optimizer)
    ]


REFUSED = {
    "fsdp": {"fsdp": "full_shard"},
    "torch_compile": {"torch_compile": True},
    "use_liger_kernel": {"use_liger_kernel": True},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "average_tokens_across_devices": {"average_tokens_across_devices": False},
    "train_sampling_strategy": {"train_sampling_strategy": "batch_rebalance"},
    "debug": {"debug": "underflow_overflow"},
    "optim_target_modules": {"optim_target_modules": ["up_proj"]},
    "bf16_full_eval": {"bf16_full_eval": True},
    "fp16_full_eval": {"fp16_full_eval": True},
    "eval_use_gather_object": {"eval_use_gather_object": True},
    "parallelism_config": {"parallelism_config": ParallelismConfig()},
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_a_plan_does_not_run_is_refused_by_name(name: str):
    args = arguments("out")
    vars(args).update(REFUSED[name])  # their checks of a GPU come before ours
    (problem,) = problems(args)
    assert problem.startswith(f"{name} = ")
    assert "which a plan does not run" in problem


def test_deepspeed_is_refused():
    args = arguments("out")
    args.deepspeed = {"zero_optimization": {"stage": 3}}
    (problem,) = problems(args)
    assert problem.startswith("deepspeed = ")
    assert "mesh=mw.Mesh(dp_shard=N) is ZeRO-3" in problem


def test_plain_arguments_are_taken():
    assert problems(arguments("out")) == []


@pytest.mark.parametrize("optimizer", ["galore_adamw", "adamw_bnb_8bit", "lomo", "schedule_free_adamw"])
def test_an_optimizer_of_full_parameters_is_refused_unless_one_is_passed(optimizer: str):
    args = arguments("out", optim=optimizer)
    assert problems(args, has_optimizer=True) == []
    (problem,) = problems(args)
    assert problem.startswith(f"optim = '{optimizer}', which needs full parameters and gradients | use adamw")


def test_batches_that_accelerate_would_share_are_refused():
    args = arguments("out", accelerator_config={"split_batches": True})
    (problem,) = problems(args)
    assert problem.startswith("accelerator_config.split_batches = True")


class Own(MeshwrightTrainer):
    """Overrides what a plan does not call."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        raise AssertionError

    def training_step(self, *args: Any, **options: Any) -> Any:
        raise AssertionError


def test_methods_that_a_subclass_overrides_in_vain_are_refused():
    found = problems(arguments("out"), Own)
    assert found[0].startswith("Own overrides compute_loss, which a plan does not call | pass loss=")
    assert found[1].startswith("Own overrides training_step")


def test_a_trainer_reports_everything_at_once():
    args = arguments("out", optim="galore_adamw", average_tokens_across_devices=False)
    args.deepspeed = "zero.json"
    with pytest.raises(PlanError) as error:
        Own(llama(), args, train_dataset=samples())
    assert len(error.value.diagnostics) == 5


def test_sizes_clipping_seed_and_precision_come_from_the_arguments():
    args = arguments("out", max_grad_norm=0.25, seed=9)
    job = job_for(args, llama(torch.float32), None, 7, 24)
    assert (job.train.steps, job.train.batch, job.train.clip, job.train.seed) == (7, 24, 0.25, 9)
    assert (job.precision.parameters, job.precision.compute) == ("float32", "float32")
    assert job_for(args, llama(), None, 7, 24).precision == mw.PrecisionConfig(
        "float64", "float64", "float64"
    )
    args.bf16 = True
    assert job_for(args, llama(torch.float32), None, 7, 24).precision.compute == "bfloat16"
    args.bf16, args.fp16 = False, True
    assert job_for(args, llama(torch.float32), None, 7, 24).precision.scales_loss


def test_weights_of_an_optimizer_that_is_not_elementwise_stay_whole():
    parameters = [nn.Parameter(torch.ones(2, 2))]
    cases = {
        torch.optim.AdamW(parameters): "adamw",
        torch.optim.SGD(parameters, 0.1): "sgd",
        torch.optim.Adafactor(parameters): "adafactor",
    }
    args, model = arguments("out"), llama()
    for optimizer, name in cases.items():
        assert job_for(args, model, optimizer, 1, 4).optimizer.name == name


def test_parameters_of_two_dtypes_are_refused():
    model = llama(torch.float32)
    model.lm_head.double()
    with pytest.raises(PlanError, match="trained parameters of several dtypes: float32, float64"):
        job_for(arguments("out"), model, None, 1, 4)


def test_a_loss_function_of_transformers_is_a_sum_and_a_count():
    def function(outputs: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int) -> torch.Tensor:
        return (outputs[labels != -100] * 1.0).sum() / num_items_in_batch

    loss = loss_for(llama(), function, 0.0, shifts=False)
    assert isinstance(loss, mw.Loss)
    batch = {"labels": torch.tensor([[1, -100, 3]])}
    assert loss.total(torch.tensor([[1.0, 2.0, 4.0]]), batch) == 5.0
    assert loss.count(batch) == 2
    shifted = loss_for(llama(), function, 0.0, shifts=True)
    assert isinstance(shifted, mw.Loss)
    assert shifted.count(batch) == 1
    assert loss_for(llama(), None, 0.0, shifts=True) is None
    smooth = loss_for(llama(), None, 0.1, shifts=True)
    assert isinstance(smooth, mw.Loss)
    assert smooth.shifts_labels


def test_a_plan_that_says_otherwise_than_the_arguments_is_refused():
    args = arguments("out")
    job = job_for(args, llama(), None, 3, 4)
    plan = SimpleNamespace(
        micro_batch=4,
        num_microbatches=1,
        job=mw.Job(train=mw.TrainConfig(clip=2.0), precision=job.precision),
        sharding=SimpleNamespace(primary_rank_axes=(), num_servers=0),
    )
    with pytest.raises(PlanError) as error:
        raise_diagnostics(plan_diagnostics(plan, args, job))  # type: ignore[arg-type]
    text = str(error.value)
    assert "per_device_train_batch_size: 2 in the arguments, 4 in the plan" in text
    assert "gradient_accumulation_steps: 2 in the arguments, 1 in the plan" in text
    assert "max_grad_norm: 1.0 in the arguments, 2.0 in the plan" in text
    assert "seed: 42 in the arguments, 0 in the plan" in text
