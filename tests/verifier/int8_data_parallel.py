"""A compressed all-reduce as a strategy: float32 gradients are summed, int8 codes and scales are sent.

Each rank codes the slices of its gradients, one scale per slice, sends slice i to rank i, sums what it
receives, codes the sum of its own slice and gathers it.

    means          all_reduce    float  [N]
    is carried by  all_to_all    int8   [n c]     c = N / n rounded up
                   all_to_all    float  [n]
                   all_gather    int8   [c]
                   all_gather    float  [1]       sent per rank: 2 (n-1)/n (N + 4 n) bytes
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from meshwright.comm.backends.fake import CompletedWork
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action, Program, Transfer
from meshwright.plan.strategy_interface import Handler, Runtime

LARGEST_CODE = 127


@dataclass(frozen=True)
class Int8DDP(DDP):
    """DDP whose buckets travel as codes of one byte."""

    exact = False

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return (
            super()
            .rewrite(program, view, job)
            .edit(
                lambda actions: [
                    replace(
                        action, transfer=self._coded(action.transfer, view.plan.mesh.group_size((self.axis,)))
                    )
                    if action.kind == "REDUCE" and action.transfer is not None
                    else action
                    for action in actions
                ]
            )
        )

    def _coded(self, transfer: Transfer, size: int) -> Transfer:
        width, axes = FLOAT_NBYTES[transfer.dtype], transfer.axes
        slice_numel = -(-transfer.nbytes // width // size)
        return replace(
            transfer,
            carried_by=(
                Transfer("all_to_all", axes, size * slice_numel, dtype="int8"),
                Transfer("all_to_all", axes, size * width, dtype=transfer.dtype),
                Transfer("all_gather", axes, slice_numel, dtype="int8"),
                Transfer("all_gather", axes, width, dtype=transfer.dtype),
            ),
        )

    def tolerance(self, sharding: ShardingPlan) -> float:
        return 0.1

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        state = runtime.state

        def reduce(action: Action) -> None:
            total = state.operand(action).input
            group, name = state.world.group(action.transfer.axes), action.name
            slices = total.new_zeros(group.size, -(-total.numel() // group.size))
            slices.view(-1)[: total.numel()] = total
            codes, scales = coded(slices)
            came, came_scales = torch.empty_like(codes), torch.empty_like(scales)
            group.all_to_all(came, codes, action=name).wait()
            group.all_to_all(came_scales, scales, action=name).wait()
            own, own_scale = coded((came * came_scales.unsqueeze(1)).sum(0, keepdim=True))
            group.all_gather(codes, own, action=name).wait()
            group.all_gather(scales, own_scale, action=name).wait()
            total.copy_((codes * scales.unsqueeze(1)).view(-1)[: total.numel()])
            state.issue(action, CompletedWork())

        return {**super().bind(runtime), "REDUCE": reduce}


def coded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes of `rows` and a scale for each."""
    scales = rows.abs().amax(dim=1) / LARGEST_CODE
    return (rows / scales.clamp_min(1e-30).unsqueeze(1)).round().to(torch.int8), scales
