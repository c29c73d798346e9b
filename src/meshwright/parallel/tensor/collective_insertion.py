"""Adds the planned collectives of sharded layers to the forwards and backwards of the block calls that run
them.

    F(block call)    per layer call in order: input, inside, output; layers that share a tensor have one input
    B(block call)    in reverse: output, inside, input if regathered, shared parameters' gradients, input
    I, W             of a split backward: W has the gradients of shared parameters, and everything of a block
                     call whose input needs no gradient; those of a joint backward, or of parameters that are
                     used twice, are summed in I

Of layers that end in one sum, the last has the redistribution of their output (joint_sum.py). A block
call is the same in every microbatch, so its collectives are computed once per direction.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.parallel.tensor.comm_overlap import chunk_sizes
from meshwright.parallel.tensor.sharded_layer import (
    LayerParam,
    LayerSharding,
    LayerShardings,
    Redistribution,
    find_layer_sharding,
    joint_sums,
    params_by_layer,
    unsharded_params,
)
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import I, P, R
from meshwright.plan.step.memory.memory_names import saved_activations_name
from meshwright.plan.step.program import Action, Program, Transfer, with_extra_memory
from meshwright.plan.step.single_device_program import (
    COUNT_NBYTES,
    FORWARD_KINDS,
    reduce_totals_along,
    samples_per_microbatch,
)

ShardedCall = tuple[int, LayerCall, LayerSharding]  # a call, with its number among those of the model
PlannedMove = tuple[
    Redistribution, int, int
]  # a move, the elements of the value, and when: after the number of the call, backwards below 0


@dataclass(frozen=True)
class _BlockCallComm:
    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]
    input_backward: tuple[Transfer, ...]
    weight_backward: tuple[Transfer, ...]
    extra_nbytes: int

    def insert(self, action: Action) -> Action:
        met = {
            **dict.fromkeys(FORWARD_KINDS, self.forward),
            "B": self.backward,
            "I": self.input_backward,
            "W": self.weight_backward,
        }
        if action.kind not in met:
            return action
        inner = tuple(sorted((*action.inner_transfers, *met[action.kind]), key=lambda each: each.position))
        if action.kind not in FORWARD_KINDS or not self.extra_nbytes:
            return replace(action, inner_transfers=inner)
        name = saved_activations_name(action.subject, action.microbatch)
        return replace(with_extra_memory(action, name, self.extra_nbytes), inner_transfers=inner)


def add_planned_comm(program: Program, layer_shardings: LayerShardings, view: RankView, job: Job) -> Program:
    """Returns `program` with the collectives of all sharded layers in the forwards and backwards that run
    them.
    """

    def add_comm(actions: list[Action]) -> list[Action]:
        block_calls = _block_call_comm(
            layer_shardings, view, job, samples_per_microbatch(actions, view.plan, job)
        )
        return [
            block_calls[action.subject].insert(action) if action.subject in block_calls else action
            for action in actions
        ]

    return program.edit(add_comm)


def reduce_token_count_along(program: Program, axis: str) -> Program:
    """Returns `program` with TOKEN_COUNT summed along `axis` too, so that every rank learns of a stop
    request.
    """
    return reduce_totals_along(program, axis, {"TOKEN_COUNT": COUNT_NBYTES})


def _block_call_comm(
    layer_shardings: LayerShardings, view: RankView, job: Job, num_samples: int
) -> dict[str, _BlockCallComm]:
    calls: dict[str, list[ShardedCall]] = {}
    sums = joint_sums(view.model_spec.layer_calls, layer_shardings)
    for at, call in enumerate(_local_calls(view)):
        layer_sharding = find_layer_sharding(layer_shardings, call.name, call.role)
        if layer_sharding is not None:
            last = sums.get(call.name, (call.name,))[-1]  # it moves the sum of all
            calls.setdefault(call.block_call, []).append(
                (
                    at,
                    call,
                    layer_sharding
                    if call.name == last
                    else replace(layer_sharding, output_redistribution=None),
                )
            )
    leaves, learning, boundaries = (
        params_by_layer(view.param_shardings),
        _trainable_layers(view),
        view.plan.model_spec.stage_boundaries,
    )

    def transfers_of(taken: Iterable[PlannedMove]) -> tuple[Transfer, ...]:
        return tuple(each for move, numel, at in taken for each in move.transfers(numel, view.plan, job, at))

    def plan_block_call(block_call: str, mine: Sequence[ShardedCall]) -> _BlockCallComm:
        back = list(_backward_moves(mine, num_samples, leaves, learning))
        if boundaries is not None and not boundaries.input_needs_grad(block_call):
            back = [(taken, True) for taken, _ in back]
        whole, first, late = (
            transfers_of(taken for taken, each in back if each in halves)
            for halves in ((True, False), (False,), (True,))
        )
        more = _gathered_numel(mine, num_samples, view.plan, learning) * FLOAT_NBYTES[job.precision.compute]
        return _BlockCallComm(transfers_of(_forward_moves(mine, num_samples)), whole, first, late, more)

    return {block_call: plan_block_call(block_call, mine) for block_call, mine in calls.items()}


def _local_calls(view: RankView) -> Iterator[LayerCall]:
    for call in view.model_spec.layer_calls:
        share = view.work_share.token_fraction(call.block_call, call.name)
        yield (
            call
            if share == 1
            else replace(call, in_numel=int(call.in_numel * share), out_numel=int(call.out_numel * share))
        )


def _gathered_numel(
    calls: Iterable[ShardedCall], num_samples: int, sharding: ShardingPlan, learning: Collection[str]
) -> int:
    kept = {
        (call.input_id, layer_sharding.input_redistribution): call.in_numel
        for _, call, layer_sharding in calls
        if call.name in learning and not layer_sharding.regather
    }
    more = 0
    for (_, into), numel in kept.items():
        if into is not None and into.src.letter == "S" and into.dst == R:
            whole = numel // sharding.mesh.group_size(into.sharded_axes)
            more += whole - whole // sharding.mesh.size(into.axis)
    return more * num_samples


def _forward_moves(calls: Iterable[ShardedCall], num_samples: int) -> Iterator[PlannedMove]:
    taken = set()
    for at, call, layer_sharding in calls:
        if (
            layer_sharding.input_redistribution is not None
            and (call.input_id, layer_sharding.input_redistribution) not in taken
        ):
            taken.add((call.input_id, layer_sharding.input_redistribution))
            yield layer_sharding.input_redistribution, call.in_numel * num_samples, at
        yield from (
            (move, numel * num_samples, at) for move, numel in layer_sharding.inner_redistributions(call)
        )
        if layer_sharding.output_redistribution is not None:
            yield from (
                (layer_sharding.output_redistribution, call.out_numel * part, at)
                for part in chunk_sizes(num_samples, layer_sharding.num_chunks)
            )


def _backward_moves(
    calls: Sequence[ShardedCall],
    num_samples: int,
    leaves: Mapping[str, Sequence[LayerParam]],
    learning: Collection[str],
) -> Iterator[tuple[PlannedMove, bool]]:
    alike: dict[tuple[int, Redistribution | None], list[LayerCall]] = {}
    first: dict[tuple[str, str], int] = {}
    uses: Counter[tuple[str, str]] = Counter()
    for at, call, layer_sharding in calls:
        alike.setdefault((call.input_id, layer_sharding.input_redistribution), []).append(call)
        for axis in layer_sharding.shared_param_axes:
            for _, param_sharding in unsharded_params(leaves.get(call.name, ()), axis):
                first.setdefault((param_sharding.param.name, axis), at)
                uses[param_sharding.param.name, axis] += 1
    anew = set()
    for at, call, layer_sharding in reversed(calls):
        into, taking = (
            layer_sharding.input_redistribution,
            alike[call.input_id, layer_sharding.input_redistribution],
        )
        if layer_sharding.output_redistribution is not None:
            yield from (
                ((layer_sharding.output_redistribution.adjoint, call.out_numel * part, -at), False)
                for part in chunk_sizes(num_samples, layer_sharding.num_chunks)[::-1]
            )
        if call.input_needs_grad:
            yield from (
                ((move.adjoint, numel * num_samples, -at), False)
                for move, numel in reversed(list(layer_sharding.inner_redistributions(call)))
            )
        if (
            into is not None
            and layer_sharding.regather
            and (call.input_id, into) not in anew
            and call.name in learning
        ):
            anew.add((call.input_id, into))
            yield (into, call.in_numel * num_samples, -at), False
        for axis in reversed(layer_sharding.shared_param_axes):
            for _, param_sharding in reversed(unsharded_params(leaves.get(call.name, ()), axis)):
                if param_sharding.param.trainable and first[param_sharding.param.name, axis] == at:
                    late = uses[param_sharding.param.name, axis] == 1 and not (
                        call.input_needs_grad and layer_sharding.has_joint_backward
                    )
                    yield (
                        (Redistribution(axis, P, I, in_param_dtype=True), param_sharding.param.numel, -at),
                        late,
                    )
        if into is not None and call is taking[0] and any(each.input_needs_grad for each in taking):
            yield (into.adjoint, call.in_numel * num_samples, -at), False


def _trainable_layers(view: RankView) -> frozenset[str]:
    matrices = [
        param_sharding.param
        for param_sharding in view.param_shardings
        if param_sharding.param.trainable and len(param_sharding.param.shape) > 1
    ]
    return frozenset(layer for weight in matrices for layer in weight.layers)
