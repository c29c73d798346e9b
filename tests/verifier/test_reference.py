"""The reference is an ordinary PyTorch loop: compared with one written by hand, without the engine."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import meshwright.engine.step.action_handlers
import meshwright.engine.step.executor
import meshwright.model.blocks.block_forward_backward
from meshwright.model.loss.loss_definition import IGNORE_INDEX
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import OptimizerConfig, ParamGroupConfig, TrainConfig
from meshwright.verifier.one_device.parity_case import ParityCase, Reference
from meshwright.verifier.reference import run_reference
from tests.tiny_model import analyzed_model, case_of, plan_of, tiny_job, token_samples


def by_hand(
    case: ParityCase, steps: int, *, lr: float, decay: float, momentum: float, clip: float
) -> list[dict[str, torch.Tensor]]:
    """SGD with momentum as its formula says (torch adds 1e-6 to the norm that clips): the parameters after
    each step.
    """
    module = case.make_trained_module().module
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    velocity = {name: torch.zeros_like(p) for name, p in parameters.items()}
    read_batch, history = case.batch_reader(case.single_device_plan, 0), []
    for step in range(steps):
        batch = read_batch(step)
        logits = module(batch["input_ids"])
        kept = batch["labels"] != IGNORE_INDEX
        loss = nn.functional.cross_entropy(logits[kept], batch["labels"][kept], reduction="sum") / kept.sum()
        grads = dict(
            zip(
                parameters,
                torch.autograd.grad(loss, list(parameters.values()), allow_unused=True),
                strict=True,
            )
        )
        grads = {
            name: torch.zeros_like(parameters[name]) if grad is None else grad for name, grad in grads.items()
        }
        norm = sum((grad**2).sum() for grad in grads.values()).sqrt().item()
        for name, parameter in parameters.items():
            shrunk = grads[name] * min(1.0, clip / (norm + 1e-6)) if clip else grads[name]
            change = shrunk + (decay if parameter.ndim > 1 else 0.0) * parameter.detach()
            velocity[name] = change if step == 0 else momentum * velocity[name] + change
            parameter.data -= lr * velocity[name]
        history.append({name: p.detach().clone() for name, p in module.named_parameters()})
    return history


@pytest.mark.parametrize("clip", [0.0, 0.1, 100.0])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"spare": True}, {"frozen": True}], ids=str)
def test_it_is_stochastic_gradient_descent_on_the_global_batch(options: dict[str, bool], clip: float):
    analyzed = analyzed_model(**options)
    job = replace(tiny_job(), train=TrainConfig(steps=20, batch=12, clip=clip))
    case = case_of(analyzed, plan_of(analyzed, 3, job=job))
    expected = by_hand(case, 4, lr=0.1, decay=job.optimizer.weight_decay, momentum=0.5, clip=clip)
    found = [truth.parameters for truth in run_reference(case, 4).steps]
    for mine, theirs in zip(expected, found, strict=True):
        assert list(mine) == list(theirs)
        for name, tensor in mine.items():
            torch.testing.assert_close(theirs[name], tensor, rtol=1e-12, atol=1e-14)


def test_it_needs_no_engine(monkeypatch: pytest.MonkeyPatch):
    """With every act of the engine broken, one device still trains."""

    def broken(*args: object, **kwargs: object) -> None:
        raise AssertionError("the reference called the engine")

    analyzed = analyzed_model(p=0.2)
    case = case_of(analyzed, plan_of(analyzed, 3))
    monkeypatch.setattr(meshwright.engine.step.executor.StepExecutor, "__init__", broken)
    monkeypatch.setattr(meshwright.engine.step.action_handlers.ActionHandlers, "__init__", broken)
    monkeypatch.setattr(meshwright.model.blocks.block_forward_backward.ForwardDriver, "__init__", broken)
    monkeypatch.setattr(meshwright.model.blocks.block_forward_backward, "backward", broken)
    assert len(run_reference(case, 2).steps) == 2


def test_it_does_not_import_what_it_verifies():
    code = "import sys, meshwright.verifier.reference; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, check=True
    )
    loaded = set(done.stdout.decode().split())
    judged = ("engine.acts", "engine.player", "strategies.data.replicate", "comm.threads", "comm.distributed")
    assert not loaded & {f"meshwright.{name}" for name in judged}


def reference_of(
    data: dict[str, torch.Tensor] | None = None, steps: int = 3, **options: float | bool
) -> Reference:
    analyzed = analyzed_model(**options)
    return run_reference(case_of(analyzed, plan_of(analyzed, 3), data), steps)


def test_every_step_is_kept_apart_from_the_next():
    truths = reference_of().steps
    assert [
        truths[i].parameters["head.bias"].equal(truths[i + 1].parameters["head.bias"]) for i in range(2)
    ] == [False, False]
    assert not reference_of().initial_values["head.bias"].equal(truths[0].parameters["head.bias"])


def test_gradients_are_those_before_clipping():
    truth = reference_of().steps[0]
    norm = sum((grad**2).sum().item() for grad in truth.gradients.values()) ** 0.5
    assert truth.grad_norm == pytest.approx(norm, rel=1e-12)
    assert norm > 0.5, "the clip of the tiny job is at work"


def test_a_frozen_parameter_has_no_gradient_and_stays():
    reference = reference_of(frozen=True)
    assert "embed.weight" not in reference.steps[0].gradients
    assert reference.steps[-1].parameters["embed.weight"].equal(reference.initial_values["embed.weight"])


def test_a_parameter_that_no_step_reaches_has_a_gradient_of_zero_and_decays():
    reference = reference_of(spare=True)
    name = "layers.3.linear.weight"
    assert reference.steps[0].gradients[name].eq(0).all()
    assert reference.steps[0].parameters[name].abs().sum() < reference.initial_values[name].abs().sum()


def test_a_step_in_which_nothing_counts_leaves_the_parameters_as_they_were():
    data = token_samples()
    data["labels"][:] = IGNORE_INDEX
    reference = reference_of(data, steps=2)
    assert [truth.loss for truth in reference.steps] == [0.0, 0.0]
    assert all(
        tensor.equal(reference.initial_values[name])
        for name, tensor in reference.steps[-1].parameters.items()
    )


def test_it_ends_with_the_data():
    analyzed = analyzed_model()
    job = tiny_job(data=DataConfig("example", epochs=1))
    assert (
        len(run_reference(case_of(analyzed, plan_of(analyzed, 3, job=job), token_samples(13)), 5).steps) == 2
    )


def test_the_users_parameter_groups_hold():
    analyzed = analyzed_model()
    groups = (ParamGroupConfig("head.*", lr_factor=0.0), ParamGroupConfig("*.norm.*", weight_decay=0.0))
    job = tiny_job(optimizer=OptimizerConfig("sgd", lr=0.1, groups=groups))
    reference = run_reference(case_of(analyzed, plan_of(analyzed, 3, job=job)), 2)
    assert reference.steps[-1].parameters["head.weight"].equal(reference.initial_values["head.weight"])
    assert not reference.steps[-1].parameters["embed.weight"].equal(reference.initial_values["embed.weight"])


def test_blocks_are_named_for_every_parameter():
    reference = reference_of(tied=True)
    assert set(reference.block_of) == set(reference.initial_values)
    assert reference.block_of["embed.weight"] == "embed"


def test_the_users_module_keeps_no_hooks():
    analyzed = analyzed_model(p=0.3)
    case = case_of(analyzed, plan_of(analyzed, 3))
    made: list[nn.Module] = []

    def make_subject() -> object:
        made.append((subject := case.make_trained_module()).module)
        return subject

    run_reference(replace(case, make_trained_module=make_subject), 1)
    assert not any(module._forward_pre_hooks for module in made[0].modules())
