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
    "Callback": "meshwright.run.callbacks",
    "DataSource": "meshwright.core.sources",
    "Engine": "meshwright.api",
    "Evaluate": "meshwright.core.job",
    "Guard": "meshwright.core.job",
    "Job": "meshwright.core.job",
    "Loss": "meshwright.engine.loss",
    "Mesh": "meshwright.core.mesh",
    "Metrics": "meshwright.engine.state",
    "Model": "meshwright.model.sources",
    "ModelSource": "meshwright.core.sources",
    "Optimizer": "meshwright.core.job",
    "ParameterGroup": "meshwright.core.job",
    "Part": "meshwright.core.sources",
    "Plan": "meshwright.core.plan",
    "PlanError": "meshwright.core.errors",
    "Precision": "meshwright.core.job",
    "Reading": "meshwright.model.reading",
    "Run": "meshwright.core.run",
    "Schedule": "meshwright.core.job",
    "Train": "meshwright.core.job",
    "build": "meshwright.api",
    "make_plan": "meshwright.api",
    "read": "meshwright.api",
    "token_cross_entropy": "meshwright.engine.loss",
    "trace": "meshwright.api",
    "train": "meshwright.verbs.loop",
    "verify": "meshwright.api",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute '{name}'; it has {', '.join(__all__)}")
    return vars(import_module(_HOMES[name]))[name]


def __dir__() -> list[str]:
    return list(__all__)
