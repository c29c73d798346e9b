"""Log-probabilities of answers are those of the model on one device, for each answer alone."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from meshwright.api import analyze, default_strategies, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.engine.generation import answer_logprobs
from meshwright.engine.generation.answer_logprobs import AnswerLogprobs
from meshwright.engine.generation.sampling_params import SamplingParams
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.tensors.float64_mode import run_in_float64
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.engine.generation.test_generate import FAMILIES, Layout
from tests.parallel.tensor.odd_llama import batches
from tests.tiny_model import tiny_job

PROMPTS = [[3, 14, 15, 9, 2, 6], [5], [35, 8, 9, 7], [9, 3], [2, 3, 8, 4, 62, 6, 4, 33], [66]]
ANSWERS = [[1, 2, 3], [65], [7, 7], [0, 66, 12, 13, 14], [4], [8, 9]]
LAYOUTS: dict[str, Layout] = {
    "one device": (Mesh(), None),
    "copies": (Mesh(dp_replicate=3), None),
    "shards": (Mesh(dp_shard=3), None),
    "vocabulary": (Mesh(tp=2), None),
    "full logits": (Mesh(tp=3), (TensorParallel(),)),
    "sequence": (Mesh(tp=2), (TensorParallel(), VocabParallel(), SequenceParallel())),
    "pipeline": (Mesh(pp=2), None),
    "context": (Mesh(cp=3), None),
    "stages and slices": (Mesh(pp=2, tp=3), None),
    "stages and shards": (Mesh(pp=2, dp_shard=2), None),
}


@cache
def analyzed_family(family: str) -> AnalyzedModel:
    """The analyzed model; cached, because nothing writes into it."""
    torch.manual_seed(0)
    return analyze(FAMILIES[family](), batches(1, 12, 10)[0])  # an even length, for shards of tokens


@cache
def planned(family: str, layout: Layout) -> Plan:
    """The plan of a family on a layout."""
    return make_plan(analyzed_family(family), tiny_job(), *layout, 1)


def logprobs_of(
    family: str, layout: Layout, use: Callable[[Any, Any], Any] = lambda trainer, found: found, **how: Any
) -> list[Any]:
    """What `use` returns of each rank, as threads, of its trainer and the log-probabilities."""
    given = {"prompts": PROMPTS, "answers": ANSWERS, "batch_size": 2, **how}
    planned(family, layout)  # once

    def body(world: World) -> Any:
        with parallelize(analyzed_family(family), planned(family, layout), world=world) as trainer:
            return use(trainer, trainer.logprobs(**given))

    return run_on_threads(body, layout[0])


@cache
def truth(family: str) -> list[AnswerLogprobs]:
    """Those of the model of transformers in float64, each sequence alone."""
    torch.manual_seed(0)
    model: Any = FAMILIES[family]().eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    if family == "mixtral":
        model.set_experts_implementation("eager")
    run_in_float64(model)
    found = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        ids = torch.tensor(answer)
        logprobs = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
        found.append(AnswerLogprobs(tuple(logprobs.tolist()), bool((logits.argmax(-1) == ids).all())))
    return found


def check(found: list[AnswerLogprobs], family: str) -> None:
    for one, other in zip(found, truth(family), strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=1e-10)
        assert one.is_greedy == other.is_greedy


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_those_of_the_model_on_one_device(layout: str):
    for found in logprobs_of("llama", LAYOUTS[layout]):
        check(found, "llama")


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(ep=3), Mesh(pp=2, ep=2)], ids=str)
def test_experts_meet_though_ranks_have_unequally_many_answers(mesh: Mesh):
    for found in logprobs_of("mixtral", (mesh, None), batch_size=1):
        check(found, "mixtral")


def test_experts_meet_on_ranks_that_have_both_ends_of_the_model():
    mesh = Mesh(pp=2, ep=2)
    default = default_strategies(mesh, analyzed_family("mixtral").model_spec)
    both = tuple(Pipeline("pp", "dualpipe") if isinstance(each, Pipeline) else each for each in default)
    for found in logprobs_of("mixtral", (mesh, both)):
        check(found, "mixtral")


@pytest.mark.parametrize("gather", ["once", "block"])
def test_ranks_without_answers_get_those_of_others(gather: str):
    for found in logprobs_of(
        "llama", LAYOUTS["shards"], prompts=PROMPTS[:1], answers=ANSWERS[:1], gather=gather
    ):
        assert found[0].logprobs == pytest.approx(truth("llama")[0].logprobs, rel=0, abs=1e-10)


@pytest.mark.parametrize("layout", ["shards", "vocabulary"])
def test_of_generated_answers_they_are_what_generate_returned(layout: str):
    params = SamplingParams(max_new_tokens=5, do_sample=True, seed=3, stop_token_ids=())
    greedy = SamplingParams(max_new_tokens=5, stop_token_ids=())

    def generated(trainer: Any, _: object) -> list[tuple[Any, AnswerLogprobs]]:
        answers = trainer.generate(PROMPTS, params) + trainer.generate(PROMPTS, greedy)
        return list(
            zip(answers, trainer.logprobs(PROMPTS * 2, [each.tokens for each in answers]), strict=True)
        )

    for pairs in logprobs_of("llama", LAYOUTS[layout], generated):
        for answer, found in pairs:
            assert found.logprobs == pytest.approx(answer.logprobs, rel=0, abs=1e-12)
        assert all(found.is_greedy for _, found in pairs[len(PROMPTS) :])
        assert not all(found.is_greedy for _, found in pairs[: len(PROMPTS)])


def sent(trainer: Any, _: object) -> float:
    """What this rank has sent for them."""
    return trainer.world.ledger.sent_nbytes["LOGPROBS"]


def test_ranks_with_parts_of_the_vocabulary_exchange_four_numbers_per_token():
    lengths = sorted(map(len, map(list.__add__, PROMPTS, ANSWERS)), reverse=True)
    inputs = 2 * sum(each - 1 for each in lengths[::2])  # two at once, as long as the longer one
    sums = (2 * 2 + 1) * inputs * 48 * 8  # of two ranks: as many bytes as the values have
    expected = sums + 32 * sum(map(len, ANSWERS)) + 8  # and a digest of the request
    assert logprobs_of("llama", LAYOUTS["vocabulary"], sent) == [pytest.approx(expected)] * 2


def test_all_that_is_wrong_with_a_request_is_said_at_once():
    one = LAYOUTS["one device"]
    with pytest.raises(PlanError) as error:
        logprobs_of("llama", one, prompts=[[], [67], [1] * 32], answers=[[1], [2], [], [-1]])
    for text in (
        "3 prompts and 4 answers", "prompt 0 is empty", "prompt 1 contains token 67", "answer 2 is empty",
        "answer 3 contains token -1, and the vocabulary of the model has 67",
    ):  # fmt: skip
        assert text in str(error.value)
    with pytest.raises(PlanError, match="0 have 33 tokens before the last, and the model has 32 positions"):
        logprobs_of("llama", one, prompts=[[1] * 32], answers=[[1, 2]])
    ((found,),) = logprobs_of("llama", one, prompts=[[1] * 32], answers=[[1]])
    assert len(found.logprobs) == 1
    assert logprobs_of("llama", LAYOUTS["copies"], prompts=[], answers=[]) == [[], [], []]


def test_ranks_that_pass_different_answers_are_refused():
    plan = planned("llama", LAYOUTS["copies"])

    def body(world: World) -> Any:
        with parallelize(analyzed_family("llama"), plan, world=world) as trainer:
            return trainer.logprobs([[1]], [[world.rank]])

    with pytest.raises(PlanError, match="the ranks passed different prompts or answers"):
        run_on_threads(body, plan.mesh)


def test_a_position_shifted_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch):
    inner = answer_logprobs._logprobs_and_greedy
    monkeypatch.setattr(
        answer_logprobs,
        "_logprobs_and_greedy",
        lambda logits, places, ids, shard: inner(logits, (places[0], places[1] - 1), ids, shard),
    )
    with pytest.raises(AssertionError):
        check(logprobs_of("llama", LAYOUTS["one device"])[0], "llama")
