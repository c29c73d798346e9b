"""Memory of flat parameters: which rank keeps which values, zero padding, and buffers reused in every
step.
"""

from collections.abc import Callable, Sequence

import pytest
import torch

from meshwright.api import make_plan
from meshwright.comm.collectives.group import Group, Work, World
from meshwright.engine.step.executor import StepExecutor
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.paper_model import FIRST_ROLE
from tests.tiny_model import analyzed_model, executor_of, tiny_job, token_samples

ANALYZED = analyzed_model()  # the 91 elements of its head do not divide by 3
RANKS = 3
STAGES = [1, 2, 3]


def plan_of(stage: int, micro_batch: int = 2) -> Plan:
    return make_plan(
        ANALYZED,
        tiny_job(),
        Mesh(dp_shard=RANKS),
        (BatchSplit(axis="dp_shard"), ZeRO(stage=stage)),
        micro_batch,
    )


def on_ranks(
    stage: int,
    body: Callable[[StepExecutor, Callable[[], float]], object],
    world_of: Callable[[World], World] = lambda w: w,
):
    """Returns what `body` finds on each rank; its second argument plays a step and returns the norm of
    its gradients.
    """
    plan = plan_of(stage)

    def on_rank(world: World) -> object:
        executor = executor_of(ANALYZED, plan, world_of(world))
        mine = {key: value[plan.samples_read(world.rank)] for key, value in token_samples().items()}
        found = body(executor, lambda: executor.step(mine).grad_norm)
        executor.close()
        return found

    return run_on_threads(on_rank, plan.mesh)


def initial() -> dict[str, torch.Tensor]:
    return {
        name: p.detach() for name, p in ANALYZED.make_module(torch.device("cpu"), torch.float64)[2].items()
    }


@pytest.mark.parametrize("stage", STAGES)
def test_each_element_is_stepped_by_one_rank(stage: int):
    def pieces(executor: StepExecutor, step: object) -> dict[str, tuple[int, torch.Tensor]]:
        owned = executor.state.flat_params.optimizer_params()
        return {
            name: (executor.state.flat_params.param_shard(name).begin, piece.detach().clone())
            for name, piece in owned.items()
        }

    found = on_ranks(stage, pieces)
    for name, whole in initial().items():
        mine = sorted((held[name] for held in found if name in held), key=lambda pair: pair[0])
        assert [begin for begin, _ in mine] == [sum(len(p) for _, p in mine[:i]) for i in range(len(mine))]
        assert torch.equal(torch.cat([piece for _, piece in mine]), whole.reshape(-1)), name


@pytest.mark.parametrize("stage", STAGES)
def test_padding_is_packed_as_zeros_whatever_was_in_the_buffer(stage: int):
    def poisoned(executor: StepExecutor, step: Callable[[], float]) -> tuple[int, float]:
        step()
        for buffer in executor.state.flat_params._buffers.values():
            buffer.view(torch.uint8).fill_(7)
        step()
        padding = 0.0, 0
        for held in executor.state.flat_params.by_param_group.values():
            ends = max((piece.shard_offset + piece.numel for piece in held.param_shards), default=0)
            padding = (
                padding[0] + held.gradient[ends:].abs().sum().item(),
                padding[1] + held.spec.shard_numel - ends,
            )
        return padding

    found = on_ranks(stage, poisoned)
    assert sum(numel for _, numel in found) > 0
    assert [nonzero for nonzero, _ in found] == [0.0] * RANKS


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_counts_no_padding_and_each_element_once(stage: int):
    clean = on_ranks(stage, lambda executor, step: [step(), step()])

    def poisoned(executor: StepExecutor, step: Callable[[], float]) -> list[float]:
        first = step()
        for buffer in executor.state.flat_params._buffers.values():
            buffer.view(torch.uint8).fill_(7)
        return [first, step()]

    assert on_ranks(stage, poisoned) == clean


@pytest.mark.parametrize("stage", [1, 2])
def test_unsharded_weights_are_gathered_in_place_and_refreshed(stage: int):
    def refreshed(executor: StepExecutor, step: Callable[[], float]) -> bool:
        step()
        for held in executor.state.flat_params.by_param_group.values():
            assert held.shard.untyped_storage().data_ptr() == held.full_tensor.untyped_storage().data_ptr()
            assert held.shard.data_ptr() == held.full_tensor[held.shard_slice].data_ptr()
        whole = {name: value.clone() for name, value in executor.gather_parameters().items()}
        parameters = executor.state.trained_module.parameters
        stale = any(not torch.equal(parameters[name], value) for name, value in whole.items())
        executor.state.flat_params.refresh_unsharded("TEST")
        assert all(torch.equal(parameters[name], value) for name, value in whole.items())
        return stale

    assert on_ranks(stage, refreshed) == [True] * RANKS, "between steps a rank knows its own shard only"


def test_a_gathered_block_is_complete():
    def fetched(executor: StepExecutor, step: Callable[[], float]) -> None:
        step()
        whole, subject = executor.gather_parameters(), executor.state.trained_module
        for block, module in subject.blocks.items():
            for buffer in executor.state.flat_params._buffers.values():
                buffer.view(torch.uint8).fill_(7)
            executor.state.flat_params.unshard_block(block, "TEST")
            mine = [
                name
                for name, p in subject.parameters.items()
                if any(p is other for other in module.parameters())
            ]
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

    recv = all_to_all = all_to_all_v = shift = exchange = broadcast = scatter = gather = reduce = barrier = (
        send
    )


class NotedWorld(World):
    """A world of such groups."""

    def __init__(self, world: World) -> None:
        self._world, self.seen = world, {}
        self.mesh, self.rank, self.ledger, self.device = world.mesh, world.rank, world.ledger, world.device

    def group(self, axes: tuple[str, ...], member_indices: Sequence[int] = ()) -> Group:
        return Noted(self._world.group(axes, member_indices), self.seen)

    def close(self) -> None:
        self._world.close()


def memory_of(executor: StepExecutor) -> frozenset[int]:
    """The addresses of all that holds weights, gradients or moments."""
    store = executor.state.flat_params
    tensors = [
        *executor.state.trained_module.parameters.values(),
        *store._buffers.values(),
        *store.optimizer_params().values(),
    ]
    tensors += [piece.grad for piece in store.optimizer_params().values() if piece.grad is not None]
    for held in store.by_param_group.values():
        tensors += [each for each in (held.full_tensor, held.shard, held.gradient) if each is not None]
    states = [held for optimizer in executor.state.optimizers for held in optimizer.state.values()]
    tensors += [value for held in states for value in held.values() if isinstance(value, torch.Tensor)]
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


@pytest.mark.parametrize("stage", STAGES)
def test_a_steady_step_makes_no_buffer_of_weights_or_gradients(stage: int):
    def traced(executor: StepExecutor, step: Callable[[], float]) -> int:
        step()
        step()
        seen, held = [], []
        for _ in range(4):
            executor.state.world.seen.clear()
            step()
            seen.append(dict(executor.state.world.seen))
            held.append((memory_of(executor), sum(executor.memory_by_category().values())))
        assert seen == [seen[0]] * 4, "steps 3 to 6 gather and sum in the same memory"
        assert held == [held[0]] * 4
        return len(seen[0])

    expected = sum(
        action.kind in ("UNSHARD", "REDUCE") for action in plan_of(stage).program.actions(FIRST_ROLE)
    )
    assert on_ranks(stage, traced, NotedWorld) == [expected] * RANKS


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_of_one_group_makes_the_views_of_that_group_alone(stage: int):
    def body(executor: StepExecutor, step: Callable[[], float]) -> list[bool]:
        step()
        store = executor.state.flat_params
        stepped = {id(parameter): name for name, parameter in store.optimizer_params().items()}
        found = []
        for group in store.by_param_group.values():
            names = frozenset(name for name, _, _ in group.spec.params)
            chosen = [stepped[id(p)] for each in store.update_groups(names) for p in each.parameters]
            found.append(set(chosen) == set(group.optimizer_params))
        every = {stepped[id(p)] for each in store.update_groups() for p in each.parameters}
        return [*found, every == set(store.optimizer_params())]

    assert all(all(found) for found in on_ranks(stage, body))
