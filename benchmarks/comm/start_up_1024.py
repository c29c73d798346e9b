"""Calls that 1,024 ranks make to start: splits of communicators, requests to the store, bytes of metadata.

Nine plans of a Llama with 7 B parameters, up to three axes (`meshwright doctor --at 1024` prints the same).
For each, one process takes the place of the first, a middle and the last of 1,024 ranks, in torch's fake
process group, and makes all groups of the plan as on NCCL; what it asks torch.distributed for is counted. A
split is collective over all ranks. Allowed is one per set of axes, and four for all pairs of neighbouring
stages.

The other counts are in the detail; seconds there are an estimate.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness.result import Result
from meshwright.comm.world import TorchWorld
from meshwright.commands.doctor import example_plans
from meshwright.engine.runtime.comm_groups import create_groups
from meshwright.plan.plan import Plan
from meshwright.run.doctor.start_up import StartUpCost, count_start_up

NAME = "start_up_1024"
WORLD, PAIR_SPLITS = 1024, 4
CLAIM = (
    "the communicators of nine plans on 1,024 ranks, up to three axes, take one split per set of axes and at "
    "most four for all pairs of pipeline stages"
)


def count_calls(plan: Plan, rank: int) -> Mapping[str, int]:
    """Returns what `rank` of `plan` asks torch.distributed for when it makes the groups, as on NCCL."""
    calls: Counter[str] = Counter()

    def split_group(*, split_ranks: list[list[int]], timeout: object) -> dist.ProcessGroup | None:
        ranks = [each for group in split_ranks for each in group]
        if len(set(ranks)) < len(ranks):
            raise RuntimeError("a split in which a rank is in two groups. Pack disjoint groups only")
        calls["split_group"] += 1
        return dist.group.WORLD if rank in ranks else None

    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("new_group is collective for each group. Split the communicator of all ranks")

    dist.init_process_group("fake", rank=rank, world_size=plan.mesh.world_size, store=FakeStore())
    try:
        with (
            patch("meshwright.comm.world._default_store", return_value=None),
            patch("meshwright.comm.world.can_split", return_value=True),
            patch.object(dist, "split_group", split_group),
            patch.object(dist, "new_group", refuse),
            patch.object(dist, "send", lambda *args: calls.update(["send"])),
            patch.object(dist, "recv", lambda *args: calls.update(["recv"])),
        ):
            world = TorchWorld(plan.mesh, rank, "cpu", shared_memory=False)
            world.serializes_p2p = True
            create_groups(plan, world)
            world._process_groups.clear()  # all of them stand for the group of all ranks
            world.close()
    finally:
        dist.destroy_process_group()
    return calls


def row(name: str, plan: Plan) -> tuple[float, dict[str, Any]]:
    """Returns the splits of `plan` as a share of those allowed, and its counts."""
    cost, last = count_start_up(plan), plan.mesh.world_size - 1
    calls = {str(rank): dict(count_calls(plan, rank)) for rank in (0, last // 2, last)}
    splits = max(each.get("split_group", 0) for each in calls.values())
    share = splits / max(1, allowed_splits(cost))
    print(f"{name}: {splits} splits of {allowed_splits(cost)} allowed", file=sys.stderr)
    return share, {"plan": name, "splits": splits, "calls_by_rank": calls, **cost.as_dict()}


def allowed_splits(cost: StartUpCost) -> int:
    """Returns the splits that the claim allows: one per set of axes, and four for pairs."""
    return cost.axis_sets + (PAIR_SPLITS if cost.pairs else 0)


def main() -> None:
    """Counts all plans, and writes the result."""
    rows = [row(name, plan) for name, plan in example_plans(WORLD)]
    shares = [share for share, _ in rows]
    detail = {"plans": [each for _, each in rows]}
    print(Result.of_count(NAME, CLAIM, shares, limit=1.0, bar=len(rows), detail=detail).write(NAME))


if __name__ == "__main__":
    main()
