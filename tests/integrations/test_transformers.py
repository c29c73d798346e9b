"""MeshwrightTrainer on one device beside transformers' Trainer: the same numbers, files and calls."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    EvalPrediction,
    TrainerCallback,
)

import meshwright as mw
from meshwright.integrations.transformers import MeshwrightTrainer
from meshwright.plan.job.errors import PlanError
from tests.integrations.small_llama import accuracy, arguments, llama, logged, samples

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def make(
    kind: type, folder: Path, model: torch.nn.Module | None = None, **options: Any
) -> transformers.Trainer:
    names = {"callbacks", "compute_metrics", "optimizers", "data_collator", "model_init", "compute_loss_func"}
    names |= {"preprocess_logits_for_metrics", "mesh", "strategies", "plan", "loss", "train_dataset"}
    passed = {name: options.pop(name) for name in list(options) if name in names}
    passed = {"train_dataset": samples(), "eval_dataset": samples(5), **passed}
    if model is None and "model_init" not in passed:
        model = llama(torch.float32)
    trainer = kind(model, arguments(folder, **options), **passed)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def assert_same(found: transformers.Trainer, wanted: transformers.Trainer, rel: float = 2e-5) -> None:
    """The same steps with the same numbers, and the same model at the end."""
    pairs = list(zip(logged(found.state), logged(wanted.state), strict=True))
    assert len(pairs) > 3
    for mine, other in pairs:
        assert mine == pytest.approx(other, rel=rel, abs=1e-7)
    theirs = wanted.model.state_dict()
    for name, value in found.model.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {"eval_strategy": "epoch", "compute_metrics": accuracy},
    "cosine": {"lr_scheduler_type": "cosine", "max_steps": 5, "num_train_epochs": 9, "max_grad_norm": 0.1},
    "sgd, no clipping": {"optim": "sgd", "max_grad_norm": 0.0, "gradient_accumulation_steps": 1},
    "adafactor": {"optim": "adafactor", "gradient_accumulation_steps": 1},
    "adagrad": {"optim": "adagrad"},
    "label smoothing": {"label_smoothing_factor": 0.2, "eval_strategy": "epoch"},
    "drop last": {"dataloader_drop_last": True, "data_seed": 5},
    "sequential": {"train_sampling_strategy": "sequential"},
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_one_device_trains_as_transformers_does(name: str, tmp_path: Path):
    trainers = []
    for kind in (MeshwrightTrainer, transformers.Trainer):
        trainer = make(kind, tmp_path / kind.__name__, **dict(OPTIONS[name]))
        trainer.train()
        trainers.append(trainer)
    assert_same(*trainers)
    assert trainers[0].state.total_flos == trainers[1].state.total_flos


def test_padded_batches_of_a_collator_with_accumulation_divide_by_the_global_count(tmp_path: Path):
    def pad(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        length = max(len(each["input_ids"]) for each in features)

        def padded(key: str, value: int) -> torch.Tensor:
            rows = [each[key].tolist() for each in features]
            return torch.tensor([row + [value] * (length - len(row)) for row in rows])

        mask = [[1] * len(each["input_ids"]) + [0] * (length - len(each["input_ids"])) for each in features]
        return {
            "input_ids": padded("input_ids", 0),
            "labels": padded("labels", -100),
            "attention_mask": torch.tensor(mask),
        }

    data = [
        {key: value[: 3 + index % 5] for key, value in each.items()} for index, each in enumerate(samples())
    ]
    trainers = []
    for kind in (MeshwrightTrainer, transformers.Trainer):
        trainer = make(kind, tmp_path / kind.__name__, train_dataset=data, data_collator=pad)
        trainer.train()
        trainers.append(trainer)
    assert_same(*trainers)


def test_an_optimizer_and_a_scheduler_of_the_user_step_as_they_would(tmp_path: Path):
    trainers = []
    for kind in (MeshwrightTrainer, transformers.Trainer):
        model = llama(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.7, 0.8))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
        trainer = make(kind, tmp_path / kind.__name__, model, optimizers=(optimizer, scheduler))
        trainer.train()
        trainers.append(trainer)
    assert_same(*trainers)


def test_a_model_init_and_a_loss_function_are_used_as_transformers_does(tmp_path: Path):
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        return (
            torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
            / num_items_in_batch
        )

    trainers = []
    for kind in (MeshwrightTrainer, transformers.Trainer):
        trainer = make(
            kind,
            tmp_path / kind.__name__,
            model_init=lambda: llama(torch.float32),
            compute_loss_func=loss,
        )
        trainer.train()
        trainers.append(trainer)
    assert_same(*trainers)


class Recorder(TrainerCallback):
    """The events of a run, and what the model was like in them."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name != "on_pre_optimizer_step":
            object.__getattribute__(self, "events").append(name)
        return object.__getattribute__(self, name)


def test_the_optimizer_is_created_once_for_the_plan(tmp_path: Path):
    created: list[int] = []

    class Counting(MeshwrightTrainer):
        def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
            created.append(1)
            return super().create_optimizer(*args)

    make(Counting, tmp_path).train()
    make(transformers.Trainer, tmp_path / "plain").train()
    assert len(created) <= 2  # by the plan, and by transformers' own loop


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_layers_under_torch_compile_are_refused(tmp_path: Path):
    model = llama(torch.float32)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    with pytest.raises(PlanError, match=r"is no parameter of the module passed\n.*before torch\.compile"):
        make(MeshwrightTrainer, tmp_path, model=model).train()


def test_callbacks_hear_the_same_events(tmp_path: Path):
    heard = []
    for kind in (MeshwrightTrainer, transformers.Trainer):
        recorder = Recorder()
        options = {"eval_strategy": "epoch", "save_strategy": "epoch", "callbacks": [recorder]}
        make(kind, tmp_path / kind.__name__, **options).train()
        heard.append(recorder.events)
    assert heard[0] == heard[1]
    assert {"on_substep_end", "on_evaluate", "on_save", "on_prediction_step"} <= set(heard[0])


def test_early_stopping_ends_with_the_best_model(tmp_path: Path):
    trainers = []
    for kind in (MeshwrightTrainer, transformers.Trainer):
        trainer = make(
            kind,
            tmp_path / kind.__name__,
            num_train_epochs=9,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            callbacks=[EarlyStoppingCallback(2, early_stopping_threshold=9.0)],
        )
        trainer.train()
        trainers.append(trainer)
    mine, theirs = trainers
    assert mine.state.global_step == theirs.state.global_step < 27
    assert mine.state.best_metric == pytest.approx(theirs.state.best_metric, rel=1e-4)
    assert mine.evaluate()["eval_loss"] == pytest.approx(mine.state.best_metric, rel=1e-6)


def test_a_saved_model_loads_and_a_checkpoint_resumes_to_the_same_end(tmp_path: Path):
    options = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}
    whole = make(MeshwrightTrainer, tmp_path / "whole", llama(), **options)
    whole.train()
    part = make(MeshwrightTrainer, tmp_path / "part", llama(), **options)
    part.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    wanted = logged(whole.state)
    assert logged(part.state) == wanted
    for mine, other in zip(part.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    part.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "whole" / "checkpoint-6"):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        for mine, other in zip(loaded.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])  # adafactor counts steps in Python numbers
def test_a_checkpoint_of_transformers_resumes_with_its_optimizer_states(tmp_path: Path, optim: str):
    options = {"save_strategy": "steps", "save_steps": 2, "optim": optim}
    theirs = make(transformers.Trainer, tmp_path / "theirs", **options)
    theirs.train()
    mine = make(MeshwrightTrainer, tmp_path / "mine", **options)
    mine.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-4"))
    assert_same(mine, theirs)


def test_predictions_metrics_and_losses_are_those_of_transformers(tmp_path: Path):
    seen: list[list[Any]] = []
    found = []

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen[-1] += [prediction.losses, prediction.inputs]
        return accuracy(prediction)

    for kind in (MeshwrightTrainer, transformers.Trainer):
        seen.append([])
        options = {"compute_metrics": metrics, "include_for_metrics": ["inputs", "loss"]}
        trainer = make(kind, tmp_path / kind.__name__, **options)
        found.append(trainer.predict(samples(5)))
    mine, theirs = found
    assert mine.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=1e-6)
    assert mine.metrics["test_accuracy"] == theirs.metrics["test_accuracy"]
    assert mine.predictions == pytest.approx(theirs.predictions, abs=1e-5)
    assert (mine.label_ids == theirs.label_ids).all()
    assert seen[0][0] == pytest.approx(seen[1][0], rel=1e-6)
    assert (seen[0][1] == seen[1][1]).all()


def test_metrics_by_batch_and_logits_that_are_chosen_before_they_are_gathered(tmp_path: Path):
    results = []
    for kind in (MeshwrightTrainer, transformers.Trainer):
        sizes: list[tuple[int, bool]] = []

        def metrics(prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
            sizes.append((len(prediction.predictions), compute_result))  # noqa: B023  called in this round
            return {"rows": float(sum(size for size, _ in sizes))} if compute_result else {}  # noqa: B023

        trainer = make(
            kind,
            tmp_path / kind.__name__,
            compute_metrics=metrics,
            batch_eval_metrics=True,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        )
        results.append((trainer.evaluate()["eval_rows"], sizes))
    assert results[0] == results[1] == (5.0, [(2, False), (2, False), (1, True)])


class PeeksAtTheModel(TrainerCallback):
    """Calls the user's model in an evaluation."""

    def on_evaluate(self, *args: Any, model: torch.nn.Module, **options: Any) -> None:
        model(torch.zeros(1, 3, dtype=torch.long))


def test_a_callback_that_uses_the_model_in_training_is_told_how(tmp_path: Path):
    trainer = make(MeshwrightTrainer, tmp_path, eval_strategy="epoch", callbacks=[PeeksAtTheModel()])
    with pytest.raises(PlanError, match="the model is called while MeshwrightTrainer trains it"):
        trainer.train()
    assert not any(parameter.isnan().any() for parameter in trainer.model.parameters())
    trainer.model(torch.zeros(1, 3, dtype=torch.long))


class Generates(TrainerCallback):
    """Generates with the parameters of the ranks."""

    def __init__(self) -> None:
        self.texts: list[torch.Tensor] = []
        self.trainer: MeshwrightTrainer | None = None

    def on_evaluate(self, *args: Any, **options: Any) -> None:
        assert self.trainer is not None
        with self.trainer.full_params() as model:
            self.texts.append(model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=4))  # type: ignore[operator]


def test_full_parameters_generate_in_training(tmp_path: Path):
    generates = Generates()
    trainer = make(MeshwrightTrainer, tmp_path, eval_strategy="epoch", callbacks=[generates])
    generates.trainer = trainer
    trainer.train()
    wanted = trainer.model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=4)
    assert len(generates.texts) == 2
    assert torch.equal(generates.texts[-1], wanted)


def test_the_users_model_is_the_truth_outside_of_training(tmp_path: Path):
    trainer = make(MeshwrightTrainer, tmp_path)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    trainer.model.load_state_dict(llama(torch.float32).state_dict())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(before, rel=1e-6)


def test_activation_checkpointing_is_the_strategy_of_that_name(tmp_path: Path):
    trainer = make(MeshwrightTrainer, tmp_path, activation_checkpointing=True)
    assert [each.name for each in trainer.plan.strategies] == ["activation_checkpointing"]
    trainer.train()
    assert trainer.args.activation_checkpointing
    plain = make(MeshwrightTrainer, tmp_path)
    plain.train()
    assert [e["loss"] for e in logged(trainer.state)] == pytest.approx(
        [e["loss"] for e in logged(plain.state)]
    )


def test_a_plan_in_place_of_a_mesh_must_say_what_the_arguments_say(tmp_path: Path):
    model = llama(torch.float32)
    example = {key: value[None] for key, value in samples()[0].items()}
    job = mw.Job(train=mw.TrainConfig(steps=6, batch=4, clip=1.0, seed=42))
    plan = mw.make_plan(mw.analyze(model, example), job, micro_batch=2)
    trainer = make(MeshwrightTrainer, tmp_path, plan=plan)
    trainer.train()
    assert trainer.plan == plan
    with pytest.raises(PlanError, match="gradient_accumulation_steps: 1 in the arguments, 2 in the plan"):
        make(MeshwrightTrainer, tmp_path, plan=plan, gradient_accumulation_steps=1).train()
    with pytest.raises(PlanError, match="both a plan, and a mesh or strategies"):
        make(MeshwrightTrainer, tmp_path, plan=plan, mesh=mw.Mesh())


def test_a_mesh_larger_than_the_number_of_processes_is_refused(tmp_path: Path):
    with pytest.raises(PlanError, match="the plan is for tp 2"):
        make(MeshwrightTrainer, tmp_path, mesh=mw.Mesh(tp=2)).train()


class PackingCollator:
    """Joins samples into one row with positions, as TRL's collator does without padding."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        def joined(key: str) -> torch.Tensor:
            return torch.tensor([list(itertools.chain.from_iterable(each[key] for each in features))])

        labels = [
            [
                token if counts and index else -100
                for index, (token, counts) in enumerate(
                    zip(each["input_ids"], each["completion_mask"], strict=True)
                )
            ]
            for each in features
        ]
        positions = [list(range(len(each["input_ids"]))) for each in features]
        return {
            "input_ids": joined("input_ids"),
            "labels": torch.tensor([list(itertools.chain.from_iterable(labels))]),
            "cu_seq_lens_q": torch.tensor([0, *itertools.accumulate(map(len, positions))]),
            "max_length_q": max(map(len, positions)),
            "position_ids": torch.tensor([list(itertools.chain.from_iterable(positions))]),
        }


PackingCollator.__module__ = "trl.trainer.sft_trainer"


def completions() -> list[dict[str, Any]]:
    """Prompts and completions of tokens, prepared as TRL's SFTTrainer does."""
    return [
        {
            "input_ids": each["input_ids"][: 4 + index % 5].tolist(),
            "completion_mask": [0, 0, *[1] * (2 + index % 5)],
            "text": "left out",
        }
        for index, each in enumerate(samples())
    ]


def test_a_dataset_prepared_by_trl_trains_with_its_collator(tmp_path: Path):
    trainers = []
    for kind in (MeshwrightTrainer, transformers.Trainer):
        trainer = make(
            kind,
            tmp_path / kind.__name__,
            train_dataset=completions(),
            data_collator=PackingCollator(),
            per_device_train_batch_size=1,
            remove_unused_columns=kind is MeshwrightTrainer,
        )
        trainer.train()
        trainers.append(trainer)
    assert_same(*trainers)


def test_a_collator_that_joins_the_samples_of_a_batch_needs_batches_of_one(tmp_path: Path):
    trainer = make(MeshwrightTrainer, tmp_path, train_dataset=completions(), data_collator=PackingCollator())
    with pytest.raises(PlanError, match="the collator makes 1 row of 2 samples") as error:
        trainer.train()
    assert "per_device_train_batch_size=1" in str(error.value)


def test_an_evaluation_without_samples_is_refused(tmp_path):
    trainer = MeshwrightTrainer(llama(), arguments(tmp_path), train_dataset=samples(), mesh=mw.Mesh())
    with pytest.raises(PlanError, match=r"trainer: evaluate\(\) without samples.*\n.*pass eval_dataset="):
        trainer.evaluate()
