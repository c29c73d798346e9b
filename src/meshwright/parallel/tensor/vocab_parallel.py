"""Vocabulary parallelism: embedding, LM head and logits are sharded along the vocabulary.

Why it works: a row of the embedding is looked up on the rank that has the id; the others add zeros. A rank's
part of the LM head computes the logits of its ids, and cross-entropy needs of the others only their
log-sum-exp and the label's logit: two numbers per token (engine/losses/vocab_parallel_logits.py). Embedding
and LM head, tied or not, are sharded alike, so a rank steps the same rows of both.

    ids ---> rows 0..33 ---P -> I---> ... layers ... ---I -> R---> logits 0..33  ---a, t--+         rank 0
    ids ---> rows 34..66 --P -> I---> ... layers ... ---I -> R---> logits 34..66 --a, t--+--> loss  rank 1
        backward: nothing                    backward: sum          backward: nothing

    a = log sum exp(a rank's logits), t = the label's logit or 0: loss = log sum exp(a_0, a_1, ...) - sum t
    weights: embedding, LM head and its bias S(vocabulary); logits S(vocabulary), never gathered

The vocabulary need not divide by the number of ranks: the first ranks have one more.
Cost, per microbatch of b samples of s tokens, on t ranks: one all_reduce of b s h in the forward, for the
embedding, and one in the backward, for the LM head; two numbers of 4 bytes per token from each rank to each.
Embedding, LM head, their gradients and optimizer states, and the logits: 1/t.
Limits: an operation over all logits of a token between LM head and loss, a loss that cannot be computed in
parts, or another reader of the embedding keep embedding or LM head unsharded (`meshwright inspect` says
which, and why). An optimizer that reads whole matrices steps each on one rank, which then has it in full;
AdamW, SGD and Lion do not.
Paper: Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053 (section 3: the parallel embedding and
cross-entropy).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, cast

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.parallel.tensor.collective_insertion import add_planned_comm, reduce_token_count_along
from meshwright.parallel.tensor.layer_split_checks import check_units
from meshwright.parallel.tensor.sharded_layer import (
    WIDTH_SHARD,
    LayerSharding,
    LayerShardings,
    ParamTensors,
    Redistribution,
    bind_layers,
    layer_key,
    linear,
    shard_params,
)
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ModelSpec
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import P, R
from meshwright.plan.step.chunked_loss_cost import chunk_sizes, num_local_logit_tokens
from meshwright.plan.step.program import Action, Program, Transfer
from meshwright.plan.step.single_device_program import samples_per_microbatch
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

VOCAB_ROLES = ("embedding", "lm_head")


@dataclass(frozen=True)
class VocabParallel(Strategy):
    """Shards embeddings and LM heads along the vocabulary over `axis`."""

    name: ClassVar[str] = "vocab_parallel"
    phase: ClassVar[StrategyPhase] = "shard"
    axis: str = field(default="tp", metadata=one_of("tp"))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location = "strategies.vocab_parallel"
        if not can_shard_vocab(sharding.model_spec, 1):
            found = {
                weight.not_shardable_reason: weight.name
                for weight in sharding.model_spec.params
                if weight.not_shardable_reason and len(weight.shape) > 1
            }
            kept = "; ".join(f"{name}: {why}" for why, name in list(found.items())[:2])
            text = f"{sharding.model_spec.name} has no embedding and no LM head that can be sharded" + (
                f" ({kept})" if kept else ""
            )
            yield Diagnostic(text, "leave the strategy out; they stay whole on every rank", location)
        yield from check_units(sharding, self.layer_shardings(sharding))

    def layer_shardings(self, sharding: ShardingPlan) -> LayerShardings:
        """Returns the layer shardings by role; the residual stream has the placement of `sharding`."""
        calls, compute = (
            sharding.model_spec.layer_calls,
            linear if sharding.num_loss_chunks == 1 else _linear_without_comm,
        )
        stream = {
            role: sharding.residual_placement([call for call in calls if call.role == role], self.axis)
            for role in VOCAB_ROLES
        }
        return {
            "embedding": LayerSharding(
                {self.axis: "in"},
                output_redistribution=Redistribution(self.axis, P, stream["embedding"], in_param_dtype=True),
            ),
            "lm_head": LayerSharding(
                {self.axis: "out"},
                input_redistribution=Redistribution(self.axis, stream["lm_head"], R),
                compute=compute,
            ),
        }

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        layer_shardings = self.layer_shardings(sharding)
        if sharding.model_spec.logits is not None:
            sharding = sharding.with_logits_placement(self.axis, WIDTH_SHARD)
        return shard_params(sharding, layer_shardings)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        program = add_planned_comm(program, self.layer_shardings(view.plan), view, job)
        return reduce_token_count_along(
            program.edit(lambda actions: self._insert_loss_gathers(actions, view, job)), self.axis
        )

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        view = runtime.state.plan.view
        layer_shardings = dict(self.layer_shardings(view.plan))
        whole = [param_sharding.param for param_sharding in view.plan.param_shardings]
        named = {name: weight for weight in whole for name in weight.names}
        for layer in dict.fromkeys(
            call.name for call in view.model_spec.layer_calls if call.role == "embedding"
        ):
            weight = named[f"{layer}.weight"]
            words = (
                range(*view.slice_range(weight.name, self.axis)),
                weight.dim_split(0).num_units,
            )  # rows, whatever the LM head calls them
            layer_shardings[layer_key(layer)] = replace(
                layer_shardings["embedding"], compute=partial(_embed_local_rows, *words)
            )
        bind_layers(runtime, layer_shardings)
        return {}

    def _insert_loss_gathers(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        logits = view.model_spec.logits
        if logits is None:
            return actions
        dtype = "float64" if job.precision.compute == "float64" else "float32"
        each = (
            samples_per_microbatch(actions, view.plan, job) * logits.num_reduced_values * FLOAT_NBYTES[dtype]
        )
        gathered = (
            Transfer("all_gather", (self.axis,), each * size, dtype=dtype)
            for size in chunk_sizes(num_local_logit_tokens(view), view.plan.num_loss_chunks)
        )
        inner = tuple(gathered)
        return [
            replace(action, inner_transfers=(*action.inner_transfers, *inner))
            if action.kind == "LOSS"
            else action
            for action in actions
        ]


def can_shard_vocab(model_spec: ModelSpec, num_ranks: int) -> bool:
    """Returns whether the model has an embedding or an LM head that can be sharded along the vocabulary over
    `num_ranks` ranks.
    """
    words = [
        weight.split_of_side("in" if weight.role == "embedding" else "out")
        for weight in model_spec.params
        if weight.role in VOCAB_ROLES
    ]
    return bool(words) and all(cut is not None and cut.num_units >= num_ranks for cut in words)


def unsharded_vocab_notes(model_spec: ModelSpec) -> Iterator[str]:
    """Yields a note on each embedding and LM head that stays unsharded, with the reason."""
    kept = [
        weight
        for weight in model_spec.params
        if weight.role in ("lm_head_unsharded", "embedding_unsharded") and len(weight.shape) > 1
    ]
    for weight in kept:
        if weight.role == "lm_head_unsharded" or weight.aliases:
            yield f"{weight.name} stays whole on every rank: {weight.not_shardable_reason}"


def _linear_without_comm(
    runtime: Runtime, module: nn.Module, held: ParamTensors, x: torch.Tensor
) -> torch.Tensor:
    return F.linear(x, held["weight"], held.get("bias"))


def _embed_local_rows(
    words: range, total: int, runtime: Runtime, module: nn.Module, held: ParamTensors, ids: torch.Tensor
) -> torch.Tensor:
    table = cast(nn.Embedding, module)
    padding, elsewhere = (
        table.padding_idx,
        (ids >= 0) & (ids < total) & ((ids < words.start) | (ids >= words.stop)),
    )
    table.padding_idx = None if padding is None or padding not in words else padding - words.start
    try:
        rows = type(table).forward(table, (ids - words.start).masked_fill(elsewhere, 0))
    finally:
        table.padding_idx = padding
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)
