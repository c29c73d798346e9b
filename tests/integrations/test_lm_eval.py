"""Numbers of tasks are those of the harness's own class for models of transformers, under any plan."""

from functools import cache
from typing import Any

import pytest

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import tiny_job

pytest.importorskip("lm_eval", reason="an extra: pip install meshwright[lm-eval]")

from lm_eval import simple_evaluate

from meshwright.integrations.lm_eval import MeshwrightLM
from tests.integrations.lm_eval_cases import (
    GENERATED,
    LIKELIHOODS,
    ROLLING,
    TEXTS,
    analyzed,
    instances,
    local_tasks,
    reference,
    responses,
    tokenizer,
)

MESHES = {
    "one device": mw.Mesh(),
    "copies": mw.Mesh(dp_replicate=3),
    "shards": mw.Mesh(dp_shard=2),
    "slices": mw.Mesh(tp=2),
    "stages": mw.Mesh(pp=2),
    "sequence": mw.Mesh(cp=2),
}


@cache
def expected() -> tuple[list[tuple[float, bool]], list[float], list[str]]:
    """What the harness's own class says."""
    return responses(reference())


def answers_of(mesh: mw.Mesh, ask: Any, **how: Any) -> list[Any]:
    """What `ask` returns of the model on each rank, as threads."""
    plan = mw.make_plan(analyzed(), tiny_job(), mesh)

    def body(world: World) -> Any:
        with mw.parallelize(analyzed(), plan, world=world) as trainer:
            return ask(MeshwrightLM(trainer, tokenizer(), batch_size=2, **how))

    return run_on_threads(body, mesh)


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        *((mesh, {}) for mesh in MESHES),
        ("sequence", {"decode_context_parallel": True}),
    ],
)
def test_responses_are_those_of_the_class_of_the_harness(mesh: str, how: dict[str, Any]):
    likelihoods, rolling, texts = expected()
    assert max(map(len, texts)) > 1
    for found_likelihoods, found_rolling, found_texts in answers_of(MESHES[mesh], responses, **how):
        assert [each[1] for each in found_likelihoods] == [each[1] for each in likelihoods]
        assert [each[0] for each in found_likelihoods] == pytest.approx(
            [each[0] for each in likelihoods], rel=0, abs=1e-10
        )
        assert found_rolling == pytest.approx(rolling, rel=0, abs=1e-10)
        assert found_texts == texts


@pytest.mark.parametrize("chat", [False, True])
def test_every_digit_of_the_results_is_that_of_the_harness(chat: bool):
    def results(lm: Any) -> dict[str, dict[str, Any]]:
        ran = simple_evaluate(model=lm, tasks=local_tasks(), bootstrap_iters=0, apply_chat_template=chat)
        return ran["results"]

    with mw.parallelize(analyzed(), mw.make_plan(analyzed(), tiny_job(), mw.Mesh())) as trainer:
        found, others = results(MeshwrightLM(trainer, tokenizer())), results(reference())
    assert set(found) == set(others) == {"choices", "texts", "answers"}
    for task, numbers in found.items():
        for name, number in numbers.items():
            wanted = others[task][name]
            assert number == (pytest.approx(wanted, rel=1e-12) if isinstance(number, float) else wanted)


class Recorder:
    """A cache of the harness: what it is told."""

    def __init__(self) -> None:
        self.told: dict[tuple[str, str], Any] = {}

    def add_partial(self, kind: str, request: Any, response: Any) -> None:
        self.told[kind, repr(tuple(request))] = response


def test_the_cache_of_the_harness_is_told_the_same_requests():
    recorders = Recorder(), Recorder()
    reference().set_cache_hook(recorders[0])
    responses(reference())

    def ask(lm: MeshwrightLM) -> None:
        lm.set_cache_hook(recorders[1])
        responses(lm)

    answers_of(mw.Mesh(), ask)
    assert recorders[0].told.keys() == recorders[1].told.keys()
    assert len(recorders[1].told) == len(LIKELIHOODS) + len(ROLLING) + len(GENERATED)


def test_options_that_generation_does_not_know_are_refused():
    request = instances("generate_until", [("A", {"until": ["\n"], "num_beams": 4, "max_gen_toks": 3})])
    with pytest.raises(mw.PlanError, match="the task generates with num_beams; known are do_sample"):
        answers_of(mw.Mesh(), lambda lm: lm.generate_until(request))
    longer = instances("generate_until", [("A", {"max_gen_toks": 48})])
    with pytest.raises(mw.PlanError, match="max_gen_toks = 48, and the model has 48 positions"):
        answers_of(mw.Mesh(), lambda lm: lm.generate_until(longer))


def test_drawn_texts_do_not_depend_on_the_plan():
    options = {"until": ["\n"], "do_sample": True, "temperature": 1.3, "top_k": 50, "max_gen_toks": 6}
    requests = instances("generate_until", [(text, options) for text in TEXTS if text])
    (alone,) = answers_of(mw.Mesh(), lambda lm: lm.generate_until(requests))
    assert alone != expected()[2][:2]
    assert answers_of(mw.Mesh(dp_replicate=2), lambda lm: lm.generate_until(requests)) == [alone, alone]
