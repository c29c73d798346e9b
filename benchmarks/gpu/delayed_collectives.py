"""Races: collectives that begin and end late must change no bit.

One rank of a large job is simulated (comm/backends/fake.py): all others are assumed to hold equal tensors.
Its collectives run once at once, and once on a stream of their own that sleeps before it reads and before it
writes; who waits too little, or writes into an operand too early, has other parameters after three steps.

    compute   [B 7] issue ..... [B 6] ....... wait ...... [step]
    late            [ sleep  read  sleep  write ]

A CPU has no streams: there a late collective runs when it is waited for. A planted race, waits that wait for
nothing, must be seen; and two runs at once must be equal, or the kernels are not deterministic.
"""

import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch

from benchmarks.gpu.llamas import AUTOCAST, FP32, SMALL, make_llama_plan, open_trainer, saved_tensors
from benchmarks.gpu.setting import Setting, same_bits
from meshwright.comm.backends.fake import CompletedWork, FakeWorld
from meshwright.comm.collectives.group import ExchangedMessage, Group, GroupKey, Rounds, Work, World
from meshwright.device.device_streams import current_stream, record_event
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.training.deterministic_kernels import deterministic_kernels

NUM_STEPS = 3
MAX_CYCLES = 2_000_000  # of one sleep: about a millisecond
PEER_VALUE = 0.01  # of each element that a peer sends
LAYOUTS = {
    "ddp": Mesh(dp_replicate=3),
    "zero 3": Mesh(dp_shard=3),
    "hsdp": Mesh(dp_replicate=2, dp_shard=3),
    "ring attention": Mesh(cp=3),
    "1f1b": Mesh(pp=3),
    "tensor parallel": Mesh(tp=3),
    "zero 3 x ring attention": Mesh(dp_shard=2, cp=3),
    "zero 3 x tensor parallel": Mesh(dp_shard=2, tp=3),
}
PRECISIONS = {"fp32": FP32, "autocast": AUTOCAST}

Timing = Literal["at once", "late", "not waited for"]


def races(setting: Setting) -> dict[str, object]:
    """Returns the verdict of each plan, "equal" where delays change no bit, and that of the planted race."""
    with deterministic_kernels(os.environ):
        plan = make_llama_plan(SMALL, FP32, LAYOUTS["zero 3"], micro_batch=1)
        at_once = bits_after(plan, 0, setting.device, "at once")
        is_planted_seen = not same_bits(at_once, bits_after(plan, 0, setting.device, "not waited for"))
        verdicts = _verdicts(setting)
    ok = is_planted_seen and set(verdicts.values()) == {"equal"}
    return {"ok": ok, "planted race seen": is_planted_seen, "plans": verdicts}


def _verdicts(setting: Setting) -> dict[str, str]:
    layouts = setting.size(LAYOUTS, {name: LAYOUTS[name] for name in ("zero 3", "1f1b")})
    verdicts: dict[str, str] = {}
    for name, mesh in layouts.items():
        for word, precision in setting.size(PRECISIONS, {"fp32": FP32}).items():
            plan = make_llama_plan(SMALL, precision, mesh, micro_batch=1)
            for rank in sorted({0, mesh.world_size - 1}):
                verdicts[f"{name}, {word}, rank {rank}"] = _verdict(plan, rank, setting.device)
                setting.keep({"plans": verdicts})
    return verdicts


def _verdict(plan: Plan, rank: int, device: torch.device) -> str:
    at_once = bits_after(plan, rank, device, "at once")
    if not same_bits(at_once, bits_after(plan, rank, device, "at once")):
        return "not deterministic"
    return "equal" if same_bits(at_once, bits_after(plan, rank, device, "late")) else "a race"


def bits_after(plan: Plan, rank: int, device: torch.device, timing: Timing) -> list[torch.Tensor]:
    """Returns all state of `rank` after some steps, and all that it has sent to a peer."""
    world = LateWorld(FakeWorld(plan.mesh, rank, device), timing)
    with open_trainer(SMALL, plan, world) as trainer:
        for _ in range(NUM_STEPS):
            trainer.step(trainer.local_batch(SMALL.samples()))
        world.finish()
        return saved_tensors(trainer) + [each.cpu() for each in world.sent.values()]


class LateWork(Work):
    """A collective that `start` issues: on the stream of its group, or, on a CPU, when it is waited for."""

    def __init__(self, start: Callable[[], object], group: "LateGroup") -> None:
        self._start: Callable[[], object] | None = start
        self._group, self._event = group, None
        self._callbacks: list[Callable[[], None]] = []
        if group.stream is not None:
            group.stream.wait_stream(current_stream(group.stream.device))
            with group.stream:
                group.sleep()
                start()
                group.sleep()
                self._event = record_event(group.stream.device)

    def wait(self) -> None:
        """Makes what follows wait for the result, unless the group forgets to."""
        if self._group.timing == "not waited for":
            return
        if self._event is not None:
            current_stream(self._event.device).wait_event(self._event)
            self._start = None
        elif self._start is not None:
            start, self._start = self._start, None
            start()
        while self._callbacks:
            self._callbacks.pop(0)()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` on the stream of the group; on a CPU, when the result has been waited for."""
        if self._group.stream is None:
            self._callbacks.append(callback)
            return
        with self._group.stream:
            callback()


class LateGroup(Group):
    """The collectives of `group`, of one simulated rank, at another time. A peer sends PEER_VALUE."""

    transport = "nothing, late"

    def __init__(
        self, group: Group, device: torch.device, timing: Timing, sent: dict[int, torch.Tensor]
    ) -> None:
        self._group, self.timing, self._sent = group, timing, sent
        self.works: list[LateWork] = []
        self.axes, self.ranks, self.index, self.ledger = group.axes, group.ranks, group.index, group.ledger
        self.device, self.member_indices = device, group.member_indices
        has_stream = device.type != "cpu" and timing != "at once"
        self.stream = torch.Stream(device) if has_stream else None
        self._random = random.Random(str(group.axes))

    def sleep(self) -> None:
        """Lets the current stream sleep for a random time."""
        if self.stream is not None and self.stream.device.type == "cuda":
            torch.cuda._sleep(self._random.randrange(MAX_CYCLES))

    def send(self, tensor: torch.Tensor, *, target: int, action: str = "") -> Work:
        """Reads `tensor` late."""
        number = len(self._sent)
        self._sent[number] = tensor

        def start() -> None:
            self._group.send(tensor, target=target, action=action)
            self._sent[number] = tensor.clone()

        return self._late(start)

    def recv(self, tensor: torch.Tensor, *, source: int, action: str = "") -> Work:
        """Fills `tensor` late."""

        def start() -> None:
            self._group.recv(tensor, source=source, action=action)
            tensor.fill_(PEER_VALUE)

        return self._late(start, tensor)

    def all_reduce(self, tensor: torch.Tensor, *, action: str = "", algorithm: str = "backend") -> Work:
        """Sums late."""
        return self._late(lambda: self._group.all_reduce(tensor, action=action, algorithm=algorithm), tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Gathers late."""
        return self._late(lambda: self._group.all_gather(output, tensor, action=action))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Sums and scatters late."""
        return self._late(lambda: self._group.reduce_scatter(output, tensor, action=action))

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Exchanges late."""
        return self._late(lambda: self._group.all_to_all(output, tensor, action=action))

    def all_to_all_v(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        action: str = "",
    ) -> Work:
        """Exchanges rows late."""
        splits = {"output_splits": output_splits, "input_splits": input_splits}
        return self._late(lambda: self._group.all_to_all_v(output, tensor, **splits, action=action))

    def shift(self, output: torch.Tensor, tensor: torch.Tensor, *, offset: int = 1, action: str = "") -> Work:
        """Shifts late."""
        return self._late(lambda: self._group.shift(output, tensor, offset=offset, action=action))

    def exchange(self, rounds: Rounds, messages: Sequence[ExchangedMessage], *, action: str = "") -> Work:
        """Runs `rounds` late."""
        return self._late(lambda: self._group.exchange(rounds, messages, action=action))

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, action: str = "") -> Work:
        """Broadcasts late."""
        return self._late(lambda: self._group.broadcast(tensor, source=source, action=action), tensor)

    def scatter(
        self, output: torch.Tensor, tensor: torch.Tensor | None, *, source: int = 0, action: str = ""
    ) -> Work:
        """Scatters late."""
        return self._late(lambda: self._group.scatter(output, tensor, source=source, action=action))

    def gather(
        self, output: torch.Tensor | None, tensor: torch.Tensor, *, target: int = 0, action: str = ""
    ) -> Work:
        """Gathers late, at the target."""
        return self._late(lambda: self._group.gather(output, tensor, target=target, action=action))

    def reduce(self, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Sums late, at the target."""
        return self._late(lambda: self._group.reduce(tensor, target=target, action=action))

    def barrier(self, *, action: str = "") -> None:
        """Records the barrier."""
        self._group.barrier(action=action)

    def _late(self, start: Callable[[], object], count: torch.Tensor | None = None) -> Work:
        """Starts it at its time. A `count` of labels is at least 1: a rank without any has equal peers."""

        def begin() -> None:
            with torch.no_grad():
                start()
                if count is not None and not count.is_floating_point():
                    count.clamp_(min=1)

        if self.timing == "at once" or self.size == 1:
            begin()
            return CompletedWork()
        work = LateWork(begin, self)
        if self.stream is None:  # else it has begun, and holds its tensors until it is waited for
            self.works.append(work)
        return work


class LateWorld(World):
    """A simulated rank whose collectives have another `timing`; `sent` is what it sent to peers, in order."""

    def __init__(self, world: FakeWorld, timing: Timing) -> None:
        self._world, self._timing = world, timing
        self.mesh, self.rank, self.ledger = world.mesh, world.rank, world.ledger
        self.device = world.device  # pyrefly: ignore[read-only]  torch.device has a __get__, and is no descriptor here
        self.serializes_p2p = world.device.type != "cpu"
        self.sent: dict[int, torch.Tensor] = {}
        self._groups: dict[GroupKey, LateGroup] = {}

    def group(self, axes: Iterable[str], member_indices: Sequence[int] = ()) -> Group:
        """Returns the group along `axes`, which is late."""
        found = self._world.group(axes, member_indices)
        key = found.axes, found.member_indices
        if key not in self._groups:
            self._groups[key] = LateGroup(found, self.device, self._timing, self.sent)
        return self._groups[key]

    def finish(self) -> None:
        """Waits for all collectives that nobody has waited for, such as sends."""
        for group in self._groups.values():
            for work in group.works:
                work.wait()

    def close(self) -> None:
        """Closes the simulated rank."""
        self._world.close()
