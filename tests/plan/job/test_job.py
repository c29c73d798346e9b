"""Jobs that cannot be trained are refused, with what was given, what is needed and the repair."""

from dataclasses import replace
from math import inf, nan

import pytest

from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError, diagnostics_in
from meshwright.plan.job.job import (
    EvalConfig,
    Job,
    LossGuard,
    LRScheduleConfig,
    OptimizerConfig,
    ParamGroupConfig,
    PrecisionConfig,
    TrainConfig,
)
from meshwright.plan.job.model_config import ModelConfig

GOOD = Job(ModelConfig("model.json"), DataConfig("text.txt"), TrainConfig(steps=100))


def test_a_job_with_a_model_and_data_is_accepted():
    assert GOOD.diagnostics(RunConfig()) == []


@pytest.mark.parametrize(
    ("part", "where", "message"),
    [
        ({"model": ModelConfig()}, "model.source", "no model is named"),
        ({"data": DataConfig()}, "data.source", "no data is named"),
        (
            {"data": DataConfig("x", sequence=0)},
            "data.sequence",
            "sequence = 0; needed is a whole number of at least 1",
        ),
        (
            {"data": DataConfig("x", epochs=-1)},
            "data.epochs",
            "epochs = -1; needed is a whole number of at least 0",
        ),
        ({"train": TrainConfig(steps=0)}, "train.steps", "steps = 0; needed is a whole number of at least 1"),
        ({"train": TrainConfig(batch=0)}, "train.batch", "batch = 0; needed is a whole number of at least 1"),
        ({"train": TrainConfig(clip=-1.0)}, "train.clip", "clip = -1.0; needed is a number of at least 0"),
        ({"train": TrainConfig(clip=nan)}, "train.clip", "clip = nan; needed is a number of at least 0"),
        ({"optimizer": OptimizerConfig(lr=0.0)}, "optimizer.lr", "lr = 0.0; needed is a number above 0"),
        ({"optimizer": OptimizerConfig(lr=nan)}, "optimizer.lr", "lr = nan; needed is a number above 0"),
        ({"optimizer": OptimizerConfig(lr=inf)}, "optimizer.lr", "lr = inf; needed is a number above 0"),
        (
            {"optimizer": OptimizerConfig(betas=(0.9, 1.0))},
            "optimizer.betas",
            "betas contains 1.0; needed is a number from 0 up to, not including, 1",
        ),
        (
            {"optimizer": OptimizerConfig("sgd", momentum=1.0)},
            "optimizer.momentum",
            "momentum = 1.0; needed is a number from 0 up to, not",
        ),
        (
            {"optimizer": OptimizerConfig("adamw", momentum=0.9)},
            "optimizer.momentum",
            "momentum = 0.9 with adamw, which has none",
        ),
        (
            {"optimizer": OptimizerConfig(weight_decay=-0.1)},
            "optimizer.weight_decay",
            "weight_decay = -0.1; needed is a number of at least 0",
        ),
        (
            {"optimizer": OptimizerConfig(eps=-1.0)},
            "optimizer.eps",
            "eps = -1.0; needed is a number of at least 0",
        ),
        (
            {"optimizer": OptimizerConfig(groups=(ParamGroupConfig("*.bias", lr_factor=-1.0),))},
            "optimizer.groups.0.lr_factor",
            "lr_factor = -1.0; needed is a number of at least 0",
        ),
        (
            {"optimizer": OptimizerConfig(groups=(ParamGroupConfig("*.bias", weight_decay=nan),))},
            "optimizer.groups.0.weight_decay",
            "weight_decay = nan; needed is a number of at least 0",
        ),
        (
            {"lr_schedule": LRScheduleConfig("wsd", warmup=60, decay=41)},
            "lr_schedule",
            "60 warm-up and 41 decay steps do not fit into 100",
        ),
        (
            {"lr_schedule": LRScheduleConfig("cosine", floor=1.5)},
            "lr_schedule.floor",
            "floor = 1.5; needed is a number from 0 to 1",
        ),
        (
            {"lr_schedule": LRScheduleConfig("cosine", decay=3)},
            "lr_schedule.decay",
            "decay = 3 with the cosine schedule, which has none",
        ),
        (
            {"optimizer": OptimizerConfig(groups=(ParamGroupConfig("*.bias", name="adamw", momentum=0.9),))},
            "optimizer.groups.0.momentum",
            "momentum = 0.9 in a group that does not name",
        ),
        (
            {"optimizer": OptimizerConfig(groups=(ParamGroupConfig("*.bias", name="sgd", momentum=1.0),))},
            "optimizer.groups.0.momentum",
            "momentum = 1.0; needed is a number from 0 up to, not",
        ),
        ({"evaluate": EvalConfig(hold_out=-1)}, "evaluate.hold_out", "hold_out = -1"),
        ({"evaluate": EvalConfig("val.txt", every=-1)}, "evaluate.every", "every = -1"),
        ({"evaluate": EvalConfig("val.txt", samples=-1)}, "evaluate.samples", "samples = -1"),
        ({"evaluate": EvalConfig("val.txt", patience=-1)}, "evaluate.patience", "patience = -1"),
        (
            {"evaluate": EvalConfig("val.txt", min_delta=nan)},
            "evaluate.min_delta",
            "min_delta = nan; needed is a number of at least 0",
        ),
        (
            {"evaluate": EvalConfig("val.txt", hold_out=3)},
            "evaluate",
            "the samples of 'val.txt' and the last 3 of the training",
        ),
        (
            {"evaluate": EvalConfig(split="dev", hold_out=3)},
            "evaluate",
            "the samples of the split 'dev' and the last 3",
        ),
        (
            {"evaluate": EvalConfig(patience=3)},
            "evaluate",
            "patience = 3, samples = 0, and nothing to evaluate on",
        ),
        (
            {"evaluate": EvalConfig(samples=4)},
            "evaluate",
            "patience = 0, samples = 4, and nothing to evaluate on",
        ),
        ({"evaluate": EvalConfig(limit=3)}, "evaluate", "include_path = '', limit = 3, and no tasks"),
        ({"guard": LossGuard(factor=1.0)}, "guard.factor", "factor = 1.0; needed is a number above 1, or 0"),
        ({"guard": LossGuard(factor=nan)}, "guard.factor", "factor = nan; needed is a number above 1, or 0"),
        (
            {"guard": LossGuard(window=1)},
            "guard.window",
            "window = 1; needed is a whole number from 2 to 100000",
        ),
        (
            {"precision": PrecisionConfig("float16", "float16")},
            "precision.master",
            "float16 parameters without a master: updates below",
        ),
        (
            {"precision": PrecisionConfig(compute="float8")},
            "precision.compute",
            "compute = 'float8'; needed is 'float64', 'float32', 'bfloat16' or 'float16'",
        ),
        (
            {"precision": PrecisionConfig("float16", "bfloat16", master="float32")},
            "precision.compute",
            "float16 parameters with",
        ),
        (
            {"precision": PrecisionConfig(master="bfloat16")},
            "precision.master",
            "a bfloat16 master of float32 parameters",
        ),
        (
            {"precision": PrecisionConfig("bfloat16", "bfloat16", master="float64")},
            "precision.master",
            "a float64 master of bfloat16",
        ),
        (
            {"precision": PrecisionConfig("float16", "float16", master="bfloat16")},
            "precision.master",
            "a bfloat16 master of float16",
        ),
        (
            {"precision": PrecisionConfig(gradients="float64")},
            "precision.gradients",
            "float64 gradients of float32 parameters",
        ),
        (
            {"precision": PrecisionConfig(gradients="float16")},
            "precision.gradients",
            "gradients in float16, and the loss is not",
        ),
        (
            {"precision": PrecisionConfig(reduce="float16")},
            "precision.reduce",
            "reduce in float16, and the loss is not scaled",
        ),
        (
            {"precision": PrecisionConfig(optimizer_states="bfloat16")},
            "precision.optimizer_states",
            "optimizer_states in bfloat16; the optimizer keeps them",
        ),
        (
            {"precision": PrecisionConfig(compute="float16", loss_scale=1000.0)},
            "precision.loss_scale",
            "a loss scale of 1000; needed is a power of two from 1 up",
        ),
        (
            {"precision": PrecisionConfig(compute="float16", loss_scale=nan)},
            "precision.loss_scale",
            "a loss scale of nan; needed is a power of two from 1 up",
        ),
        (
            {"precision": PrecisionConfig(compute="float16", loss_scale_window=0)},
            "precision.loss_scale_window",
            "loss_scale_window = 0; needed is a whole number of at least 1",
        ),
        (
            {"precision": PrecisionConfig(compute="bfloat16", loss_scale=8.0)},
            "precision.loss_scale",
            "a loss scale, and nothing is computed in float16, but in bfloat16",
        ),
        (
            {"precision": PrecisionConfig("bfloat16", "float32")},
            "precision.compute",
            "bfloat16 parameters with float32 compute",
        ),
        (
            {"precision": PrecisionConfig("float64", "float32")},
            "precision.compute",
            "float64 parameters with float32 compute",
        ),
        (
            {"precision": PrecisionConfig("float32", "float64")},
            "precision.parameters",
            "float64 compute with float32 parameters",
        ),
    ],
)
def test_an_invalid_option_is_refused_once_and_by_its_key(part: dict[str, object], where: str, message: str):
    diagnostics = replace(GOOD, **part).diagnostics(RunConfig())
    assert [diagnostic.location for diagnostic in diagnostics] == [where]
    assert diagnostics[0].problem.startswith(message)
    assert diagnostics[0].fix


@pytest.mark.parametrize(
    ("run", "where"),
    [
        (RunConfig(save_every=-1), "run.save_every"),
        (RunConfig(keep=0), "run.keep"),
        (RunConfig(trackers=("wandb", "mlfow")), "run.trackers"),
        (RunConfig(trackers=("wandb",), tracker_project=" "), "run.tracker_project"),
        (RunConfig(trace_steps=-1), "run.trace_steps"),
    ],
    ids=["save_every", "keep", "trackers", "tracker_project", "trace_steps"],
)
def test_an_invalid_run_is_refused(run: RunConfig, where: str):
    assert [diagnostic.location for diagnostic in GOOD.diagnostics(run)] == [where]


def test_errors_of_all_tables_are_reported_together():
    job = Job(ModelConfig(), DataConfig(), TrainConfig(steps=0, batch=0), OptimizerConfig(lr=-1.0))
    assert [diagnostic.location for diagnostic in job.diagnostics(RunConfig())] == [
        "model.source",
        "data.source",
        "train.steps",
        "train.batch",
        "optimizer.lr",
    ]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"train": TrainConfig(steps="10")}, "train.steps: steps = '10'; needed is a whole number"),
        (
            {"train": TrainConfig(seed="x")},
            "train.seed: seed = 'x'; needed is a whole number\n",
        ),
        (
            {"lr_schedule": LRScheduleConfig(warmup="2")},
            "lr_schedule.warmup: warmup = '2'; needed",
        ),
        (
            {"optimizer": OptimizerConfig(betas=("a", 0.9))},
            "optimizer.betas: betas contains 'a'; needed",
        ),
        (
            {"precision": PrecisionConfig(loss_scale="8")},
            "precision.loss_scale: loss_scale = '8'; ",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_before_anything_is_computed_with_it(
    part: dict[str, object], message: str
):
    with pytest.raises(PlanError) as caught:
        replace(GOOD, **part).diagnostics(RunConfig(keep=0))
    wrong_type, wrong_value = caught.value.diagnostics
    assert str(wrong_type).startswith(message)
    assert wrong_value.location == "run.keep"


def test_diagnostics_are_told_apart_by_table():
    found = replace(GOOD, model=ModelConfig(), data=DataConfig("x", sequence=0)).diagnostics(RunConfig())
    assert [each.location for each in diagnostics_in("model", found)] == ["model.source"]
    assert [each.location for each in diagnostics_in("data", found)] == ["data.sequence"]
    assert not diagnostics_in("train", found)
