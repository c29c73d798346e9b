"""Predicts the least seconds of `generate`, and its bytes, by simulating the second program of a plan.

    prefill    the operations of a block call in the trial, of other rows and tokens; attention with itself
    decode     those of one token of each row, which read all weights; attention to the cache, which is read
               and written anew with each token, and read by attention
    sample     passes over the logits of a rank in float64

    seconds of a token    how much later a longer program ends, per token: stages of a pipeline overlap

It is the least: one token of a few rows is small work, and Python between operations is not counted. On two
CPU cores, Llamas of 25.6 M and of 3.4 M parameters, 4 to 16 rows, alone and on two ranks along tp, pp and
dp_shard: a prefill took 1.3 to 3.1 times as long, a token 1.7 to 3.7 times.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.plan.generation_program import (
    FORWARDS_OF_GENERATION,
    Rollout,
    generation_program,
    num_sample_tokens,
    num_stages_at_once,
    row_axes,
)
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.kv_cache_spec import CachedLayer
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.model_spec.op_sizes_and_memory import AttentionOp, MatmulOp, MemoryOp
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Action, Program, Role
from meshwright.planner.program_cost.action_cost import ActionCost, ActionCosts, RankFraction
from meshwright.planner.program_cost.device_time import ExecutionTarget
from meshwright.planner.program_cost.kv_cache_memory import kv_cache_nbytes
from meshwright.planner.program_cost.prediction import shared_cores_of, step_breakdown, with_collective_waits

CACHE_PASSES = 3  # a token joins a copy of the cache, which attention reads
LOGITS_PASSES, LOGITS_CALLS, LOGITS_NBYTES = 6, 20, 8
FEW, MORE = 2, 6  # tokens of the two programs whose ends are compared


@dataclass(frozen=True)
class GenerationPrediction:
    """A rollout on all ranks, each the least: the seconds until weights are gathered, from there to the first
    tokens behind the prompts, and for each further token of all sequences that run. `tokens_per_s` are those
    of all ranks, the most.
    """

    gather_s: float
    prefill_s: float
    token_s: float
    tokens_per_s: float


def predict_generation(
    plan: Plan, target: ExecutionTarget, rollout: Rollout, cached_layers: Sequence[CachedLayer]
) -> GenerationPrediction:
    """Returns the prediction of `rollout` under `plan` on `target`. Raises PlanError as `rollout_program`."""

    def seconds(num_new_tokens: int) -> tuple[float, float]:
        longer = replace(rollout, num_new_tokens=num_new_tokens)
        program = with_collective_waits(rollout_program(plan, longer, cached_layers), plan.mesh)
        costs = dict[int, ActionCost]()
        for role in program.roles:
            role_costs = GenerationCosts(plan, role.ranks[0], target, longer, cached_layers)
            costs |= {id(action): role_costs.cost(action) for action in role.actions}
        gather_s = max(sum(costs[id(each)].seconds for each in _gathers_once(role)) for role in program.roles)
        return step_breakdown(program, costs, shared_cores_of(program, target))[0], gather_s

    (first_s, gather_s), (few_s, _), (more_s, _) = map(seconds, (1, FEW, MORE))
    token_s = (more_s - few_s) / (MORE - FEW)
    num_seqs = rollout.num_seqs * plan.mesh.group_size(row_axes(plan))
    return GenerationPrediction(gather_s, first_s - gather_s, token_s, num_seqs / token_s if token_s else 0.0)


def rollout_program(plan: Plan, rollout: Rollout, cached_layers: Sequence[CachedLayer] | None) -> Program:
    """Returns the program of `rollout`. Raises PlanError where it is not known, as `generation_program` does,
    and for a pipeline whose stages run in lockstep because the cache has more than keys and values.
    """
    has_states = cached_layers is None or any(each.states for each in cached_layers)
    if plan.mesh.pp > 1 and has_states:
        text = "the program of generation is not known: stages send each other the outputs of all blocks"
        raise PlanError(text, fix="leave it out")
    return generation_program(plan, rollout)


def sent_per_token(plan: Plan, program: Program) -> dict[str, float]:
    """Returns the bytes that the busiest rank sends for the second token of its sequences in `program`, by
    kind of action.
    """
    found = list[dict[str, float]]()
    for role in program.roles:
        decoded = {each.microbatch for each in role.actions if each.kind == "DECODE"}
        by_kind = defaultdict[str, float](float)
        for action in (each for each in role.actions if each.microbatch in decoded):
            for each in action.sent_transfers:
                by_kind[action.kind] += min_max_sent_nbytes(each, plan.mesh, role.ranks[0])[1]
        found.append({kind: nbytes for kind, nbytes in by_kind.items() if nbytes})
    return max(found, key=lambda by_kind: sum(by_kind.values()))


def sent_weights_nbytes(plan: Plan, program: Program) -> float:
    """Returns the bytes of weights that the busiest rank sends once in `program`, to be gathered."""
    return max(
        sum(
            min_max_sent_nbytes(each, plan.mesh, role.ranks[0])[1]
            for action in _gathers_once(role)
            for each in action.sent_transfers
        )
        for role in program.roles
    )


def _gathers_once(role: Role) -> list[Action]:
    """Returns what gathers weights for all forwards."""
    return [each for each in role.actions if each.kind == "UNSHARD" and each.microbatch is None]


class GenerationCosts(ActionCosts):
    """Computes the cost of each action of one role of the program of `rollout`."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        target: ExecutionTarget,
        rollout: Rollout,
        cached_layers: Sequence[CachedLayer],
    ) -> None:
        super().__init__(plan, rank, target)
        self._rollout, self._layers = rollout, cached_layers
        self._batch_sizes = rollout.batch_sizes(num_stages_at_once(plan))
        self._num_tokens, self._num_keys = rollout.num_prompt_tokens, rollout.num_prompt_tokens
        logits = plan.model_spec.logits
        self._vocab = 0 if logits is None else logits.vocab_size
        self._vocab //= plan.mesh.group_size(plan.sharding.logits_layout.axes_with("S"))

    def _compute_seconds(self, action: Action) -> float:
        sizes = self._batch_sizes
        self._num_samples = sizes[(action.microbatch or 0) % len(sizes)]
        if action.kind == "SAMPLE":
            numel = self._num_samples * self._vocab
            passes = self._warm_memory_seconds(LOGITS_PASSES * LOGITS_NBYTES * numel)
            return max(passes, LOGITS_CALLS * self.target.device_time.call_s)
        if action.kind not in FORWARDS_OF_GENERATION:
            return 0.0
        is_decode = action.kind == "DECODE"
        self._num_tokens = 1 if is_decode else self._rollout.num_prompt_tokens
        self._num_keys = self._rollout.num_prompt_tokens + is_decode
        glue = self._glue_seconds if action.subject in self._first_calls else 0.0
        cache = self._cache_seconds(block_of(action.subject)) if is_decode else 0.0
        if self._model_ops is None:
            ratio = self._num_tokens / num_sample_tokens(self._plan.model_spec)
            flops = self._view.work_share.block_shares[action.subject].flops * self._num_samples * ratio
            return cache + self._unseen_seconds(flops, 0.0)
        work = self._model_ops.by_block_call[action.subject].forward
        return glue + cache + self._ops_seconds(work, self._rank_fraction(action.subject), backward=False)

    def _cache_seconds(self, block: str) -> float:
        layers = [each for each in self._layers if each.block == block]
        nbytes = kv_cache_nbytes(layers, self._plan, self._rank, self._num_samples, self._num_keys)
        return self._warm_memory_seconds(CACHE_PASSES * nbytes) if nbytes else 0.0

    def _rank_fraction(self, block_call: str) -> RankFraction:
        """The tokens of a forward in place of those of a sample; logits are those of the last token."""
        of_step, logits = super()._rank_fraction(block_call), self._plan.model_spec.logits
        is_head = logits is not None and block_of(block_call) == logits.layer
        tokens = (1 if is_head else self._num_tokens) / num_sample_tokens(self._plan.model_spec)
        return RankFraction(tokens, of_step.features, of_step.memory / of_step.tokens * tokens)

    def _op_seconds(
        self, work: MatmulOp | AttentionOp | MemoryOp, fraction: RankFraction, num_samples: int
    ) -> float:
        if isinstance(work, AttentionOp):
            is_causal = work.is_causal and self._num_tokens > 1
            work = replace(work, key_len=self._num_keys, is_causal=is_causal)
        return super()._op_seconds(work, fraction, num_samples)
