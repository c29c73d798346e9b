"""Action handlers on one device: the numbers are those of an ordinary training loop."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import OptimizerConfig, PrecisionConfig
from tests.engine.one_device import Custom, Pair, bits, ignored, job_of, pair, sample_range
from tests.tiny_model import TOKENS, Tiny, token_samples

UNEVEN = token_samples(36)
SGD = {"lr": 0.1, "foreach": False, "fused": False}


def chain(model: Custom, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x).tanh()
    return model.head(x)


def train(
    done: Pair, steps: int, batch: dict[str, torch.Tensor] = UNEVEN, count: int = 12, clip: float = 0.0
) -> float:
    """Step both on `count` rows at a time; the largest error of loss and gradient norm."""
    optimizer, worst = torch.optim.SGD(done.model.parameters(), **SGD), 0.0
    for step in range(steps):
        some = sample_range(batch, step * count, (step + 1) * count)
        metrics = done.executor.step(some)
        loss, norm = done.step_alone(optimizer, some, clip)
        worst = max(worst, abs(metrics.loss - loss), abs(metrics.grad_norm - norm))
    return worst


@pytest.mark.parametrize("micro_batch", [12, 6, 4, 1])
def test_accumulated_micro_batches_are_one_batch(micro_batch: int):
    done = pair(micro_batch=micro_batch)
    assert (
        train(done, 3) < 1e-12
    )  # rows ignore different numbers of labels, row 3 and every seventh after it all
    assert done.error < 1e-12


@pytest.mark.parametrize("count", [5, 7, 11])
def test_a_short_batch_leaves_micro_batches_short_or_empty(count: int):
    done = pair(micro_batch=3)
    assert train(done, 3, count=count) < 1e-12
    assert done.error < 1e-12


def test_micro_batches_without_labels_weigh_nothing():
    batch = ignored(token_samples(12, uneven=False), 3, 4, 5, 9)
    done = pair(micro_batch=3)
    assert train(done, 1, batch) < 1e-12
    assert done.error < 1e-12


@pytest.mark.parametrize(
    "batch",
    [None, ignored(token_samples(12)), sample_range(token_samples(12), 0, 0)],
    ids=["no samples", "no labels", "an empty batch"],
)
def test_a_step_in_which_nothing_counts_changes_nothing_but_the_count_of_steps(
    batch: dict[str, torch.Tensor] | None,
):
    done = pair(job=job_of(optimizer=OptimizerConfig("adamw", weight_decay=0.5)), micro_batch=4)
    done.executor.step(sample_range(UNEVEN, 0, 12))
    before = bits(done.executor.state_dict())
    metrics = done.executor.step(batch)
    assert (metrics.is_skipped, metrics.loss, metrics.grad_norm, metrics.tokens, metrics.step) == (
        True,
        0.0,
        0.0,
        0,
        2,
    )
    assert bits(done.executor.state_dict()) == before
    assert done.executor.steps_done == 2
    assert not done.executor.step(sample_range(UNEVEN, 12, 24)).is_skipped


@pytest.mark.parametrize(("clip", "clipped"), [(0.0, False), (0.05, True), (1e3, False), (1e-9, True)])
def test_clipping_is_that_of_torch(clip: float, clipped: bool):
    done, free = pair(job=job_of(clip=clip), micro_batch=4), pair()
    assert train(done, 3, clip=clip) < 1e-12
    assert done.error < 1e-14
    free.executor.step(sample_range(UNEVEN, 0, 12))
    one = pair(job=job_of(clip=clip))
    one.executor.step(sample_range(UNEVEN, 0, 12))
    moved = max((one.parameters[name] - free.parameters[name]).abs().max().item() for name in free.parameters)
    assert (moved > 1e-3) == clipped


def test_a_norm_just_below_the_limit_is_scaled_as_torch_does_it():
    free = pair()
    norm = free.executor.step(sample_range(UNEVEN, 0, 12)).grad_norm
    done = pair(job=job_of(clip=norm + 5e-7))
    train(done, 1, clip=norm + 5e-7)
    assert done.error < 1e-15
    assert any(not torch.equal(done.parameters[name], free.parameters[name]) for name in free.parameters)


def test_tied_parameters_count_once_and_frozen_ones_stay():
    done = pair(lambda: Tiny(tied=True), job=job_of(clip=0.05), micro_batch=4)
    assert train(done, 3, clip=0.05) < 1e-12
    assert done.error < 1e-14
    done = pair(lambda: Tiny(frozen=True), micro_batch=4)
    before = done.parameters["embed.weight"].clone()
    assert train(done, 3) < 1e-12
    assert torch.equal(done.parameters["embed.weight"], before)


def test_parameters_that_a_step_does_not_reach_have_gradients_of_zero():
    job = job_of(optimizer=OptimizerConfig("sgd", lr=0.1, weight_decay=0.5, momentum=0.9))
    done = pair(lambda: Tiny(spare=True), job=job)
    name = "layers.3.linear.weight"
    before = done.parameters[name].clone()
    done.executor.step(sample_range(UNEVEN, 0, 12))
    assert torch.allclose(done.parameters[name], before * (1 - 0.1 * 0.5), rtol=1e-14)


def test_a_block_skipped_in_some_steps_is_no_error():
    class Skipping(Custom):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            for layer in self.layers if input_ids[0, 0] < 7 else self.layers[2:]:
                x = layer(x).tanh()
            return self.head(x)

    done = pair(
        lambda: Skipping(chain),
        {key: torch.zeros_like(value) for key, value in token_samples(2).items()},
        micro_batch=3,
    )
    optimizer = torch.optim.SGD(done.model.parameters(), **SGD)
    reached = []
    for start in range(0, 36, 3):
        batch = sample_range(UNEVEN, start, start + 3)
        done.executor.step(batch)
        done.step_alone(optimizer, batch)
        reached.append(done.model.layers[0].weight.grad is not None)
        assert done.error < 1e-13
    assert set(reached) == {True, False}


def test_a_forward_without_trained_parameters_is_no_error():
    def cut(model: Custom, x: torch.Tensor) -> torch.Tensor:
        return chain(model, x) if x[0, 0, 0] > 0 else chain(model, x).detach()

    done = pair(lambda: Custom(cut), UNEVEN, micro_batch=2)
    for start in (0, 12, 24):
        assert done.executor.step(sample_range(UNEVEN, start, start + 12)).loss > 0


def test_a_step_that_failed_leaves_nothing_to_the_next():
    armed: list[bool] = []

    def failing(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if armed and batch["labels"][0, 0] == armed[0]:
            raise KeyError("planted")
        return token_cross_entropy().total(outputs, batch)

    batch = token_samples(12, uneven=False)
    batch["labels"][8, 0] = 12
    batch["labels"][[0, 4], 0] = 0
    done = pair(
        loss=Loss(failing, token_cross_entropy().count),
        micro_batch=4,
        job=job_of(optimizer=OptimizerConfig(lr=0.01)),
    )
    armed.append(12)
    with pytest.raises(KeyError, match="planted"):
        done.executor.step(batch)
    armed.clear()
    fresh = pair(micro_batch=4, job=job_of(optimizer=OptimizerConfig(lr=0.01)))
    assert done.executor.step(batch) == fresh.executor.step(batch)
    assert bits(done.executor.state_dict()) == bits(fresh.executor.state_dict())


class Watched(nn.Module):
    """A linear that notes in which dtype it computed."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.linear, self.dtypes = nn.Linear(*sizes), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.dtypes.append(y.dtype)
        return y.tanh()


def test_bfloat16_compute_keeps_parameters_gradients_and_moments_in_float32():
    def build() -> nn.Module:
        model = Custom(chain)
        model.layers = nn.ModuleList(Watched(6, 6) for _ in range(3))
        return model

    job = job_of(
        precision=PrecisionConfig("float32", "bfloat16", "float32"), optimizer=OptimizerConfig(lr=0.01)
    )
    half, full = (
        pair(build, job=job, micro_batch=4),
        pair(build, job=job_of(precision=PrecisionConfig(), optimizer=OptimizerConfig(lr=0.01))),
    )
    for start in (0, 12, 24):
        metrics, expected = (
            done.executor.step(sample_range(UNEVEN, start, start + 12)) for done in (half, full)
        )
        assert metrics.loss == pytest.approx(expected.loss, rel=0.01)
        assert metrics.loss != expected.loss
        assert metrics.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    layers = half.executor.state.trained_module.module.layers
    assert {dtype for layer in layers for dtype in layer.dtypes} == {torch.bfloat16}
    assert {value.dtype for value in half.executor.state_dict().values()} == {torch.float32}


def test_a_weight_that_two_block_calls_cast_to_bfloat16_is_cast_for_each():
    def twice(model: Custom, x: torch.Tensor) -> torch.Tensor:
        return model.head(model.layers[0](model.layers[0](x).tanh()).tanh())

    done = pair(
        lambda: Custom(twice),
        job=job_of(precision=PrecisionConfig("float32", "bfloat16", "float32")),
        micro_batch=4,
    )
    assert done.executor.step(sample_range(UNEVEN, 0, 12)).loss == pytest.approx(
        done.loss_alone(sample_range(UNEVEN, 0, 12)).item(), rel=0.01
    )


def test_bfloat16_throughout():
    job = job_of(precision=PrecisionConfig("bfloat16", "bfloat16", "bfloat16"), clip=0.5)
    done = pair(job=job, micro_batch=4)
    assert done.executor.step(sample_range(UNEVEN, 0, 12)).loss == pytest.approx(
        done.loss_alone(sample_range(UNEVEN, 0, 12)).item(), rel=0.02
    )
    assert {parameter.dtype for parameter in done.parameters.values()} == {torch.bfloat16}


def test_a_loss_that_uses_a_parameter_directly_is_refused_before_it_is_used():
    held: list[nn.Parameter] = []
    loss = Loss(
        lambda out, batch: out.sum() + sum(p.square().sum() for p in held),
        lambda batch: batch["labels"].numel(),
    )
    done = pair(loss=loss, micro_batch=4)
    held.append(done.parameters["head.weight"])
    with pytest.raises(
        PlanError, match=r"^loss: the loss reaches the parameter head\.weight directly(?s:.*)inside the model"
    ):
        done.executor.step(sample_range(UNEVEN, 0, 12))


def test_a_parameter_that_the_model_returns_may_be_used_by_the_loss():
    class Scaled(Custom):
        def __init__(self) -> None:
            super().__init__(chain)
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(input_ids), self.scale

    def total(outputs: tuple[torch.Tensor, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return token_cross_entropy().total(outputs[0] * outputs[1], batch)

    done = pair(Scaled, loss=Loss(total, token_cross_entropy().count), micro_batch=4)
    assert train(done, 3) < 1e-12
    assert done.error < 1e-13


def test_a_loss_that_is_no_scalar_is_refused():
    loss = Loss(
        lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten(), reduction="none"),
        lambda batch: 1,
    )
    with pytest.raises(
        PlanError,
        match=rf"^loss: the loss has the shape \[{12 * TOKENS}\]; needed is a scalar(?s:.*)\.sum\(\)",
    ):
        pair(loss=loss).executor.step(sample_range(UNEVEN, 0, 12))


def test_a_side_channel_unknown_to_the_trial_is_refused_in_the_first_step():
    def leaking(model: Custom, x: torch.Tensor) -> torch.Tensor:
        out = chain(model, x)
        return out + F.linear(x, model.layers[1].weight).mean() if len(x) > 3 else out

    done = pair(lambda: Custom(leaking), sample_range(UNEVEN, 0, 2), micro_batch=4)
    with pytest.raises(
        PlanError,
        match=r"^model: the glue between blocks uses the parameter layers\.1\.weight, which it did not",
    ):
        done.executor.step(sample_range(UNEVEN, 0, 12))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_redraws_its_dropout_in_backward_is_refused(reentrant: bool):
    def recomputed(p: float) -> Callable[[Custom, torch.Tensor], torch.Tensor]:
        def rule(model: Custom, x: torch.Tensor) -> torch.Tensor:
            for layer in model.layers:
                x = checkpoint(
                    lambda x, layer=layer: F.dropout(layer(x).tanh(), p), x, use_reentrant=reentrant
                )
            return model.head(x)

        return rule

    done = pair(lambda: Custom(recomputed(0.0)), micro_batch=4)
    assert train(done, 2) < 1e-12
    with pytest.raises(
        PlanError,
        match=r"random numbers are drawn inside torch.utils.checkpoint, .*\n.* strategy 'activation_ch",
    ):
        pair(lambda: Custom(recomputed(0.5)), micro_batch=4)


def test_dropout_does_not_depend_on_micro_batches_and_changes_from_step_to_step():
    losses = []
    for micro_batch in (12, 4, 1):
        done = pair(lambda: Tiny(p=0.5), micro_batch=micro_batch)
        losses.append([done.executor.step(sample_range(UNEVEN, 0, 12)).loss for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[0] == pytest.approx(losses[2], rel=1e-12)
    still = pair(
        lambda: Tiny(p=0.5), job=job_of(optimizer=OptimizerConfig("sgd", lr=1e-12, weight_decay=0.0))
    )
    first, second = (still.executor.step(sample_range(UNEVEN, 0, 12)).loss for _ in range(2))
    assert abs(first - second) > 1e-3
