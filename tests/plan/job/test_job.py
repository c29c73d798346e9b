"""What cannot be trained is refused, each with what was given, what is needed and the repair."""

from dataclasses import replace
from math import inf, nan

import pytest

from meshwright.plan.job.data_source import DataSource, ModelSource
from meshwright.plan.job.job import Evaluate, Guard, Job, Optimizer, ParameterGroup, Precision, Schedule, Train
from meshwright.plan.job.precision import ROLES
from meshwright.plan.job.run_options import Run

GOOD = Job(ModelSource("model.json"), DataSource("text.txt"), Train(steps=100))


def test_a_job_with_a_model_and_data_is_accepted():
    assert list(GOOD.faults()) == []
    assert list(Run().faults()) == []


@pytest.mark.parametrize(
    ("part", "where", "said"),
    [
        ({"model": ModelSource()}, "model.source", "no model is named"),
        ({"data": DataSource()}, "data.source", "no data is named"),
        ({"data": DataSource("x", sequence=0)}, "data.sequence", "a sample of 0 tokens; needed is at least 1"),
        ({"data": DataSource("x", epochs=-1)}, "data.epochs", "-1 epochs"),
        ({"train": Train(steps=0)}, "train.steps", "0 steps"),
        ({"train": Train(batch=0)}, "train.batch", "a global batch of 0 samples"),
        ({"train": Train(clip=-1.0)}, "train.clip", "a gradient norm of -1.0"),
        ({"train": Train(clip=nan)}, "train.clip", "a gradient norm of nan"),
        ({"optimizer": Optimizer(lr=0.0)}, "optimizer.lr", "a learning rate of 0.0"),
        ({"optimizer": Optimizer(lr=nan)}, "optimizer.lr", "a learning rate of nan"),
        ({"optimizer": Optimizer(lr=inf)}, "optimizer.lr", "a learning rate of inf"),
        ({"optimizer": Optimizer(betas=(0.9, 1.0))}, "optimizer.betas", "betas of (0.9, 1.0); needed are numbers from 0"),
        ({"optimizer": Optimizer("sgd", momentum=1.0)}, "optimizer.momentum", "a momentum of 1.0"),
        ({"optimizer": Optimizer("adamw", momentum=0.9)}, "optimizer.momentum", "momentum = 0.9 with adamw, which has none"),
        ({"optimizer": Optimizer(weight_decay=-0.1)}, "optimizer.weight_decay", "a weight decay of -0.1"),
        ({"optimizer": Optimizer(eps=-1.0)}, "optimizer.eps", "an eps of -1.0"),
        (
            {"optimizer": Optimizer(groups=(ParameterGroup("*.bias", lr_factor=-1.0),))},
            "optimizer.groups '*.bias'",
            "a learning-rate factor of -1.0",
        ),
        (
            {"optimizer": Optimizer(groups=(ParameterGroup("*.bias", weight_decay=nan),))},
            "optimizer.groups '*.bias'",
            "a weight decay of nan",
        ),
        ({"schedule": Schedule("wsd", warmup=60, decay=41)}, "schedule", "60 warm-up and 41 decay steps do not fit into 100"),
        ({"schedule": Schedule("cosine", floor=1.5)}, "schedule.floor", "a floor of 1.5; it is a share of optimizer.lr"),
        ({"schedule": Schedule("cosine", decay=3)}, "schedule.decay", "decay = 3 with the cosine schedule, which has none"),
        (
            {"optimizer": Optimizer(groups=(ParameterGroup("*.bias", name="adamw", momentum=0.9),))},
            "optimizer.groups '*.bias'",
            "momentum = 0.9 in a group that does not name",
        ),
        (
            {"optimizer": Optimizer(groups=(ParameterGroup("*.bias", name="sgd", momentum=1.0),))},
            "optimizer.groups '*.bias'",
            "a momentum of 1.0",
        ),
        ({"evaluate": Evaluate(hold_out=-1)}, "evaluate.hold_out", "hold_out = -1"),
        ({"evaluate": Evaluate("val.txt", every=-1)}, "evaluate.every", "every = -1"),
        ({"evaluate": Evaluate("val.txt", samples=-1)}, "evaluate.samples", "samples = -1"),
        ({"evaluate": Evaluate("val.txt", patience=-1)}, "evaluate.patience", "patience = -1"),
        ({"evaluate": Evaluate("val.txt", min_delta=nan)}, "evaluate.min_delta", "a min_delta of nan"),
        ({"evaluate": Evaluate("val.txt", hold_out=3)}, "evaluate", "the samples of 'val.txt' and the last 3 of the training"),
        ({"evaluate": Evaluate(split="dev", hold_out=3)}, "evaluate", "the samples of the split 'dev' and the last 3"),
        ({"evaluate": Evaluate(patience=3)}, "evaluate", "patience = 3, samples = 0, and nothing to evaluate on"),
        ({"evaluate": Evaluate(samples=4)}, "evaluate", "patience = 0, samples = 4, and nothing to evaluate on"),
        ({"guard": Guard(factor=1.0)}, "guard.factor", "a factor of 1.0 on the median"),
        ({"guard": Guard(factor=nan)}, "guard.factor", "a factor of nan"),
        ({"guard": Guard(window=1)}, "guard.window", "a window of 1 steps"),
        ({"precision": Precision("float16", "float16")}, "precision.master", "float16 parameters without a master: steps below"),
        ({"precision": Precision(compute="float8")}, "precision.compute", "compute in float8; there are no float8 products here"),
        ({"precision": Precision("float16", "bfloat16", master="float32")}, "precision.compute", "float16 parameters with"),
        ({"precision": Precision(master="bfloat16")}, "precision.master", "a bfloat16 master of float32 parameters"),
        ({"precision": Precision("bfloat16", "bfloat16", master="float64")}, "precision.master", "a float64 master of bfloat16"),
        ({"precision": Precision("float16", "float16", master="bfloat16")}, "precision.master", "a bfloat16 master of float16"),
        ({"precision": Precision(gradients="float64")}, "precision.gradients", "float64 gradients of float32 parameters"),
        ({"precision": Precision(gradients="float16")}, "precision.gradients", "gradients in float16, and the loss is not"),
        ({"precision": Precision(reduce="float16")}, "precision.reduce", "reduce in float16, and the loss is not scaled"),
        ({"precision": Precision(moments="bfloat16")}, "precision.moments", "moments in bfloat16; the optimizer keeps them"),
        (
            {"precision": Precision(compute="float16", loss_scale=1000.0)},
            "precision.loss_scale",
            "a loss scale of 1000; needed is a power of two from 1 up",
        ),
        (
            {"precision": Precision(compute="float16", loss_scale=nan)},
            "precision.loss_scale",
            "a loss scale of nan; needed is a power of two from 1 up",
        ),
        (
            {"precision": Precision(compute="float16", loss_scale_window=0)},
            "precision.loss_scale_window",
            "a window of 0 steps",
        ),
        (
            {"precision": Precision(compute="bfloat16", loss_scale=8.0)},
            "precision.loss_scale",
            "a loss scale, and nothing is computed in float16, but in bfloat16",
        ),
        ({"precision": Precision("bfloat16", "float32")}, "precision.compute", "bfloat16 parameters with float32 compute"),
        ({"precision": Precision("float64", "float32")}, "precision.compute", "float64 parameters with float32 compute"),
        ({"precision": Precision("float32", "float64")}, "precision.parameters", "float64 compute with float32 parameters"),
    ],
)
def test_a_faulty_part_is_refused_once_and_by_its_key(part: dict[str, object], where: str, said: str):
    faults = list(replace(GOOD, **part).faults())
    assert [fault.where for fault in faults] == [where]
    assert faults[0].what.startswith(said)
    assert faults[0].fix


@pytest.mark.parametrize(
    ("run", "where"),
    [
        (Run(save_every=-1), "run.save_every"),
        (Run(keep=0), "run.keep"),
        (Run(trackers=("wandb", "mlfow")), "run.trackers"),
        (Run(trackers=("wandb",), tracker_project=" "), "run.tracker_project"),
        (Run(trace_steps=-1), "run.trace_steps"),
    ],
    ids=["save_every", "keep", "trackers", "tracker_project", "trace_steps"],
)
def test_a_faulty_run_is_refused(run: Run, where: str):
    assert [fault.where for fault in run.faults()] == [where]


def test_faults_of_all_parts_are_reported_together():
    job = Job(ModelSource(), DataSource(), Train(steps=0, batch=0), Optimizer(lr=-1.0))
    assert [fault.where for fault in job.faults()] == [
        "model.source",
        "data.source",
        "train.steps",
        "train.batch",
        "optimizer.lr",
    ]


@pytest.mark.parametrize(
    ("precision", "roles"),
    [
        (Precision(), "float32 float32 float32 float32 float32 float32"),
        (Precision(compute="bfloat16"), "float32 float32 bfloat16 float32 float32 float32"),
        (Precision("bfloat16", "bfloat16", "bfloat16"), "bfloat16 bfloat16 bfloat16 bfloat16 bfloat16 bfloat16"),
        (Precision("bfloat16", "bfloat16", "float32", "float32"), "bfloat16 float32 bfloat16 bfloat16 float32 float32"),
        (Precision("bfloat16", "bfloat16", "bfloat16", "float32", "float32"), " ".join(["bfloat16 float32"] * 3)),
        (Precision("float16", "float16", "float16", "float32"), "float16 float32 float16 float16 float16 float32"),
        (Precision("float64", "float64", "float64", moments="float64"), "float64 float64 float64 float64 float64 float64"),
    ],
    ids=str,
)
def test_every_role_has_a_dtype(precision: Precision, roles: str):
    assert list(precision.faults()) == []
    assert dict(zip(ROLES, roles.split(), strict=True)) == precision.roles
    assert precision.scales_loss == ("float16" in roles.split())
