"""Local SGD: every H steps the parameters of all sites become their mean.

Why it works: each site takes H steps of its own from the same start. Where the steps are small, H steps and
one mean come close to H steps with the mean gradient, and send 1 / H of the bytes. Early in a run, when
parameters move fast, sites drift apart most: post-local SGD averages after each of the first `warmup_steps`
steps, and only then begins rounds of H (rounds.py has what holds for all rounds).

    step        1  2  3  4  5  6  7  8  9  10        sync_every = 4, warmup_steps = 2
    average     x  x           x           x

    x <- 1/k sum over the k sites of x        masters, shards or parameters: what the optimizer steps

With plain SGD, H = 1 and as many tokens at each site, that is data parallelism: the mean of steps is the step
of the mean.

    optimizer_states = "own"     a momentum stays that of its site, which knows nothing of the others
    optimizer_states = "mean"    moments travel with the parameters, and every site goes on with their mean:
                                 exp_avg and exp_avg_sq of AdamW, the momentum of SGD, Lion and Muon

Hierarchical: one local SGD with axis = "site" within data centres, one behind it over `outer` between them,
with `sync_every` a multiple (rounds.py).

Counters stay those of the site. One that has not updated yet puts zeros into the mean, and takes none of it.
With plain momentum and H = 1 that is data parallelism, too.

Cost: per round 2 (k-1)/k N bytes over `outer`; with the mean of s states (1 + s) times as many, and as large
buffers; between rounds 0. No state beyond the totals of the round.
Limits: the noise that averaging takes out of the parameters is noise that a larger H lets in. States that are
codes (adamw_8bit), or belong to rows (adafactor), have no mean.
Paper: Stich 2019, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767 (algorithm 1); Lin et
al. 2020, "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217 (post-local SGD, section 3;
hierarchical local SGD, appendix); Yu et al. 2019, "On the Linear Speedup Analysis of Communication Efficient
Momentum SGD", arXiv 1905.03817 (algorithm 1: momenta are averaged with the parameters).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import nn

from meshwright.parallel.outer.rounds import EndRound, RoundStrategy
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ParamSpec
from meshwright.plan.optimizer_per_param import param_optimizer
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Period
from meshwright.plan.strategy_interface import SiteLoop


@dataclass(frozen=True)
class LocalSGD(RoundStrategy):
    """Averages the parameters of the sites along `axis` every `sync_every` steps, and after each of the first
    `warmup_steps` steps; with `optimizer_states` "mean" the states of their optimizers too.
    """

    name: ClassVar[str] = "local_sgd"
    warmup_steps: int = field(default=0, metadata=at_least(0))
    optimizer_states: Literal["own", "mean"] = "own"

    def period(self, job: Job) -> Period:
        return Period(self.sync_every, self.warmup_steps, job.train.steps)

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from super().check(job, sharding)
        if self.warmup_steps > job.train.steps > 0:
            text = f"{self.warmup_steps} warm-up steps in a run of {job.train.steps}"
            fix = f"write fewer than {job.train.steps}, or raise train.steps"
            yield Diagnostic(text, fix, f"strategies.{self.name}.warmup_steps")
        where, keep = f"strategies.{self.name}.optimizer_states", 'set optimizer_states = "own"'
        params = sharding.model_spec.trainable if self.optimizer_states == "mean" else ()
        without = [(param, param_optimizer(job.optimizer, param).optimizer) for param in params]
        without = [each for each in without if not self.averaged_states(job, each[0])]
        coded = next((each for each in without if each[1] != "sgd"), None)
        if coded is not None:
            text = f"{coded[1]} steps {coded[0].name}, and its states have no mean, element by element"
            yield Diagnostic(text, f'{keep}, or use an optimizer such as "adamw"', where)
        elif params and len(without) == len(params):
            text = "sgd without momentum keeps no states that could be averaged"
            yield Diagnostic(text, f"{keep}, or optimizer.momentum above 0", where)

    def averaged_states(self, job: Job, param: ParamSpec) -> tuple[str, ...]:
        is_averaged = self.optimizer_states == "mean"
        return param_optimizer(job.optimizer, param).element_states if is_averaged else ()

    def end_round(self, name: str, mean: torch.Tensor, kept: Mapping[str, torch.Tensor]) -> None:
        """Leaves the mean as it is."""

    def end_rounds_of(self, sites: Sequence[SiteLoop]) -> EndRound:
        @torch.no_grad()
        def end_round(lost: Mapping[str, torch.Tensor]) -> None:
            for name in sites[0].parameters:
                values = [site.parameters[name] for site in sites]
                _set_to_mean(values, values)
                if self.optimizer_states == "mean":
                    _average_states(values, [site.optimizer for site in sites])

        return end_round


def _average_states(values: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Makes all states of one parameter that have its shape their mean, on every site that has any."""
    of_sites = [optimizer.state.get(value, {}) for value, optimizer in zip(values, optimizers, strict=True)]
    keys = {key for states in of_sites for key, each in states.items() if each.shape == values[0].shape}
    for key in sorted(keys):
        kept = [states[key] for states in of_sites if key in states]
        absent = [torch.zeros_like(values[0])] * (len(of_sites) - len(kept))
        _set_to_mean(kept, [*kept, *absent])


def _set_to_mean(targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    mean = torch.stack(list(tensors)).mean(0)
    for target in targets:
        target.copy_(mean)
