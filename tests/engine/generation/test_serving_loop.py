"""Requests that arrive while others run are answered as if each were alone, under every plan."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from meshwright.api import parallelize
from meshwright.comm.collectives.group import World
from meshwright.engine.generation.continuous_batch import AT_LENGTH, NOT_FINITE, RUNNING, STOPPED
from meshwright.engine.generation.generation_step import GENERATE_ACTION
from meshwright.engine.generation.sampling_params import SamplingParams
from meshwright.engine.generation.serving_loop import Arrivals, ArrivingRequest, NewToken, serve_requests
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool, run_on_threads
from tests.engine.generation.test_generate import (
    COMBINED,
    DRAWN,
    GREEDY,
    LAYOUTS,
    NEW,
    PROMPTS,
    Layout,
    analyzed_family,
    answers_of,
    planned,
    truth,
)

Answers = dict[tuple[int, int], list[NewToken]]


class Script:
    """A source whose request `number` arrives when the first ones have `number` tokens; an answer ends early
    with the token that `last_tokens` names, a request is cancelled when its answer has so many tokens.
    """

    def __init__(
        self,
        requests: Sequence[ArrivingRequest],
        cancelled: dict[int, int] | None = None,
        last_tokens: dict[int, int] | None = None,
    ) -> None:
        self.left, self.cancelled, self.last_tokens = list(requests), cancelled or {}, last_tokens or {}
        self.answers: Answers = {(each.number, k): [] for each in requests for k in range(each.params.n)}
        self.ended = set[tuple[int, int]]()
        self.num_calls = 0

    def arrivals(self, wait_s: float) -> Arrivals:
        self.num_calls += 1
        still_to_come = {each.number for each in self.left}
        new = [each for each in self.left if each.number < self.num_calls]
        self.left = [each for each in self.left if each not in new]
        arrived = {n: size for n, size in self.cancelled.items() if n not in still_to_come}
        gone = [n for n, size in arrived.items() if len(self.answers[n, 0]) >= size]
        self.ended |= {key for key in self.answers if key[0] in gone}
        self.cancelled = {n: size for n, size in self.cancelled.items() if n not in gone}
        return Arrivals(new, gone, is_over=not self.left and self.ended == self.answers.keys())

    def deliver(self, token: NewToken) -> bool:
        key = token.number, token.sample
        assert key not in self.ended, "a token of an answer that has ended"
        self.answers[key].append(token)
        goes_on = self.last_tokens.get(token.number) != token.token
        if token.state != RUNNING or not goes_on:
            self.ended.add(key)
        return goes_on


def served_on(world: World, family: str, layout: Layout, script: Any, **how: Any) -> Answers:
    """What rank 0 gets; nothing on the others."""
    plan = planned(family, layout, 2)
    with parallelize(analyzed_family(family), plan, world=world) as trainer:
        source = script() if world.rank == 0 else None
        serve_requests(trainer.executor, source, **{"max_num_seqs": 2, **how})
        return {} if source is None else source.answers


def served(family: str, layout: Layout, script: Any, **how: Any) -> Answers:
    planned(family, layout, 2)
    first, *others = run_on_threads(lambda world: served_on(world, family, layout, script, **how), layout[0])
    assert not any(others)
    return first


def requests(params: SamplingParams) -> list[ArrivingRequest]:
    """The prompts one after the other, each as its own request."""
    return [ArrivingRequest(number, prompt, params, number) for number, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
@pytest.mark.parametrize("layout", ["one device", "tensor", "pipeline", "shards", "stages and shards"])
def test_requests_that_join_are_answered_as_all_together(layout: str, max_num_seqs: int):
    layouts = LAYOUTS | COMBINED
    expected = answers_of("llama", LAYOUTS["one device"], DRAWN)[0]
    answers = served("llama", layouts[layout], lambda: Script(requests(DRAWN)), max_num_seqs=max_num_seqs)
    for number, answer in enumerate(expected):
        tokens = answers[number, 0]
        assert tuple(each.token for each in tokens) == answer.tokens
        assert [each.logprob for each in tokens] == pytest.approx(list(answer.logprobs), abs=1e-10)
        assert [each.state for each in tokens] == [RUNNING] * (NEW - 1) + [AT_LENGTH]


@pytest.mark.parametrize("layout", ["shards", "pipeline"])
def test_ranks_that_meet_in_a_forward_wait_for_each_other(layout: str):
    """Shards are gathered block by block, also by ranks that have no request."""
    answers = served("llama", LAYOUTS[layout], lambda: Script(requests(GREEDY)[:2]), gather="block")
    found = [[each.token for each in answers[number, 0]] for number in range(2)]
    assert found == truth("llama")[0][:2]


@pytest.mark.parametrize("layout", ["one device", "copies", "pipeline"])
def test_answers_end_with_an_end_token_or_where_the_source_says(layout: str):
    greedy = truth("llama")[0]
    params, script = replace(GREEDY, stop_token_ids=(greedy[0][3],)), {2: greedy[2][1]}
    answers = served("llama", LAYOUTS[layout], lambda: Script(requests(params), last_tokens=script))
    for number, tokens in enumerate(greedy):
        is_stopped = greedy[0][3] in tokens
        end = tokens.index(greedy[0][3]) + 1 if is_stopped else NEW
        state = STOPPED if is_stopped else AT_LENGTH
        if number == 2 and tokens.index(greedy[2][1]) + 1 < end:
            end, state = tokens.index(greedy[2][1]) + 1, RUNNING
        assert [each.token for each in answers[number, 0]] == tokens[:end]
        assert answers[number, 0][-1].state == state


@pytest.mark.parametrize(
    ("layout", "max_num_seqs"),
    [("one device", 1), ("tensor", 1), ("copies", 1), ("pipeline", 1), ("pipeline", 3)],
)
def test_a_cancelled_request_makes_room_and_harms_nobody(layout: str, max_num_seqs: int):
    """The first one is cancelled while it runs, the last one while it waits, or runs where there is room."""
    last = len(PROMPTS) - 1
    script, how = {0: 2, last: 0}, {"max_num_seqs": max_num_seqs}
    answers = served("llama", LAYOUTS[layout], lambda: Script(requests(DRAWN), script), **how)
    expected = [each.tokens for each in answers_of("llama", LAYOUTS["one device"], DRAWN)[0]]
    found = [tuple(each.token for each in answers[number, 0]) for number in range(len(PROMPTS))]
    assert found[1:last] == expected[1:last]
    assert found[0] == expected[0][:2]
    assert len(answers[last, 0]) < NEW


@pytest.mark.parametrize("layout", ["copies", "pipeline"])
def test_an_answer_depends_on_its_request_alone(layout: str):
    """The same request, sent twice: what runs beside it, and when it came, change nothing."""
    params = replace(DRAWN, n=2)
    (expected,) = answers_of("llama", LAYOUTS["one device"], params, prompts=PROMPTS[:1])
    sent = [
        ArrivingRequest(0, PROMPTS[0], params),
        ArrivingRequest(1, PROMPTS[4], DRAWN, 7),
        ArrivingRequest(2, PROMPTS[0], params),
    ]
    answers = served("llama", LAYOUTS[layout], lambda: Script(sent), max_num_seqs=3)
    for number in (0, 2):
        found = [tuple(each.token for each in answers[number, sample]) for sample in range(2)]
        assert found == [each.tokens for each in expected]


@pytest.mark.parametrize("layout", ["one device", "copies"])
def test_logits_that_are_not_finite_end_one_request(layout: str):
    """The embedding of one token is NaN, so one prompt has no next token; others are answered."""
    plan = planned("llama", LAYOUTS[layout], 2)

    def rank(world: World) -> Answers:
        with parallelize(analyzed_family("llama"), plan, world=world) as trainer:
            trainer.module.get_input_embeddings().weight.data[PROMPTS[1][0]] = float("nan")
            source = None if world.rank else Script(requests(GREEDY)[:2])
            serve_requests(trainer.executor, source, max_num_seqs=2)
            return {} if source is None else source.answers

    answers = run_on_threads(rank, plan.mesh)[0]
    assert [each.token for each in answers[0, 0]] == truth("llama")[0][0]
    assert [each.state for each in answers[1, 0]] == [NOT_FINITE]


def test_a_signal_to_any_rank_ends_all():
    plan = planned("llama", LAYOUTS["tensor"], 2)

    class Endless(Script):
        def arrivals(self, wait_s: float) -> Arrivals:
            return super().arrivals(wait_s)._replace(is_over=False)

    def rank(world: World) -> int:
        calls = []

        def should_stop() -> bool:
            calls.append(1)
            return world.rank == 1 and len(calls) == 4

        with parallelize(analyzed_family("llama"), plan, world=world) as trainer:
            source = None if world.rank else Endless(requests(GREEDY))
            serve_requests(trainer.executor, source, max_num_seqs=2, should_stop=should_stop)
        return len(calls)

    assert run_on_threads(rank, plan.mesh) == [4, 4, 4]


def test_a_token_costs_what_the_formula_says():
    """Of copies: the announcement, and the tokens of a rank to all others."""
    plan = planned("llama", LAYOUTS["copies"], 2)

    def rank(world: World) -> tuple[float, int]:
        with parallelize(analyzed_family("llama"), plan, world=world) as trainer:
            source = None if world.rank else Script(requests(GREEDY))
            serve_requests(trainer.executor, source, max_num_seqs=2)
            num_calls = 0 if source is None else source.num_calls
            return world.ledger.sent_nbytes[GENERATE_ACTION], num_calls

    (_, num_announced), (sent, _), _ = run_on_threads(rank, plan.mesh)
    sums = num_announced * 24 * 2 * 2 / 3
    assert sent == pytest.approx(sums + (num_announced - 1) * 2 * 40 * 2)


MESHES = {"shards": Mesh(dp_shard=2), "stages": Mesh(pp=2), "slices": Mesh(tp=2)}


def served_by_process(world: World, layout: str) -> Answers:
    """What rank 0 of a group of processes gets."""
    return served_on(world, "llama", (MESHES[layout], None), lambda: Script(requests(DRAWN)))


@pytest.mark.parametrize("layout", MESHES)
def test_processes_answer_as_one_device(process_pool: ProcessPool, layout: str):
    expected = [each.tokens for each in answers_of("llama", LAYOUTS["one device"], DRAWN)[0]]
    answers = process_pool.run(served_by_process, MESHES[layout], layout)[0]
    found = [tuple(each.token for each in answers[number, 0]) for number in range(len(PROMPTS))]
    assert found == expected
