"""Sequences come and go between forwards, and an answer is that of its prompt alone."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from meshwright.comm.collectives.group import World
from meshwright.engine.generation import continuous_batch, kv_cache
from meshwright.engine.generation.cached_forward import CachedForward
from meshwright.engine.generation.sampling_params import GeneratedAnswer, SamplingParams
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.engine.generation import test_generate
from tests.engine.generation.test_generate import (
    COMBINED,
    DRAWN,
    GREEDY,
    LAYOUTS,
    PROMPTS,
    answers_of,
    answers_on,
    planned,
    reference_model,
    truth,
)
from tests.parallel.tensor.odd_llama import HEADS, SIZES

ONE = LAYOUTS["one device"]
MAMBA = {"vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "expand": 2}
FAMILIES: dict[str, Callable[[], Any]] = {
    "mamba": lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**MAMBA)),
    "alternating windows": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, **HEADS, head_dim=8, sliding_window=5)
    ),
    "recurrent and attention": lambda: transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(**SIZES, **HEADS, layer_types=["conv", "full_attention"])
    ),
}


@pytest.fixture(autouse=True)
def more_families(monkeypatch) -> None:
    """Adds the families of this module to those of the answers."""
    for name, make in FAMILIES.items():
        monkeypatch.setitem(test_generate.FAMILIES, name, make)


def requests(number: int, params: SamplingParams) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of unlike length, each with a limit of its own."""
    chance = random.Random(5)
    prompts = [[chance.randrange(67) for _ in range(chance.randint(1, 12))] for _ in range(number)]
    limits = [chance.randint(1, 14) for _ in range(number)]
    return prompts, [replace(params, max_new_tokens=limit) for limit in limits]


@cache
def alone(family: str, number: int, params: SamplingParams) -> list[GeneratedAnswer]:
    """The answers of one device that continues a single sequence at a time."""
    prompts, each = requests(number, params)
    return answers_of(family, ONE, each, prompts=prompts, max_num_seqs=1)[0]


def check_equal(found: list[GeneratedAnswer], expected: list[GeneratedAnswer]) -> None:
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    for name in ("logprobs", "sampling_logprobs"):
        numbers = ([x for each in those for x in vars(each)[name]] for those in (found, expected))
        torch.testing.assert_close(*map(torch.tensor, numbers), rtol=0, atol=1e-10)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", *FAMILIES])
def test_answers_are_those_of_each_request_alone(family: str, params: SamplingParams):
    prompts, each = requests(40, params)
    found = answers_of(family, ONE, each, prompts=prompts, max_num_seqs=5)[0]
    assert [len(answer.tokens) for answer in found] == [one.max_new_tokens for one in each]
    check_equal(found, alone(family, 40, params))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_alone_are_those_of_transformers(family: str):
    model, (prompts, each) = reference_model(family), requests(40, GREEDY)
    for prompt, params, answer in zip(prompts, each, alone(family, 40, GREEDY), strict=True):
        how = {"max_new_tokens": params.max_new_tokens, "do_sample": False, "eos_token_id": None}
        expected = model.generate(torch.tensor([prompt]), pad_token_id=0, **how)[0, len(prompt) :]
        assert list(answer.tokens) == expected.tolist()


RANKS = {
    "copies": (LAYOUTS["copies"], "llama", {}),
    "shards": (LAYOUTS["shards"], "llama", {"gather": "block"}),
    "slices": (LAYOUTS["tensor"], "mixtral", {}),
    "stages": (LAYOUTS["pipeline"], "alternating windows", {}),
    "stages in lockstep": (LAYOUTS["pipeline"], "recurrent and attention", {}),
    "stages and slices": (COMBINED["stages and slices"], "llama", {}),
    "experts": ((Mesh(ep=3), None), "mixtral", {"micro_batch": 1}),
}


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_take_requests_and_end_together(ranks: str):
    layout, family, how = RANKS[ranks]
    prompts, each = requests(13, DRAWN)
    for found in answers_of(family, layout, each, prompts=prompts, max_num_seqs=2, **how):
        check_equal(found, alone(family, 13, DRAWN))


@pytest.fixture
def forwards(monkeypatch) -> list[tuple[int, int]]:
    """The rows and tokens that go through each forward."""
    found, right = list[tuple[int, int]](), CachedForward._inputs

    def observed(self: Any, *given: Any) -> Any:
        inputs = right(self, *given)
        found.append(tuple(inputs["input_ids"].shape))
        return inputs

    monkeypatch.setattr(CachedForward, "_inputs", observed)
    return found


def test_one_that_ends_makes_room_for_the_next(forwards: list[tuple[int, int]]):
    each = [replace(GREEDY, max_new_tokens=limit) for limit in (1, 4, 2, 3)]
    found = answers_of("llama", ONE, each, prompts=PROMPTS[:4], max_num_seqs=2)[0]
    assert [list(answer.tokens) for answer in found] == [
        tokens[: params.max_new_tokens] for tokens, params in zip(truth("llama")[0], each, strict=False)
    ]
    # the longest first: 1 and 3, twice more; 3 has ended, so 2; 1 and 2, which both end; 0
    assert forwards == [(2, 2), (2, 1), (2, 1), (1, 4), (2, 1), (1, 6)]


@pytest.mark.parametrize("layout", ["one device", "copies", "pipeline", "tensor"])
def test_answers_to_a_prompt_do_not_depend_on_how_many_there_are(layout: str):
    single, several = (
        answers_of("llama", LAYOUTS[layout], replace(DRAWN, n=n), prompts=PROMPTS[:3], max_num_seqs=4)[-1]
        for n in (1, 3)
    )
    assert [each.tokens for each in several[::3]] == [each.tokens for each in single]
    assert len({each.tokens for each in several}) == 9
    check_equal(several, answers_of("llama", ONE, replace(DRAWN, n=3), prompts=PROMPTS[:3])[0])


@pytest.mark.parametrize("family", ["llama", *FAMILIES])
def test_a_prompt_is_computed_once_for_all_answers(family: str, forwards: list[tuple[int, int]]):
    params = replace(GREEDY, n=3, max_new_tokens=2)
    found = answers_of(family, ONE, params, prompts=PROMPTS[:1])[0]
    assert forwards == [(1, 6), (3, 1)]
    one = answers_of(family, ONE, replace(params, n=1), prompts=PROMPTS[:1])[0]
    assert [each.tokens for each in found] == 3 * [one[0].tokens]


@pytest.mark.parametrize("layout", ["one device", "copies", "pipeline", "tensor"])
def test_each_token_is_told_to_the_ranks_that_continue_its_answer(layout: str):
    expected = truth("llama")[0]

    def rank(world: World) -> tuple[dict[int, list[int]], list[GeneratedAnswer]]:
        told = dict[int, list[int]]()

        def on_token(index: int, token: int) -> bool:
            told.setdefault(index, []).append(token)
            return world.rank != world.mesh.world_size - 1 or (index, len(told[index])) != (4, 3)

        return told, answers_on(world, "llama", LAYOUTS[layout], on_token=on_token)

    found = run_on_threads(rank, LAYOUTS[layout][0])
    for told, answers in found:
        assert [each.finish_reason for each in answers] == ["length"] * 4 + ["abort"]
        assert [list(each.tokens) for each in answers] == [*expected[:4], expected[4][:3]]
        assert all(list(answers[index].tokens) == tokens for index, tokens in told.items())
        assert layout == "copies" or len(told) == len(PROMPTS)
    assert {index for told, _ in found for index in told} == set(range(len(PROMPTS)))


class Failing:
    """A tokenizer that fails on one rank."""

    def __init__(self, world: World) -> None:
        self._world = world

    def decode(self, token_ids: list[int], /) -> str:
        if self._world.rank == 1 and len(token_ids) == 2:
            raise ValueError("no such token")
        return ""


@pytest.mark.parametrize("name", ["tokenizer", "on_token"])
@pytest.mark.parametrize("layout", ["copies", "shards", "tensor", "pipeline"])
def test_what_raises_on_one_rank_ends_all(layout: str, name: str):
    planned("llama", LAYOUTS[layout], 2)

    def rank(world: World) -> None:
        failing, tokens, params = Failing(world), list[int](), replace(GREEDY, stop_strings=("a",))
        how: dict[str, Any] = {"tokenizer": failing}
        if name == "on_token":
            params = GREEDY
            how = {"on_token": lambda index, token: tokens.append(token) or failing.decode(tokens)}
        kind, text = (
            (ValueError, "^no such") if world.rank == 1 else (PlanError, "rank 1: ValueError: no such")
        )
        with pytest.raises(kind, match=text):
            answers_on(world, "llama", LAYOUTS[layout], params, **how)

    run_on_threads(rank, LAYOUTS[layout][0])


def join_on_the_right(monkeypatch) -> None:
    pad = torch.nn.functional.pad

    def pad_right(tensor: torch.Tensor, sizes: Any, **how: Any) -> torch.Tensor:
        *others, left, right = sizes
        return pad(tensor, (*others, right, left), **how)

    monkeypatch.setattr(kv_cache.F, "pad", pad_right)


def keep_the_wrong_sequences(monkeypatch) -> None:
    monkeypatch.setattr(
        continuous_batch,
        "select_sequences",
        lambda cache, indices: kv_cache.select_sequences(cache, indices[::-1]),
    )


def drop_one_column_more(monkeypatch) -> None:
    def drop(cache: Any, number: int) -> None:
        kv_cache.drop_columns(cache, number + 1)

    monkeypatch.setattr(continuous_batch, "drop_columns", drop)


@pytest.mark.parametrize("plant", [join_on_the_right, keep_the_wrong_sequences, drop_one_column_more])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_faults_of_the_cache_are_noticed(family: str, plant: Callable[[Any], None], monkeypatch):
    prompts, each = requests(13, GREEDY)
    expected = alone(family, 13, GREEDY)
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)):  # or a shape does not fit
        check_equal(answers_of(family, ONE, each, prompts=prompts, max_num_seqs=3)[0], expected)
