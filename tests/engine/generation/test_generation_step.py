"""Along pp as many batches go round as there are stages, and no more than there are sequences for."""

from collections import defaultdict
from dataclasses import replace
from threading import Condition
from typing import Any

import pytest

from meshwright.comm.collectives.group import Work
from meshwright.engine.generation.generation_step import GenerationStep
from meshwright.engine.generation.sampling_params import SamplingParams
from meshwright.engine.generation.stage_forwards import StageForwards
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from tests.engine.generation.test_generate import (
    GREEDY,
    NEW,
    PROMPTS,
    Layout,
    answers_of,
    check_greedy,
    truth,
)
from tests.engine.generation.test_serving_loop import Script, requests, served

HELD = range(4, 8)  # forwards in which the last stage is slow


class NotedWork:
    """Notes when it is waited for."""

    def __init__(self, work: Work, notes: list[str]) -> None:
        self._work, self._notes = work, notes

    def wait(self) -> None:
        self._notes.append("wait")
        self._work.wait()


@pytest.fixture
def notes(monkeypatch) -> dict[int, list[str]]:
    """When each rank shares the tokens of a forward, and when it waits for them."""
    found, right = defaultdict[int, list[str]](list), StageForwards.share_tokens

    def noted(self: StageForwards, ids: Any) -> Any:
        own = found[self._group.index]
        own.append("share")
        return NotedWork(right(self, ids), own)

    monkeypatch.setattr(StageForwards, "share_tokens", noted)
    return found


def most_under_way(notes: list[str]) -> int:
    """How many forwards had begun at once, whose tokens nobody had waited for."""
    counts = [notes[:end].count("share") - notes[:end].count("wait") for end in range(len(notes) + 1)]
    assert counts[-1] == 0
    return max(counts)


@pytest.mark.parametrize(
    ("layout", "prompts", "how", "expected"),
    [
        ((Mesh(pp=2), None), PROMPTS, {}, 2),
        ((Mesh(pp=3), None), PROMPTS, {}, 3),
        ((Mesh(pp=3), None), PROMPTS[:2], {}, 2),
        ((Mesh(pp=2), None), PROMPTS[:1], {}, 1),
        ((Mesh(pp=2), None), PROMPTS, {"max_num_seqs": 1}, 1),
        ((Mesh(pp=2), (Pipeline(schedule="interleaved", virtual_stages=2),)), PROMPTS, {}, 1),
    ],
    ids=str,
)
def test_the_next_forward_begins_while_tokens_are_under_way(
    layout: Layout, prompts: Any, how: Any, expected: int, notes: dict[int, list[str]]
):
    answers = answers_of("llama", layout, prompts=prompts, **how)
    if prompts is PROMPTS:
        for each in answers:
            check_greedy(each, "llama")
    assert {most_under_way(each) for each in notes.values()} == {expected}
    assert len(notes) == layout[0].pp


@pytest.fixture
def overtakings(monkeypatch) -> list[bool]:
    """Makes the last stage end a forward only when the first one has begun the next: whether it has."""
    begun, changed, found, right = defaultdict[int, int](int), Condition(), list[bool](), GenerationStep.begin

    def begin(self: GenerationStep, batch: Any) -> Any:
        index = self._state.world.group(("pp",)).index
        with changed:
            begun[index] += 1
            changed.notify_all()
        forward, number = right(self, batch), begun[index]
        if index == self._stages.last_rank and number in HELD:
            with changed:
                found.append(changed.wait_for(lambda: begun[0] > number, timeout=20))
        return forward

    monkeypatch.setattr(GenerationStep, "begin", begin)
    return found


class Letters:
    """A tokenizer whose tokens are a letter each."""

    def decode(self, token_ids: list[int], /) -> str:
        return "".join(chr(65 + token) for token in token_ids)


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("stops", [False, True])
def test_the_first_stage_does_not_wait_for_the_last_one(pp: int, stops: bool, overtakings: list[bool]):
    params = replace(GREEDY, stop_strings=("?",)) if stops else GREEDY
    for answers in answers_of("llama", (Mesh(pp=pp), None), params, tokenizer=Letters()):
        check_greedy(answers, "llama")
    assert overtakings == [True] * len(HELD)


@pytest.mark.parametrize("pp", [2, 3])
def test_the_first_stage_does_not_wait_while_requests_arrive(pp: int, overtakings: list[bool]):
    def script() -> Script:
        all_at_once = Script(requests(GREEDY))
        all_at_once.num_calls = len(PROMPTS)
        return all_at_once

    found = served("llama", (Mesh(pp=pp), None), script, max_num_seqs=5)
    for number, tokens in enumerate(truth("llama")[0]):
        assert [each.token for each in found[number, 0]] == tokens
    assert overtakings == [True] * len(HELD)


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_stop_strings_end_answers_where_they_do_on_one_device(pp: int, length: int):
    """Of each answer another part of its text stops it, also at its last token."""
    text = [Letters().decode(tokens) for tokens in truth("llama")[0]]
    params = [
        replace(GREEDY, stop_strings=(each[place : place + length],))
        for place, each in zip((0, 1, 3, NEW - length, NEW - length - 1), text, strict=True)
    ]
    (expected,) = answers_of("llama", (Mesh(), None), params, tokenizer=Letters())
    assert {each.finish_reason for each in expected} == {"stop"}
    assert len({len(each.tokens) for each in expected}) > 2
    for answers in answers_of("llama", (Mesh(pp=pp), None), params, tokenizer=Letters(), max_num_seqs=3):
        for one, other in zip(answers, expected, strict=True):
            assert (one.tokens, one.finish_reason) == (other.tokens, other.finish_reason)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-10)
            assert len(one.sampling_logprobs) == len(one.tokens)


@pytest.mark.parametrize(
    ("family", "mesh", "gather"),
    [
        ("mixtral", Mesh(pp=2, ep=2), "once"),
        ("mixtral", Mesh(pp=3, ep=2), "once"),
        ("llama", Mesh(pp=2, dp_shard=2), "block"),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_prompts", [1, 2, 3])
def test_ranks_that_meet_end_together_however_many_batches_each_has(
    family: str, mesh: Mesh, gather: str, num_prompts: int
):
    layout, prompts = (mesh, None), PROMPTS[:num_prompts]
    for answers in answers_of(family, layout, prompts=prompts, gather=gather, micro_batch=1):
        assert [list(each.tokens) for each in answers] == truth(family)[0][:num_prompts]


def test_answers_to_one_prompt_stay_together(notes: dict[int, list[str]]):
    params = SamplingParams(max_new_tokens=3, do_sample=True, n=3, stop_token_ids=())
    layout = Mesh(pp=2), None
    together = answers_of("llama", layout, params, prompts=PROMPTS[:2], max_num_seqs=5)
    assert {most_under_way(each) for each in notes.values()} == {1}  # two batches have no room for 3 each
    notes.clear()
    apart = answers_of("llama", layout, params, prompts=PROMPTS[:2], max_num_seqs=6)
    assert {most_under_way(each) for each in notes.values()} == {2}
    assert [each.tokens for each in together[0]] == [each.tokens for each in apart[0]]


def test_forwards_that_are_under_way_end_when_a_callback_fails(notes: dict[int, list[str]]):
    def fail(index: int, token: int) -> None:
        raise ValueError("no")

    with pytest.raises((ValueError, PlanError), match="no"):
        answers_of("llama", (Mesh(pp=2), None), GREEDY, on_token=fail)
    assert {most_under_way(each) for each in notes.values()} == {2}  # and none is left
