"""Bytes that generation sends, by the ledgers of all ranks, and those that it keeps: equal to their laws.

    R rows of a rank, N new tokens, T = prompt + N - 1 tokens through the layers; D wide, e bytes an element
    tp of t ranks     a sum of R T D e in two places of each layer, and one of the embedding: 2 (t-1)/t each;
                      48 (t-1) per row and token to choose it
    pp                R T D e at each border; 8 per row and token from the last stage to the others
    shards            (n-1) S of each shard of S bytes, once per call, however many tokens; gathered block by
                      block once per forward, and two numbers to agree on each
    copies, cp        nothing per token
    every call        24 to each rank; at the end each rank its answers to those with other rows, 24 N + 16 a
                      row, and the last stage 16 N a row to the others

    memory            keys, values and states that live after each forward, and gathered weights: what
                      `plan --max-num-seqs` states

Two calls with 9 and with 5 new tokens show what a token adds. Ranks are threads, a Llama in float64.

    python -m benchmarks.generation.generation_bytes                 all cases, and the result; two minutes
    python -m benchmarks.generation.generation_bytes --only "tp 3"   those with this in their name; no result
"""

import sys
import threading
from argparse import ArgumentParser
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.generation.generation_cases import analyzed_model, plan_of
from benchmarks.harness.result import Result
from meshwright.api import parallelize
from meshwright.comm.collectives.group import World
from meshwright.engine.generation.continuous_batch import ContinuousBatch
from meshwright.engine.generation.sampling_params import SamplingParams
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.generation_program import Gather
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.kv_cache_memory import gathered_weights_nbytes, kv_cache_nbytes
from meshwright.testing.ranks import run_on_threads

NAME = "generation_bytes"
CLAIM = (
    "bytes sent per token while a model in training generates equal the formulas to the byte: two sums per "
    "layer along tp, hidden states and tokens along pp, sharded weights once per call; and live bytes of "
    "keys, values, states and gathered weights are those that plan states"
)
NUM_PROMPTS, LENGTH, NEW, FEWER = 6, 5, 9, 5
ITEM, SCORE_NBYTES, DIGEST_NBYTES, ANSWER_NBYTES, STATE_NBYTES, NUMBER_NBYTES = 8, 48, 24, 24, 16, 8
SHARDED_TOKENS = (TensorParallel(), SequenceParallel(), VocabParallel())
Kept = list[tuple[int, int, int, bool]]  # rows, tokens and bytes of a cache; whether all went on by a token
_kept = threading.local()


@dataclass(frozen=True)
class Case:
    """A model under a plan; without `strategies`, those that the mesh has by default."""

    name: str
    mesh: Mesh
    model: str = "llama"
    strategies: tuple[Strategy, ...] | None = None
    gather: Gather = "once"

    def plan(self) -> Plan:
        """Makes the plan."""
        return plan_of(self.model, self.mesh, self.strategies)


SENT_CASES = (
    *(Case(f"{axis} {size}", Mesh(**{axis: size})) for axis in ("tp", "pp", "cp") for size in (2, 3)),
    Case("tp 3, sharded tokens", Mesh(tp=3), strategies=SHARDED_TOKENS),
    Case("copies on 3", Mesh(dp_replicate=3)),
    *(Case(f"ZeRO-3 on {size}", Mesh(dp_shard=size)) for size in (2, 3)),
    Case("ZeRO-3 on 3, block by block", Mesh(dp_shard=3), gather="block"),
    Case("ZeRO-3 on 2, tp 3", Mesh(dp_shard=2, tp=3)),
    Case("ZeRO-3 on 2, pp 2", Mesh(dp_shard=2, pp=2)),
    Case("pp 2, tp 3", Mesh(pp=2, tp=3)),
    Case("pp 3, tp 2", Mesh(pp=3, tp=2)),
)
KEPT_ON = {"one device": Mesh(), "tp 2": Mesh(tp=2), "tp 3": Mesh(tp=3), "pp 2": Mesh(pp=2)}
KEPT_CASES = tuple(
    Case(f"{model}, {name}", mesh, model)
    for model in ("gpt2", "mistral", "gemma3_text", "deepseek_v3", "mixtral", "mamba")
    for name, mesh in KEPT_ON.items()
    if model != "mamba" or mesh.tp == 1  # tensor_parallel refuses it
)


def law(case: Case, plan: Plan, rank: int, new: int) -> Fraction:
    """Returns the bytes that `rank` sends in a call that adds `new` tokens to each prompt."""
    mesh, at = plan.mesh, plan.mesh.coordinate(rank)
    groups, view = mesh.dp_replicate * mesh.dp_shard * mesh.cp, plan.rank_view(rank)
    rows, tokens = NUM_PROMPTS // groups, LENGTH + new - 1
    stream = rows * tokens * plan.model_spec.residual_flows[0].hidden_size * ITEM
    calls = view.model_spec.block_calls
    is_first, is_last = at["pp"] == 0, at["pp"] == mesh.pp - 1
    sums = 2 * sum("layers." in call for call in calls) + is_first
    found = Fraction(DIGEST_NBYTES * (mesh.world_size - 1))
    found += sums * stream * Fraction(2 * (mesh.tp - 1), mesh.tp)
    found += SCORE_NBYTES * (mesh.tp - 1) * rows * new * is_last
    found += stream * (not is_last)
    if mesh.pp > 1 and is_last:
        found += rows * new * (NUMBER_NBYTES + 2 * NUMBER_NBYTES)
    found += (groups - 1) * rows * (ANSWER_NBYTES * new + STATE_NBYTES)
    forwards = 1 if case.gather == "once" else new
    shards = sum(map(view.shard_numel, view.flat_param_specs.values())) if mesh.dp_shard > 1 else 0
    found += (mesh.dp_shard - 1) * shards * ITEM * forwards
    if case.gather == "block":
        agreed = 2 * NUMBER_NBYTES * (new + 1)
        found += agreed * Fraction(2 * (mesh.dp_shard - 1), mesh.dp_shard)
    return found


def sent_by_rank(case: Case, plan: Plan, new: int) -> list[Fraction]:
    """Returns what the ledger of each rank says of a call."""

    def rank(world: World) -> Fraction:
        with parallelize(analyzed_model(case.model), plan, world=world) as trainer:
            before = _generated_nbytes(world)
            trainer.generate(_prompts(), _params(new), max_num_seqs=NUM_PROMPTS, gather=case.gather)
            return _generated_nbytes(world) - before

    return run_on_threads(rank, plan.mesh, timeout_s=600)


def compare_sent(case: Case) -> dict[str, Any]:
    """Returns the row of a case: how far the ledgers are from the law, and what a token adds."""
    plan = case.plan()
    by_tokens = {new: sent_by_rank(case, plan, new) for new in (NEW, FEWER)}
    off = max(
        abs(found - law(case, plan, rank, new))
        for new, by_rank in by_tokens.items()
        for rank, found in enumerate(by_rank)
    )
    more = zip(by_tokens[NEW], by_tokens[FEWER], strict=True)
    per_token = [float((one - other) / (NEW - FEWER)) for one, other in more]
    sent = list(map(float, by_tokens[NEW]))
    return {"case": case.name, "off": float(off), "sent": sent, "per token": per_token}


def kept_by_rank(case: Case, plan: Plan) -> list[tuple[Kept, int]]:
    """Returns of each rank what its cache kept after each forward, and the bytes of its parameters, shared
    memory counted once.
    """

    def rank(world: World) -> tuple[Kept, int]:
        with parallelize(analyzed_model(case.model), plan, world=world) as trainer:
            _kept.caches, _kept.gathered = [], 0
            trainer.generate(_prompts(), _params(NEW), max_num_seqs=NUM_PROMPTS, gather=case.gather)
            return _kept.caches, _kept.gathered

    with patch.object(ContinuousBatch, "append", _noting(ContinuousBatch.append)):
        return run_on_threads(rank, plan.mesh, timeout_s=600)


def compare_kept(case: Case) -> dict[str, Any]:
    """Returns the row of a case: how far live bytes are from those of the plan. After a prefill, windows may
    keep less.
    """
    plan, layers = case.plan(), analyzed_model(case.model).cached_layers or ()
    off, peaks = [], []
    for rank, (caches, gathered) in enumerate(kept_by_rank(case, plan)):
        stated = [kv_cache_nbytes(layers, plan, rank, rows, tokens) for rows, tokens, _, _ in caches]
        for (_, _, found, go_on), expected in zip(caches, stated, strict=True):
            off.append(abs(found - expected) if go_on else max(0, found - expected))
        peaks.append(max(found for _, _, found, _ in caches))
        if planned := gathered_weights_nbytes(plan, rank) if case.gather == "once" else 0:
            off.append(abs(gathered - planned))
    return {"case": f"memory: {case.name}", "off": float(max(off)), "cache": peaks}


def _noting(append: Any) -> Any:
    def noted(self: Any, rows: Any, ids: torch.Tensor) -> None:
        before = [] if self._running is None else self._running.sequences
        append(self, rows, ids)
        if self._running is not None:
            sequences, columns = self._running.context.shape
            goes_on = rows.sequences is before and sequences == len(before)
            _kept.caches.append((sequences, columns - 1, self.cache_nbytes, goes_on))
        memory = [(each.untyped_storage(), each.nbytes) for each in self._forward._module.parameters()]
        # those of other stages have no memory of their own
        storages = {each.data_ptr(): each.nbytes() for each, nbytes in memory if each.nbytes() >= nbytes}
        _kept.gathered = sum(storages.values())

    return noted


def _generated_nbytes(world: World) -> Fraction:
    sent = [nbytes for name, nbytes in world.ledger.sent_nbytes.items() if "GENERATE" in name]
    return sum((Fraction(each).limit_denominator(10**3) for each in sent), Fraction(0))


def _prompts() -> list[list[int]]:
    return [[1 + (7 * row + place) % 250 for place in range(LENGTH)] for row in range(NUM_PROMPTS)]


def _params(new: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, stop_token_ids=())


def result(rows: list[dict[str, Any]]) -> Result:
    """Returns the result of all cases: how many agree to the byte."""
    values = [row["off"] for row in rows]
    return Result.of_count(NAME, CLAIM, values, limit=0.0, bar=len(values), detail={"cases": rows})


def main() -> None:
    """Compares the selected cases, and writes the result if all were."""
    parser = ArgumentParser(description="bytes that generation sends and keeps, against their laws")
    parser.add_argument("--only", default="", help="a text in the name of a case")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    rows = []
    compared = [*((compare_sent, each) for each in SENT_CASES)]
    compared += [(compare_kept, each) for each in (*SENT_CASES, *KEPT_CASES)]
    for compare, case in compared:
        if only in case.name:
            rows.append(compare(case))
            print(rows[-1], file=sys.stderr, flush=True)
    if not only:
        print(result(rows).write(NAME))


if __name__ == "__main__":
    main()
