"""What observers do not work with, functions that break their promise, and faults that must be noticed."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.parallel.observer.observations import AnswerForm, WorkerRank
from meshwright.plan.job.job import LossGuard, OptimizerConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.static_checks import static_checks
from tests.parallel.observer.observer_plans import FILE, observer, observer_plan, run
from tests.tiny_model import analyzed_model, case_of, edited, tiny_job, verdict_of


def plan_on(mesh: mw.Mesh, *strategies: Strategy, **job: object) -> Plan:
    return mw.make_plan(
        analyzed_model(), tiny_job(**job), mesh, (mw.BatchSplit(), observer(), *strategies), 1
    )


THREE = mw.Mesh(dp_replicate=3)
REFUSED = {
    "no worker": (lambda: observer_plan(workers=0), r"observers = 1 of the 1 ranks(?s:.*)raise mesh"),
    "too many": (
        lambda: mw.make_plan(
            analyzed_model(), tiny_job(), THREE, (mw.BatchSplit(), observer(observers=3), mw.DDP()), 1
        ),
        r"observers = 3 of the 3 ranks(?s:.*)observers = 2 or fewer",
    ),
    "none": (lambda: observer(observers=0), r"observers = 0(?s:.*)1 or more"),
    "never": (lambda: observer(every=0), r"every = 0(?s:.*)1 or more"),
    "after the end": (
        lambda: observer_plan(observers=observer(every=21)),
        r"every = 21, and the run has 20 steps(?s:.*)20 or less",
    ),
    "no file": (
        lambda: observer_plan(observers=mw.Observer("nowhere.py:choose", answers=("arm:int64",))),
        r"there is no file nowhere.py(?s:.*)function = \"file.py:name\"",
    ),
    "no name": (
        lambda: observer_plan(observers=mw.Observer(str(FILE), answers=("arm:int64",))),
        r"needed is a Python file, and a function in it",
    ),
    "no function": (
        lambda: observer_plan(observers=observer("choose")),
        r"observing.py has no function choose",
    ),
    "a number": (lambda: observer_plan(observers=observer("arm")), r"arm in \S+observing.py is no function"),
    "no answers": (lambda: observer_plan(observers=observer(answers=())), r"answers names none"),
    "no dtype": (
        lambda: observer_plan(observers=observer(answers=("rows:int65",))),
        r"'rows:int65' is no name with a dtype",
    ),
    "twice": (
        lambda: observer_plan(observers=observer(answers=("a:int8", "a:int16"))),
        r"a stands there 2 times",
    ),
    "shards alone": (
        lambda: observer_plan(mw.ZeRO("dp_replicate", stage=3)),
        r"stage 3 stores weights in shards alone(?s:.*)stage = 2",
    ),
    "tp": (
        lambda: plan_on(mw.Mesh(dp_replicate=3, tp=2), mw.TensorParallel(), mw.DDP()),
        r"mesh.tp is 2(?s:.*)mesh.tp = 1",
    ),
    "pp": (lambda: plan_on(mw.Mesh(dp_replicate=3, pp=2), mw.Pipeline(), mw.DDP()), r"mesh.pp is 2"),
    "servers": (lambda: plan_on(THREE, mw.ParameterServer()), r"both have ranks that run no step"),
    "codes": (lambda: plan_on(THREE, mw.DDP(), mw.Int8Compression()), r"no part of its sums"),
    "offload": (
        lambda: plan_on(THREE, mw.ZeRO("dp_replicate", stage=1), mw.Offload()),
        r"where they are stepped, on the device",
    ),
    "guard": (lambda: observer_plan(guard=LossGuard("stop")), r"guard(?s:.*)guard.action = \"off\""),
    "noise": (
        lambda: observer_plan(train=TrainConfig(steps=20, batch=12, noise_scale=True)),
        r"noise_scale = false",
    ),
    "matrices": (
        lambda: observer_plan("zero 1", optimizer=OptimizerConfig("adafactor")),
        r"steps the whole matrix(?s:.*)adamw",
    ),
}


@pytest.mark.parametrize(("make", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_with_the_repair(make: Callable[[], object], text: str):
    with pytest.raises(mw.PlanError, match=text):
        make()


def test_a_file_that_cannot_be_imported_is_refused_with_its_line(tmp_path: Path):
    file = tmp_path / "broken.py"
    file.write_text("def choose(model, version, generator):\n    return {}\n\n\nimport no_such_module\n")
    with pytest.raises(mw.PlanError, match=r"cannot be imported(?s:.*)line 5(?s:.*)no_such_module"):
        observer_plan(observers=mw.Observer(f"{file}:choose", answers=("arm:int64",)))


def test_another_function_in_the_file_is_another_plan(tmp_path: Path):
    def hash_of(text: str) -> str:
        file = tmp_path / "bandit.py"
        file.write_text(f"def choose(model, version, generator):\n    return {text}\n")
        return observer_plan(observers=mw.Observer(f"{file}:choose", answers=("arm:int64",))).hash

    assert hash_of("{}") == hash_of("{}") != hash_of("{'arm': 1}")


BROKEN = {
    "raises": r"raises raised ZeroDivisionError: no arm was ever drawn; it observed version 2 on rank 2",
    "another_name": r"returned the names flat, arm; it observed version 1 on rank 2",
    "another_dtype": r"returned rows in float32; it observed version 1 on rank 2(?s:.*)rows:int64",
    "no_tensor": r"returned a int as rows",
    "nothing": r"returned a NoneType",
    "too_much": r"returned 720016 bytes(?s:.*)65536 bytes(?s:.*)answer_bytes",
    "too_deep": r"returned rows of 9 dims, more than 8",
}


@pytest.mark.parametrize(("function", "text"), BROKEN.items(), ids=BROKEN)
def test_a_function_that_breaks_its_promise_ends_all_ranks_with_rank_and_version(function: str, text: str):
    begin = time.monotonic()
    with pytest.raises(Exception, match=text):
        run(observer_plan(observers=observer(function)))
    assert time.monotonic() - begin < 10


def noticed(plan: Plan) -> str:
    verdict = verdict_of(case_of(analyzed_model(), plan), 2)
    assert not verdict.passed
    return str(verdict)


def shown_before_step(actions: list[Action]) -> list[Action]:
    shows = [replace(each, waits=("CLIP()",)) for each in actions if each.kind == "SHOW"]
    step = next(at for at, each in enumerate(actions) if each.kind == "STEP")
    rest = [each for each in actions if each.kind != "SHOW"]
    return [*rest[:step], *shows, *rest[step:]]


def without_a_show(actions: list[Action]) -> list[Action]:
    lost = next(each for each in actions if each.kind == "SHOW").name
    return [
        replace(each, waits=tuple(wait for wait in each.waits if wait != lost), frees=())
        for each in actions
        if each.name != lost
    ]


def shown_in_another_order(actions: list[Action]) -> list[Action]:
    shows = [at for at, each in enumerate(actions) if each.kind == "SHOW"]
    if any(each.kind == "OBSERVE" for each in actions):
        actions[shows[0]], actions[shows[1]] = actions[shows[1]], actions[shows[0]]
    return actions


@pytest.mark.parametrize("store", ["ddp", "zero 1"])
def test_weights_that_are_shown_before_they_are_stepped_are_noticed(store: str):
    plan = edited(observer_plan(store, 2, 2), shown_before_step)
    assert "does not wait for STEP: it shows the weights of the step before" in str(static_checks(plan))
    assert "parameter" in noticed(plan)


def test_a_group_that_is_not_shown_is_noticed():
    plan = edited(observer_plan("ddp", 2, 2), without_a_show)
    assert "is shown to observers 0 times" in str(static_checks(plan))
    with pytest.raises(Exception, match=r"has no \S+ to observe; it observed version 1 on rank 2"):
        run(plan)


def test_an_observer_that_takes_groups_in_another_order_is_noticed():
    plan = edited(observer_plan("ddp", 2, 2), shown_in_another_order)
    assert "and its workers to SHOW(" in str(static_checks(plan))


def test_an_answer_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch):
    usual = AnswerForm.header
    monkeypatch.setattr(AnswerForm, "header", lambda self, version, found: usual(self, version - 1, found))
    with pytest.raises(Exception, match=r"observer 0 answers to version 0, and 1 was shown"):
        run(observer_plan())


def test_answers_in_the_order_of_arrival_are_noticed(monkeypatch: pytest.MonkeyPatch):
    def are_in_order() -> bool:
        worker, *observers = [run_of for at, run_of in enumerate(run(plan, range(1))) if at != 1]
        flat = worker.weights[0].numel()
        taken = [8 * (flat + len(each.tensors["rows"])) for each in worker.answers[0]]
        return taken == [each.counts[0]["answer"] for each in observers]

    def take(self: WorkerRank, action: Action) -> None:
        usual(self, action)
        arrived = reversed(self._exchange.state.answers)
        numbered = (replace(each, observer=at) for at, each in enumerate(arrived))
        self._exchange.state.answers = tuple(numbered)

    plan, usual = observer_plan(observers=observer(observers=2)), WorkerRank.take
    assert are_in_order()
    monkeypatch.setattr(WorkerRank, "take", take)
    assert not are_in_order()
