"""Compares a plan with one device: every rank trains, and compares each number with the reference.

The comparison runs in float64 with plain SGD: Adam would hide a gradient that is wrong by a factor. Errors of
gradients and parameters are measured against the largest magnitude in their block, because a gradient that is
truly zero (a key bias) holds nothing but rounding noise. Each rank compares its own copy, so a replica that
drifts is found. NaN is a difference, and so is a collective that the program does not state; what was not
compared does not pass. A technique that rounds declares a tolerance (Strategy.tolerance): that is allowed,
except for initial values. One more action stands before CLIP: COMPARE (compares every gradient with one
device, before it is clipped). The reference is on the CPU, wherever the ranks are.

Messages are compared with the program also where microbatches have other sizes or sequence lengths: what is
sent for such a microbatch is what the plan for such samples says; for that the model is analyzed on them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from hashlib import sha256
from math import inf, isnan, nan

import torch

from meshwright.comm.collectives.group import World
from meshwright.comm.collectives.ledger import LedgerEntry
from meshwright.engine.runtime.microbatches import BatchShapes, microbatch_shapes
from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.recording.expert_choices import ChoiceRecorder, first_other_choice
from meshwright.model.tensors.select_token_ranges import span_positions
from meshwright.plan.job.job import Job, LossGuard, LRScheduleConfig, OptimizerConfig, PrecisionConfig
from meshwright.plan.plan import Plan, RankPlan
from meshwright.plan.sharding.sequence_sharding import num_positions, with_padding
from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import FORWARD_KINDS, stepped_microbatches
from meshwright.verifier.divergence_cause import find_cause
from meshwright.verifier.messages import PlannedMessages, count_problems, planned_messages
from meshwright.verifier.one_device.parity_case import (
    NOTHING_MISSING,
    ParityCase,
    Reference,
    ReferenceStep,
    TensorsByName,
    on_cpu,
)
from meshwright.verifier.verdict_and_cause import (
    COMPARED_QUANTITIES,
    QUANTITIES,
    Difference,
    Verdict,
)

TOLERANCE = 1e-10
MIN_ROUNDS = 2  # of sites that train apart: the second begins where the first has ended


@dataclass
class RankReport:
    """The report of one rank: differences, largest errors, digests of parameters, and what it sent."""

    rank: int
    differences: list[Difference] = field(default_factory=list)
    max_errors: dict[str, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    sent_entries: list[LedgerEntry] = field(default_factory=list)
    # by step, of each microbatch; none: as planned
    microbatch_shapes: list[tuple[BatchShapes, ...]] = field(default_factory=list)
    counts: list[dict[str, int]] = field(default_factory=list)  # by step, the rows that decide sizes
    num_steps: int = 0


def parity_job(job: Job) -> Job:
    """Returns `job` as parity runs it.

    Float64, SGD with its groups and clip, a constant learning rate, no loss guard.
    """
    groups = tuple(replace(group, name=None, momentum=0.0) for group in job.optimizer.groups)
    given = job.optimizer
    is_plain = given.name == "sgd" and not any(group.name not in (None, "sgd") for group in given.groups)
    has_momentum = given.momentum or any(group.momentum for group in given.groups)
    momentum = 0.0 if is_plain and not has_momentum else 0.5
    sgd = OptimizerConfig("sgd", lr=0.1, weight_decay=given.weight_decay, momentum=momentum, groups=groups)
    wide = PrecisionConfig("float64", "float64", "float64")
    return replace(job, precision=wide, optimizer=sgd, lr_schedule=LRScheduleConfig(), guard=LossGuard())


def single_device_job(job: Job) -> Job:
    """Returns `job` for one device, which has no second batch size, so that it measures no noise scale."""
    return replace(job, train=replace(job.train, noise_scale=False))


def compare_rank(parity_case: ParityCase, world: World, reference: Reference) -> RankReport:
    """Trains one rank of `parity_case.plan` and compares it with `reference`, step by step."""
    report, reference = RankReport(world.rank), reference.of_site(parity_case.plan.site_of(world.rank))
    comparison = _RankComparison(parity_case, reference, report)
    subject = parity_case.make_trained_module()
    comparison.values("initial value", 0, on_cpu(subject.parameters), reference.initial_values)
    world.ledger.is_recording = True
    state = RankState(subject, world, parity_case.loss, arrivals=reference.arrivals, observed_weights={})
    executor = StepExecutor(
        _with_compare_action(parity_case.plan.for_rank(world.rank)),
        state,
        stateless_rng=parity_case.make_rng(),
        extra_handlers={"COMPARE": lambda action, state: comparison.gradients(action.microbatch)},
    )
    comparison.executor = executor
    recorder = comparison.record_choices(state)
    read_batch = parity_case.batch_reader(parity_case.plan, world.rank)
    try:
        for step, truth in enumerate(reference.steps):
            comparison.step = step
            batch = read_batch(step)
            comparison.samples(batch, truth)
            if not parity_case.plan.sharding.primary_rank_axes and not state.plan.view.is_server:
                report.microbatch_shapes.append(
                    microbatch_shapes(batch, parity_case.plan, subject.dummy_batch)
                )
            world.ledger.counts.clear()
            metrics = executor.step(batch)
            report.counts.append(dict(world.ledger.counts))
            comparison.choices(recorder, truth)
            comparison.sums_of_codes(truth)
            comparison.rounded_loss(truth)
            comparison.number("loss", metrics.loss, truth.loss)
            comparison.number("grad norm", metrics.grad_norm, truth.grad_norm)
            comparison.values("parameter", step, comparison.parameters(), truth.parameters)
            comparison.biases(subject.module, truth)
            comparison.observed_weights(state, truth)
            report.num_steps += 1
        report.digests = {name: _digest(each) for name, each in comparison.parameters().items()}
    finally:
        recorder.detach()
        executor.close()
    report.sent_entries = list(world.ledger.entries)
    return report


def make_verdict(
    parity_case: ParityCase, reports: list[RankReport], rank_backend: str, versions: Mapping[str, str]
) -> Verdict:
    """Returns the verdict over all ranks' reports: numbers, equal replicas, and messages as planned."""
    plan, expected_messages = parity_case.plan, PlannedMessages(parity_case)
    found = [difference for report in reports for difference in report.differences]
    found += [
        d
        for report in reports
        for d in (
            _replica_drift(report, _replica_of(report, reports, plan), _names_held(plan, report.rank)),
            _uncounted_rows(report, plan),
            _unplanned_message(report, expected_messages),
        )
        if d is not None
    ]
    found.sort(key=lambda d: (d.step, QUANTITIES.index(d.quantity)))
    missing = tuple(_not_compared(plan, reports))
    return Verdict(
        plan=plan.hash,
        mesh=str(plan.mesh),
        model=plan.model_spec.name,
        rank_backend=rank_backend,
        num_steps=min((report.num_steps for report in reports), default=0),
        tolerance=max(TOLERANCE, plan.tolerance),
        passed=not found and not missing,
        max_errors={
            key: _max_error(report.max_errors[key] for report in reports if key in report.max_errors)
            for key in COMPARED_QUANTITIES
        },
        planned_nbytes={message.action: message.nbytes for message in planned_messages(plan.for_rank(0))},
        cause=find_cause(found, parity_case) or ("incomplete" if missing else ""),
        first_difference=found[0] if found else None,
        num_other_differences=max(0, len(found) - 1),
        not_compared=missing,
        versions=dict(versions),
        reference="its updates in the order in which they arrived, played in one process"
        if plan.program.depends_on_arrivals
        else f"{plan.num_sites} devices, one for each site"
        if plan.num_sites > 1
        else "a replay of its weight versions in one process"
        if stepped_microbatches(plan.for_rank(0).actions) or plan.sharding.tiers.delay
        else "one device",
    )


def _not_compared(plan: Plan, reports: list[RankReport]) -> Iterator[str]:
    reporting_ranks = {report.rank for report in reports}
    for rank in sorted(set(range(plan.mesh.world_size)) - reporting_ranks):
        yield f"rank {rank} did not report"
    num_steps = min((report.num_steps for report in reports), default=0)
    if plan.program.periods:
        rounds = MIN_ROUNDS if plan.program.period else 1  # observers change nothing in what follows
        last = max(plan.program.periods, key=lambda each: each.first_step_behind(rounds))
        needed, num_ends = last.first_step_behind(rounds), sum(map(last.ends_with, range(num_steps)))
        if num_steps < needed:
            text = f"{num_steps} steps end {num_ends} rounds, and {rounds} are needed"
            yield f"{text}: compare more steps, at least {needed}"
    for report in reports:
        if not report.num_steps:
            yield f"rank {report.rank} compared no step"
        elif report.num_steps != reports[0].num_steps:
            yield (
                f"rank {report.rank} compared {report.num_steps} steps and rank {reports[0].rank} "
                f"{reports[0].num_steps}"
            )
        exempt = ("gradient",) if not plan.is_primary_rank(report.rank) else ()
        if not plan.rank_view(report.rank).param_shardings:  # an observer: it compares what it sees
            exempt = ("initial value", "gradient")
        for quantity in COMPARED_QUANTITIES if report.num_steps else ():
            if quantity not in (*report.max_errors, *exempt):
                yield f"rank {report.rank} compared no {quantity}"


def _replica_of(report: RankReport, reports: Sequence[RankReport], plan: Plan) -> RankReport:
    """Returns the first report that must have the same parameters: of any rank, or, in the middle of a round
    and where workers pull when they may, of a rank of the same site.
    """
    period, last = plan.program.period, report.num_steps - 1
    if not plan.program.depends_on_arrivals and (period is None or period.ends_with(last)):
        return reports[0]
    site = plan.site_of(report.rank)
    return next(each for each in reports if plan.site_of(each.rank) == site)


def _names_held(plan: Plan, rank: int) -> frozenset[str]:
    """Returns the parameters of which `rank` has the values in the end: all, or those that a server steps."""
    view = plan.rank_view(rank)
    model_spec = view.model_spec if view.is_server else plan.model_spec
    return frozenset(param.name for param in model_spec.params)


def _replica_drift(report: RankReport, other: RankReport, held: frozenset[str]) -> Difference | None:
    """Returns the first parameter of those `held` of which two ranks have different bits, since rounding
    differences grow.
    """
    names = [
        name
        for name in {**other.digests, **report.digests}
        if name in held and report.digests.get(name) != other.digests.get(name)
    ]
    if not names:
        return None
    return Difference(max(0, report.num_steps - 1), "replica", names[0], "", None, report.rank)


def _uncounted_rows(report: RankReport, plan: Plan) -> Difference | None:
    for step, counts in enumerate(report.counts):
        for _, problem in count_problems(plan.for_rank(report.rank), counts, step):
            return Difference(step, "ledger", problem, "", None, report.rank)
    return None


def _unplanned_message(report: RankReport, expected_messages: PlannedMessages) -> Difference | None:
    found = expected_messages.unplanned(report)
    return None if found is None else Difference(found[0], "ledger", found[1], "", None, report.rank)


class _RankComparison:
    def __init__(self, parity_case: ParityCase, reference: Reference, report: RankReport) -> None:
        self._parity_case, self._reference, self._report = parity_case, reference, report
        self.executor: StepExecutor | None = None
        self.step = 0
        self._allowed = max(TOLERANCE, parity_case.plan.tolerance)
        self._held = _names_held(parity_case.plan, report.rank)
        # ranks that wait for no one have values of their own, and gather none
        self._is_alone = parity_case.plan.program.depends_on_arrivals

    def samples(self, batch: Mapping[str, torch.Tensor] | None, truth: ReferenceStep) -> None:
        """Compares the rank's samples with those of the reference's global batch."""
        self._record_error("samples", 0.0)
        expected = self._parity_case.plan.samples_read(self._report.rank)
        for key, full in truth.batch.items():
            read_batch = full[truth.rows_of(expected)]
            actual = read_batch[:0] if batch is None else batch[key]
            if actual.shape != read_batch.shape or not torch.equal(actual, read_batch):
                self._add_difference("samples", key, "", None)

    def record_choices(self, state: RankState) -> ChoiceRecorder:
        """Returns a recorder of the choices of experts in the forwards of the rank, by microbatch."""
        forwards = [action for action in state.plan.actions if action.kind in FORWARD_KINDS]
        microbatches = {action.name: action.microbatch or 0 for action in forwards}
        recorder = ChoiceRecorder(lambda: microbatches.get(state.current_action))
        if not state.plan.sharding.primary_rank_axes:
            recorder.attach(state.trained_module.module, state.plan.view.model_spec.experts_calls)
        return recorder

    def choices(self, recorder: ChoiceRecorder, truth: ReferenceStep) -> None:
        """Compares the experts that each token of the rank has chosen, and forgets what was recorded."""
        plan, rank = self._parity_case.plan, self._report.rank
        read = truth.rows_of(plan.samples_read(rank))
        for (layer, microbatch), found in recorder.found.items():
            first = int(str(microbatch)) * plan.micro_batch
            samples, expected = read[first : first + plan.micro_batch], truth.choices.get(layer)
            if not samples or expected is None:  # a dummy
                continue
            by_sample, length = found.of_samples(len(samples)), expected.index.shape[1]
            positions = list(range(length))
            if plan.sharding.sequence_sharding is not None:
                index = plan.rank_view(rank).work_share.token_shard
                spans = plan.sharding.sequence_sharding.token_ranges(length, index)
                if by_sample.index.shape[1] == num_positions(with_padding(spans)):
                    positions = span_positions(spans).tolist()
                    by_sample = by_sample.first_tokens(len(positions))  # padding is behind them
            if by_sample.index.shape[1] == len(positions):
                other = first_other_choice(by_sample, expected, samples, positions)
                if other:
                    self._add_difference("choice of experts", f"{layer}, {other}", "", None)
        recorder.found.clear()

    def sums_of_codes(self, truth: ReferenceStep) -> None:
        """Compares the sums of codes with what their techniques define, as found beforehand."""
        if not truth.sum_error <= TOLERANCE:
            self._add_difference("sum of codes", "", "", truth.sum_error)

    def rounded_loss(self, truth: ReferenceStep) -> None:
        """Compares what codes of activations do to the loss, at equal weights, with what is stated."""
        plan, exact = self._parity_case.plan, truth.exact_loss
        if exact is None:
            return
        error = abs(truth.loss - exact) / max(abs(exact), 1e-300)
        if not error <= sum(each.loss_tolerance(plan.sharding) for each in plan.strategies):
            self._add_difference("rounded loss", "", "", error)

    def number(self, quantity: str, actual: float, expected: float) -> None:
        error = abs(actual - expected) / max(abs(expected), 1e-300)
        self._record_error(quantity, error)
        if not error <= self._allowed:
            self._add_difference(quantity, "", "", error)

    def values(
        self,
        quantity: str,
        step: int,
        actual: Mapping[str, torch.Tensor],
        expected: TensorsByName,
        factor: Callable[[], float | None] = lambda: None,
        largest: Mapping[str, float] = NOTHING_MISSING,
    ) -> None:
        """Compares each tensor at the scale of its block, in the order of backward: the last block first.

        `factor` is computed when the first of them differs. `largest` are further elements for the scale.
        """
        self.step, common_factor = step, cache(factor)
        scales = self._reference.scales(expected, largest)
        allowed = TOLERANCE if quantity == "initial value" else self._allowed
        for name in (each for each in reversed(list(expected)) if each in self._held):
            block = self._reference.block_of[name]
            error = _distance(actual[name].detach(), expected[name]) / scales[block]
            self._record_error(quantity, error)
            if not error <= allowed:
                self._add_difference(quantity, name, block, error, common_factor())

    def biases(self, module: torch.nn.Module, truth: ReferenceStep) -> None:
        """Compares the buffers of this stage that move the choice of experts: they have the same bits."""
        for bias in self._parity_case.plan.rank_view(self._report.rank).model_spec.choice_biases:
            known = truth.biases.get(bias.buffer)
            if known is not None and not torch.equal(module.get_buffer(bias.buffer).cpu(), known):
                self._add_difference("parameter", bias.buffer, bias.block_call, None)

    def observed_weights(self, state: RankState, truth: ReferenceStep) -> None:
        """Compares the weights that a function of the user has seen after the step on this rank, if any."""
        if state.observed_weights:
            held, self._held = self._held, frozenset(state.observed_weights)
            self.values("parameter", self.step, on_cpu(state.observed_weights), truth.parameters)
            self._held, state.observed_weights = held, {}

    def parameters(self) -> TensorsByName:
        """Returns the parameters that the rank has."""
        if self.executor is None:
            return {}
        if self._is_alone:
            return on_cpu(self.executor.state.trained_module.parameters)
        return on_cpu(self.executor.gather_parameters())

    def _gradients(self, executor: StepExecutor, *, local_only: bool) -> TensorsByName:
        if not self._is_alone:
            return on_cpu(executor.gather_gradients(local_only=local_only))
        own = executor.state.trained_module.trainable_parameters
        stepped = executor.state.flat_params.optimizer_params()  # by a server, which takes their gradients
        found = {name: each.grad for name, each in (own | stepped).items() if each.grad is not None}
        return on_cpu({name: gradient.view(own[name].shape) for name, gradient in found.items()})

    def gradients(self, microbatch: int | None) -> None:
        """Handles COMPARE: compares every gradient as the optimizer is about to see it, before clipping.

        With updates per microbatch, only this rank's gradients: other ranks compare theirs at other times.
        """
        if self.executor is None or not self._parity_case.plan.is_primary_rank(self._report.rank):
            return
        truth = self._reference.steps[self.step]
        found = self._gradients(self.executor, local_only=microbatch is not None)
        expected = (
            {name: gradient for name, gradient in truth.gradients.items() if name in self._held}
            if microbatch is None
            else {name: truth.microbatch_gradients[microbatch][name] for name in found}
        )
        factor = partial(self._common_factor, found, expected)
        self.values("gradient", self.step, found, expected, factor, truth.largest_missing)

    def _common_factor(self, actual: TensorsByName, expected: TensorsByName) -> float | None:
        """Returns the number f with actual = f * expected for all gradients at once, if there is one."""
        norm = sum((tensor * tensor).sum().item() for tensor in expected.values())
        if not norm > 0:
            return None
        factor = sum((actual[name] * expected[name]).sum().item() for name in expected) / norm
        scales = self._reference.scales(expected)
        errors = [
            _distance(actual[name], factor * tensor) / scales[self._reference.block_of[name]]
            for name, tensor in expected.items()
        ]
        return factor if all(error <= 1e-8 * max(1.0, abs(factor)) for error in errors) else None

    def _record_error(self, quantity: str, error: float) -> None:
        self._report.max_errors[quantity] = _max_error([self._report.max_errors.get(quantity, 0.0), error])

    def _add_difference(
        self, quantity: str, name: str, block: str, error: float | None, factor: float | None = None
    ) -> None:
        self._report.differences.append(
            Difference(self.step, quantity, name, block, error, self._report.rank, factor)
        )


def _with_compare_action(plan: RankPlan) -> RankPlan:
    """Returns `plan` with COMPARE before CLIP, waiting for all that CLIP waits for.

    Without CLIP, before each STEP.
    """

    def insert(actions: list[Action]) -> list[Action]:
        edited = []
        for action in actions:
            if action.kind == "CLIP" or (action.kind == "STEP" and action.microbatch is not None):
                found = Action("COMPARE", "", action.microbatch, waits=action.waits, tensors=action.tensors)
                edited.append(found)
            edited.append(action)
        return edited

    return replace(plan, role=replace(plan.role, actions=tuple(insert(list(plan.actions)))))


def _distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference of two elements; infinite for other shapes, NaN if an element is NaN.

    For integers, which are exact: infinite when any differs.
    """
    if actual.shape != expected.shape:
        return inf
    if not expected.is_floating_point():
        return 0.0 if actual.dtype == expected.dtype and torch.equal(actual, expected) else inf
    return (actual - expected).abs().max().item() if actual.numel() else 0.0


def _max_error(errors: Iterable[float]) -> float:
    """Returns the largest of `errors`.

    NaN is larger than any number, and without errors the result is NaN.
    """
    found = list(errors)
    return nan if not found or any(isnan(error) for error in found) else max(found)


def _digest(parameter: torch.Tensor) -> str:
    values = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return sha256(values.numpy().tobytes()).hexdigest()
