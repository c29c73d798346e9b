"""The reference: one device, in an ordinary PyTorch loop, computes what every plan must compute.

The model's own forward on the whole global batch, one `loss.backward()`, torch's own clipping and optimizer.
Nothing here cuts a graph, buckets a gradient or knows a mesh. It shares with the engine only what defines the
numbers: initial values, the order of samples, and the stateless dropout.

A plan in which every microbatch is an update of its own, at weights that are several updates old, computes
something else. For it the loop replays the weight versions that its program states
(plan/step/weight_stashing.py): still one model, its own forward, one backward. Likewise where the host steps
beside the next step (offload with a delay): gradients are those at weights that lack the last update.

Where weights are gathered as codes, the loop computes loss and gradients at the values of the codes, made in
one process (engine/params/gathered_weights.py), and steps the exact weights.

Where sites train apart and meet in rounds (local SGD, DiLoCo), the loop is played once for each site, one
after the other, on its samples; what follows at the end of a round the technique says itself, in plain tensor
operations on the parameters and optimizers of all sites (`Strategy.on_sites`). Every rank is compared with
its site.

A plan with gradient compression steps with what its codes say. That is verified in two ways, to 1e-10: every
sum equals what its technique defines (engine/step/observed_sums.py), and nothing is lost: what is applied +
what is owed afterwards = the gradient of one device + what was owed before. For the second one the ranks
train once beforehand and report what each step `lost`: the change of all they owe, or, where nothing is owed,
what codes lost. The reference steps with its own gradient less that; every number of the ranks must equal it.
Where momentum is added before codes, the reference has its own; the ranks report which of it ended. Where
codes carry outer gradients (DiLoCo), what is lost is left out of these, when a round ends.

Where servers take gradients as they arrive, the order is recorded beforehand, and one process plays it
(one_device/arrival_replay.py).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from meshwright.engine.optim.lr_schedule import lr_factor
from meshwright.engine.params.gathered_weights import GatheredWeights
from meshwright.model.loss.loss_definition import Batch
from meshwright.model.pipeline.rounded_values import RoundedValues
from meshwright.model.recording.expert_choices import ChoiceRecorder
from meshwright.plan.step.single_device_program import stepped_microbatches as alone
from meshwright.plan.strategy_interface import SiteLoop
from meshwright.verifier.one_device.arrival_replay import batches_of, replay_arrivals
from meshwright.verifier.one_device.loss_and_gradients import (
    backward,
    copied_values,
    exact_loss_of,
    gradients_of,
    loss_of,
    plain_sgd,
    set_values,
)
from meshwright.verifier.one_device.lost_steps import LostStep, missing_gradients
from meshwright.verifier.one_device.parity_case import (
    ParityCase,
    Reference,
    ReferenceStep,
    TensorsByName,
    largest_element,
)
from meshwright.verifier.one_device.recorded_run import NOTHING_RECORDED, RecordedRun
from meshwright.verifier.one_device.weight_version_replay import WeightVersionReplay


def run_reference(
    parity_case: ParityCase, num_steps: int, recorded: RecordedRun = NOTHING_RECORDED
) -> Reference:
    """Trains `num_steps` steps on one device, or on one per site, and records all that is compared.

    Replays weight versions if the plan has any. `recorded` is what one device cannot know (`record_run`).
    """
    if recorded.arrivals:
        return replay_arrivals(parity_case, num_steps, recorded.arrivals)
    lost = recorded.lost
    sites = [_Site(parity_case, site) for site in range(parity_case.plan.num_sites)]
    loops = [site.loop for site in sites]
    found = (each.on_sites(parity_case.plan.job, loops) for each in parity_case.plan.strategies)
    round_ends = [each for each in found if each is not None]
    for step, batch in enumerate(batches_of(parity_case, num_steps)):
        left_out = lost[step] if lost else None
        of_round = left_out.lost if left_out and round_ends else {}
        if left_out and round_ends:  # codes carry outer gradients, not those of a site
            left_out = replace(left_out, lost={})
        for site in sites:
            site.train_step(step, batch, left_out)
        for end_step in round_ends:
            end_step(step, of_round)
        for site in sites:
            site.record_parameters()
    for site in sites:
        site.close()
    references = tuple(site.reference for site in sites)
    return references[0] if len(sites) == 1 else replace(references[0], sites=references)


class _Site:
    """One device that trains by itself, on all samples or on those of a site of the plan."""

    def __init__(self, parity_case: ParityCase, number: int) -> None:
        self._number = number
        self._parity_case, self._job = parity_case, parity_case.single_device_plan.job
        self._model_spec = parity_case.single_device_plan.model_spec
        subject, rng = parity_case.make_reference_module(), parity_case.make_rng()
        self._subject, self._rng, self.trainable = subject, rng, subject.trainable_parameters
        self._replay = (
            WeightVersionReplay(parity_case, subject, rng)
            if alone(parity_case.plan.for_rank(0).actions)
            else None
        )
        self.reference = Reference(
            copied_values(subject.parameters),
            block_of={weight.name: weight.block_calls[0] for weight in self._model_spec.params},
        )
        self.optimizer = plain_sgd(self._job, self.trainable)
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        has_delay = parity_case.plan.sharding.tiers.delay
        self._update = _DelayedUpdate(self.trainable) if has_delay else _update
        found = (each.on_one_device(subject.module, self._model_spec) for each in parity_case.plan.strategies)
        self._step_ends = [each for each in found if each is not None]
        self._gathered = GatheredWeights(parity_case.plan)
        self._momenta = dict[str, torch.Tensor]()  # those that are added before codes
        self._recorder = ChoiceRecorder(lambda: len(self.reference.steps))
        if self._replay is None:
            self._recorder.attach(subject.module, self._model_spec.experts_calls)
        self._samples = parity_case.plan.site_samples(number) if parity_case.plan.num_sites > 1 else None

    @property
    def loop(self) -> SiteLoop:
        """What techniques change of this site when a round ends."""
        plan = self._parity_case.plan
        rank = next(rank for rank in range(plan.mesh.world_size) if plan.site_of(rank) == self._number)
        coordinate = plan.mesh.coordinate(rank)
        index = {axis: coordinate[axis] for axis in plan.sharding.varying_axes}
        of_block = defaultdict[str, list[str]](list)
        for param in self._model_spec.trainable:
            of_block[param.block_calls[0]].append(param.name)
        called = [of_block.pop(each) for each in self._model_spec.block_calls if each in of_block]
        return SiteLoop(self.trainable, self.optimizer, index, (*called, *of_block.values()))

    def train_step(self, step: int, batch: Batch, lost: LostStep | None) -> None:
        """Trains a step on this site's samples of the global `batch`, and records it."""
        rounded = lost.rounded if lost else None
        for group, base_lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base_lr * lr_factor(self._job.lr_schedule, step, self._job.train.steps)
        if self._replay is not None:
            found = self._replay.step(self.optimizer, batch, step, rounded)
            self.reference.steps.append(replace(found, sum_error=lost.error if lost else 0.0))
            return
        rows = self._samples
        if rows is not None:
            num_rows = len(next(iter(batch.values())))
            rows = tuple(row for row in rows if row < num_rows)
            batch = {key: value[list(rows)] for key, value in batch.items()}
        updates = rows != () and bool(self._parity_case.loss.count(batch) > 0)  # else nothing changes
        loss, exact_loss = self._compute_gradients(step, batch, rows, rounded)
        missing = missing_gradients(self._subject, lost, self._momenta) if lost and updates else {}
        gradients = gradients_of(self._subject, missing)
        limit = self._job.train.clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(list(self.trainable.values()), limit)
        self._update(self.optimizer, updates)
        for end_step in self._step_ends:
            end_step(updates)
        module = self._subject.module
        biases = {each.buffer: module.get_buffer(each.buffer) for each in self._model_spec.choice_biases}
        choices = self._recorder.pop_choices(len(next(iter(batch.values())))) if rows != () else {}
        found = (loss, norm.item(), gradients, {}, {}, copied_values(biases), choices)
        error = lost.error if lost else 0.0
        largest = {name: largest_element(each) for name, each in missing.items()}
        self.reference.steps.append(ReferenceStep(batch, *found, error, exact_loss, rows, largest))

    def _compute_gradients(
        self, step: int, batch: Batch, rows: Sequence[int] | None, rounded: RoundedValues | None
    ) -> tuple[float, float | None]:
        """Computes the gradients of `batch`, and returns its loss with codes of activations and without."""
        self.optimizer.zero_grad(set_to_none=True)
        if rows is not None and not rows:
            return 0.0, None
        parameters = self._subject.parameters
        stored = copied_values(parameters) if self._gathered else {}
        set_values(parameters, self._gathered.values(stored))
        case, subject, exact_loss = self._parity_case, self._subject, None
        if rounded is not None:
            exact_loss = exact_loss_of(case, subject, batch, step, rows)
        loss = loss_of(case, subject, self._rng, batch, step, rows, rounded)
        backward(loss)
        set_values(parameters, stored)
        return loss.item(), exact_loss

    def record_parameters(self) -> None:
        """Records the parameters after the step, and after the round if one has ended."""
        last = self.reference.steps[-1]
        self.reference.steps[-1] = replace(last, parameters=copied_values(self._subject.parameters))

    def close(self) -> None:
        """Ends the recording of choices."""
        self._recorder.detach()


def batch_gradients(parity_case: ParityCase, batch: Batch, part_sizes: Sequence[int]) -> TensorsByName:
    """Returns the gradients of a global batch at the initial values on one device, summed over parts of it of
    `part_sizes` samples.
    """
    subject, rng = parity_case.make_reference_module(), parity_case.make_rng()
    weight = parity_case.loss.count_weight_and_tokens(batch)[0] or 1.0
    begin = 0
    for size in part_sizes:
        part = {key: value[begin : begin + size] for key, value in batch.items()}
        part_weight = parity_case.loss.count_weight_and_tokens(part)[0]
        if part_weight > 0:
            rows = range(begin, begin + size)
            backward(loss_of(parity_case, subject, rng, part, 0, rows) * (part_weight / weight))
        begin += size
    return gradients_of(subject)


def _update(optimizer: torch.optim.Optimizer, updates: bool) -> None:
    if updates:
        optimizer.step()


class _DelayedUpdate:
    """Updates weights, and leaves those in the model that lack the last update."""

    def __init__(self, trainable: Mapping[str, torch.nn.Parameter]) -> None:
        self._trainable, self._stepped = trainable, copied_values(trainable)

    def __call__(self, optimizer: torch.optim.Optimizer, updates: bool) -> None:
        before = self._stepped
        set_values(self._trainable, before)
        _update(optimizer, updates)
        self._stepped = copied_values(self._trainable)
        set_values(self._trainable, before)
