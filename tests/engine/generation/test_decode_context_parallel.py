"""Ranks that divide keys and values answer as one device, and say what they cannot divide."""

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, make_plan
from meshwright.comm.collectives.group import World
from meshwright.engine.generation import decode_context_parallel, generation_step
from meshwright.engine.generation.continuous_batch import ContinuousBatch
from meshwright.engine.generation.decode_context_parallel import (
    OwnedColumns,
    division_diagnostics,
)
from meshwright.engine.generation.token_sampler import ABSENT
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.output_merge import decode_attention as decode_attention_module
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.program_cost.kv_cache_memory import kv_cache_nbytes
from meshwright.run.training import trainer as trainer_module
from meshwright.testing.ranks import run_on_threads
from tests.engine.generation import test_generate
from tests.engine.generation.test_continuous_batch import alone, check_equal, requests
from tests.engine.generation.test_generate import (
    DRAWN,
    FAMILIES,
    GREEDY,
    LAYOUTS,
    NEW,
    PROMPTS,
    Layout,
    analyzed_family,
    answers_of,
    answers_on,
    check_greedy,
    drawn_on_one_device,
    planned,
    reference_model,
    sent,
    truth,
)
from tests.engine.generation.test_serving_loop import Script, served
from tests.engine.generation.test_serving_loop import requests as arriving
from tests.parallel.tensor.odd_llama import HEADS, SIZES, batches
from tests.tiny_model import tiny_job

TWO, THREE = (Mesh(cp=2), None), (Mesh(cp=3), None)
DIVIDED = {"decode_context_parallel": True}
BESIDE: dict[str, Layout] = {
    "copies": (Mesh(dp_replicate=2, cp=2), None),
    "shards along cp too": (Mesh(dp_shard=2, cp=2), (BatchSplit(axis="dp_shard"), RingAttention(), ZeRO())),
    "slices": (Mesh(cp=2, tp=3), None),
    "stages": (Mesh(pp=2, cp=3), None),
    "Ulysses": (Mesh(cp=3), (Ulysses(), DDP(axis="cp"))),
    "hybrid": (Mesh(cp=3), (HybridContextParallel(ulysses_degree=3), DDP(axis="cp"))),
}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
DEEPSEEK = {"num_attention_heads": 6, "num_key_value_heads": 6, "first_k_dense_replace": 2, **LATENT}


@pytest.mark.parametrize("layout", [TWO, THREE], ids=["cp 2", "cp 3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_transformers(family: str, layout: Layout):
    """Of Mixtral each rank has the windows whole; more prompts than run at once."""
    for answers in answers_of(family, layout, max_num_seqs=2, **DIVIDED):
        check_greedy(answers, family)


@pytest.mark.parametrize(
    ("layout", "gather"), [*((layout, "once") for layout in BESIDE), ("shards along cp too", "block")]
)
def test_greedy_answers_beside_other_techniques(layout: str, gather: str):
    for answers in answers_of("llama", BESIDE[layout], max_num_seqs=2, gather=gather, **DIVIDED):
        check_greedy(answers, "llama")


@pytest.mark.parametrize("layout", [THREE, (Mesh(pp=2, cp=2), None)], ids=["ranks", "stages"])
def test_drawn_answers_that_come_and_go_are_those_of_one_device(layout: Layout):
    prompts, each = requests(13, DRAWN)
    for found in answers_of("llama", layout, each, prompts=prompts, max_num_seqs=4, **DIVIDED):
        check_equal(found, alone("llama", 13, DRAWN))


def test_one_rank_ends_an_answer_on_all_that_share_it():
    def rank(world: World) -> Any:
        def on_token(index: int, token: int) -> bool:
            return not (world.rank == 1 and index == 2 and len(seen) > 4)

        seen = list[int]()
        how = {"on_token": lambda index, token: (seen.append(token), on_token(index, token))[1], **DIVIDED}
        return answers_on(world, "llama", TWO, **how), len(seen)

    planned("llama", TWO, 2)
    first, second = run_on_threads(rank, TWO[0])
    assert first == second
    reasons = [each.finish_reason for each in first[0]]
    assert reasons == ["abort" if number == 2 else "length" for number in range(len(PROMPTS))]


def test_several_answers_to_a_prompt_copy_the_columns_of_each_rank():
    params = replace(DRAWN, n=3)
    (expected,) = answers_of("llama", LAYOUTS["one device"], params)
    for found in answers_of("llama", TWO, params, max_num_seqs=4, **DIVIDED):
        check_equal(found, expected)
    assert expected[0].tokens == drawn_on_one_device("llama")[0].tokens


def test_requests_that_arrive_are_answered_as_all_together():
    answers = served("llama", THREE, lambda: Script(arriving(DRAWN)), **DIVIDED)
    for number, answer in enumerate(drawn_on_one_device("llama")):
        assert tuple(each.token for each in answers[number, 0]) == answer.tokens


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_logits_of_every_forward_are_those_of_the_whole_text(family: str, monkeypatch):
    found, right = list[tuple[torch.Tensor, torch.Tensor]](), ContinuousBatch.run_forward

    def observed(self: Any) -> Any:
        rows, logits = right(self)
        found.append((rows.context.clone(), logits.clone()))
        return rows, logits

    monkeypatch.setattr(ContinuousBatch, "run_forward", observed)
    answers_of(family, THREE, max_num_seqs=2, **DIVIDED)
    assert len(found) > 3 * 2 * NEW
    for context, logits in found:
        for row, expected in zip(context, logits, strict=True):
            with torch.no_grad():
                whole = reference_model(family)(row[row != ABSENT].unsqueeze(0), use_cache=False).logits
            torch.testing.assert_close(expected, whole[0, -1], rtol=0, atol=1e-10)


def test_a_decode_step_sends_outputs_and_tokens_alone():
    rows, heads, layers = len(PROMPTS), 6, 2
    for size, layout in ((2, TWO), (3, THREE)):
        merged = (NEW - 1) * layers * (size - 1) * rows * heads * (8 * 8 + 8)
        agreed = (size - 1) * 24  # on the request
        for rank, found in enumerate(answers_of("llama", layout, use=sent, **DIVIDED)):
            chosen = NEW * rows * 8 if rank == 0 else 0
            assert found == {"GENERATE": merged + agreed + chosen}


def test_each_rank_keeps_its_share_of_the_columns_and_the_plan_says_so(monkeypatch):
    """Whatever sequences come and go: the rank with most has what the plan says, the others a column less."""
    by_thread, right = defaultdict[int, list[tuple[int, int, int]]](list), ContinuousBatch.append

    def observed(self: Any, *given: Any) -> None:
        right(self, *given)
        if self._running is not None:
            rows, columns = self._running.context.shape
            by_thread[threading.get_ident()].append((rows, columns - 1, self.cache_nbytes))

    monkeypatch.setattr(ContinuousBatch, "append", observed)
    plan, layers = planned("llama", THREE, 2), analyzed_family("llama").cached_layers or ()

    def rank(world: World) -> list[tuple[int, int, int]]:
        prompts, each = requests(9, GREEDY)
        answers_on(world, "llama", THREE, each, prompts=prompts, max_num_seqs=3, **DIVIDED)
        return by_thread[threading.get_ident()]

    steps = list(zip(*run_on_threads(rank, THREE[0]), strict=True))
    assert len(steps) > 20
    for ranks in steps:
        ((rows, columns),) = {each[:2] for each in ranks}
        whole = kv_cache_nbytes(layers, plan, 0, rows, columns)
        most = kv_cache_nbytes(layers, plan, 0, rows, columns, **DIVIDED)
        column = kv_cache_nbytes(layers, plan, 0, rows, 1)
        assert most == -(-columns // 3) * column
        assert max(nbytes for *_, nbytes in ranks) == most
        assert sum(nbytes for *_, nbytes in ranks) == whole


def test_windows_lie_whole_on_each_rank_in_the_plan():
    plan, (layer, _) = planned("llama", THREE, 2), analyzed_family("llama").cached_layers or ()
    window = replace(layer, window=7)
    assert kv_cache_nbytes([window], plan, 0, 4, 100, **DIVIDED) == kv_cache_nbytes([window], plan, 0, 4, 7)
    assert kv_cache_nbytes([layer], plan, 0, 4, 100, **DIVIDED) == kv_cache_nbytes([layer], plan, 0, 4, 34)


def test_what_fits_divided_is_refused_whole_and_the_repair_says_so(monkeypatch):
    plan, layers = planned("llama", THREE, 2), analyzed_family("llama").cached_layers or ()
    longest = max(map(len, PROMPTS)) + NEW - 1
    each = kv_cache_nbytes(layers, plan, 0, 1, longest, **DIVIDED)
    monkeypatch.setattr(trainer_module, "available_nbytes", lambda device: 2 * each)

    def rank(world: World) -> Any:
        message = r"for 0 of the longest\n  repair: .* decode_context_parallel=True"
        with pytest.raises(PlanError, match=message):
            answers_on(world, "llama", THREE, max_num_seqs=2)
        with pytest.raises(PlanError, match="for 2 of the longest\n  repair: pass max_num_seqs=2"):
            answers_on(world, "llama", THREE, max_num_seqs=3, **DIVIDED)
        return answers_on(world, "llama", THREE, max_num_seqs=2, **DIVIDED)

    for answers in run_on_threads(rank, THREE[0]):
        check_greedy(answers, "llama")


def test_columns_keep_their_rank_when_others_come_and_go():
    for size in (1, 2, 3):
        columns = [OwnedColumns(index, size, newest=10) for index in range(size)]
        for count in range(9):
            numbers = list(range(11 - count, 11))
            for index, each in enumerate(columns):
                own = numbers[each.places(count)]
                assert own == [number for number in numbers if number % size == index]
                assert each.count(count) == len(own)


def new_columns_without_owner(monkeypatch) -> None:
    right = OwnedColumns.places
    monkeypatch.setattr(
        OwnedColumns, "places", lambda self, count: slice(0, 0, 1) if count == 1 else right(self, count)
    )


def new_columns_of_two_owners(monkeypatch) -> None:
    """The rank before the owner appends the column too."""
    right = OwnedColumns.places

    def places(self: Any, count: int) -> slice:
        is_next = (self.newest + 1) % self._num_ranks == self._index
        return slice(0, 1, 1) if count == 1 and is_next else right(self, count)

    monkeypatch.setattr(OwnedColumns, "places", places)


def masks_of_other_columns(monkeypatch) -> None:
    right = decode_context_parallel._with_own_columns

    def rolled(arguments: Any, layer: Any) -> Any:
        mask = arguments.attn_mask
        return right(arguments if mask is None else replace(arguments, attn_mask=mask.roll(1, -1)), layer)

    monkeypatch.setattr(decode_context_parallel, "_with_own_columns", rolled)


def without_lse(monkeypatch) -> None:
    right = decode_attention_module.attention

    def attention(*given: Any, **how: Any) -> Any:
        out, lse = right(*given, **how)
        return out, torch.zeros_like(lse)

    monkeypatch.setattr(decode_attention_module, "attention", attention)


FAULTS = {
    new_columns_without_owner: PROMPTS[:1],
    new_columns_of_two_owners: PROMPTS[:1],
    masks_of_other_columns: PROMPTS,
    without_lse: PROMPTS[:1],
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_wrong_owners_masks_and_weights_change_the_answers(plant: Callable[[Any], None], monkeypatch):
    prompts, (_, expected) = FAULTS[plant], truth("llama")

    def largest_error() -> float:
        answers = answers_of("llama", THREE, prompts=prompts, **DIVIDED)[0]
        pairs = zip(answers, expected, strict=False)
        return max(abs(x - y) for answer, those in pairs for x, y in zip(answer.logprobs, those, strict=True))

    assert largest_error() < 1e-10
    plant(monkeypatch)
    assert largest_error() > 1e-5


def own_attention() -> nn.Module:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))
    model.config._attn_implementation_internal = "flex_attention"
    return model


def shared_keys() -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, **HEADS)
    config.num_kv_shared_layers = 1
    return transformers.LlamaForCausalLM(config)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bare": (lambda: nn.Linear(2, 2), "Linear is no transformers model"),
    "recurrent": (
        lambda: transformers.Lfm2ForCausalLM(
            transformers.Lfm2Config(**SIZES, **HEADS, layer_types=["full_attention", "conv"])
        ),
        "layer 1 of Lfm2ForCausalLM caches LinearAttentionLayer",
    ),
    "latent": (
        lambda: transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES, **DEEPSEEK)),
        "DeepseekV3ForCausalLM has kv_lora_rank = 8: its layers cache a latent vector",
    ),
    "shared keys": (shared_keys, "num_kv_shared_layers = 1: its layers attend to keys of other layers"),
    "own attention": (own_attention, r"has attention of its own \('flex_attention'\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused_by_name(case: str):
    make, message = REFUSED[case]
    (found,) = division_diagnostics(make(), planned("llama", TWO, 2).sharding)
    with pytest.raises(PlanError, match=message) as error:
        raise PlanError.from_diagnostics([found])
    assert "repair: leave decode_context_parallel out: each rank along cp then has whole" in str(error.value)


def test_a_plan_without_ranks_along_cp_is_refused():
    for layout in (LAYOUTS["one device"], LAYOUTS["tensor"]):
        message = r"the plan shards no sequence(?s:.*)repair: plan with mesh.cp > 1, or leave"
        with pytest.raises(PlanError, match=message):
            answers_of("llama", layout, **DIVIDED)
    with pytest.raises(PlanError, match="the plan shards no sequence"):
        served("llama", LAYOUTS["one device"], lambda: Script(arriving(GREEDY)), **DIVIDED)


def test_stages_that_run_in_lockstep_are_refused(monkeypatch):
    monkeypatch.setattr(generation_step, "make_stage_forwards", lambda *given: None)
    message = "stages of the pipeline send each other more than outputs of blocks\n  repair: leave"
    with pytest.raises(PlanError, match=message):
        answers_of("llama", (Mesh(pp=2, cp=2), None), **DIVIDED)


def test_keys_that_do_not_reach_attention_are_refused_in_the_first_forward(monkeypatch):
    monkeypatch.setitem(test_generate.FAMILIES, "latent", REFUSED["latent"][0])
    monkeypatch.setattr(decode_context_parallel, "UNDIVIDED_SETTINGS", {})
    with pytest.raises(PlanError, match=r"does not receive the keys that its cache returns, in 2 layers"):
        answers_of("latent", TWO, **DIVIDED)


def test_capped_scores_are_refused_by_the_plan():
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **HEADS, head_dim=8))
    with pytest.raises(PlanError, match="softcap"):
        make_plan(analyze(model, batches(1, 12)[0]), tiny_job(), *TWO, 2)


def test_ranks_that_divide_and_ranks_that_do_not_are_refused_together():
    def rank(world: World) -> None:
        with pytest.raises(PlanError, match="the ranks passed different prompts or parameters"):
            answers_on(world, "llama", TWO, decode_context_parallel=world.rank == 0)

    planned("llama", TWO, 2)
    run_on_threads(rank, TWO[0])


def test_the_answers_of_a_call_without_it_are_unchanged():
    def both(trainer: Any, divided: Any) -> Any:
        return divided, trainer.generate(PROMPTS, GREEDY)

    for divided, whole in answers_of("llama", TWO, use=both, **DIVIDED):
        check_greedy(divided, "llama")
        check_greedy(whole, "llama")
