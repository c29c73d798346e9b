"""Memory of attention on a sequence shard, in addition to a rank's share of the memory of one device.

    saved       key and value heads that go to several ranks; the output, which the next product
                saves in addition to the copy of the backward of attention
    backward    in the backward of attention, the gradients of those heads, and the messages of a ring

The backward part counts from the memory at that moment, when most of a block's activations are freed already
(plan/step/memory/block_call_memory.py): the peak of a backward may well be at another moment.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.parallel.context.context_parallel_strategy import local_heads
from meshwright.parallel.context.ulysses_all_to_all import KVHeadAssignment
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.model_spec.sequence_info import AttentionSpec
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sequence_sharding import SequenceSharding
from meshwright.plan.step.memory.block_call_memory import ActivationMemory, activation_memory
from meshwright.plan.step.memory.memory_names import SCRATCH, saved_activations_name
from meshwright.plan.step.program import Action, Program, with_extra_memory
from meshwright.plan.step.single_device_program import FORWARD_KINDS, INPUT_GRAD_KINDS, samples_per_microbatch


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of attention in one block call and microbatch: saved, and in addition during its backward."""

    saved_nbytes: int = 0
    backward_nbytes: int = 0


def ring_memory(
    view: RankView,
    job: Job,
    sequence_sharding: SequenceSharding,
    attend: AttentionSpec,
    num_samples: int,
) -> AttentionMemory:
    """Returns the memory that a ring adds to one attention call: a copy of its output for the next product,
    which may overwrite it.
    """
    heads, _ = local_heads(view, attend)
    return AttentionMemory(
        num_samples
        * max(sequence_sharding.num_tokens_by_rank(attend.query_len))
        * heads
        * attend.value_head_dim
        * FLOAT_NBYTES[job.precision.compute]
    )


def exchange_memory(
    view: RankView,
    job: Job,
    sequence_sharding: SequenceSharding,
    attend: AttentionSpec,
    num_samples: int,
) -> AttentionMemory:
    """Returns the memory that the exchange of tokens and heads adds to one attention call."""
    if sequence_sharding.num_inner_ranks == 1:
        return AttentionMemory()
    heads, groups = local_heads(view, attend)
    needs, keys = (
        KVHeadAssignment.for_heads(heads, groups, sequence_sharding.num_inner_ranks),
        num_samples
        * max(sequence_sharding.num_tokens_by_rank(attend.key_len))
        * FLOAT_NBYTES[job.precision.compute],
    )
    sent = heads if needs.used_heads else sequence_sharding.num_inner_ranks * needs.num_sent
    more = keys * (sent - groups) * (attend.head_dim + attend.value_head_dim)
    return AttentionMemory(
        more + ring_memory(view, job, sequence_sharding, attend, num_samples).saved_nbytes, more
    )


def add_attention_memory(
    program: Program,
    view: RankView,
    job: Job,
    in_flight_nbytes: Callable[[Action], int] = lambda action: 0,
    memory_of: Callable[[AttentionSpec, int], AttentionMemory] = lambda attention_call, num_samples: (
        AttentionMemory()
    ),
) -> Program:
    """Returns `program` with the memory of attention: `memory_of` a call on a number of samples, and
    `in_flight_nbytes` of a backward.
    """
    tokens = view.plan.model_spec.sequence_info

    def add_memory(actions: list[Action]) -> list[Action]:
        num_samples = samples_per_microbatch(actions, view.plan, job)
        known, memory_by_call = activation_memory(view, job, num_samples), dict[str, AttentionMemory]()
        for attention_call in tokens.attention_calls if tokens is not None else ():
            before, own = (
                memory_by_call.get(attention_call.block_call, AttentionMemory()),
                memory_of(attention_call, num_samples),
            )
            memory_by_call[attention_call.block_call] = AttentionMemory(
                before.saved_nbytes + own.saved_nbytes, max(before.backward_nbytes, own.backward_nbytes)
            )
        return [
            _with_memory(action, memory_by_call.get(action.subject), known, in_flight_nbytes)
            for action in actions
        ]

    return program.edit(add_memory)


def _with_memory(
    action: Action,
    memory: AttentionMemory | None,
    known: Mapping[str, ActivationMemory],
    travelling: Callable[[Action], int],
) -> Action:
    if memory is None:
        return action
    if action.kind in FORWARD_KINDS:
        return with_extra_memory(
            action, saved_activations_name(action.subject, action.microbatch), memory.saved_nbytes
        )
    held = next((hold.nbytes for hold in action.allocations if hold.name == SCRATCH), None)
    if action.kind not in INPUT_GRAD_KINDS or held is None:
        return action
    late = known[action.subject].attention_backward_nbytes if action.subject in known else None
    on_top = memory.backward_nbytes + travelling(action)
    return with_extra_memory(action, SCRATCH, on_top if late is None else max(0, late + on_top - held))
