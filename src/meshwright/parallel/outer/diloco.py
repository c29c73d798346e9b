"""DiLoCo: every H steps an outer optimizer steps the outer weights along the mean way that the sites went.

Why it works: how far the sites went from their common start is a gradient of a kind, taken over H steps. Its
mean over the sites is less noisy than that of one; Nesterov momentum over rounds carries the way that rounds
have in common, so that H may be 100 or 500 where plain averaging needs a few steps. Inside a site any
optimizer steps (AdamW in the paper) and keeps its states; rounds.py has what holds for all rounds.

    site i        start -> H steps of the inner optimizer -> x_i
    site i        delta_i = start - x_i               its outer gradient
    all sites     delta = mean_i(delta_i)             OUTER_REDUCE, then END_ROUND on each rank
                  m     = mu m + delta
                  start = start - lr (delta + mu m)   Nesterov, as torch.optim.SGD has it
                  x_i   = start

    state/diloco/start/W       the outer weights: the parameters at the begin of the round
    state/diloco/momentum/W    the outer momentum m

Both are equal on all sites (I along `outer`), since each computes them from the same bits, and are cut like
the parameters inside a site: in the shards of ZeRO, the slices of tensor parallelism, the stages of a
pipeline. They are saved, so that a run resumes in the middle of a round; without them in a checkpoint, a
round begins at the parameters. lr = 1 and mu = 0 are local SGD.

`compress` with axis = "outer" makes codes carry the outer gradients: int8 a quarter of their bytes, int4 an
eighth. What codes lose is owed to the next round (error feedback), in a residual that is saved like m.
Nothing else is coded: gradients inside a site are summed exactly.

Cost: per round 2 (k-1)/k N bytes over `outer`, with codes c of them (c = 0.254 for int8 of float32, 0.129 for
int4), between rounds 0; memory 8 bytes per parameter that a rank steps, in float32, and 4 for the residual of
codes.
Limits: `sync_every`, `outer_lr` and `outer_momentum` belong together: with longer rounds, a smaller rate.
Learning-rate warm-up is the inner schedule's.
Paper: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training", arXiv 2311.08105 (algorithm 1;
Nesterov with 0.7 and 0.9); Jaghouar et al. 2024, "OpenDiLoCo", arXiv 2407.07852; "INTELLECT-1 Technical
Report", arXiv 2412.01152 (int8 outer gradients).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from meshwright.parallel.outer.rounds import EVERY_FIX, OUTER_REDUCE, EndRound, RoundStrategy, averaged_dtype
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import above, at_least, below_one
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import FLAT, Layout, S
from meshwright.plan.step.program import Period
from meshwright.plan.strategy_interface import SiteLoop
from meshwright.plan.strategy_state import StateSpec

START, MOMENTUM = "start", "momentum"


@dataclass(frozen=True)
class DiLoCo(RoundStrategy):
    """Steps the outer weights of the sites along `axis` every `sync_every` steps, by Nesterov momentum with
    the rate `outer_lr` and the momentum `outer_momentum`.
    """

    name: ClassVar[str] = "diloco"
    sum_kind: ClassVar[str] = OUTER_REDUCE
    sync_every: int = field(default=100, metadata=at_least(1, EVERY_FIX))
    outer_lr: float = field(default=0.7, metadata=above(0))
    outer_momentum: float = field(default=0.9, metadata=below_one())

    def period(self, job: Job) -> Period:
        return Period(self.sync_every, run_steps=job.train.steps)

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from super().check(job, sharding)
        if not self.is_outermost:
            text = f"rounds over outer would set the parameters anew within those of diloco over {self.axis}"
            fix = f'use local_sgd with axis = "{self.axis}", and diloco with axis = "outer"'
            yield Diagnostic(text, fix, f"strategies.{self.name}.axis")

    def states(self, view: RankView, job: Job) -> Iterator[StateSpec]:
        yield from super().states(view, job)
        dtype = averaged_dtype(job)
        for each in view.param_shardings:
            if each.param.trainable:
                layout = Layout().with_placement(each.flat_shard_axes, S(FLAT))
                name = each.param.name
                yield StateSpec(START, param=name, dtype=dtype, layout=layout, fills_from_param=True)
                yield StateSpec(MOMENTUM, param=name, dtype=dtype, layout=layout)

    def begin_average(self, name: str, stepped: torch.Tensor, kept: Mapping[str, torch.Tensor]) -> None:
        """Makes the outer gradient of what the parameter `name` was `stepped` to."""
        stepped.sub_(kept[f"{START}/{name}"].view(-1)).neg_()

    def end_round(self, name: str, mean: torch.Tensor, kept: Mapping[str, torch.Tensor]) -> None:
        """Makes the outer weights of `name`, stepped, of the `mean` of its outer gradients."""
        start, momentum = kept[f"{START}/{name}"].view(-1), kept[f"{MOMENTUM}/{name}"].view(-1)
        delta = mean  # in its memory
        momentum.mul_(self.outer_momentum).add_(delta)
        start.sub_(delta.add_(momentum, alpha=self.outer_momentum), alpha=self.outer_lr)
        mean.copy_(start)

    def end_rounds_of(self, sites: Sequence[SiteLoop]) -> EndRound:
        outer = {name: nn.Parameter(value.detach().clone()) for name, value in sites[0].parameters.items()}
        optimizer = torch.optim.SGD(
            outer.values(), lr=self.outer_lr, momentum=self.outer_momentum, nesterov=self.outer_momentum > 0
        )

        @torch.no_grad()
        def end_round(lost: Mapping[str, torch.Tensor]) -> None:
            for name, weight in outer.items():
                weight.grad = weight - torch.stack([site.parameters[name] for site in sites]).mean(0)
                if name in lost:
                    weight.grad -= lost[name] / len(sites)
            optimizer.step()
            for site in sites:
                for name, parameter in site.parameters.items():
                    parameter.copy_(outer[name])

        return end_round
