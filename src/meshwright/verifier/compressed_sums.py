"""What sums of codes leave out, step by step: the reference needs it, and each sum is compared with what its
technique defines.

A plan with gradient compression does not step with the gradient of one device, but with what its codes say.
That is verified in two ways, both to 1e-10:

    definition     the sum that the ranks end with = what the technique defines, computed in one process from
                   the inputs of all ranks, without messages
    conservation   what is applied + what is owed afterwards = the gradient of one device + what was owed
                   before

For the second one the ranks train once beforehand and report what each step `lost`: the change of all they
owe, or, where nothing is owed, what the codes lost. The reference steps with its own gradient less that
(reference.py); then every number of the ranks must equal it.
"""

from collections.abc import Iterator, Mapping

import torch

from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.broadcast_stage_params import gather_full_values
from meshwright.engine.step.executor import StepExecutor
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.tensor_placements import FLAT, Layout, S
from meshwright.plan.strategy_interface import ObservedSum
from meshwright.verifier.reference import LostStep, ParityCase, TensorsByName

ACTION = "GATHER_FULL"  # the ledger name of collectives that no plan has


def record_lost(parity_case: ParityCase, world: World, num_steps: int) -> tuple[LostStep, ...]:
    """Trains one rank of the plan and returns what each step left out, the same on every rank; () if the plan
    has no sums of codes that say so.

    All ranks call it.
    """
    plan = parity_case.plan.for_rank(world.rank)
    if not any(each.carried_by for role in plan.program.roles for a in role.actions for each in a.transfers):
        return ()
    state = RankState(parity_case.make_trained_module(), world, parity_case.loss, observed_sums=[])
    executor = StepExecutor(plan, state, stateless_rng=parity_case.make_rng())
    read_batch = parity_case.batch_reader(parity_case.plan, world.rank)
    steps, before = list[LostStep](), dict[str, torch.Tensor]()
    try:
        with world.ledger.pause_recording():
            for step in range(num_steps):
                executor.step(read_batch(step))
                owed = _owed(state)
                lost = {name: each - before[name] if before else each for name, each in owed.items()}
                for name, each in _unowed(state).items():
                    lost[name] = lost[name] + each if name in lost else each
                steps.append(LostStep(lost, _largest_error(state)))
                before = owed
                state.observed_sums = []
    finally:
        executor.close()
    return tuple(steps) if any(step.lost for step in steps) else ()


def _owed(state: RankState) -> TensorsByName:
    """Returns what all ranks together owe to each parameter."""
    summands, layouts = dict[str, torch.Tensor](), dict[str, Layout]()
    for owner, specs in state.plan.states.items():
        tensors = state.strategy_tensors.of(owner)
        for spec in specs:
            if spec.param and spec.name == "residual":
                summands[spec.param], layouts[spec.param] = tensors[spec.key], spec.layout
    return _logical_sums(state, summands, layouts)


def _unowed(state: RankState) -> TensorsByName:
    """Returns what codes have lost in this step, and no rank owes."""
    summands, layouts = dict[str, torch.Tensor](), dict[str, Layout]()
    for observed in state.observed_sums or ():
        for name, lost in observed.lost.items() if not observed.is_owed else ():
            summands[name] = lost + summands[name] if name in summands else lost
            layouts[name] = observed.layouts[name]
    return _logical_sums(state, summands, layouts)


def _logical_sums(
    state: RankState, summands: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout]
) -> TensorsByName:
    compressed = state.plan.sharding.compressed_params
    specs = [each for each in state.plan.model_spec.trainable if each.name in compressed]
    shapes = {each.name: each.shape for each in specs}

    def local() -> Iterator[tuple[str, torch.Tensor]]:
        for spec in (each for each in state.plan.view.model_spec.trainable if each.name in compressed):
            name, parameter = spec.name, state.trained_module.parameters[spec.name]
            if name not in summands:  # on no rank that has it
                yield name, torch.zeros(shapes[name], dtype=parameter.dtype)
                continue
            summand = summands[name]
            total = summand.new_zeros(parameter.numel())
            shard = state.flat_params.param_shard(name) if summand.numel() != total.numel() else None
            begin = 0 if shard is None else shard.begin
            total[begin : begin + summand.numel()] = summand.view(-1)
            layout = layouts[name]
            axes = (*layout.axes_with("P"), *(axis for axis, at in layout.placements if at == S(FLAT)))
            state.world.group(axes).all_reduce(total, action=ACTION).wait()
            yield name, state.flat_params.param_slices.gather_full(name, total.view(parameter.shape), ACTION)

    return dict(gather_full_values(state, local(), specs, ACTION)) if specs else {}


def _largest_error(state: RankState) -> float:
    """Returns the largest error of any sum of this step on any rank, relative to the largest element."""
    errors = [_error(state, each) for each in state.observed_sums or ()]
    mine = torch.tensor([max(errors, default=0.0)], dtype=torch.float64)
    group = state.world.group(AXES)
    found = mine.new_empty(group.size)
    group.all_gather(found, mine, action=ACTION).wait()
    return float("nan") if found.isnan().any() else found.max().item()


def _error(state: RankState, observed: ObservedSum) -> float:
    group = state.world.group(observed.axes)
    inputs = observed.input.new_empty(group.size, observed.input.numel())
    group.all_gather(inputs, observed.input.contiguous(), action=ACTION).wait()
    defined = observed.defined_sum(list(inputs))
    numel = observed.output.numel()
    first = group.index * numel if numel < observed.input.numel() else 0
    expected = defined[first : first + numel]
    scale = max(expected.abs().max().item(), 1e-30) if numel else 1.0
    return (observed.output - expected).abs().max().item() / scale if numel else 0.0
