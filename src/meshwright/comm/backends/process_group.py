"""The torch.distributed backend: gloo on CPUs, NCCL on GPUs.

gloo moves as many bytes for a reduce_scatter as for an all_reduce. Here it is an all_to_all and a local sum
in rank order: half the bytes, and 2.6 times as fast (4 processes on one host). Its all_gather goes through
memory of its own; broadcasts replace it where they help (gloo_workarounds.py). An all_reduce of two ranks is
one exchange, after which each rank adds both summands: the same bytes as the backend's two rounds, and the
order of two summands does not matter. Measured (2 cores, 32 KiB, 0.5 and 4 MiB): 0.5, 0.7 and 0.75 of the CPU
time, 0.5 of the time. The backend's own threads sum larger ones, for which nobody waits at once.

An all_reduce by a named algorithm runs here over send and receive: on a CPU in a communication thread
(comm_thread.py), on a GPU on the group's own stream, so it overlaps with computation in both cases.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from math import prod

import torch
import torch.distributed as dist

from meshwright.comm.allreduce import BACKEND, get_algorithm
from meshwright.comm.backends.async_work import CollectiveWait, P2PWork, StreamWork, TorchWork
from meshwright.comm.backends.comm_thread import CommThread
from meshwright.comm.backends.fake import CompletedWork, copy_to_output
from meshwright.comm.backends.gloo_workarounds import (
    BackendWork,
    ReceiveBuffers,
    broadcast_all_gather,
    sum_into,
)
from meshwright.comm.backends.run_algorithm import run_rounds
from meshwright.comm.collectives.collective_call import (
    POINT_TO_POINT,
    UNEVEN,
    CollectiveCall,
    announce,
    announce_exchange,
    announce_rows,
    rank_slices,
)
from meshwright.comm.collectives.deterministic_sum import SUMMABLE_DTYPES
from meshwright.comm.collectives.group import ExchangedMessage, Group, PeerTensors, Rounds, Work, World
from meshwright.comm.watchdog.watchdog import Watchdog
from meshwright.device.device_streams import current_stream, record_event
from meshwright.plan.job.errors import CollectiveError, PlanError
from meshwright.plan.sharding.mesh import AXES

MAX_PAIR_EXCHANGE_NBYTES = 8 * 2**20  # bytes of an all_reduce that a pair does as an exchange
# tags that separate messages of callers, messages of algorithms, and a receive that never completes
USER_TAG, ROUND_TAG, ABORT_TAG = 0, 1, 2


def check_not_destroyed() -> None:
    """Raises PlanError if the program has destroyed the process groups of torch.distributed."""
    if not dist.is_initialized():
        raise PlanError(
            "torch.distributed.destroy_process_group() was called, and ranks still have messages to send",
            fix="call it behind the last step, evaluation and checkpoint, and behind trainer.close()",
            location="torch.distributed",
        )


class TorchGroup(Group):
    """The ranks along some axes, in one process group.

    `is_single_host` is set once all of them are known to be on one host.
    """

    def __init__(
        self,
        axes: tuple[str, ...],
        ranks: tuple[int, ...],
        process_group: dist.ProcessGroup,
        world: World,
        watchdog: Watchdog,
    ) -> None:
        self.axes = axes
        self.ranks = ranks
        self.index = ranks.index(world.rank)
        self.ledger = world.ledger
        self._process_group, self._backend_ranks = (
            process_group,
            [sorted(ranks).index(rank) for rank in ranks],
        )  # torch has its own order
        self.device = world.device
        self.watchdog = watchdog
        self.transport = dist.get_backend(process_group)
        self.on_gloo, self.is_single_host = self.transport == "gloo", False
        # groups over different axes may have the same ranks and process group, but each has its own thread
        self._round_tag = ROUND_TAG + sum(2 << AXES.index(axis) for axis in axes)
        self._all_reduce_options = dist.AllreduceOptions()
        if "asyncOp" in vars(
            dist.AllreduceOptions
        ):  # newer torch: on a stream of the backend's own, as it always was
            self._all_reduce_options.asyncOp = True
        self._all_to_all_options = dist.AllToAllOptions()
        if "asyncOp" in vars(dist.AllToAllOptions):
            self._all_to_all_options.asyncOp = True
        self._comm_thread: CommThread | None = None
        self._receive_buffers = ReceiveBuffers()
        self._stream: torch.Stream | None = None

    def close(self) -> None:
        """Ends the communication thread of the group, if it has one."""
        if self._comm_thread is not None:
            self._comm_thread.close()

    def abort(self) -> None:
        """Breaks the connections, so that collectives in flight fail here and on the peers.

        Only gloo needs it.
        """
        if self.on_gloo:
            peer = (self.index + 1) % self.size
            with suppress(
                RuntimeError
            ):  # a receive that is late makes gloo close every connection of the group
                self._process_group.recv([torch.empty(1)], peer, ABORT_TAG).wait(timedelta(milliseconds=1))

    def send(self, tensor: torch.Tensor, *, target: int, action: str = "") -> Work:
        """Sends `tensor` to the rank at index `target`."""
        call = announce(self, "send", tensor, action=action, source=target)
        return self._issue_p2p(call, tensor, target)

    def recv(self, tensor: torch.Tensor, *, source: int, action: str = "") -> Work:
        """Fills `tensor` with what the rank at index `source` sends."""
        call = announce(self, "recv", tensor, action=action, source=source)
        return self._issue_p2p(call, tensor, source)

    def recv_any(self, tensor: torch.Tensor, *, action: str = "") -> int:
        """Fills `tensor` with what comes first, on gloo; returns the index of the rank that sent it."""
        if not self.on_gloo:
            return super().recv_any(tensor, action=action)
        call, works = announce(self, "recv", tensor, action=action), list[dist.Work]()

        def start(**how: object) -> dist.Work:
            works.append(self._process_group.recv_anysource([_flat(tensor)], USER_TAG))
            return works[0]

        self._issue(call, start, keep=(tensor,)).wait()
        return self._backend_ranks.index(works[0]._source_rank())

    def all_reduce(self, tensor: torch.Tensor, *, action: str = "", algorithm: str = BACKEND) -> Work:
        """Sums `tensor` over the group, in place.

        Raises PlanError for an algorithm that is unknown, or cannot run in this group.
        """
        call = announce(self, "all_reduce", tensor, action=action, algorithm=algorithm)
        if algorithm != BACKEND:
            return self._run_algorithm(call, _flat(tensor))
        if self._uses_pair_exchange(tensor):
            return self._pair_exchange(call, _flat(tensor), _flat(tensor))
        return self._issue(call, partial(self._backend_all_reduce, _flat(tensor)), keep=(tensor,))

    def all_reduce_copy(self, tensor: torch.Tensor, *, action: str = "") -> tuple[torch.Tensor, Work]:
        """Returns a new sum, as in `Group`; two ranks compute it from both summands without a copy."""
        if not self._uses_pair_exchange(tensor):
            return super().all_reduce_copy(tensor, action=action)
        tensor = tensor.detach().contiguous()
        total = torch.empty_like(tensor)
        call = announce(self, "all_reduce", tensor, action=action)
        return total, self._pair_exchange(call, _flat(tensor), _flat(total))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fills `output` (size x tensor.numel() elements) with every rank's `tensor`, in rank order."""
        call = announce(self, "all_gather", tensor, output, action=action)
        how = (
            partial(broadcast_all_gather, index=self.index)
            if self.on_gloo and (self.is_single_host or self.size == 2)
            else _collective_fn("all_gather")
        )
        return self._issue(call, partial(how, _flat(output), _flat(tensor)), keep=(output, tensor))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fills `output` with this rank's slice of the sum of `tensor` (size x output.numel() elements)."""
        call = announce(self, "reduce_scatter", tensor, output, action=action)
        if not self.on_gloo:
            return self._issue(
                call,
                partial(_collective_fn("reduce_scatter"), _flat(output), _flat(tensor)),
                keep=(output, tensor),
            )

        mine, pieces = self.index, rank_slices(_flat(tensor), self.size)
        alone = (
            self.size == 2
        )  # a pair sends the other's half alone: its own is not copied, and summed where it is
        sent = pieces[1 - mine] if alone else _flat(tensor)
        split = [0, sent.numel()] if mine == 0 else [sent.numel(), 0]
        splits = {"output_split_sizes": split, "input_split_sizes": split} if alone else {}

        def issue(arrived: torch.Tensor) -> Work:
            start = partial(dist.all_to_all_single, arrived, sent, **splits)
            finish = partial(
                sum_into, output, (pieces[mine], arrived) if alone else rank_slices(arrived, self.size)
            )
            return self._issue(call, start, keep=(tensor, arrived), finish=finish)

        return self._receive_buffers.receive(sent, issue)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Sends slice i of `tensor` to rank i; slice i of `output` comes from rank i."""
        call = announce(self, "all_to_all", tensor, output, action=action)
        return self._issue(
            call, partial(dist.all_to_all_single, _flat(output), _flat(tensor)), keep=(output, tensor)
        )

    def all_to_all_v(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        action: str = "",
    ) -> Work:
        """Sends `input_splits[i]` rows of `tensor` to rank i; `output_splits[i]` rows come from rank i.

        A rank without rows takes part: only it knows that it has none.
        """
        call = announce_rows(self, output, tensor, output_splits, input_splits, action)
        width = prod(call.shape) * (1 if call.dtype in SUMMABLE_DTYPES else call.dtype.itemsize)  # as `_flat`
        start = partial(
            dist.all_to_all_single,
            _flat(output),
            _flat(tensor),
            [rows * width for rows in output_splits],
            [rows * width for rows in input_splits],
        )
        return self._issue(call, start, keep=(output, tensor))

    def shift(self, output: torch.Tensor, tensor: torch.Tensor, *, offset: int = 1, action: str = "") -> Work:
        """Sends `tensor` to the rank `by` places on, round the group.

        `output` comes from the rank as far behind.
        """
        call = announce(self, "shift", tensor, output, action=action, source=offset % self.size)
        if not call.source:
            return copy_to_output(output, tensor)
        flat, there, here = _flat(tensor), [0] * self.size, [0] * self.size
        there[(self.index + offset) % self.size] = here[(self.index - offset) % self.size] = flat.numel()
        start = partial(
            dist.all_to_all_single, _flat(output), flat, here, there
        )  # NCCL too starts both sides of it together
        return self._issue(call, start, keep=(output, tensor))

    def exchange(self, rounds: Rounds, messages: Sequence[ExchangedMessage], *, action: str = "") -> Work:
        """Runs `rounds` in the communication thread; on a GPU, on the group's own stream."""
        return self._run_rounds(*announce_exchange(self, rounds, messages, action))

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, action: str = "") -> Work:
        """Overwrites `tensor` with that of the rank at index `source` of the group."""
        call = announce(self, "broadcast", tensor, action=action, source=source)
        return self._issue(
            call, partial(dist.broadcast, _flat(tensor), src=self.ranks[source]), keep=(tensor,)
        )

    def scatter(
        self, output: torch.Tensor, tensor: torch.Tensor | None, *, source: int = 0, action: str = ""
    ) -> Work:
        """Fills `output` with this rank's slice of the source's `tensor` (size x output.numel() elements;
        None elsewhere).
        """
        call = announce(self, "scatter", output, tensor, action=action, source=source)
        pieces = None if tensor is None else list(rank_slices(_flat(tensor), self.size))
        start = partial(dist.scatter, _flat(output), pieces, src=self.ranks[source])
        return self._issue(call, start, keep=(output, *(pieces or ())))

    def gather(
        self, output: torch.Tensor | None, tensor: torch.Tensor, *, target: int = 0, action: str = ""
    ) -> Work:
        """Fills the target's `output` (size x tensor.numel() elements;
        None elsewhere) with all ranks' `tensor`, in rank order.
        """
        call = announce(self, "gather", tensor, output, action=action, source=target)
        pieces = None if output is None else list(rank_slices(_flat(output), self.size))
        start = partial(dist.gather, _flat(tensor), pieces, dst=self.ranks[target])
        return self._issue(call, start, keep=(tensor, *(pieces or ())))

    def reduce(self, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Sums `tensor` over the group, in place on the rank at index `target`.

        The others' may hold anything afterwards.
        """
        call = announce(self, "reduce", tensor, action=action, source=target)
        return self._issue(call, partial(dist.reduce, _flat(tensor), dst=self.ranks[target]), keep=(tensor,))

    def barrier(self, *, action: str = "") -> None:
        """Returns when every rank has come."""
        call = announce(self, "barrier", torch.empty(0), action=action)
        token = torch.zeros(1, device=self.device)
        self._issue(call, partial(dist.all_reduce, token), keep=(token,)).wait()
        token.item()  # on a GPU, wait only orders streams; reading the value makes the host wait too

    def _backend_all_reduce(self, tensor: torch.Tensor, **how: object) -> dist.Work:
        # straight to the backend: torch.distributed's checks are known here, and took 12 us on a busy machine
        return self._process_group.allreduce([tensor], self._all_reduce_options)

    def _uses_pair_exchange(self, tensor: torch.Tensor) -> bool:
        return self.on_gloo and self.size == 2 and tensor.nbytes <= MAX_PAIR_EXCHANGE_NBYTES

    def _pair_exchange(self, call: CollectiveCall, flat: torch.Tensor, total: torch.Tensor) -> Work:
        """Sums `flat` over two ranks into `total`: a + b and b + a are the same bits."""
        # torch orders a pair by rank, whatever its order here
        split = [0, flat.numel()] if self._backend_ranks[self.index] == 0 else [flat.numel(), 0]

        def issue(arrived: torch.Tensor) -> Work:
            start = partial(self._backend_all_to_all, arrived, flat, split)
            return self._issue(
                call, start, keep=(flat, arrived), finish=partial(sum_into, total, (flat, arrived))
            )

        return self._receive_buffers.receive(flat, issue)

    def _backend_all_to_all(
        self, arrived: torch.Tensor, sent: torch.Tensor, split: list[int], **how: object
    ) -> dist.Work:
        return self._process_group.alltoall_base(
            arrived, sent, split, split, self._all_to_all_options
        )  # straight to the backend, as above

    def _run_algorithm(self, call: CollectiveCall, flat: torch.Tensor) -> Work:
        if flat.numel() == 0:
            return CompletedWork()
        rounds = run_rounds(get_algorithm(call.algorithm), self.size, self.index, flat)
        return self._run_rounds(call, rounds, flat)

    def _run_rounds(self, call: CollectiveCall, rounds: Rounds, *operands: torch.Tensor) -> Work:
        """Runs `rounds`, which keep their tensors alive; a failed step frees `operands` without the wait."""
        check_not_destroyed()
        asked = CollectiveWait(self, call, self.watchdog, on_gloo=self.on_gloo, is_p2p=True)
        device = self.device
        if device is not None and device.type != "cpu":
            self._stream = self._stream or torch.Stream(device)
            self._stream.wait_stream(current_stream(device))
            for each in operands:
                each.record_stream(self._stream)
            with self._stream, torch.no_grad():
                for sends, receives in rounds:
                    self._deliver(asked, sends, receives)
                event = record_event(device)
            return StreamWork(event, self._stream, (rounds, *operands))
        self._comm_thread = self._comm_thread or CommThread(f"rounds over {' x '.join(self.axes)}")

        def play() -> None:
            with torch.no_grad():  # a thread has a mode of its own
                for sends, receives in rounds:
                    self._deliver(asked, sends, receives)

        return self._comm_thread.submit(play)

    def _deliver(self, asked: CollectiveWait, sends: PeerTensors, receives: PeerTensors) -> None:
        """Sends and receives the messages of one round; on a GPU, enqueues them on the stream."""
        if not sends and not receives:
            return
        try:
            works = self._start_round(sends, receives)
        except RuntimeError as error:
            raise asked.error_for(error) from error
        for work in works:
            asked.wait(work)

    def _start_round(self, sends: PeerTensors, receives: PeerTensors) -> list[dist.Work]:
        if (
            self.on_gloo
        ):  # straight to the backend: batches and ranks of the world cost 0.1 ms more per round of Python
            arriving = [
                self._process_group.recv([tensor], peer, self._round_tag) for peer, tensor in receives
            ]
            return arriving + [
                self._process_group.send([tensor], peer, self._round_tag) for peer, tensor in sends
            ]
        ops = [
            dist.P2POp(dist.irecv, tensor, self.ranks[peer], self._process_group, self._round_tag)
            for peer, tensor in receives
        ]
        ops += [
            dist.P2POp(dist.isend, tensor, self.ranks[peer], self._process_group, self._round_tag)
            for peer, tensor in sends
        ]
        return dist.batch_isend_irecv(ops)  # NCCL starts them together, or they would wait for each other

    def _issue_p2p(self, call: CollectiveCall, tensor: torch.Tensor, peer: int) -> Work:
        flat, sends = _flat(tensor), call.collective == "send"
        if self.on_gloo:  # straight to the backend, as in `_backend_all_reduce`: the same way, 15 us shorter
            backend, rank = self._process_group, self._backend_ranks[peer]
            move = backend.send if sends else backend.recv
            return self._issue(call, lambda **how: move([flat], rank, USER_TAG), keep=(tensor,))
        start = partial(_start_p2p, dist.isend if sends else dist.irecv, flat, self.ranks[peer])
        return self._issue(call, start, keep=(tensor,))

    def _issue(
        self,
        call: CollectiveCall,
        start: Callable[..., BackendWork | None],
        *,
        keep: tuple[torch.Tensor, ...],
        finish: Callable[[], None] | None = None,
    ) -> Work:
        if keep[0].numel() == 0 and call.collective != UNEVEN:
            return CompletedWork()  # nothing to move, on any rank
        check_not_destroyed()
        pairwise = call.collective in POINT_TO_POINT
        asked = CollectiveWait(self, call, self.watchdog, on_gloo=self.on_gloo, is_p2p=pairwise)
        try:
            work = start(group=self._process_group, async_op=True)
        except RuntimeError as error:
            raise asked.error_for(error) from error
        if work is None:
            text = (
                f"{call}: torch.distributed does not count this process into ranks "
                f"{', '.join(map(str, self.ranks))}"
            )
            raise CollectiveError(f"{text}. Ask the world of this process for groups")
        if not self.on_gloo and self.watchdog.pending_works is not None:
            self.watchdog.pending_works.add(self.ledger.flight_recorder.sequence_id, work.is_completed)
        issued = TorchWork(work, asked, keep, finish)
        return P2PWork(issued) if pairwise else issued


def _collective_fn(collective: str) -> Callable[..., dist.Work | None]:
    # newer torch warns at the old names of these two, older torch has only those
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[collective]
    new = f"{collective}_single"
    return vars(dist)[new if new in vars(dist) else old]


def _start_p2p(
    start: Callable[..., dist.Work | None],
    tensor: torch.Tensor,
    peer: int,
    *,
    group: dist.ProcessGroup,
    async_op: bool,
) -> dist.Work | None:
    return start(tensor, peer, group=group, tag=USER_TAG)  # send and receive know no other way than async


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 1 and not tensor.requires_grad and tensor.dtype in SUMMABLE_DTYPES:
        return tensor  # as it mostly is: 2 us less
    flat = tensor.detach().view(-1)
    return (
        flat if flat.dtype in SUMMABLE_DTYPES else flat.view(torch.uint8)
    )  # what gloo does not know, int16 and float8 say, is moved
