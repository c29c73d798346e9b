"""meshwright: plan, verify and train any PyTorch model with any combination of parallel techniques.

    job = meshwright.Job(train=meshwright.Train(steps=1000, batch=16))
    reading = meshwright.read(model, example=batch)
    plan = meshwright.make_plan(reading, job, mesh)
    engine = meshwright.build(reading, plan, optimizer=..., loss=...)
    metrics = engine.step(engine.share(batch))

Names are imported on first use, so that `import meshwright` costs nothing and needs no torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Callback": "meshwright.run.telemetry.callbacks",
    "DataSource": "meshwright.plan.job.data_source",
    "Engine": "meshwright.api",
    "Evaluate": "meshwright.plan.job.job",
    "Guard": "meshwright.plan.job.job",
    "Job": "meshwright.plan.job.job",
    "Loss": "meshwright.engine.runtime.loss",
    "Mesh": "meshwright.plan.sharding.mesh",
    "Metrics": "meshwright.engine.runtime.state",
    "Model": "meshwright.model.loading.loader",
    "ModelSource": "meshwright.plan.job.data_source",
    "Optimizer": "meshwright.plan.job.job",
    "ParameterGroup": "meshwright.plan.job.job",
    "Part": "meshwright.plan.job.data_source",
    "Plan": "meshwright.plan.plan",
    "PlanError": "meshwright.plan.job.errors",
    "Precision": "meshwright.plan.job.job",
    "Reading": "meshwright.model.analysis.analyze",
    "Run": "meshwright.plan.job.run_options",
    "Schedule": "meshwright.plan.job.job",
    "Train": "meshwright.plan.job.job",
    "build": "meshwright.api",
    "make_plan": "meshwright.api",
    "read": "meshwright.api",
    "token_cross_entropy": "meshwright.engine.runtime.loss",
    "trace": "meshwright.api",
    "train": "meshwright.commands.train_function",
    "verify": "meshwright.api",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute '{name}'; it has {', '.join(__all__)}")
    return vars(import_module(_HOMES[name]))[name]


def __dir__() -> list[str]:
    return list(__all__)
