"""Answers are those of transformers' `generate` for each prompt alone, on every rank of every plan."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.engine.generation import cached_forward, generate, token_sampler
from meshwright.engine.generation.sampling_params import GeneratedAnswer, SamplingParams
from meshwright.engine.params.flat_param import FlatParam
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.tensors.float64_mode import run_in_float64
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.parallel.tensor.odd_llama import HEADS, SIZES, batches
from tests.tiny_model import tiny_job

PROMPTS = [[3, 14, 15, 9, 2, 6], [5], [35, 8, 9, 7], [9, 3], [2, 3, 8, 4, 62, 6, 4, 33]]
NEW = 7
GREEDY = SamplingParams(max_new_tokens=NEW, stop_token_ids=())
DRAWN = SamplingParams(
    max_new_tokens=NEW, do_sample=True, temperature=1.5, top_k=40, top_p=0.9, min_p=0.001, seed=3,
    repetition_penalty=1.2, stop_token_ids=(),
)  # fmt: skip
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": 67, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 32}
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **NO_DROPOUT)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, **HEADS, **EXPERTS, sliding_window=4)
    ),
}
Layout = tuple[Mesh, tuple[Strategy, ...] | None]
LAYOUTS: dict[str, Layout] = {
    "one device": (Mesh(), None),
    "copies": (Mesh(dp_replicate=3), None),
    "shards": (Mesh(dp_shard=3), None),
    "tensor": (Mesh(tp=3), None),
    "pipeline": (Mesh(pp=2), None),
    "context": (Mesh(cp=3), None),
}
COMBINED: dict[str, Layout] = {
    "full logits": (Mesh(tp=2), (TensorParallel(),)),
    "sharded tokens": (Mesh(tp=3), (TensorParallel(), SequenceParallel(), VocabParallel())),
    "stages and sharded tokens": (Mesh(pp=2, tp=3), (TensorParallel(), SequenceParallel(), Pipeline())),
    "Ulysses": (Mesh(cp=3), (Ulysses(), DDP(axis="cp"))),
    "shards and slices": (Mesh(dp_shard=2, tp=3), None),
    "shards along cp": (Mesh(dp_shard=2, cp=2), (BatchSplit(axis="dp_shard"), RingAttention(), ZeRO())),
    "stages and shards": (Mesh(pp=2, dp_shard=2), None),
    "stages and slices": (Mesh(pp=2, tp=3), None),
}


@cache
def analyzed_family(family: str) -> AnalyzedModel:
    """The analyzed model; cached, because nothing writes into it."""
    torch.manual_seed(0)
    return analyze(FAMILIES[family](), batches(1, 12)[0])


@cache
def planned(family: str, layout: Layout, micro_batch: int) -> Plan:
    """The plan of a family on a layout."""
    return make_plan(analyzed_family(family), tiny_job(), *layout, micro_batch)


def answers_on(
    world: World,
    family: str,
    layout: Layout,
    params: SamplingParams = GREEDY,
    *,
    use: Callable[..., Any] | None = None,
    prompts: Any = PROMPTS,
    micro_batch: int = 2,
    **how: Any,
) -> Any:
    """The answers on one rank, or what `use` returns of its trainer and them."""
    plan = planned(family, layout, micro_batch)
    with parallelize(analyzed_family(family), plan, world=world) as trainer:
        found = trainer.generate(prompts, params, **how)
        return found if use is None else use(trainer, found)


def answers_of(
    family: str, layout: Layout, params: SamplingParams = GREEDY, *, micro_batch: int = 2, **how: Any
) -> list[Any]:
    """Those of all ranks, as threads."""
    planned(family, layout, micro_batch)  # once
    how["micro_batch"] = micro_batch
    return run_on_threads(lambda world: answers_on(world, family, layout, params, **how), layout[0])


@cache
def reference_model(family: str) -> Any:
    """The model in float64 throughout; experts one by one, as grouped products have no float64."""
    torch.manual_seed(0)
    model: Any = FAMILIES[family]().eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    if "expert" in repr(model).lower():
        model.set_experts_implementation("eager")
    run_in_float64(model)
    return model


@cache
def truth(family: str) -> tuple[list[list[int]], list[list[float]]]:
    """What transformers generates for each prompt alone, and the log-probabilities of its tokens."""
    model, tokens, logprobs = reference_model(family), [], []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        how = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        whole = model.generate(ids, **how)
        with torch.no_grad():
            logits = model(whole, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        new = whole[0, len(prompt) :]
        tokens.append(new.tolist())
        logprobs.append(logits.gather(1, new[:, None])[:, 0].tolist())
    return tokens, logprobs


def check_greedy(answers: list[GeneratedAnswer], family: str) -> None:
    tokens, logprobs = truth(family)
    assert [list(each.tokens) for each in answers] == tokens
    found = torch.tensor([each.logprobs for each in answers], dtype=torch.float64)
    torch.testing.assert_close(found, torch.tensor(logprobs, dtype=torch.float64), rtol=0, atol=1e-10)
    assert {each.finish_reason for each in answers} == {"length"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_transformers(family: str, layout: str):
    for answers in answers_of(family, LAYOUTS[layout], max_num_seqs=2):
        check_greedy(answers, family)


@pytest.mark.parametrize("layout", COMBINED)
def test_greedy_answers_under_combined_plans(layout: str):
    for answers in answers_of("llama", COMBINED[layout]):
        check_greedy(answers, "llama")


@pytest.mark.parametrize("mesh", [Mesh(ep=3), Mesh(dp_shard=2, ep=2), Mesh(pp=2, ep=2)], ids=str)
def test_experts_meet_though_ranks_have_unequally_many_prompts(mesh: Mesh):
    for answers in answers_of("mixtral", (mesh, None), max_num_seqs=1, micro_batch=1):
        check_greedy(answers, "mixtral")


@pytest.mark.parametrize("layout", ["copies", "shards", "context"])
@pytest.mark.parametrize("gather", ["once", "block"])
def test_ranks_without_prompts_get_the_answers_of_others(layout: str, gather: str):
    for answers in answers_of("llama", LAYOUTS[layout], prompts=PROMPTS[:1], gather=gather):
        assert [list(each.tokens) for each in answers] == truth("llama")[0][:1]


@cache
def drawn_on_one_device(family: str) -> list[GeneratedAnswer]:
    """That of one device."""
    return answers_of(family, LAYOUTS["one device"], DRAWN)[0]


@pytest.mark.parametrize("layout", [*LAYOUTS, *COMBINED])
def test_drawn_answers_are_the_same_on_every_plan(layout: str):
    expected = drawn_on_one_device("llama")
    assert [each.tokens for each in expected] != [tuple(each) for each in truth("llama")[0]]
    for answers in answers_of("llama", (LAYOUTS | COMBINED)[layout], DRAWN, max_num_seqs=3):
        assert [each.tokens for each in answers] == [each.tokens for each in expected]
        for name in ("logprobs", "sampling_logprobs"):
            found, wanted = (
                torch.tensor([vars(each)[name] for each in those]) for those in (answers, expected)
            )
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_logprobs_are_those_of_a_forward_on_the_whole_answer():
    for prompt, answer in zip(PROMPTS, drawn_on_one_device("llama"), strict=True):
        ids = torch.tensor([[*prompt, *answer.tokens]])
        with torch.no_grad():
            logits = reference_model("llama")(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        found = torch.tensor(answer.logprobs, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_an_answer_does_not_depend_on_its_neighbours():
    expected = [each.tokens for each in drawn_on_one_device("llama")]
    for size in (1, 2, 5):
        found = answers_of("llama", LAYOUTS["one device"], DRAWN, max_num_seqs=size)[0]
        assert [each.tokens for each in found] == expected
    other = answers_of("llama", LAYOUTS["one device"], replace(DRAWN, seed=4))[0]
    assert [each.tokens for each in other] != expected


class Bare(nn.Module):
    """No transformers model: it has no cache, and takes no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(67, 8), nn.Linear(8, 67)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(input_ids).cumsum(1))


def test_a_module_without_cache_and_mask_runs_on_rows_of_equal_length(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setitem(FAMILIES, "bare", Bare)
    model = reference_model("bare")
    for answers in answers_of("bare", (Mesh(dp_replicate=2), None), prompts=[*PROMPTS, [4, 5]]):
        for prompt, answer in zip([*PROMPTS, [4, 5]], answers, strict=True):
            tokens = list(prompt)
            while len(tokens) < len(prompt) + NEW:
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
            assert [*prompt, *answer.tokens] == tokens


@pytest.mark.parametrize("layout", ["one device", "shards", "pipeline"])
def test_answers_end_with_a_stop_token_or_a_stop_string(layout: str):
    greedy = truth("llama")[0]
    stop = greedy[0][3]
    params = replace(GREEDY, stop_token_ids=(stop,))
    for answers in answers_of("llama", LAYOUTS[layout], params, gather="block"):
        for answer, tokens in zip(answers, greedy, strict=True):
            end = tokens.index(stop) + 1 if stop in tokens else NEW
            assert answer.tokens == tuple(tokens[:end])
            assert answer.finish_reason == ("stop" if stop in tokens else "length")
            assert len(answer.logprobs) == len(answer.sampling_logprobs) == end

    class Letters:
        """Each token is two letters, so that a stop string lies across two tokens."""

        def decode(self, token_ids: list[int], /) -> str:
            return "".join(chr(65 + token // 26) + chr(97 + token % 26) for token in token_ids)

    text = Letters().decode(greedy[1])
    params = replace(GREEDY, stop_strings=(text[3:5],))
    for answers in answers_of("llama", LAYOUTS[layout], params, tokenizer=Letters()):
        assert answers[1].tokens == tuple(greedy[1][: text.index(text[3:5]) // 2 + 2])
        assert answers[1].finish_reason == "stop"


def sent(trainer: Any, _: object) -> dict[str, float]:
    """What this rank has sent for generation, by action."""
    ledger = trainer.world.ledger.sent_nbytes
    return {name: nbytes for name, nbytes in ledger.items() if name.startswith("GENERATE") and nbytes}


NUM_PARAMS = 67 * 48 * 2 + 48 + 2 * (48 * 48 * 2 + 48 * 24 * 2 + 3 * 48 * 53 + 2 * 48)
DIGEST = 24  # of the request, whether a callback came with it, and how many sequences fit


def answer_nbytes(rows: int, num_ranks: int) -> int:
    """What a rank sends to tell others its answers."""
    return (num_ranks - 1) * rows * (24 * NEW + 16)


def test_shards_are_sent_once_per_call_or_once_per_forward():
    shard = -(-NUM_PARAMS // 3) * 8
    for once, blocks in zip(
        answers_of("llama", LAYOUTS["shards"], use=sent, prompts=PROMPTS[:3]),
        answers_of("llama", LAYOUTS["shards"], use=sent, prompts=PROMPTS[:3], gather="block"),
        strict=True,
    ):
        told = 2 * DIGEST + answer_nbytes(1, 3)
        assert 0 <= once["GENERATE"] - told - 2 * shard <= 2 * 8 * 3 * 5  # shards are padded
        agreed = (NEW + 1) * 16 * 2 * 2 / 3
        assert blocks["GENERATE"] == pytest.approx(NEW * (once["GENERATE"] - told) + told + agreed)


@pytest.mark.parametrize("layout", [LAYOUTS["tensor"], COMBINED["sharded tokens"]], ids=str)
def test_slices_send_two_sums_per_layer_and_a_few_numbers_per_row(layout: Layout):
    rows, longest = len(PROMPTS), max(map(len, PROMPTS))
    tokens = rows * (longest + NEW - 1)  # that go through the layers, padding too
    sums = (2 * 2 + 1) * tokens * 48 * 8 * 2 * 2 / 3
    chosen = rows * NEW * 48 * 2
    for found in answers_of("llama", layout, use=sent):
        assert found == {"GENERATE": pytest.approx(sums + chosen + 2 * DIGEST)}


def test_stages_send_hidden_states_and_tokens_alone():
    batches = PROMPTS[:3], PROMPTS[3:]  # that go round, padded to their longest
    tokens = sum(len(each) * (max(map(len, each)) + NEW - 1) for each in batches)
    first, last = answers_of("llama", LAYOUTS["pipeline"], use=sent)
    assert first == {"GENERATE(model.layers.0)": tokens * 48 * 8, "GENERATE": DIGEST}
    chosen, logprobs = len(PROMPTS) * NEW * 8, len(PROMPTS) * NEW * 16
    assert last == {"GENERATE": DIGEST + chosen + logprobs}


def test_a_callback_costs_two_sums_per_forward():
    rows = len(PROMPTS)
    for found in answers_of("llama", LAYOUTS["pipeline"], use=sent, on_token=lambda index, token: None):
        calls = 2 * (NEW + 1) * 16 + NEW * 16 * rows  # two batches; a sum sends as much over two ranks
        tokens = 3 * (6 + NEW - 1) + 2 * (8 + NEW - 1)
        told = {"GENERATE(model.layers.0)": tokens * 48 * 8}
        is_first = "GENERATE(model.layers.0)" in found
        assert found == {"GENERATE": DIGEST + calls + (0 if is_first else rows * NEW * 24)} | (
            told if is_first else {}
        )


@pytest.mark.parametrize("layout", ["copies", "context"])
def test_ranks_with_prompts_of_their_own_send_answers_alone(layout: str):
    for found in answers_of("llama", LAYOUTS[layout], use=sent):
        assert found == {"GENERATE": 2 * DIGEST + answer_nbytes(2, 3)}


@pytest.mark.parametrize("gather", ["once", "block"])
@pytest.mark.parametrize("layout", ["shards", "copies", "shards and slices"])
def test_training_goes_on_and_answers_are_those_of_the_stepped_weights(layout: str, gather: str):
    batch = batches(1, 12)[0]

    def steps(trainer: Any, found: list[GeneratedAnswer]) -> Any:
        losses, local = [], trainer.local_batch(batch)
        for _ in range(3):
            losses.append(trainer.step(local).loss)
            found = trainer.generate(PROMPTS, GREEDY, gather=gather)
        return losses, [each.tokens for each in found], [each.logprobs for each in found]

    (expected,) = answers_of("llama", LAYOUTS["one device"], use=steps)
    for losses, tokens, logprobs in answers_of("llama", (LAYOUTS | COMBINED)[layout], use=steps):
        assert losses == pytest.approx(expected[0], rel=1e-12)
        assert tokens == expected[1]
        assert tokens != [tuple(each) for each in truth("llama")[0]]
        for mine, wanted in zip(logprobs, expected[2], strict=True):
            assert mine == pytest.approx(wanted, abs=1e-10)


def test_logits_that_are_not_finite_are_refused_on_all_ranks():
    analyzed = analyzed_family("llama")
    plan = make_plan(analyzed, tiny_job(), Mesh(dp_replicate=3), None, 2)

    def rank(world: World) -> str:
        with parallelize(analyzed, plan, world=world) as trainer:
            if world.rank == 1:
                next(trainer.module.parameters()).data.fill_(float("nan"))
            with pytest.raises(PlanError, match="logits of prompt 1 at position 1 are not finite") as error:
                trainer.generate(PROMPTS, GREEDY)
            return str(error.value)

    assert len(set(run_on_threads(rank, plan.mesh))) == 1


def test_ranks_that_ask_for_other_texts_are_refused_together():
    analyzed = analyzed_family("llama")
    plan = make_plan(analyzed, tiny_job(), Mesh(tp=2), None, 2)

    def rank(world: World) -> str:
        with parallelize(analyzed, plan, world=world) as trainer:
            with pytest.raises(
                PlanError, match=r"the ranks passed different prompts(?s:.*)the same parameters"
            ):
                trainer.generate(PROMPTS, replace(DRAWN, seed=world.rank))
            return ""

    run_on_threads(rank, plan.mesh)


def shifted_positions(monkeypatch) -> None:
    right = cached_forward.CachedForward._inputs

    def inputs(self, ids, mask, cache):
        found = right(self, ids, mask, cache)
        return found | {"position_ids": found["position_ids"] + (cache is not None)}

    monkeypatch.setattr(cached_forward.CachedForward, "_inputs", inputs)


def unmasked_padding(monkeypatch) -> None:
    right = cached_forward.CachedForward._inputs
    monkeypatch.setattr(
        cached_forward.CachedForward,
        "_inputs",
        lambda self, ids, mask, cache: right(self, ids, mask, cache) | {"attention_mask": mask * 0 + 1},
    )


@pytest.mark.parametrize("plant", [shifted_positions, unmasked_padding])
def test_wrong_positions_and_masks_are_noticed(plant: Callable[[Any], None], monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_greedy(answers_of("llama", LAYOUTS["one device"])[0], "llama")


def test_seeds_by_rank_are_noticed(monkeypatch):
    """A rank that takes other numbers draws another text, though its request is the same."""
    right, ranks = token_sampler.derive_key, iter(range(10**6))
    monkeypatch.setattr(token_sampler, "derive_key", lambda *labels: right(*labels, next(ranks)))
    expected = [each.tokens for each in drawn_on_one_device("llama")]
    found = answers_of("llama", LAYOUTS["copies"], DRAWN)[0]
    assert [each.tokens for each in found] != expected


def test_stale_weights_are_noticed(monkeypatch):
    """Weights that are kept from the call before are those of another step."""
    kept = {}

    def gather(self, full_tensor, shard, *, action):
        if action == generate.GENERATE_ACTION and id(self) in kept:
            full_tensor.copy_(kept[id(self)])
            return
        right(self, full_tensor, shard, action=action)
        if action == generate.GENERATE_ACTION:
            kept[id(self)] = full_tensor.clone()

    right = FlatParam.gather
    monkeypatch.setattr(FlatParam, "gather", gather)
    with pytest.raises(AssertionError):
        test_training_goes_on_and_answers_are_those_of_the_stepped_weights("shards", "once")
