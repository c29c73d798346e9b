"""The bytes of keys, values and states are those that live on each rank, and what does not fit is refused."""

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from meshwright.comm.collectives.group import World
from meshwright.engine.generation.continuous_batch import ContinuousBatch
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.kv_cache_spec import CachedLayer
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.program_cost.kv_cache_memory import gathered_weights_nbytes, kv_cache_nbytes
from meshwright.run.training import trainer as trainer_module
from meshwright.testing.ranks import run_on_threads
from tests.engine.generation import test_generate
from tests.engine.generation.test_continuous_batch import FAMILIES
from tests.engine.generation.test_generate import (
    GREEDY,
    LAYOUTS,
    PROMPTS,
    analyzed_family,
    answers_of,
    answers_on,
    planned,
)
from tests.parallel.tensor.odd_llama import SIZES

LATENT = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
DEEPSEEK = {"num_attention_heads": 6, "num_key_value_heads": 6, "first_k_dense_replace": 2, **LATENT}
MORE: dict[str, Callable[[], Any]] = {
    **FAMILIES,
    "latent": lambda: transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES, **DEEPSEEK)),
    "one key": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=1)
    ),
}
LIMITS = [replace(GREEDY, max_new_tokens=limit) for limit in (7, 3, 9, 2, 5)]


@pytest.fixture(autouse=True)
def more_families(monkeypatch) -> None:
    """Adds the families of this module to those of the answers."""
    for name, make in MORE.items():
        monkeypatch.setitem(test_generate.FAMILIES, name, make)


ONE, SLICES, STAGES = LAYOUTS["one device"], LAYOUTS["tensor"], LAYOUTS["pipeline"]
CASES = [
    *[(family, ONE) for family in ("gpt2", "mixtral", *MORE)],
    *[(family, SLICES) for family in ("llama", "gpt2", "mixtral", "latent", "one key")],
    ("llama", (Mesh(tp=2), None)),
    ("llama", (Mesh(tp=5), None)),
    ("mixtral", STAGES),
    ("recurrent and attention", STAGES),
]


Live = list[tuple[bool, int, int, int]]  # whether all went on by a token; sequences, tokens and bytes


@pytest.fixture
def live(monkeypatch) -> dict[int, Live]:
    """What each rank caches after each forward, by its thread."""
    found, right = defaultdict[int, Live](list), ContinuousBatch.append

    def observed(self: Any, rows: Any, ids: torch.Tensor) -> None:
        before = None if self._running is None else self._running.sequences
        right(self, rows, ids)
        if self._running is not None:
            sequences, columns = self._running.context.shape
            go_on = rows.sequences is before and sequences == len(before)
            found[threading.get_ident()].append((go_on, sequences, columns - 1, self.cache_nbytes))

    monkeypatch.setattr(ContinuousBatch, "append", observed)
    return found


@pytest.mark.parametrize(("family", "layout"), CASES, ids=str)
def test_live_bytes_are_those_of_the_plan(family: str, layout: Any, live: dict[int, Live]):
    plan, layers = planned(family, layout, 2), analyzed_family(family).cached_layers
    assert layers

    def rank(world: World) -> Live:
        answers_on(world, family, layout, LIMITS, max_num_seqs=2)
        return live[threading.get_ident()]

    by_rank = run_on_threads(rank, layout[0])
    assert any(go_on and sequences == 2 for found in by_rank for go_on, sequences, _, _ in found)
    for index, found in enumerate(by_rank):
        for go_on, sequences, tokens, nbytes in found:
            expected = kv_cache_nbytes(layers, plan, index, sequences, tokens)
            assert nbytes == expected if go_on else nbytes <= expected  # copies of a window are smaller


def test_the_formula_is_that_of_the_heads():
    (layer, _), plan = analyzed_family("llama").cached_layers or (), planned("llama", ONE, 2)
    assert layer == CachedLayer("model.layers.0", num_heads=3, per_token_numel=2 * 3 * 8)
    assert kv_cache_nbytes([layer], plan, 0, 4, 100) == 2 * 4 * 100 * 3 * 8 * 8
    assert kv_cache_nbytes([replace(layer, window=7)], plan, 0, 4, 100) == 2 * 4 * 7 * 3 * 8 * 8


def test_gathered_weights_are_those_of_slices_and_stages():
    """With padding: shards of a group are equally large."""
    by_layout = {
        mesh: gathered_weights_nbytes(planned("llama", (mesh, None), 2), 0)
        for mesh in (Mesh(tp=3), Mesh(dp_shard=3), Mesh(dp_shard=2, tp=3), Mesh(dp_shard=2, pp=2))
    }
    whole, in_slices, in_stage = list(by_layout.values())[1:]
    numels = [param.numel for param in planned("llama", ONE, 2).model_spec.params]
    assert by_layout[Mesh(tp=3)] == 0
    assert 0 <= whole - 8 * sum(numels) < 8 * 3 * 8 * len(numels)
    assert whole / 3 < in_slices < 0.4 * whole
    assert 0.4 * whole < in_stage < 0.6 * whole


@pytest.mark.parametrize("gather", ["once", "block"])
def test_what_does_not_fit_is_refused_on_all_ranks(gather: str, monkeypatch):
    layout, layers = LAYOUTS["shards"], analyzed_family("llama").cached_layers or ()
    plan = planned("llama", layout, 2)
    longest = max(len(prompt) + params.max_new_tokens for prompt, params in zip(PROMPTS, LIMITS, strict=True))
    each = kv_cache_nbytes(layers, plan, 0, 1, longest - 1)
    weights = gathered_weights_nbytes(plan, 0) if gather == "once" else 0
    monkeypatch.setattr(trainer_module, "available_nbytes", lambda device: weights + 4 * each - 1)

    def rank(world: World) -> None:
        with pytest.raises(PlanError, match="for 3 of the longest\n  repair: pass max_num_seqs=3"):
            answers_on(world, "llama", layout, LIMITS, gather=gather, max_num_seqs=4)
        assert len(answers_on(world, "llama", layout, LIMITS, gather=gather, max_num_seqs=3)) == len(PROMPTS)

    run_on_threads(rank, layout[0])


def test_a_cache_of_which_nothing_fits_is_refused_with_shorter_answers(monkeypatch):
    monkeypatch.setattr(trainer_module, "available_nbytes", lambda device: 100)
    with pytest.raises(PlanError, match="for 0 of the longest\n  repair: shorten the prompts"):
        answers_of("llama", ONE, LIMITS)
