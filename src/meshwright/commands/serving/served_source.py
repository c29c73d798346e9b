"""Finds what SOURCE of `serve` names: the request of a plan, and the folder of the weights.

    SOURCE                             plan                          weights
    a run's folder                     the one it was trained under  its newest checkpoint
    the folder of one checkpoint       likewise                      that checkpoint
    a folder or hub id of a model      one device, or --mesh.tp 2    its own
    a config or plan file              its own                       --checkpoint; else those that it names

Data and evaluations are left out of the request: the files may be gone, and nothing reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import tomli_w

from meshwright.model.analysis.plan_for_model import EXAMPLE_SOURCE
from meshwright.model.hf.hub import is_hub_id
from meshwright.parallel import STRATEGIES
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import EvalConfig
from meshwright.run.checkpoint.distributed_checkpoint import newest_whole
from meshwright.run.checkpoint.manifest import MANIFEST_FILE
from meshwright.run.checkpoint.resume import CHECKPOINTS_FOLDER
from meshwright.run.config.config_and_plan_files import PlanRequest, read_request
from meshwright.run.config.plan_file import PLAN_FILE

LOCATION = "serve"


@dataclass(frozen=True)
class ServedSource:
    """The request of a plan, and the checkpoint with the weights; None: those that the model names."""

    request: PlanRequest
    checkpoint: Path | None


def find_source(source: str, checkpoint: Path | None, overrides: Sequence[str]) -> ServedSource:
    """Returns what `source` names, with the weights of `checkpoint` (a run's folder: its newest) if given.

    Raises PlanError for a source that is none of those above.
    """
    path = Path(source)
    given = None if checkpoint is None else _checkpoint_folder(checkpoint)
    if (path / MANIFEST_FILE).is_file():
        plan_file, given = path.absolute().parents[1] / PLAN_FILE, given or path.absolute()
        if not plan_file.is_file():
            text = f"the checkpoint {path} is in no run's folder, which would contain {PLAN_FILE}"
            fix = f"name its config: serve CONFIG.toml --checkpoint {path}"
            raise PlanError(text, fix=fix, location=LOCATION)
        return ServedSource(_read(plan_file, overrides), given)
    if (path / PLAN_FILE).is_file():
        return ServedSource(_read(path / PLAN_FILE, overrides), given or _checkpoint_folder(path))
    if (path / "config.json").is_file() or is_hub_id(source):
        name = source if is_hub_id(source) else str(path.absolute())
        with TemporaryDirectory(prefix="meshwright-serve-") as private:
            config = Path(private) / "config.toml"
            config.write_text(tomli_w.dumps({"model": {"source": name, "weights": name}}), encoding="utf-8")
            return ServedSource(_read(config, overrides), given)
    if not path.is_file():
        text = f"'{source}' is neither a run's folder, nor a checkpoint, nor a model, nor a config"
        fix = "name a folder with plan.toml or config.json, a config file, or a model on the hub: owner/name"
        raise PlanError(text, fix=fix, location=LOCATION)
    return ServedSource(_read(path, overrides), given)


def _read(config: Path, overrides: Sequence[str]) -> PlanRequest:
    """Returns the request of a file without its data, which may be gone."""
    request = read_request(config, overrides, STRATEGIES)
    data = request.job.data
    source = EXAMPLE_SOURCE if data.source == EXAMPLE_SOURCE else ""
    kept = DataConfig(source=source, sequence=data.sequence, tokenizer=data.tokenizer)
    return replace(request, job=replace(request.job, data=kept, evaluate=EvalConfig()), extra={})


def _checkpoint_folder(path: Path) -> Path:
    """Returns the folder of a checkpoint: `path`, or the newest complete one of the run in `path`."""
    if (path / MANIFEST_FILE).is_file():
        return path.absolute()
    folder = path.absolute() / CHECKPOINTS_FOLDER
    found, _, rejected = newest_whole(folder)
    if found is not None:
        return found
    reasons = "".join(f"; {each.name}: {why}" for each, why in rejected)
    text = f"there is no complete checkpoint in {path}{reasons}"
    fix = "name the folder of a run that has saved one, or of one step: runs/NAME/checkpoints/step-00000100"
    raise PlanError(text, fix=fix, location=LOCATION)


def source_name(source: str) -> str:
    """Returns the name of what `source` names: a hub id, a run, a model, or a config."""
    path = Path(source).absolute()
    if (path / MANIFEST_FILE).is_file():
        path = path.parents[1]
    return source if is_hub_id(source) else path.stem if path.is_file() else path.name
