"""Tasks that a config names: what cannot work is refused, and the metrics are those of the harness."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.integrations.lm_eval_tasks import TaskRunner, metrics_by_name, task_diagnostics
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.job import EvalConfig
from meshwright.run.telemetry.metrics_log import read_metrics
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import tiny_job

ADAPTER = "meshwright.integrations.lm_eval"  # imports the harness
BYTES = {"data": mw.DataConfig("example", tokenizer="bytes")}
ROWS = [{"text": "A cat sat", "answer": index, "choices": [" on", " under", " by"]} for index in (0, 2, 1)]
TASK = """
task: small_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def problems(spec: EvalConfig, module: nn.Module, tokenizer: Any = None, **job: Any) -> list[Diagnostic]:
    return list(task_diagnostics(tiny_job(evaluate=spec, **job), module, tokenizer))


def llama() -> nn.Module:
    sizes = {"vocab_size": 259, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))


def test_what_cannot_be_evaluated_is_refused_with_everything_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in [name for name in sys.modules if name.startswith("lm_eval.") or name == ADAPTER]:
        monkeypatch.delitem(sys.modules, name)
    sizes = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    with torch.device("meta"):
        encoder_decoder = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    spec = EvalConfig(tasks=("hellaswag",), include_path=str(tmp_path / "absent"))
    found = problems(spec, encoder_decoder, **BYTES)
    assert [each.location for each in found] == [
        "evaluate.tasks", "evaluate.tasks", "evaluate.include_path", "lm_eval",
    ]  # fmt: skip
    model, tokenizer, folder, harness = found
    assert "is an encoder-decoder" in model.problem
    assert "the job has no tokenizer of transformers" in tokenizer.problem
    assert "there is no folder" in folder.problem
    assert "cannot be imported" in harness.problem
    assert harness.fix == 'pip install "meshwright[lm-eval]"'
    assert not problems(EvalConfig(hold_out=3), encoder_decoder, **BYTES)


def test_numbers_of_the_harness_are_named_by_task_metric_and_filter():
    results = {
        "choice": {"alias": "choice", "sample_len": 3, "acc,none": 0.5, "acc_stderr,none": "N/A"},
        "answer": {"alias": " - answer", "exact_match,strict": 1, "exact_match,loose": 0.25},
    }
    assert metrics_by_name(results) == {
        "choice/acc": 0.5, "answer/exact_match/strict": 1.0, "answer/exact_match/loose": 0.25,
    }  # fmt: skip


@pytest.fixture
def small_choice(tmp_path: Path) -> EvalConfig:
    """A task in a YAML file, with data beside it."""
    pytest.importorskip("lm_eval", reason="an extra: pip install meshwright[lm-eval]")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "small_choice.yaml").write_text(TASK.format(data=tmp_path / "rows.jsonl"))
    return EvalConfig(tasks=("small_choice",), include_path=str(tmp_path), every=2)


def test_a_task_that_nobody_defines_is_refused_with_the_nearest_name(small_choice: EvalConfig):
    from tests.integrations.lm_eval_cases import tokenizer

    (found,) = problems(replace(small_choice, tasks=("small_choise", "small_choice")), llama(), tokenizer())
    assert found.problem == "no task is called 'small_choise'"
    assert found.fix == "did you mean 'small_choice'?"


def test_a_run_writes_the_metrics_that_the_harness_finds_on_one_device(
    small_choice: EvalConfig, tmp_path: Path
):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from tests.integrations.lm_eval_cases import analyzed, reference, tokenizer

    samples = {key: torch.randint(0, 256, (8, 9)) for key in ("input_ids", "labels")}
    job = tiny_job(batch=4, evaluate=small_choice)
    heard = list[Any]()

    def body(world: World) -> dict[str, float]:
        plan = mw.make_plan(analyzed(), replace(job, train=replace(job.train, steps=4)), mesh, run=run)
        with mw.parallelize(analyzed(), plan, world=world) as trainer:
            before = TaskRunner(trainer, tokenizer(), small_choice)()
            listening = mw.Callback(on_evaluate=lambda event: heard.append(dict(event.evaluation)))
            mw.train(trainer, samples, callbacks=[listening], tokenizer=tokenizer())
            return before

    mesh, run = mw.Mesh(tp=2), mw.RunConfig(str(tmp_path / "run"))
    expected = simple_evaluate(
        model=reference(),
        tasks=["small_choice"],
        task_manager=TaskManager(include_path=small_choice.include_path),
        bootstrap_iters=0,
    )
    for before in run_on_threads(body, mesh):
        assert before == pytest.approx(metrics_by_name(expected["results"]), rel=1e-12)
        assert set(before) == {"small_choice/acc", "small_choice/acc_norm"}
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line.get("kind") == "tasks"]
    assert [line["step"] for line in lines] == [2, 4]
    for line, metrics in zip(lines, heard, strict=True):
        assert {f"eval/{name}": value for name, value in metrics.items()}.items() <= line.items()
