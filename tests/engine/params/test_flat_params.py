"""The memory of shards: who holds which values, zeros where arenas are padded, and the same buffers step after step."""

from collections.abc import Callable, Sequence

import pytest
import torch

from meshwright.api import make_plan
from meshwright.comm.collectives.group import Group, Work, World
from meshwright.engine.step.executor import Player
from meshwright.parallel.data.batch_split import Batch
from meshwright.parallel.data.zero import Zero
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.single_device import ROLE
from meshwright.testing.ranks import on_threads
from tests.tiny_model import player_of, reading_of, rows, tiny_job

READING = reading_of()  # the 91 elements of its head do not divide by 3
RANKS = 3
STAGES = [1, 2, 3]


def plan_of(stage: int, micro_batch: int = 2) -> Plan:
    return make_plan(READING, tiny_job(), Mesh(dp_shard=RANKS), (Batch(axis="dp_shard"), Zero(stage=stage)), micro_batch)


def on_ranks(stage: int, body: Callable[[Player, Callable[[], float]], object], world_of: Callable[[World], World] = lambda w: w):
    """What `body` finds on each rank; its second argument plays a step and returns the norm of its gradients."""
    plan = plan_of(stage)

    def on_rank(world: World) -> object:
        player = player_of(READING, plan, world_of(world))
        mine = {key: value[plan.rows_read(world.rank)] for key, value in rows().items()}
        found = body(player, lambda: player.step(mine).grad_norm)
        player.close()
        return found

    return on_threads(on_rank, plan.mesh)


def initial() -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in READING.make(torch.device("cpu"), torch.float64)[2].items()}


@pytest.mark.parametrize("stage", STAGES)
def test_each_element_is_stepped_by_one_rank(stage: int):
    def pieces(player: Player, step: object) -> dict[str, tuple[int, torch.Tensor]]:
        owned = player.store.owned()
        return {name: (player.store.piece(name).begin, piece.detach().clone()) for name, piece in owned.items()}

    found = on_ranks(stage, pieces)
    for name, whole in initial().items():
        mine = sorted((held[name] for held in found if name in held), key=lambda pair: pair[0])
        assert [begin for begin, _ in mine] == [sum(len(p) for _, p in mine[:i]) for i in range(len(mine))]
        assert torch.equal(torch.cat([piece for _, piece in mine]), whole.reshape(-1)), name


@pytest.mark.parametrize("stage", STAGES)
def test_padding_is_packed_as_zeros_whatever_the_buffer_held(stage: int):
    def poisoned(player: Player, step: Callable[[], float]) -> tuple[int, float]:
        step()
        for buffer in player.store._buffers.values():
            buffer.view(torch.uint8).fill_(7)
        step()
        padding = 0.0, 0
        for held in player.store.arenas.values():
            ends = max((piece.at + piece.numel for piece in held.pieces), default=0)
            padding = padding[0] + held.gradient[ends:].abs().sum().item(), padding[1] + held.arena.shard - ends
        return padding

    found = on_ranks(stage, poisoned)
    assert sum(numel for _, numel in found) > 0
    assert [nonzero for nonzero, _ in found] == [0.0] * RANKS


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_counts_no_padding_and_each_element_once(stage: int):
    clean = on_ranks(stage, lambda player, step: [step(), step()])

    def poisoned(player: Player, step: Callable[[], float]) -> list[float]:
        first = step()
        for buffer in player.store._buffers.values():
            buffer.view(torch.uint8).fill_(7)
        return [first, step()]

    assert on_ranks(stage, poisoned) == clean


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_that_stay_whole_are_gathered_in_place_and_refreshed(stage: int):
    def refreshed(player: Player, step: Callable[[], float]) -> bool:
        step()
        for held in player.store.arenas.values():
            assert held.shard.untyped_storage().data_ptr() == held.whole.untyped_storage().data_ptr()
            assert held.shard.data_ptr() == held.whole[held.mine].data_ptr()
        whole = {name: value.clone() for name, value in player.parameters().items()}
        parameters = player.state.subject.parameters
        stale = any(not torch.equal(parameters[name], value) for name, value in whole.items())
        player.store.refresh("TEST")
        assert all(torch.equal(parameters[name], value) for name, value in whole.items())
        return stale

    assert on_ranks(stage, refreshed) == [True] * RANKS, "between steps a rank knows its own shard only"


def test_a_block_that_is_fetched_is_whole():
    def fetched(player: Player, step: Callable[[], float]) -> None:
        step()
        whole, subject = player.parameters(), player.state.subject
        for block, module in subject.blocks.items():
            for buffer in player.store._buffers.values():
                buffer.view(torch.uint8).fill_(7)
            player.store.fetch(block, "TEST")
            mine = [name for name, p in subject.parameters.items() if any(p is other for other in module.parameters())]
            assert mine or not list(module.parameters())
            assert all(torch.equal(subject.parameters[name], whole[name]) for name in mine), block

    on_ranks(3, fetched)


class Noted(Group):
    """A group that notes in which memory the gathers and sums of shards lie."""

    def __init__(self, group: Group, seen: dict[str, tuple[int, ...]]) -> None:
        self._group, self._seen = group, seen
        self.axes, self.ranks, self.index, self.ledger = group.axes, group.ranks, group.index, group.ledger
        self.transport, self.device = group.transport, group.device

    def _note(self, action: str, *tensors: torch.Tensor) -> None:
        if action.startswith(("UNSHARD", "REDUCE")):
            self._seen[action] = tuple(tensor.data_ptr() for tensor in tensors)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        self._note(action, output, tensor)
        return self._group.all_gather(output, tensor, action=action)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        self._note(action, output, tensor)
        return self._group.reduce_scatter(output, tensor, action=action)

    def all_reduce(self, tensor: torch.Tensor, *, action: str = "", algorithm: str = "backend") -> Work:
        self._note(action, tensor)
        return self._group.all_reduce(tensor, action=action, algorithm=algorithm)

    def send(self, *others: object, **more: object) -> Work:
        raise NotImplementedError("no shard is sent so")

    receive = all_to_all = shift = broadcast = scatter = gather = reduce = barrier = send


class NotedWorld(World):
    """A world of such groups."""

    def __init__(self, world: World) -> None:
        self._world, self.seen = world, {}
        self.mesh, self.rank, self.ledger, self.device = world.mesh, world.rank, world.ledger, world.device

    def group(self, axes: tuple[str, ...], among: Sequence[int] = ()) -> Group:
        return Noted(self._world.group(axes, among), self.seen)

    def close(self) -> None:
        self._world.close()


def memory_of(player: Player) -> frozenset[int]:
    """The addresses of all that holds weights, gradients or moments."""
    store = player.store
    tensors = [*player.state.subject.parameters.values(), *store._buffers.values(), *store.owned().values()]
    tensors += [piece.grad for piece in store.owned().values() if piece.grad is not None]
    for held in store.arenas.values():
        tensors += [each for each in (held.whole, held.shard, held.gradient) if each is not None]
    states = [held for optimizer in player.optimizers for held in optimizer.state.values()]
    tensors += [value for held in states for value in held.values() if isinstance(value, torch.Tensor)]
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


@pytest.mark.parametrize("stage", STAGES)
def test_a_steady_step_makes_no_buffer_of_weights_or_gradients(stage: int):
    def traced(player: Player, step: Callable[[], float]) -> int:
        step()
        step()
        seen, held = [], []
        for _ in range(4):
            player.state.world.seen.clear()
            step()
            seen.append(dict(player.state.world.seen))
            held.append((memory_of(player), sum(player.sizes().values())))
        assert seen == [seen[0]] * 4, "steps 3 to 6 gather and sum in the same memory"
        assert held == [held[0]] * 4
        return len(seen[0])

    expected = sum(action.kind in ("UNSHARD", "REDUCE") for action in plan_of(stage).program.actions(ROLE))
    assert on_ranks(stage, traced, NotedWorld) == [expected] * RANKS
