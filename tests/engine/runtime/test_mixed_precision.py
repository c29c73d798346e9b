"""Mixed precision on one device: bytes and dtypes by role, master weights, and the loss scale of float16."""

from dataclasses import replace
from math import inf

import pytest
import torch

from meshwright.api import make_plan, parallelize
from meshwright.engine.optim.make_optimizers import OptimizerFactory
from meshwright.engine.runtime.mixed_precision import (
    LossScale,
    check_dtype_support,
    check_dtypes_match_plan,
    set_float32_products,
    total_norm,
)
from meshwright.engine.runtime.rank_state import Metrics
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, LossGuard, OptimizerConfig, PrecisionConfig
from meshwright.plan.strategy_state import loss_scale_states
from meshwright.run.training.trainer import Trainer
from tests.engine.one_device import bits, job_of
from tests.tiny_model import analyzed_model, tensors_of, token_samples

MIXED = PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")
HALF = PrecisionConfig("float16", "float16", "float16", master="float32")
AUTOCAST = [PrecisionConfig(compute="bfloat16"), PrecisionConfig(compute="float16")]
ADAMW = OptimizerConfig(lr=0.01)
ANALYZED = analyzed_model()
CPU = torch.device("cpu")


def engine_of(
    precision: PrecisionConfig,
    optimizer: OptimizerConfig = ADAMW,
    made: OptimizerFactory | None = None,
    **parts: object,
) -> Trainer:
    """One device."""
    job: Job = job_of(precision=precision, optimizer=optimizer, **parts)
    return parallelize(ANALYZED, make_plan(ANALYZED, job), optimizer=made)


def trained(engine: Trainer, steps: int) -> list[Metrics]:
    return [engine.step(token_samples(12)) for _ in range(steps)]


def model_of(engine: Trainer) -> dict[str, torch.Tensor]:
    """Returns what a checkpoint would hold of the parameters, copied."""
    found = {
        name: tensor.clone()
        for name, tensor in engine.executor.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }
    return {
        name.removeprefix("model/"): tensor for name, tensor in found.items() if name.startswith("model/")
    }


@pytest.mark.parametrize(
    ("precision", "parameters", "gradients", "master", "optimizer_states"),
    [
        (MIXED, 2, 2, 4, 8),
        (HALF, 2, 2, 4, 8),
        *((each, 4, 4, 0, 8) for each in (PrecisionConfig(), *AUTOCAST)),
    ],
    ids=str,
)
def test_every_parameter_takes_two_and_two_and_twelve_bytes(
    precision: PrecisionConfig, parameters: int, gradients: int, master: int, optimizer_states: int
):
    engine, numel = engine_of(precision), ANALYZED.model_spec.numel
    engine.step(token_samples(12))
    sizes, counters = engine.executor.memory_by_category(), 4 * len(ANALYZED.model_spec.params)
    assert sizes["parameters"] == parameters * numel
    assert sizes["gradients"] == gradients * numel
    assert sizes.get("master", 0) == master * numel
    assert sizes["optimizer_states"] == optimizer_states * numel + counters
    largest = max(param_group.numel for param_group in engine.plan.rank_view(0).param_groups)
    assert sizes["buckets"] == (4 * largest if master else 0)  # gradients are cast one group at a time


@pytest.mark.parametrize(
    "precision",
    [MIXED, HALF, PrecisionConfig(), *AUTOCAST, PrecisionConfig("float64", "float64", "float64")],
    ids=str,
)
def test_live_tensors_have_the_dtypes_that_the_plan_says(precision: PrecisionConfig):
    engine, seen = engine_of(precision), set()
    for parameter in engine.module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.add(p.grad.dtype))
    engine.step(token_samples(12))
    roles = {role: getattr(torch, dtype) for role, dtype in precision.roles.items()}
    assert {parameter.dtype for parameter in engine.module.parameters()} == {roles["parameters"]}
    assert seen == {roles["gradients"]}
    stepped = engine.executor.state.flat_params.optimizer_params()
    assert {parameter.dtype for parameter in stepped.values()} == {roles["master"]}
    kept = [
        value
        for optimizer in engine.executor.state.optimizers
        for held in optimizer.state.values()
        for value in held.values()
    ]
    assert {value.dtype for value in kept if value.ndim} == {roles["optimizer_states"]}
    assert {tensor.dtype for tensor in model_of(engine).values()} == {roles["master"]}


def test_a_tensor_of_another_dtype_than_planned_is_noticed():
    engine = engine_of(MIXED)
    engine.module.head.bias.data = engine.module.head.bias.data.float()
    with pytest.raises(
        RuntimeError, match=r"the parameters of head\.bias are float32 in memory, and the plan says bfloat16"
    ):
        check_dtypes_match_plan(engine.plan, [("parameters", "head.bias", engine.module.head.bias)])


def test_a_master_weight_starts_unrounded_and_the_parameter_is_its_rounded_value():
    engine = engine_of(MIXED)
    for step in range(3):
        for name, master in model_of(engine).items():
            if not step:
                assert torch.equal(master, ANALYZED.deferred_init.initial_value(name, torch.float32))
            assert torch.equal(engine.module.get_parameter(name), master.bfloat16())
        engine.step(token_samples(12))


@pytest.mark.parametrize(
    "optimizer", [ADAMW, OptimizerConfig("sgd", lr=0.1, momentum=0.9)], ids=lambda each: each.name
)
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_it_equals_an_ordinary_mixed_precision_loop(optimizer: OptimizerConfig, clip: float):
    job = job_of(precision=MIXED, optimizer=replace(optimizer, weight_decay=0.0), clip=clip)
    engine = parallelize(ANALYZED, make_plan(ANALYZED, job))
    twin = parallelize(ANALYZED, make_plan(ANALYZED, job))
    module, masters = twin.module, {n: m.clone().requires_grad_() for n, m in model_of(twin).items()}
    twin.close()
    make = torch.optim.AdamW if optimizer.name == "adamw" else torch.optim.SGD
    words = {"betas": optimizer.betas} if optimizer.name == "adamw" else {"momentum": 0.9}
    alone = make(list(masters.values()), lr=optimizer.lr, weight_decay=0.0, fused=True, **words)
    for _ in range(3):
        batch = token_samples(12)
        metrics = engine.step(batch)
        module.zero_grad()
        logits = module(batch["input_ids"]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        for name, parameter in module.named_parameters():
            masters[name].grad = parameter.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), clip or inf)
        alone.step()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(masters[name])
        assert metrics.loss == pytest.approx(loss.item(), rel=1e-3)
        assert metrics.grad_norm == pytest.approx(
            norm.item(), rel=2e-2
        )  # 1/count is rounded into the gradients' 8 bits
    for name, master in model_of(engine).items():
        torch.testing.assert_close(master, masters[name].detach(), rtol=0, atol=3e-3)


def test_small_updates_accumulate_in_master_weights_and_are_lost_without():
    tiny = OptimizerConfig("sgd", lr=2e-4, weight_decay=0.0)
    pure, mixed, full = (
        engine_of(each, tiny, steps=100) for each in (replace(MIXED, master=""), MIXED, PrecisionConfig())
    )
    first = model_of(full)
    for engine in (pure, mixed, full):
        trained(engine, 100)
    expected = {name: value - first[name] for name, value in model_of(full).items()}
    scale = sum(each.square().sum() for each in expected.values())

    def missed(engine: Trainer) -> float:
        moved = {name: value.float() - first[name] for name, value in model_of(engine).items()}
        if engine is pure:
            moved = {
                name: value.float() - first[name].bfloat16().float()
                for name, value in model_of(engine).items()
            }
        return float(sum((moved[name] - expected[name]).square().sum() for name in expected) / scale)

    assert missed(mixed) < 0.01
    assert missed(pure) > 0.1


@pytest.mark.parametrize("precision", [PrecisionConfig(compute="float16"), HALF], ids=["autocast", "half"])
def test_a_loss_scale_halves_at_an_overflow_and_doubles_after_a_window(precision: PrecisionConfig):
    engine = engine_of(
        replace(precision, loss_scale=2.0**40, loss_scale_window=3),
        OptimizerConfig("sgd", lr=1e-3, weight_decay=0.0),
    )
    before, left_out = model_of(engine), 0
    while (metrics := engine.step(token_samples(12))).overflow:
        left_out += 1
        assert metrics.is_skipped
        assert metrics.spike is None
        assert metrics.loss_scale == 2.0 ** (40 - left_out)
        assert bits(model_of(engine)) == bits(before)
    assert 10 < left_out < 30
    assert metrics.loss_scale == 2.0 ** (40 - left_out)
    assert bits(model_of(engine)) != bits(before)
    said = [engine.step(token_samples(12)).loss_scale for _ in range(3)]
    assert 2.0 ** (41 - left_out) in said


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("precision", [PrecisionConfig(compute="float16"), HALF], ids=["autocast", "half"])
def test_a_scaled_loss_trains_the_same(precision: PrecisionConfig, clip: float):
    sgd = OptimizerConfig("sgd", lr=0.1, weight_decay=0.0)
    half, full = (engine_of(each, sgd, clip=clip) for each in (precision, PrecisionConfig()))
    first = model_of(full)
    for mine, expected in zip(trained(half, 5), trained(full, 5), strict=True):
        assert not mine.overflow
        assert mine.loss == pytest.approx(expected.loss, rel=2e-3)
        assert mine.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)
    for name, value in model_of(full).items():
        moved = (value - first[name]).norm()
        assert (model_of(half)[name] - value).norm() < 0.02 * moved + 1e-6, name


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_unscaled_gradients_come_from_the_executor(compute: str):
    found = []
    for precision in (PrecisionConfig(compute=compute), PrecisionConfig()):
        engine = engine_of(precision)
        engine.executor.state.update.step = lambda names, engine=engine: found.append(
            engine.executor.gather_gradients()
        )
        engine.step(token_samples(12))
    for name, gradient in found[1].items():
        torch.testing.assert_close(found[0][name], gradient, rtol=0.05, atol=2e-3)


def test_a_custom_optimizer_steps_once_with_unscaled_gradients():
    calls = []

    class Counting(torch.optim.SGD):
        def step(self, *some: object) -> None:
            calls.append(all(p.grad is not None for group in self.param_groups for p in group["params"]))
            super().step(*some)

    sgd = OptimizerConfig("sgd", lr=0.1, weight_decay=0.0)
    for precision in (MIXED, PrecisionConfig(compute="float16")):
        calls.clear()
        mine, usual = (
            engine_of(precision, sgd, lambda groups: Counting(groups, lr=0.1)),
            engine_of(precision, sgd),
        )
        trained(mine, 2)
        trained(usual, 2)
        assert calls == [True, True]
        for name, value in model_of(mine).items():
            torch.testing.assert_close(value, model_of(usual)[name], rtol=0, atol=1e-6)


def test_an_overflow_is_counted_apart_from_what_the_guard_judges():
    guard = LossGuard("skip", factor=0.0)
    engine = engine_of(replace(HALF, loss_scale=2.0**40), guard=guard)
    metrics = engine.step(token_samples(12))
    assert (metrics.overflow, metrics.spike, metrics.loss_scale) == (True, None, 2.0**39)
    engine = engine_of(HALF, guard=guard)
    with torch.no_grad():
        engine.module.head.bias[0] = inf
    metrics = engine.step(token_samples(12))
    assert not metrics.overflow
    assert metrics.spike is not None
    assert metrics.loss_scale == 65536.0  # a forward that is not finite says nothing about the scale


def test_gradients_that_overflow_at_no_scale_end_the_run():
    precision = PrecisionConfig(compute="float16", loss_scale=2.0)
    scale = LossScale(precision, tensors_of(loss_scale_states(precision)))
    assert scale.update_on_overflow(inf, 1)
    with pytest.raises(
        PlanError, match=r"step 2: the gradients overflow float16 at a loss scale of 1(?s:.*)\"bfloat16\""
    ):
        scale.update_on_overflow(float("nan"), 2)


@pytest.mark.parametrize("precision", [MIXED, HALF, replace(HALF, loss_scale_window=2)], ids=str)
def test_a_resumed_run_repeats_the_one_that_went_on(precision: PrecisionConfig):
    engine, again = engine_of(precision), engine_of(precision)
    trained(engine, 3)
    saved = {name: tensor.clone() for name, tensor in engine.executor.state_dict().items()}
    again.executor.load_state_dict(saved, 3)
    assert trained(again, 3) == trained(engine, 3)
    assert bits(again.executor.state_dict()) == bits(engine.executor.state_dict())


def test_master_weights_recreated_from_rounded_weights_are_noticed():
    engine, again = engine_of(MIXED), engine_of(MIXED)
    trained(engine, 3)
    saved = {name: tensor.clone() for name, tensor in engine.executor.state_dict().items()}
    rounded = {
        name: value.bfloat16().float() if name.startswith("model/") else value
        for name, value in saved.items()
    }
    again.executor.load_state_dict(rounded, 3)
    trained(again, 1)
    trained(engine, 1)
    assert bits(model_of(again)) != bits(model_of(engine))


@pytest.mark.parametrize(
    "then",
    [MIXED, PrecisionConfig(), PrecisionConfig(compute="bfloat16"), replace(MIXED, master="")],
    ids=str,
)
@pytest.mark.parametrize("now", [MIXED, HALF, PrecisionConfig(), replace(MIXED, master="")], ids=str)
def test_a_run_goes_on_in_other_dtypes(then: PrecisionConfig, now: PrecisionConfig):
    engine, other = engine_of(then), engine_of(now)
    trained(engine, 3)
    saved = {name: tensor.clone() for name, tensor in engine.executor.state_dict().items()}
    other.executor.load_state_dict(saved, 3)
    dtype = getattr(torch, now.effective.master)
    for name, tensor in other.executor.state_dict().items():
        if name.startswith("model/") or "exp_avg" in name:
            assert torch.equal(tensor, saved[name].to(dtype)), name
    assert trained(other, 1)[0].loss == pytest.approx(trained(engine, 1)[0].loss, rel=0.02)


def test_a_norm_of_half_types_does_not_overflow():
    grads = [torch.full((100,), 3e4, dtype=torch.float16), torch.full((7,), 1.0, dtype=torch.bfloat16)]
    expected = torch.cat([each.double() for each in grads]).norm().item()
    assert total_norm(grads).item() == pytest.approx(expected, rel=1e-6)
    assert total_norm([each.double() for each in grads]).item() == expected


def test_a_device_that_cannot_multiply_in_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    def unable(*some: object) -> torch.Tensor:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    check_dtype_support(HALF, CPU)
    monkeypatch.setattr(torch.Tensor, "__matmul__", unable)
    check_dtype_support(PrecisionConfig(), CPU)
    with pytest.raises(
        PlanError, match=r"the device cpu cannot compute in float16: .*'Half'(?s:.*)\"float32\""
    ):
        check_dtype_support(HALF, CPU)


def test_gradients_of_another_dtype_need_shards():
    with pytest.raises(
        PlanError, match=r"gradients in float32, and those of \d+ parameters .* are not sharded"
    ):
        engine_of(replace(MIXED, gradients="float32"))


def test_products_and_convolutions_take_tf32_together_if_the_job_says_so(caplog: pytest.LogCaptureFixture):
    gpu, before = torch.device("cuda", 0), torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn.allow_tf32
    found = []
    try:
        torch.backends.cudnn.allow_tf32 = True  # as torch has it
        for tf32, device in ((True, CPU), (True, gpu), (False, CPU), (False, gpu)):
            set_float32_products(PrecisionConfig(tf32=tf32), device)
            found.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = cudnn
    assert found == [("highest", True), ("high", True), ("high", True), ("highest", False)]
    assert [record.getMessage() for record in caplog.records] == [
        "TF32 was on in this process and is off now; keep it with precision.tf32 = true"
    ]


def test_full_float32_on_a_gpu_is_said_once_with_the_repair(caplog: pytest.LogCaptureFixture):
    check_dtype_support(PrecisionConfig(), CPU)
    assert not caplog.records
    check_dtype_support(PrecisionConfig(), torch.device("cuda", 0))
    (record,) = caplog.records
    assert 'set precision.compute = "bfloat16"' in record.getMessage()
    assert "cuda:0" in record.getMessage()
    check_dtype_support(PrecisionConfig(tf32=True), torch.device("cuda", 0))
    assert len(caplog.records) == 1
