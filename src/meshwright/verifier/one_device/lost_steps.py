"""What the codes of a lossy plan leave out of each step: reported by its ranks for the loop on one device."""

from dataclasses import dataclass, field, replace

import torch

from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.rank_state import RankState, TrainedModule
from meshwright.engine.step.executor import StepExecutor
from meshwright.engine.step.observed_activations import largest_code_error, rounded_values
from meshwright.engine.step.observed_sums import (
    LocalChanges,
    largest_sum_error,
    local_changes,
    owed_sums,
    unowed_sums,
)
from meshwright.model.pipeline.rounded_values import RoundedValues
from meshwright.verifier.one_device.parity_case import ParityCase, TensorsByName, on_cpu


@dataclass(frozen=True)
class LostStep:
    """What the sums of codes of one step left out of each gradient, all ranks together; and the largest error
    of such a sum, relative, against what its technique defines. `before` is what ranks did before codes.

    `rounded` are the values that travelled as codes, as each stage saw them.
    """

    lost: TensorsByName
    error: float
    before: LocalChanges = field(default_factory=LocalChanges)
    rounded: RoundedValues | None = None


def record_lost(parity_case: ParityCase, world: World, num_steps: int) -> tuple[LostStep, ...]:
    """Trains one rank of the plan and returns what each step left out, the same on every rank; () if the plan
    has no codes that say so.

    All ranks call it.
    """
    plan = parity_case.plan.for_rank(world.rank)
    actions = (action for role in plan.program.roles for action in role.actions)
    # gathers of codes lose nothing that the loop on one device does not compute itself
    carried = (action.transfers for action in actions if action.kind != "UNSHARD")
    if not any(transfer.carried_by for transfers in carried for transfer in transfers):
        return ()
    state = RankState(
        parity_case.make_trained_module(), world, parity_case.loss, observed_sums=[], observed_codes=[]
    )
    executor = StepExecutor(plan, state, stateless_rng=parity_case.make_rng())
    read_batch = parity_case.batch_reader(parity_case.plan, world.rank)
    steps, before = list[LostStep](), dict[str, torch.Tensor]()
    try:
        with world.ledger.pause_recording():
            for step in range(num_steps):
                executor.step(read_batch(step))
                state.wait_for_carried()  # what codes lose belongs to the step in which their sum began
                owed = on_cpu(owed_sums(state))
                lost = {name: each - before[name] if before else each for name, each in owed.items()}
                for name, each in on_cpu(unowed_sums(state)).items():
                    lost[name] = lost[name] + each if name in lost else each
                error = largest_sum_error(state) + max(0.0, largest_code_error(state) - 1.0)
                local = local_changes(state)
                local = replace(local, clipped=on_cpu(local.clipped), dropped=on_cpu(local.dropped))
                steps.append(LostStep(lost, error, local, rounded_values(state)))
                before = owed
                state.observed_sums, state.observed_codes = [], []
    finally:
        executor.close()
    return tuple(steps) if any(step.lost or step.rounded is not None for step in steps) else ()


def missing_gradients(subject: TrainedModule, step: LostStep, momenta: TensorsByName) -> TensorsByName:
    """Returns what the step of ranks leaves out of each gradient; `momenta` become those after the step."""
    missing, before = dict(step.lost), step.before
    for name, clipped in before.clipped.items():
        missing[name] = missing[name] + clipped
    for name, dropped in before.dropped.items():
        gradient, clipped = subject.trainable_parameters[name].grad, before.clipped.get(name, 0.0)
        new = (torch.zeros_like(dropped) if gradient is None else gradient) - clipped
        decayed = before.momentum * momenta.get(name, torch.zeros_like(new))
        missing[name] = missing[name] - decayed
        momenta[name] = decayed + new - dropped
    return missing
