"""Tasks of lm-evaluation-harness while a config trains: `evaluate.tasks = ["hellaswag", "my_task"]`.

    evaluate.tasks           names that the harness knows: tasks, groups and tags
    evaluate.include_path    a folder with tasks of your own, in YAML files, as --include_path of the harness
    evaluate.limit           documents of each task at most, as --limit of the harness

What cannot work is refused before a process starts: a harness that is not installed, a task that nobody
defines, a model that predicts no next token, a tokenizer that is not of transformers. The results are the
numbers of the harness by task and metric, `hellaswag/acc`, and with a filter `gsm8k/exact_match/strict`;
standard errors are left out, because a metric that has to draw samples for them takes longer than the task.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from meshwright.engine.generation.sampling_params import model_diagnostics
from meshwright.model.hf.tokenizer_files import own_tokenizer
from meshwright.plan.job.data_config import BYTES
from meshwright.plan.job.errors import Diagnostic, PlanError, collect_diagnostics, suggest_name
from meshwright.plan.job.job import EvalConfig, Job
from meshwright.run.data.tokenizer import PretrainedTokenizer
from meshwright.run.training.trainer import Trainer

WHERE = "evaluate.tasks"


@dataclass(frozen=True)
class TaskRunner:
    """Evaluates the model that `trainer` trains by the tasks of `spec`: a call returns their metrics."""

    trainer: Trainer
    tokenizer: PreTrainedTokenizerBase
    spec: EvalConfig

    def __call__(self) -> dict[str, float]:
        """Returns the metrics by name, on rank 0 at least; all ranks call it.

        Raises PlanError where the harness does.
        """
        model = _import_adapter().MeshwrightLM(self.trainer, self.tokenizer)
        harness = import_module("lm_eval")
        found = harness.simple_evaluate(
            model=model,
            tasks=list(self.spec.tasks),
            task_manager=self._manager,
            limit=self.spec.limit or None,
            bootstrap_iters=0,
            log_samples=False,
        )
        return {} if found is None else metrics_by_name(found["results"])

    @cached_property
    def _manager(self) -> Any:
        return _task_manager(self.spec)


def metrics_by_name(results: Mapping[str, Mapping[str, object]]) -> dict[str, float]:
    """Returns the numbers of the harness' `results` by "task/metric", with a filter "task/metric/filter"."""
    found = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, comma, result_filter = key.partition(",")
            if comma and isinstance(value, int | float):
                name = f"{task}/{metric}" + ("" if result_filter == "none" else f"/{result_filter}")
                found[name] = float(value)
    return found


def task_tokenizer(job: Job) -> PreTrainedTokenizerBase:
    """Returns the tokenizer with which `job` reads tasks: that of its data, or of its model.

    Raises PlanError if it has none of transformers, or one without an end token.
    """
    name = job.data.tokenizer or own_tokenizer(job.model)
    if name in ("", BYTES):
        text = "tasks are texts, and the job has no tokenizer of transformers"
        fix = 'name one, a folder or a model on the hub: data.tokenizer = "owner/name"'
        raise PlanError(text, fix=fix, location=WHERE)
    found = PretrainedTokenizer(name).hf_tokenizer
    if found.eos_token_id is None:
        text = f"the tokenizer '{name}' names no end token (eos_token), which ends the answers of a task"
        raise PlanError(text, fix="write one into its tokenizer_config.json", location=WHERE)
    return found


def task_diagnostics(
    job: Job, module: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None
) -> Iterator[Diagnostic]:
    """Yields why `module`, which needs no values, cannot be evaluated by the tasks of `job`, with `tokenizer`
    or that of the job.
    """
    if not job.evaluate.tasks:
        return
    for problem in model_diagnostics(module):
        fix = "leave evaluate.tasks out: tasks need a causal language model"
        yield Diagnostic(problem.problem, fix, WHERE)
    found = list[Diagnostic]()
    if tokenizer is None:
        collect_diagnostics(found, task_tokenizer, job)
    folder = job.evaluate.include_path
    if folder and not Path(folder).is_dir():
        text = f"there is no folder '{folder}'"
        fix = "name the folder with the YAML files of your tasks"
        found.append(Diagnostic(text, fix, "evaluate.include_path"))
    manager = collect_diagnostics(found, _task_manager, job.evaluate)
    yield from found
    if manager is None:
        return
    for name in job.evaluate.tasks:
        if name not in manager.task_index:
            yield Diagnostic(f"no task is called '{name}'", _similar_task(name, manager), WHERE)


def _similar_task(name: str, manager: Any) -> str:
    fix = suggest_name(name, manager.all_tasks)
    if fix.startswith("choose one of"):  # of thousands
        fix = "`lm_eval ls tasks` lists all; one of your own is found with evaluate.include_path"
    return fix


def _task_manager(spec: EvalConfig) -> Any:
    """Returns the harness' index of tasks; that of the user's folder alone if it defines all of `spec`.

    The harness reads 14,000 files for its own tasks: 5 seconds of a CPU.
    """
    _import_adapter()
    make, folder = import_module("lm_eval.tasks").TaskManager, spec.include_path or None
    own = make(include_path=folder, include_defaults=False)
    return own if set(spec.tasks) <= own.task_index.keys() else make(include_path=folder)


def _import_adapter() -> Any:
    """Returns the module of `MeshwrightLM`. Raises PlanError, naming the extra, without the harness."""
    return import_module("meshwright.integrations.lm_eval")
