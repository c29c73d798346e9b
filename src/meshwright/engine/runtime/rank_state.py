"""The mutable state of one rank in a step, the module that it trains, and the metrics of the step."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.comm.backends.fake import CompletedWork
from meshwright.comm.collectives.group import ExchangedMessage, Group, Rounds, Work, World
from meshwright.engine.runtime.async_copies import DeviceCopies
from meshwright.engine.runtime.grad_bucket import GradBucket
from meshwright.engine.runtime.host_memory import HostMemory
from meshwright.engine.runtime.loss_guard import LossSpike, SpikeDetector
from meshwright.engine.runtime.module_patches import ModulePatches
from meshwright.model.analysis.forward_graph_trace import ForwardGraphCache
from meshwright.model.blocks.block_forward_backward import BlockCall, ForwardDriver, ForwardPass
from meshwright.model.blocks.split_backward import WeightBackward
from meshwright.model.loss.loss_definition import Batch, Loss
from meshwright.model.sequence_analysis.same_ops_on_shards import SequenceShardCheck
from meshwright.plan.compiled_graphs import CompiledGraphs
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.plan import RankPlan
from meshwright.plan.sharding.expert_load import ExpertLoad
from meshwright.plan.sharding.tensor_placements import TOKEN_DIM
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import ActivationCodec, Answer, ObservedCodes, ObservedSum

if TYPE_CHECKING:  # the parts, which receive the state, lie in the layers above
    from meshwright.engine.forward_backward.block_redistributions import BlockCollectives
    from meshwright.engine.forward_backward.context_parallel_forward import FullSequenceRunner
    from meshwright.engine.forward_backward.stage_send_recv import StageIO
    from meshwright.engine.forward_backward.step_rng import StepRNG
    from meshwright.engine.losses.batch_sums import BatchSums
    from meshwright.engine.losses.token_count import TokenCounter
    from meshwright.engine.optim.make_optimizers import Optimizers
    from meshwright.engine.optim.optimizer_step import OptimizerUpdate
    from meshwright.engine.params.disk_states import DiskStates
    from meshwright.engine.params.flat_param_store import FlatParamStore
    from meshwright.engine.params.offloaded_states import OffloadedStates
    from meshwright.engine.params.rank_file import RankFile
    from meshwright.engine.step.strategy_tensors import StrategyTensors


StepValues = tuple[float, float, tuple[ExpertLoad, ...]]


class StepNumbers:
    """The loss, the gradient norm and the expert load of a step, as `read` returns them.

    `is_late`: the step has returned before the device has computed them, and the first read waits for it.
    """

    def __init__(self, read: Callable[[], StepValues], *, is_late: bool = False) -> None:
        self._read, self.is_late = read, is_late

    @cached_property
    def values(self) -> StepValues:
        """The loss, the gradient norm, and the expert load by layer."""
        return self._read()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepNumbers) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)

    def __repr__(self) -> str:
        loss, grad_norm, _ = self.values
        return f"(loss={loss!r}, grad_norm={grad_norm!r})"

    def __reduce__(self) -> tuple[type["StepNumbers"], tuple[Callable[[], StepValues]]]:
        return StepNumbers, (partial(tuple, self.values),)


@dataclass(frozen=True)
class RoundMetrics:
    """What all sites have done in a round: the loss over all that counts, tokens and samples."""

    loss: float
    tokens: int
    samples: int


@dataclass(frozen=True)
class Metrics:
    """The result of a step, the same on every rank. `tokens` and `samples` are global counts.

    Where sites train apart, the result is that of a site, and the same on its ranks; a step that ends a round
    returns the `round` of all sites too, and only such a step returns wishes to stop.

    On a GPU, reading `loss`, `grad_norm` or `expert_loads` waits until the device has ended the step. A loop
    that reads those of the step before, or of every tenth step, keeps the device busy; all other values are
    there at once.

    `stop_requested`: a rank asked to stop. `is_skipped`: the parameters did not change, because no token
    counted, because the loss guard found a loss spike (`spike`), or because gradients overflowed float16
    (`overflow`). `loss_scale` is that of the next step; None without float16. `noise_scale` is in samples
    (step/gradient_noise.py); None: not measured or not known yet.
    """

    step: int
    numbers: StepNumbers
    lr: float
    tokens: int
    stop_requested: bool = False
    is_skipped: bool = False
    spike: LossSpike | None = None
    samples: int = 0
    noise_scale: float | None = None
    overflow: bool = False
    loss_scale: float | None = None
    round: RoundMetrics | None = None

    @property
    def loss(self) -> float:
        """The loss over all that counts in the global batch."""
        return self.numbers.values[0]

    @property
    def grad_norm(self) -> float:
        """The norm of the full gradient before clipping."""
        return self.numbers.values[1]

    @property
    def expert_loads(self) -> tuple[ExpertLoad, ...]:
        """The choices of the global batch for each expert, by layer; empty without experts."""
        return self.numbers.values[2]


@dataclass
class TrainedModule:
    """The model in training: the user's module, its blocks, logical parameters, and an example batch.

    `initial_values` are made on demand, for parameters that have a shape and no memory: a flat parameter or a
    slice gives it. `forward_graphs` are the recorded forwards that pipeline stages need. `sequence_check`
    compares sequences of other lengths with the plan. `remote_param_names` are the parameters of other
    pipeline ranks.
    """

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    model_spec: ModelSpec
    dummy_batch: Batch
    initial_values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    forward_graphs: ForwardGraphCache | None = None
    sequence_check: SequenceShardCheck | None = None
    remote_param_names: frozenset[str] = frozenset()

    def restrict_to(self, model_spec: ModelSpec) -> "TrainedModule":
        """Returns the part that runs the block calls of `model_spec`.

        The module frees all other parameters.
        """
        local_params = {weight.name: self.parameters[weight.name] for weight in model_spec.params}
        for name in self.parameters.keys() - local_params.keys():  # shapes stay, the memory is freed
            remote_param = self.parameters[name]
            remote_param.data = remote_param.detach().new_zeros(()).expand(remote_param.shape)
        return replace(
            self,
            parameters=local_params,
            model_spec=model_spec,
            remote_param_names=frozenset(self.parameters.keys() - local_params.keys()),
        )

    @property
    def example_param(self) -> nn.Parameter:
        """One of the parameters; of a rank that has none of its own, of the module. What is made like it is
        on the device of all others, and fake where they are.
        """
        return next(iter(self.parameters.values() or self.module.parameters()))

    @property
    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The logical parameters that receive gradients."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}


@dataclass(frozen=True)
class Operand:
    """The tensors that a collective reads and writes: one and the same where it works in place."""

    input: torch.Tensor
    output: torch.Tensor

    @classmethod
    def in_place(cls, tensor: torch.Tensor) -> "Operand":
        """Returns the operand of a collective that replaces `tensor` by its result."""
        return cls(tensor, tensor)


@dataclass
class StepState:
    """What the current step has produced so far on one rank."""

    number: int = 0  # the global step, from 0
    microbatches: list[Batch] = field(default_factory=list)  # dummies come last
    # as they were given: what counts in them is read without waiting for the device
    host_microbatches: list[Batch] = field(default_factory=list)
    num_real_microbatches: int = 0  # microbatches with samples
    num_samples: int = 0  # samples in them
    stop_requested: bool = False  # by this rank
    microbatch_weights: list[float] = field(default_factory=list)  # what counts in each of them
    # the loss, and the expert load; they are summed over ranks together
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    loss_factor: float | torch.Tensor = 1.0  # the loss is multiplied by it before its backward
    forward_passes: dict[int, ForwardPass] = field(default_factory=dict)
    final_glue: dict[int, tuple[Any, BlockCall]] = field(default_factory=dict)
    # what W still has to compute, by block call and microbatch
    weight_backwards: dict[tuple[str, int], WeightBackward] = field(default_factory=dict)
    # squared norms of gradients before they are summed
    local_sqnorms: dict[str, torch.Tensor] = field(default_factory=dict)
    scaled_norm: torch.Tensor = field(
        default_factory=lambda: torch.zeros(())
    )  # of gradients times loss_scale
    loss_scale: float = 1.0
    # as it travels to other ranks
    grad_norm_tensor: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    noise_scale: float | None = None
    spike: LossSpike | None = None
    overflow: bool = False
    updates: bool = False  # whether the STEPs of the current update step
    # loss, loss weight, samples, tokens and wishes to stop of the round that ends with the step, all sites'
    round_totals: torch.Tensor | None = None

    @classmethod
    def on_device(cls, device: torch.device, num_load_counts: int = 0) -> "StepState":
        """Returns the state before a step, with numbers that collectives on `device` may sum."""
        sums = torch.zeros(1 + num_load_counts, dtype=torch.float64, device=device)
        return cls(sums=sums, scaled_norm=sums.new_zeros(()), grad_norm_tensor=sums.new_zeros(1))

    @property
    def loss_sum(self) -> torch.Tensor:
        """The loss over all that counts."""
        return self.sums[0]

    @property
    def grad_norm(self) -> float:
        """The norm of the gradients; on a GPU this waits for the device."""
        return self.scaled_norm.item() / self.loss_scale

    def free(self) -> None:
        """Frees samples and activations; the numbers stay."""
        self.microbatches, self.host_microbatches = [], []
        self.forward_passes.clear()
        self.final_glue.clear()
        self.weight_backwards.clear()
        self.local_sqnorms.clear()


@dataclass
class RankState:
    """One rank: its model, its place in the world, the parts of the engine that work on it, and its step.

    A caller gives the first fields; `StepExecutor` adds the others, in this order. `plan` is the plan as this
    rank sees it. `loss` is what a step computes, which may be a part of the loss that the caller gave.
    """

    trained_module: TrainedModule
    world: World
    loss: Loss
    works: dict[str, Work] = field(default_factory=dict)  # the collectives that are under way, by action
    # those of the actions `awaited_later`, for which a later step waits: strategies name them
    carried_works: dict[str, Work] = field(default_factory=dict)
    awaited_later: set[str] = field(default_factory=set)
    buckets: dict[str, GradBucket] = field(default_factory=dict)
    current_action: str = ""  # the ledger name of collectives inside a block
    observed_sums: "list[ObservedSum] | None" = None  # of codes, since the verifier has looked; None: not
    # of activations, likewise; and how activations travel where codes carry them, by axis
    observed_codes: list[ObservedCodes] | None = None
    # workers, in the order in which this server takes their gradients: those that are given, and behind them
    # those that have come, for the verifier; None: it does not ask
    arrivals: list[int] | None = None
    # the weights that a function of the user has seen on this rank, for the verifier; None: it does not ask
    observed_weights: dict[str, torch.Tensor] | None = None
    answers: tuple[Answer, ...] = ()  # of observers, to the last weights that they have seen
    activation_codecs: dict[str, ActivationCodec] = field(default_factory=dict)
    # what a server does in a forward of its workers outside of a step, by the action; None: nothing
    serve_forward: Callable[[str], None] | None = None
    num_load_counts: int = 0  # of experts, in a step (plan/sharding/expert_load.py)
    # whether every rank has all tokens where a step shards them (sequence_parallel): forwards of one token
    has_whole_tokens: bool = False
    evaluated_batch: Batch | None = None  # the microbatch of a forward outside of steps
    compiled_graphs: CompiledGraphs | None = None  # of its blocks; None: no strategy compiles them
    copies: DeviceCopies = field(init=False)
    host_memory: HostMemory = field(init=False)
    step: StepState = field(init=False)
    plan: RankPlan = field(init=False)
    disk: "DiskStates | None" = field(init=False)
    # makes a file of so many bytes for what rests on disk, which the executor closes; by key of the config
    make_file: "Callable[[int, str], RankFile]" = field(init=False)
    flat_params: "FlatParamStore" = field(init=False)
    optimizers: "Optimizers" = field(init=False)
    offloaded: "OffloadedStates" = field(init=False)
    collectives: "BlockCollectives" = field(init=False)
    patches: ModulePatches = field(init=False)
    strategy_tensors: "StrategyTensors" = field(init=False)
    sequence_runner: "FullSequenceRunner" = field(init=False)
    driver: ForwardDriver = field(init=False)
    stage_io: "StageIO | None" = field(init=False)
    step_rng: "StepRNG" = field(init=False)
    token_counter: "TokenCounter" = field(init=False)
    batch_sums: "BatchSums" = field(init=False)
    update: "OptimizerUpdate" = field(init=False)
    spike_detector: SpikeDetector | None = field(init=False)

    def __post_init__(self) -> None:
        self._sends: dict[str, Work] = {}
        self._lent: dict[str, tuple[Operand, Mapping[str, torch.Tensor]]] = {}  # by collective, in a step
        self.copies = DeviceCopies(self.world.device)
        self.host_memory = HostMemory(self.world.device, self.world.ledger)
        self.step = StepState.on_device(self.world.device)

    def begin_step(self, number: int) -> None:
        """Begins step `number`, whatever the last one, which may have failed, has left."""
        self.works.clear()
        self._sends.clear()
        self._lent.clear()
        self.step = StepState.on_device(self.world.device, self.num_load_counts)
        self.step.number = number

    def end_step(self) -> None:
        """Frees the samples, activations and messages of the step; its numbers stay."""
        self.works.clear()
        self._sends.clear()
        self._lent.clear()
        self.step.free()

    def takes_residual_slices(self, *, has_whole_tokens: bool) -> bool:
        """Returns whether blocks take slices of the residual stream, along its tokens or its features."""
        layout, mesh = self.plan.sharding.residual_layout, self.plan.mesh
        return any(
            each.dim is not None and mesh.size(axis) > 1 and not (has_whole_tokens and each.dim == TOKEN_DIM)
            for axis, each in layout.placements
        )

    def lend_operand(self, name: str, flat: torch.Tensor, by_param: Mapping[str, torch.Tensor]) -> None:
        """Makes `flat` the operand, in place, of the collective of the action `name` in this step.

        `by_param` are flat views of it, by parameter, without padding.
        """
        self._lent[name] = Operand.in_place(flat), by_param

    def operand(self, action: Action) -> Operand:
        """Returns the tensors that the collective of `action` reads and writes.

        What a strategy has lent; else the shard and the full tensor of a flat parameter, its packed gradients
        and their shard (everything, at an owner), a bucket, one parameter's gradient, or the range of a
        bucket in which the gradients of `action.tensors` lie.
        """
        if action.name in self._lent:
            return self._lent[action.name][0]
        if action.tensors and self.flat_params.is_flattened(action.tensors[0]):
            return self.flat_params.operand(action)
        if action.subject in self.buckets:
            return Operand.in_place(self.buckets[action.subject].buffer)
        parameter = self.trained_module.parameters.get(action.subject)
        if parameter is None:
            return Operand.in_place(self._bucket(action).flat_gradients(action.tensors))
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return Operand.in_place(parameter.grad)

    def operand_by_param(self, action: Action) -> dict[str, torch.Tensor]:
        """Returns flat views of what the collective of `action` reads, by parameter; padding is left out."""
        if action.name in self._lent:
            return dict(self._lent[action.name][1])
        flat = self.operand(action).input.view(-1)
        if self.flat_params.is_flattened(action.tensors[0]):
            return self.flat_params.views_by_param(action.tensors[0], flat)
        if action.subject in self.trained_module.parameters:
            return {action.subject: flat}
        bucket = self._bucket(action)
        return {name: bucket.views[name].view(-1) for name in action.tensors}

    def _bucket(self, action: Action) -> GradBucket:
        return next(bucket for bucket in self.buckets.values() if action.tensors[0] in bucket.views)

    def start_collective(self, action: Action, tensor: torch.Tensor | None = None) -> None:
        """Starts the collective of `action.transfer`, if it has one, on the action's operand.

        With `tensor`, on that one, in place.
        """
        transfer = action.transfer
        if transfer is None:
            return
        operand = self.operand(action) if tensor is None else Operand.in_place(tensor)
        group, output = self.world.group(transfer.axes, transfer.member_indices), operand.output
        match transfer.collective:
            case "broadcast":
                work = group.broadcast(output, source=transfer.group_root, action=action.name)
            case "reduce":
                work = group.reduce(output, target=transfer.group_root, action=action.name)
            case "all_gather":
                work = group.all_gather(output, operand.input, action=action.name)
            case "reduce_scatter":
                work = group.reduce_scatter(output, operand.input, action=action.name)
            case _:
                work = group.all_reduce(output, action=action.name, algorithm=transfer.algorithm)
        self.issue(action, work)

    def start_exchange(self, action: Action, group: Group, rounds: Rounds) -> None:
        """Starts `rounds` in `group`: the messages that carry the transfer of `action`."""
        carried = () if action.transfer is None else action.transfer.messages
        messages = [
            ExchangedMessage(
                each.collective, each.nbytes, each.dtype, each.num_ranks(self.plan.mesh), each.group_root
            )
            for each in carried
        ]
        self.issue(action, group.exchange(rounds, messages, action=action.name))

    def issue_send(self, action: Action, work: Work) -> None:
        """Records the send of a tensor that nobody waits for; sends that have ended let go of theirs."""
        self.issue(action, work)
        self._sends[action.name] = work
        for name in [name for name, send in self._sends.items() if send.is_done]:
            del self._sends[name]
            self.works[name] = CompletedWork()

    def issue(self, action: Action, work: Work) -> None:
        """Records `work` as what `action` has started: actions that wait for the action wait for it."""
        works = self.carried_works if action.name in self.awaited_later else self.works
        works[action.name] = work

    def wait_for_carried(self, names: Iterable[str] | None = None) -> None:
        """Waits for what the actions `names`, or all, have started in an earlier step, if it is under way."""
        for name in list(self.carried_works) if names is None else names:
            if name in self.carried_works:
                self.carried_works.pop(name).wait()

    def end_earlier_steps(self) -> None:
        """Waits for all that earlier steps have started and a later one waits for."""
        self.offloaded.delayed_steps.wait_for_all()
        self.wait_for_carried()
