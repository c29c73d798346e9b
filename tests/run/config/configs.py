"""A config file with two made-up strategies, and how tests read it."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.plan.job.errors import PlanError
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.config.config_and_plan_files import PlanRequest, read_request


@dataclass(frozen=True)
class Copies(Strategy):
    name = "copies"
    phase = "storage"
    bucket_mb: float | None = 25.0
    overlap: bool = True


@dataclass(frozen=True)
class Layers(Strategy):
    name = "layers"
    phase = "schedule"
    chunks: tuple[int, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if any(chunk < 1 for chunk in self.chunks):
            raise PlanError(
                f"chunks of {self.chunks}",
                fix="write numbers of at least 1",
                location="strategies.layers.chunks",
            )


KNOWN = {"copies": {"": Copies}, "layers": {"": Layers}}
CONFIG = """
micro_batch = 2
[model]
source = "no/such/model"
[train]
steps = 30
[optimizer]
lr = 1
[[optimizer.groups]]
pattern = "*.bias"
[mesh]
dp_replicate = -1
[[strategies]]
name = "copies"
bucket_mb = 4
[[strategies]]
name = "layers"
chunks = [1, 2]
"""


def read(tmp_path: Path, text: str, *overrides: str) -> PlanRequest:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return read_request(path, overrides, KNOWN)


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(PlanError) as caught:
        read(tmp_path, text, *overrides)
    return str(caught.value).replace(str(tmp_path / "run.toml"), "run.toml")
