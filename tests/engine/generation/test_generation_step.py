"""Along pp as many batches go round as there are stages, and no more than there are sequences for."""

from collections import defaultdict
from typing import Any

import pytest

from meshwright.comm.collectives.group import Work
from meshwright.engine.generation.sampling_params import SamplingParams
from meshwright.engine.generation.stage_forwards import StageForwards
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from tests.engine.generation.test_generate import (
    GREEDY,
    PROMPTS,
    Layout,
    answers_of,
    check_greedy,
    truth,
)


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
