"""The order of the receives, runs and sends of a pipeline rank outside of steps, as data.

With v stages on each rank, stage p of forward k runs at time v k + p; at equal times stages run in order:

    one stage each    rank 0   0  1  2  3  4          two each, in a V    rank 0   0  .  1  0' 2  1' 3  2'
                      rank 1      0  1  2  3  4                           rank 1      0  0' 1  1' 2  2' 3  3'
                      rank 2         0  1  2  3  4

So all ranks are busy once the first forward has passed through, and no rank waits for anything with a later
time: no order of sends and receives can deadlock. A rank posts a receive before its own first run that is not
earlier than the run of the sender: of inputs from the stage before, one run ahead. So the receive is not
posted before a run on which it depends, nor after one that depends on what the sender does next; on a GPU,
either could stop both ranks (verifier/nccl_deadlocks.py). A run begins only when the sends that were due a
round before have completed. This bounds what is in flight.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

from meshwright.plan.model_spec.stage_transfers import StageTransfer, stage_transfers
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action, Program, Role, Transfer
from meshwright.plan.step.single_device_program import stage_role_name


def stage_ranks(sharding: ShardingPlan) -> tuple[int, ...]:
    """Returns for every stage the pp rank that runs it outside of steps."""
    ranks = list[int]()
    for stage in sharding.stages:
        candidates = [
            index
            for index, block_calls in enumerate(sharding.block_calls_by_pp_rank)
            if stage.block_calls[0] in block_calls
        ]
        ranks.append(min(candidates, key=lambda index: (ranks.count(index), index)))
    return tuple(ranks)


def rank_schedule(
    stages: Sequence[int], max_stages_per_rank: int, has_forward: Callable[[int], bool]
) -> Iterator[tuple[int, int]]:
    """Yields (stage, number of the forward) in the order of a rank with these `stages`.

    No rank has more than `max_stages_per_rank` stages. `has_forward(number)` tells whether there is a forward
    of that number.
    """
    for now in count() if stages else ():
        if now >= stages[-1] and not has_forward((now - stages[-1]) // max_stages_per_rank):
            return
        for stage in stages:
            number, rest = divmod(now - stage, max_stages_per_rank)
            if not rest and number >= 0 and has_forward(number):
                yield stage, number


@dataclass(frozen=True)
class EvalEvent:
    """A receive, a run or a send of the forward `number`, or its end on this rank.

    `stage` is what runs, sends or receives. `time` is when it runs; for a send or a receive, when the
    receiver runs. A send or a receive has a `transfer`.
    """

    kind: Literal["recv", "run", "send", "end"]
    number: int
    stage: int
    time: int
    transfer: StageTransfer | None = None


class EvalOrder:
    """The events of each rank, for stages on `stage_ranks`.

    `has_forward(number)` tells whether there is a forward of that number, `transfers_of(number)` returns the
    transfers between its stages; none if the rank is done with it.
    """

    def __init__(
        self,
        ranks_of_stages: Sequence[int],
        has_forward: Callable[[int], bool],
        transfers_of: Callable[[int], Sequence[StageTransfer]],
    ) -> None:
        self._ranks, self._has_forward, self._transfers_of = ranks_of_stages, has_forward, transfers_of
        self.max_stages_per_rank = max(map(ranks_of_stages.count, ranks_of_stages))

    def events(self, rank: int) -> Iterator[EvalEvent]:
        """Yields the events of `rank`, lazily: forwards begin when they are reached."""
        incoming = [self._receives(peer, rank) for peer in sorted(set(self._ranks)) if peer != rank]
        waiting = [next(receives, None) for receives in incoming]
        for stage, number in self._schedule(rank):
            run = EvalEvent("run", number, stage, self._time(stage, number))
            for peer, receives in enumerate(incoming):
                while (receive := waiting[peer]) is not None and self._send_time(receive) <= run.time:
                    yield receive
                    waiting[peer] = next(receives, None)
            yield from self._run_and_send(run)

    def _time(self, stage: int, number: int) -> int:
        return self.max_stages_per_rank * number + stage

    def _send_time(self, receive: EvalEvent) -> int:
        return self._time(receive.transfer.source if receive.transfer else receive.stage, receive.number)

    def _schedule(self, rank: int) -> Iterator[tuple[int, int]]:
        stages = [stage for stage, stage_rank in enumerate(self._ranks) if stage_rank == rank]
        return rank_schedule(stages, self.max_stages_per_rank, self._has_forward)

    def _receives(self, source: int, target: int) -> Iterator[EvalEvent]:
        """Yields the receives of `target` from `source` in the order in which it sends."""
        for stage, number in self._schedule(source):
            for transfer in self._transfers_of(number):
                if transfer.source == stage and self._ranks[transfer.target] == target:
                    time = self._time(transfer.target, number)
                    yield EvalEvent("recv", number, transfer.target, time, transfer)

    def transfers_into(self, stage: int, number: int) -> Iterator[StageTransfer]:
        """Yields the transfers from other ranks that a run needs."""
        for transfer in self._transfers_of(number):
            if transfer.target == stage and self._ranks[transfer.source] != self._ranks[stage]:
                yield transfer

    def _run_and_send(self, run: EvalEvent) -> Iterator[EvalEvent]:
        sent = [
            transfer
            for transfer in self._transfers_of(run.number)
            if transfer.source == run.stage and self._ranks[transfer.target] != self._ranks[run.stage]
        ]
        yield run
        for transfer in sent:
            time = self._time(transfer.target, run.number)
            yield EvalEvent("send", run.number, run.stage, time, transfer)
        if self._ranks[run.stage] not in self._ranks[run.stage + 1 :]:
            yield replace(run, kind="end")


def evaluation_program(step: Program, sharding: ShardingPlan, num_forwards: int) -> Program:
    """Returns what the pipeline ranks of `step` do in an evaluation of so many forwards, for checks."""
    ranks = stage_ranks(sharding)
    transfers = list(stage_transfers(sharding.stages, ranks))
    order = EvalOrder(ranks, lambda number: number < num_forwards, lambda _: transfers)
    return Program(
        tuple(
            Role(role.name, role.ranks, tuple(_actions(order, ranks, pp_rank)))
            for pp_rank, role in enumerate(step.roles[: sharding.mesh.pp])
        )
    )


def _actions(order: EvalOrder, ranks: Sequence[int], pp_rank: int) -> Iterator[Action]:
    sends: list[tuple[int, str]] = []  # with the time at which each is due
    for event in order.events(pp_rank):
        if event.kind == "run":
            overdue = [name for due, name in sends if due < event.time - order.max_stages_per_rank]
            arrived = [
                Action("RECV", transfer.subject(backward=False), event.number).name
                for transfer in order.transfers_into(event.stage, event.number)
            ]
            yield Action("F", f"stage {event.stage}", event.number, waits=(*overdue, *arrived))
        if event.transfer is None:
            continue
        subject = event.transfer.subject(backward=False)
        peer = ranks[event.transfer.source if event.kind == "recv" else event.transfer.target]
        message = Transfer(event.kind, ("pp",), 0, dtype=event.transfer.value.dtype, peer=peer)
        sent = Action("SEND", subject, event.number, "send", transfer=message)
        if event.kind == "send":
            sends.append((event.time, sent.name))
            yield sent
        else:
            waits = (f"{stage_role_name(peer)}/{sent.name}",)
            yield Action("RECV", subject, event.number, "recv", waits, transfer=message)
