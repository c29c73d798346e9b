"""What one rank takes from other parts of the model and gives to them: values forward, their gradients back.

    RECV x ---> [ a part of the model ] ---> SEND y          x is a leaf where the part begins, y one where it ends
    SEND_GRAD dx <--- [ its backwards ] <--- RECV_GRAD dy    dx is what x's leaf has collected when the part's last one ended

A value that is received, used, and sent on collects its gradient here too: that of those who come later is added to what this
part makes of it. Parts on the same rank hand their leaves to each other. Where ranks have slices of a value, each sends its own;
where they have the same and send a piece each, CONCAT puts what has come together: RECV piece ---> CONCAT ---> x.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import torch

from meshwright.comm.collectives.group import Work
from meshwright.engine.forward.sequence_sharding import FullSequenceRunner
from meshwright.engine.runtime.comm_groups import p2p_group
from meshwright.engine.runtime.state import RankState
from meshwright.model.analysis.pipeline_trial import ForwardGraphCache
from meshwright.model.blocks.driver import BeforeBlock, ForwardDriver, backward, run_backward
from meshwright.model.pipeline.forward_graph import ForwardGraph
from meshwright.model.pipeline.replay_script import ScriptCache
from meshwright.model.pipeline.stage_forward import StageResult, run_stage
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.stage_boundaries import StageSpec, StageValue
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.stage_values import DimSizes, StageValueShards
from meshwright.plan.step.action import Action, Transfer

MAX_CACHED_SHAPES = (
    4096  # of values that are remembered; where rows have more lengths than that, some are found again
)


@dataclass
class _MicrobatchValues:
    """Of one micro-batch: values by name, as they came or were made, what parts have left, and gradients that have come."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    stage_runs: dict[str, StageResult] = field(default_factory=dict)  # by the first visit of the part
    gradients: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    slices: dict[str, torch.Tensor] = field(default_factory=dict)  # by what CONCAT is about
    sends: dict[str, list[Work]] = field(default_factory=dict)  # forward
    forward_graph: ForwardGraph | None = None

    def pop_gradient(self, name: str) -> torch.Tensor:
        """The sum of the gradients that have come for a value, which are let go of."""
        first, *rest = self.gradients.pop(name)
        return sum(rest, start=first)


def make_stage_io(
    plan: Plan, state: RankState, driver: ForwardDriver, sequence_runner: FullSequenceRunner
) -> "StageIO | None":
    """What this rank's parts take and give; None where it runs the whole model."""
    if not plan.sharding.block_calls_by_pp_rank:
        return None
    parts, courses = plan.sharding.stages, state.trained_module.forward_graphs
    if not parts or courses is None:
        raise RuntimeError("a plan has stages, and nothing is known of the borders between them")
    return StageIO(plan, state, driver, sequence_runner, parts, courses)


class StageIO:
    """The values of the micro-batches that are under way on this rank, which runs `parts`."""

    def __init__(
        self,
        plan: Plan,
        state: RankState,
        driver: ForwardDriver,
        sequence_runner: FullSequenceRunner,
        stages: tuple[StageSpec, ...],
        forward_graphs: ForwardGraphCache,
    ) -> None:
        self._state, self._drive, self._courses, self._space, self._dealing = (
            state,
            driver,
            forward_graphs,
            plan.sharding,
            sequence_runner,
        )
        own = set(plan.sharding.model_spec.block_calls)
        mine = [part for part in stages if part.block_calls[0] in own]
        self._first = {part.block_calls[0]: part for part in mine}
        self._last = {part.block_calls[-1]: part for part in mine}
        self._values = {value.name: value for part in stages for value in part.outputs}
        self._crossed, self._compute = (
            StageValueShards(plan.sharding, self._values.values()),
            getattr(torch, plan.job.precision.compute),
        )
        self._shapes: dict[tuple[str, DimSizes, int], tuple[int, ...]] = {}
        self._held: defaultdict[int, _MicrobatchValues] = defaultdict(_MicrobatchValues)
        self._scripts = ScriptCache(state.trained_module.module, state.trained_module.blocks)

    @property
    def first_block_calls(self) -> frozenset[str]:
        """The visits with which the parts of this rank begin."""
        return frozenset(self._first)

    def clear(self) -> None:
        """Let go of all values: a step has ended, or has failed."""
        self._held.clear()
        self._scripts.clear()

    def forward(
        self,
        first_block_call: str,
        microbatch: int,
        inputs: Mapping[str, torch.Tensor],
        before_block: BeforeBlock,
        after_block: Callable[[], None] | None,
        skip_block: Callable[[str], None] | None,
    ) -> None:
        """Run the part that begins with `first` on a micro-batch; passes, and what the last part gives out, go into the state.

        `reach` and `leave` hear of its own visits, `skip` of those before them.
        """
        part, held = self._first[first_block_call], self._held[microbatch]
        course, rows = self._course(microbatch), next(iter(inputs.values())).shape[0]
        given = {value.name: held.values[value.name] for value in part.inputs}
        device, dealt = self._state.world.device, self._dealing.sharded_forward()
        call = partial(self._state.trained_module.module, **inputs)
        # what draws numbers draws them where the model's forward stands; and what stands for all tokens is made anew in each
        scripts = self._scripts if skip_block is None and dealt is None else None
        how = {
            "script_cache": scripts,
            "inputs": inputs,
            "glue_shape": self._crossed.glue_shape,
            "sharded_forward": dealt,
        }
        ran = run_stage(
            call,
            self._drive,
            course,
            part,
            rows,
            given,
            device,
            before_block=before_block,
            after_block=after_block,
            on_skipped_call=skip_block,
            **how,
        )
        if ran.closing_call is None or ran.forward_pass is None:
            raise RuntimeError("a part was run without gradients in a step")
        held.stage_runs[first_block_call] = ran
        held.values |= {
            name: leaf.detach() for name, leaf in ran.sent_values.items()
        }  # for other parts of this rank
        known = self._state.forward_passes.setdefault(microbatch, ran.forward_pass)
        if known is not ran.forward_pass:
            known.block_calls |= ran.forward_pass.block_calls
        if part.is_last:
            self._state.final_glue[microbatch] = ran.outputs, ran.closing_call

    def is_stage_boundary(self, block_call: str) -> bool:
        """Whether a part begins or ends with `visit`, so that its backward has to do with what crosses."""
        return block_call in self._first or block_call in self._last

    def begin_backward(self, last_block_call: str, microbatch: int) -> None:
        """Bring the gradients of what the part that ends with `last` has given to where they flow on, before its backwards."""
        part = self._last.get(last_block_call)
        if part is None:
            return
        held = self._held[microbatch]
        ran = held.stage_runs[part.block_calls[0]]
        for name in (
            ran.sent_values.keys() & held.gradients.keys()
        ):  # who has sent all these gradients has the value
            for work in held.sends.pop(name, ()):
                work.wait()  # at once; it lets go of the value
        whole = {}  # what has the graph of the part: one backward is that of all its visits
        for name, leaf in (ran.sent_values | ran.received_values).items():
            if name in held.gradients and leaf.is_leaf:
                leaf.grad = held.pop_gradient(name)
            elif name in held.gradients:
                whole[leaf] = held.pop_gradient(name)
        if whole:
            run_backward(tuple(whole), tuple(whole.values()), False, False, (), True, True)
        if not part.is_last and ran.closing_call is not None:
            backward(ran.closing_call)

    def end_backward(self, first_block_call: str, microbatch: int) -> None:
        """The backwards of the part that begins with `first` have ended: what it has received has its gradients."""
        part = self._first.get(first_block_call)
        if part is None:
            return
        held = self._held[microbatch]
        for name, leaf in held.stage_runs.pop(first_block_call).received_values.items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            held.gradients.setdefault(name, []).append(gradient)
        for value in (
            *part.inputs,
            *part.outputs,
        ):  # later parts have run by now, and earlier ones do not know it or have run too
            held.values.pop(value.name, None)

    def start_send_recv(self, action: Action) -> None:
        """Start sending or receiving the value of `action`, or its gradient, or putting the pieces of one together."""
        (name,), micro, move = action.tensors, action.microbatch or 0, action.transfer
        if move is None:
            raise RuntimeError(f"{action.name} says nothing of what it moves")
        held, value = self._held[micro], self._values[name]
        match action.kind:
            case "SEND":
                self._sent(action, move, held.values[name], value, micro)
            case "SEND_GRAD":
                self._sent(action, move, held.pop_gradient(name), value, micro)
            case "RECV" | "RECV_GRAD" if move.replica_axes:
                held.slices[action.subject] = self._received(
                    action, move, self._piece(value, micro, move.replica_axes)
                )
            case "RECV":
                held.values[name] = self._received(action, move, self._blank(value, micro))
            case "RECV_GRAD":
                held.gradients.setdefault(name, []).append(
                    self._received(action, move, self._blank(value, micro))
                )
            case "CONCAT":
                held.values[name] = self._joined(action, move, held.slices.pop(action.subject), value, micro)
            case "CONCAT_GRAD":
                joined = self._joined(action, move, held.slices.pop(action.subject), value, micro)
                held.gradients.setdefault(name, []).append(joined)
            case other:
                raise RuntimeError(f"{action.name}: nothing is known of a {other} between parts")

    def _sent(
        self, action: Action, move: Transfer, tensor: torch.Tensor, value: StageValue, micro: int
    ) -> None:
        shape, dtype = self._shape(value, micro), getattr(torch, value.dtype)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            text = f"{action.name} is to send {value.dtype} {list(shape)}, and the value '{value}' is {found} here"
            fix = "let the forward give out the same shapes and dtypes as in the trial run; or choose cuts that it does not cross"
            raise PlanError(text, fix=fix, location="model")
        tensor = tensor.detach().contiguous()
        if move.replica_axes:
            index, piece = (
                self._state.world.group(move.replica_axes).index,
                self._piece(value, micro, move.replica_axes),
            )
            mine = tensor.view(-1)[index * len(piece) : (index + 1) * len(piece)]
            if len(mine) < len(piece):
                piece.zero_()[: len(mine)].copy_(mine)
                mine = piece
            tensor = mine
        if move.peer is not None:
            group, peer = p2p_group(self._state.world, move.axes, move.peer, is_sender=True)
            self._state.works[action.name] = work = group.send(tensor, target=peer, action=action.name)
            if action.kind == "SEND":
                self._held[micro].sends.setdefault(value.name, []).append(work)

    def _received(self, action: Action, move: Transfer, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, which is filled."""
        if move.peer is not None:
            group, peer = p2p_group(self._state.world, move.axes, move.peer, is_sender=False)
            self._state.works[action.name] = group.recv(tensor, source=peer, action=action.name)
        return tensor

    def _joined(
        self, action: Action, move: Transfer, piece: torch.Tensor, value: StageValue, micro: int
    ) -> torch.Tensor:
        """The whole value, in which the pieces of all ranks are put."""
        group, shape = self._state.world.group(move.axes), self._shape(value, micro)
        whole = piece.new_empty(group.size * len(piece))
        self._state.works[action.name] = group.all_gather(whole, piece, action=action.name)
        return whole[: prod(shape)].view(shape)

    def _course(self, micro: int) -> ForwardGraph:
        """The course of a forward on this micro-batch: rows may be longer than those of the example, and be fewer."""
        held = self._held[micro]
        if held.forward_graph is None:
            state = self._state
            inputs = state.loss.model_inputs(state.microbatches[micro])
            # said, not looked at: what is received is asked for before any forward casts
            held.forward_graph = self._courses.get(
                inputs, self._compute, sequence_sharded=self._space.sequence_sharding is not None
            )
            missing = sorted(self._values.keys() - held.forward_graph.dim_sizes.keys())
            if missing:
                shapes = ", ".join(f"{key} {list(value.shape[1:])}" for key, value in inputs.items())
                text = f"on rows of {shapes} the forward does not make '{missing[0]}', which crosses between parts"
                raise PlanError(
                    text,
                    fix="make the plan from such rows, or let the forward take one way",
                    location="model",
                )
        return held.forward_graph

    def _shape(self, value: StageValue, micro: int) -> tuple[int, ...]:
        """The shape that this rank has of it."""
        rows, dims = (
            next(iter(self._state.microbatches[micro].values())).shape[0],
            self._course(micro).dim_sizes[value.name],
        )
        key = value.name, dims, rows
        if key not in self._shapes:
            if len(self._shapes) >= MAX_CACHED_SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._crossed.local_shape(replace(value, dim_sizes=dims), rows)
        return self._shapes[key]

    def _blank(self, value: StageValue, micro: int) -> torch.Tensor:
        dtype = getattr(torch, value.dtype)
        return torch.empty(self._shape(value, micro), dtype=dtype, device=self._state.world.device)

    def _piece(self, value: StageValue, micro: int, over: tuple[str, ...]) -> torch.Tensor:
        """Memory for the piece that each rank along the axes `over` sends."""
        numel = -(-prod(self._shape(value, micro)) // self._space.mesh.group_size(over))
        return torch.empty(numel, dtype=getattr(torch, value.dtype), device=self._state.world.device)
