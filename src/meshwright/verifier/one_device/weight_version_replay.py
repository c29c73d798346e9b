"""One device plays a plan in which every microbatch is an update of its own, at weights that are older."""

import torch

from meshwright.engine.runtime.rank_state import TrainedModule
from meshwright.model.loss.loss_definition import Batch
from meshwright.model.pipeline.rounded_values import RoundedValues
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.plan.step.single_device_program import stepped_microbatches as alone
from meshwright.plan.step.weight_stashing import forward_versions
from meshwright.verifier.one_device.loss_and_gradients import (
    backward,
    copied_values,
    gradients_of,
    loss_of,
    set_values,
)
from meshwright.verifier.one_device.parity_case import ParityCase, ReferenceStep, TensorsByName


class WeightVersionReplay:
    """Updates with one microbatch each.

    Its gradient at the weight version of its forward, applied to the latest weights.
    """

    def __init__(self, parity_case: ParityCase, subject: TrainedModule, rng: StatelessRNG | None) -> None:
        self._parity_case, self._subject, self._rng, self._plan = parity_case, subject, rng, parity_case.plan
        plan = parity_case.plan
        # all ranks step with the same microbatches in the same order
        (self._microbatch_order,) = {alone(role.actions) for role in plan.program.roles} - {()}
        versions = [forward_versions(plan.stage_role(pp_rank).actions) for pp_rank in range(plan.mesh.pp)]
        self._version_by_param = {
            weight.name: versions[plan.sharding.pp_ranks_using(weight)[0]]
            for weight in parity_case.plan.model_spec.trainable
        }

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
        step: int,
        rounded: RoundedValues | None,
    ) -> ReferenceStep:
        """Runs one step of the plan, from the latest weights to those after all its updates."""
        trainable, num_rows = self._subject.trainable_parameters, self._plan.micro_batch * self._plan.num_data
        weight_history = [copied_values(trainable)]  # by number of updates
        gradients_by_microbatch: dict[int, TensorsByName] = {}
        loss, counts = 0.0, list[float]()
        for microbatch in self._microbatch_order:
            samples = {
                key: value[microbatch * num_rows : (microbatch + 1) * num_rows]
                for key, value in batch.items()
            }
            set_values(
                trainable,
                {name: weight_history[self._version_by_param[name][microbatch]][name] for name in trainable},
            )
            optimizer.zero_grad(set_to_none=True)
            counts.append(
                self._parity_case.loss.count_weight_and_tokens(samples)[0]
                if len(next(iter(samples.values())))
                else 0.0
            )
            if counts[-1] > 0:
                rows = range(microbatch * num_rows, (microbatch + 1) * num_rows)
                microbatch_loss = loss_of(
                    self._parity_case, self._subject, self._rng, samples, step, rows, rounded
                )
                backward(microbatch_loss)
                loss += microbatch_loss.item() * counts[-1]
            gradients_by_microbatch[microbatch] = gradients_of(self._subject)
            set_values(trainable, weight_history[-1])
            if counts[-1] > 0:  # an update in which nothing counts changes nothing
                optimizer.step()
            weight_history.append(copied_values(trainable))
        squares = sum(
            (tensor * tensor).sum().item()
            for values in gradients_by_microbatch.values()
            for tensor in values.values()
        )
        norm = (squares / max(1, sum(count > 0 for count in counts))) ** 0.5
        return ReferenceStep(
            batch,
            loss / (sum(counts) or 1.0),
            norm,
            gradients_by_microbatch[self._microbatch_order[-1]],
            {},  # recorded when the round has ended
            gradients_by_microbatch,
        )
