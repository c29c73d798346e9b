"""Inserts the sends and receives of pipeline ranks: RECV before each run of a stage, SEND behind it,
gradients back.

    SEND         sends a value to the next stage that needs it
    RECV         receives a value
    SEND_GRAD    sends the gradient of a value back to the stage that sent the value
    RECV_GRAD    receives a gradient
    CONCAT       concatenates received chunks of a value
    CONCAT_GRAD  concatenates received chunks of a gradient

    F of a stage     waits for the RECVs of its inputs, which precede the previous run of a stage on the
                     rank, unless they depend on it (receive_prefetch.py)
    SEND             stands behind the last block call of the stage that made the value; before the first of
                     one that forwards it
    RECV_GRAD        stands one run before the stage's backward, too; SEND_GRAD behind the backward of its
                     first block call

If a value is sliced, each rank sends its own slice (plan/sharding/stage_value_shards.py). With `scatter` each
of several ranks that have the same full value sends a chunk of it, and CONCAT, behind the RECV, joins the
chunks:

    RECV chunk 0 of 2 --> CONCAT along tp --> F         rank 0 of tp          half the bytes between stages,
    RECV chunk 1 of 2 --> CONCAT along tp --> F         rank 1 of tp          the rest within them

Users of a value forward it, and stages that do not use it never see it. In a V-shaped placement the skip
connections of a U-Net stay on a rank if the splits are symmetric: nothing is sent. Each rank that needs a
value receives it once on any route, so the bytes are the same; if the first stage sent all k copies, they
would share one link for each microbatch. A stage forwards a value as soon as it arrives, before it runs.
Simulated (encoder-decoders of 6 stages on 6 ranks, 4 to 16 microbatches; t the time of a transfer in units
of a layer's forward, links that carry one message at a time), the length of a step, forwarded / sent
directly:

    t            0.05     0.2      0.5             1               2
    1f1b         1.00     1.00     1.00 .. 1.02    1.02 .. 1.07    0.91 .. 1.07
    gpipe        1.00     1.00     0.76 .. 0.96    0.67 .. 0.93    0.65 .. 0.93

Forwarding costs nothing if links are faster than layers, and wins most if they are not. Forwarding only
after the stage has run would cost 1f1b up to 1.09 at t = 0.5. The gradient returns the same way, and is
summed on it.

Messages from one rank to another arrive in the order in which they are sent. A rank whose stages need them
in another order receives them early, in the order of the sender, and keeps them:

    rank 0 sends     x of microbatch 1 to stage 1,  y of microbatch 0 to stage 3
    rank 1 needs     y of microbatch 0 first:       RECV x, RECV y, F(stage 3, 0), F(stage 1, 1)
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

from meshwright.parallel.pipeline.receive_prefetch import ReceiveWindow, RunsNeeded, post_receives_early
from meshwright.parallel.pipeline.schedules.schedule import Dependency, Schedule
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.stage_transfers import StageSpec, StageTransfer, stage_transfers
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.stage_value_shards import StageValueShards
from meshwright.plan.step.program import Action, Allocation, Transfer, with_waits
from meshwright.plan.step.single_device_program import (
    INPUT_GRAD_KINDS,
    WEIGHT_GRAD_KINDS,
    samples_per_microbatch,
    stage_role_name,
)


class TransferRoutes:
    """The routes of all values of every microbatch between `stages` under `schedule`."""

    def __init__(self, stages: Sequence[StageSpec], schedule: Schedule) -> None:
        self._stages, self._schedule = stages, schedule
        actions = ((rank, action) for rank, actions in enumerate(schedule.actions) for action in actions)
        self._rank = {
            (schedule.virtual_stages[action.virtual_stage].stage, action.microbatch): rank
            for rank, action in actions
        }
        self._known: dict[tuple[int, ...], _MicrobatchTransfers] = {}
        self._by_microbatch: dict[int, _MicrobatchTransfers] = {}

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Returns the rank that runs `stage` for the microbatch."""
        return self._rank[stage, microbatch]

    def transfers(self, microbatch: int) -> list[StageTransfer]:
        """Returns the transfers of a microbatch's values; stages on one rank pass values without sending."""
        return self._microbatch_transfers(microbatch).transfers

    def transfers_into(self, stage: int, microbatch: int) -> list[StageTransfer]:
        """Returns those that end at `stage`."""
        return self._microbatch_transfers(microbatch).by_target[stage]

    def transfers_from(self, stage: int, microbatch: int) -> list[StageTransfer]:
        """Returns those that begin at `stage`."""
        return self._microbatch_transfers(microbatch).by_source[stage]

    def _microbatch_transfers(self, microbatch: int) -> "_MicrobatchTransfers":
        if microbatch not in self._by_microbatch:
            num_ranks = tuple(self._rank[stage, microbatch] for stage in range(len(self._stages)))
            if num_ranks not in self._known:
                self._known[num_ranks] = _MicrobatchTransfers(
                    list(stage_transfers(self._stages, num_ranks)), len(self._stages)
                )
            self._by_microbatch[microbatch] = self._known[num_ranks]
        return self._by_microbatch[microbatch]

    def order_receives(self, actions: Iterable[Action], pp_rank: int) -> list[Action]:
        """Returns `actions` of `pp_rank`, with its receives from each other rank in the order in which that
        rank sends.
        """
        actions = list(actions)
        receives = {action.name: action for action in actions if action.stream == "recv"}
        left = {
            peer: deque(self._receives.get((peer, pp_rank), ()))
            for peer in range(self._schedule.num_ranks)
            if peer != pp_rank
        }
        missing, done = set(receives), list[Action]()
        for action in actions:
            if action.name not in receives:
                done.append(action)
            while action.name in missing:
                peer = action.transfer.peer if action.transfer else None
                name = left[-1 if peer is None else peer].popleft()
                missing.remove(name)
                done.append(receives[name])
        return done

    def receive_windows(self, pp_rank: int) -> Mapping[str, ReceiveWindow]:
        """Returns when `pp_rank` may post each of its receives, by name."""
        return {
            name: self._runs_needed.window(sender, pp_rank, is_forwarded=is_forwarded)
            for (_, target), receives in self._receives.items()
            if target == pp_rank
            for name, (sender, is_forwarded) in receives.items()
        }

    @cached_property
    def _runs_needed(self) -> RunsNeeded:
        return RunsNeeded(self._schedule)

    @cached_property
    def _receives(self) -> dict[tuple[int, int], dict[str, tuple[Dependency, bool]]]:
        """The names of the receives, with the run that sends each and whether it only forwards it, in order,
        by the two ranks.
        """
        found: dict[tuple[int, int], dict[str, tuple[Dependency, bool]]] = {}
        for source, actions in enumerate(self._schedule.actions):
            for action in (action for action in actions if action.kind != "W"):
                stage, back = self._schedule.virtual_stages[action.virtual_stage].stage, action.kind != "F"
                sender: Dependency = ("I" if back else "F", stage, action.microbatch)
                for transfer in (
                    self.transfers_into(stage, action.microbatch)
                    if back
                    else self.transfers_from(stage, action.microbatch)
                ):
                    target = self._rank[transfer.source if back else transfer.target, action.microbatch]
                    is_forwarded = not back and transfer.value not in self._stages[stage].outputs
                    if target != source and (transfer.value.needs_grad or not back):
                        name = Action(
                            "RECV_GRAD" if back else "RECV",
                            transfer.subject(backward=back),
                            action.microbatch,
                        ).name
                        found.setdefault((source, target), {})[name] = sender, is_forwarded
        return found


class _MicrobatchTransfers:
    def __init__(self, found: list[StageTransfer], num_stages: int) -> None:
        self.transfers = found
        self.by_source: list[list[StageTransfer]] = [[] for _ in range(num_stages)]
        self.by_target: list[list[StageTransfer]] = [[] for _ in range(num_stages)]
        for transfer in found:
            self.by_source[transfer.source].append(transfer)
            self.by_target[transfer.target].append(transfer)


class SendRecvInsertion:
    """Inserts the sends and receives of the rank of `view` into its actions."""

    def __init__(
        self,
        stages: Sequence[StageSpec],
        routes: TransferRoutes,
        view: RankView,
        job: Job,
        axis: str,
        *,
        scatter: bool = False,
    ) -> None:
        self._view, self._job, self._axis, self._stages = view, job, axis, stages
        self._crossed = StageValueShards(view, (value for stage in stages for value in stage.outputs))
        self._scatter, self._transfers = scatter, dict[tuple[str, str, int], Transfer]()
        self._routes, self._mine = routes, view.coordinate[axis]

    def insert(self, actions: list[Action]) -> list[Action]:
        """Returns `actions` with receives before each run of a stage, and sends behind it."""
        num_samples, done, taken = (
            samples_per_microbatch(actions, self._view.plan, self._job),
            list[Action](),
            dict[tuple[int, int | None], list[str]](),
        )
        first = {stage.block_calls[0]: number for number, stage in enumerate(self._stages)}
        last = {stage.block_calls[-1]: number for number, stage in enumerate(self._stages)}
        for action in actions:
            back = action.kind in INPUT_GRAD_KINDS
            begins, ends = (last, first) if back else (first, last)
            crosses = back or action.kind == "F"
            if crosses and action.subject in begins:
                arriving = list(self._receives(begins[action.subject], action, num_samples, back=back))
                done += arriving
                done += (
                    ()
                    if back
                    else self._forwarded_sends(begins[action.subject], action, arriving, num_samples)
                )
                action = with_waits(action, (each.name for each in arriving))
                if back:
                    action = replace(action, frees=(*action.frees, *_held_buffers(arriving)))
                else:
                    taken[begins[action.subject], action.microbatch] = list(_held_buffers(arriving))
            if action.kind in WEIGHT_GRAD_KINDS and action.subject in first:
                held = taken.pop((first[action.subject], action.microbatch))
                action = replace(action, frees=(*action.frees, *held))
            done.append(action)
            if crosses and action.subject in ends:
                outputs = set(self._stages[ends[action.subject]].outputs)
                sent = self._sends(ends[action.subject], action, num_samples, back=back)
                done += (each for transfer, each in sent if back or transfer.value in outputs)
        starts = {("F", stage.block_calls[0]) for stage in self._stages}
        starts |= {(kind, stage.block_calls[-1]) for stage in self._stages for kind in ("B", "I", "W")}
        ordered = self._routes.order_receives(done, self._mine)
        return list(post_receives_early(ordered, starts, self._routes.receive_windows(self._mine)))

    def _receives(self, stage: int, action: Action, num_samples: int, *, back: bool) -> Iterator[Action]:
        kind, sent, join = ("RECV_GRAD", "SEND_GRAD", "CONCAT_GRAD") if back else ("RECV", "SEND", "CONCAT")
        for transfer, peer in self._transfers_with_peers(stage, action, to=not back, back=back):
            name, message = (
                transfer.subject(backward=back),
                self._transfer("recv", transfer, peer, num_samples),
            )
            waits = (f"{stage_role_name(peer)}/{sent}({name}, {action.microbatch})",)
            received = Action(kind, name, action.microbatch, "recv", waits, (transfer.value.name,), message)
            yield replace(received, allocations=(Allocation(received.name, message.nbytes),))
            if message.replica_axes:
                together = Transfer("all_gather", message.replica_axes, message.nbytes, dtype=message.dtype)
                joined = Action(
                    join, name, action.microbatch, "comm", (received.name,), (transfer.value.name,), together
                )
                whole = Allocation(
                    joined.name, message.nbytes * self._view.plan.mesh.group_size(message.replica_axes)
                )
                yield replace(joined, allocations=(whole,), frees=(received.name,))

    def _sends(
        self, stage: int, action: Action, num_samples: int, *, back: bool
    ) -> Iterator[tuple[StageTransfer, Action]]:
        kind = "SEND_GRAD" if back else "SEND"
        for transfer, peer in self._transfers_with_peers(stage, action, to=back, back=back):
            message = self._transfer("send", transfer, peer, num_samples)
            yield (
                transfer,
                Action(
                    kind,
                    transfer.subject(backward=back),
                    action.microbatch,
                    "send",
                    (action.name,),
                    (transfer.value.name,),
                    message,
                ),
            )

    def _forwarded_sends(
        self, stage: int, action: Action, arriving: Sequence[Action], num_samples: int
    ) -> Iterator[Action]:
        for transfer, sent in self._sends(stage, action, num_samples, back=False):
            if transfer.value not in self._stages[stage].outputs:
                yield replace(
                    sent, waits=tuple(each.name for each in arriving if transfer.value.name in each.tensors)
                )

    def _transfers_with_peers(
        self, stage: int, action: Action, *, to: bool, back: bool
    ) -> Iterator[tuple[StageTransfer, int]]:
        microbatch = action.microbatch or 0
        for transfer in (
            self._routes.transfers_into(stage, microbatch)
            if to
            else self._routes.transfers_from(stage, microbatch)
        ):
            peer = self._routes.rank_of(transfer.source if to else transfer.target, microbatch)
            if peer != self._mine and (transfer.value.needs_grad or not back):
                yield transfer, peer

    def _transfer(self, collective: str, transfer: StageTransfer, peer: int, num_samples: int) -> Transfer:
        value, key = transfer.value, (collective, transfer.value.name, peer)
        if key not in self._transfers:
            over = self._crossed.replicated_axes(value) if self._scatter else ()
            nbytes = (
                -(
                    -prod(self._crossed.local_shape(value, num_samples))
                    // self._view.plan.mesh.group_size(over)
                )
                * value.itemsize
            )
            self._transfers[key] = Transfer(
                collective, (self._axis,), nbytes, dtype=value.dtype, peer=peer, replica_axes=over
            )
        return self._transfers[key]


def _held_buffers(arriving: Sequence[Action]) -> Iterator[str]:
    freed = {name for action in arriving for name in action.frees}
    return (hold.name for action in arriving for hold in action.allocations if hold.name not in freed)
