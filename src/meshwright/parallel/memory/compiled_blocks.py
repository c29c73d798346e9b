"""Compiled blocks: torch.compile makes few kernels of the many operations of each block.

Why it works: between matrix products a block reads and writes its activations once per operation: norms,
rotary embeddings, activations, dropout, residual sums. A compiler fuses those in a row into one kernel, which
reads and writes once. Blocks are the unit of compilation (torch: regional compilation): blocks of one class
have the same code, and with equal shapes one compiled graph serves all of them.

    layers.0  layers.1 ... layers.31      one graph, compiled at the first call; 32 sets of weights
    layers.0 under tensor parallelism     graph | collective | graph | collective | graph

    compiled graphs = different blocks x (1 + breaks inside)        the depth of the model does not matter

The engine runs between blocks, so everything that strategies do there is as before. What a strategy does
inside a block (a sharded layer, a counted router) runs uncompiled: the graph breaks there, and goes on
behind. A block call that is recomputed, and weights gathered anew into their buffer, run the same graph.
Dropout masks are inputs of a graph (model/rng/compiled_draws.py): the same as without a compiler.

`blocks` selects blocks by patterns ("model.layers.*"; by default all). `backend` and `inductor_mode` are
backend and mode of torch.compile. `dynamic` says whether graphs hold for all lengths: with "auto" the second
length is compiled for all. A run warns once of a block that is compiled after the first two steps.

In half precision Inductor keeps float32 between the operations that it fuses, where torch rounds the result
of each: fewer roundings, so another loss in the first digits that bfloat16 does not hold (2e-4 of it, on a
tiny model). With `emulate_precision_casts` it rounds where torch does, and a forward equals an uncompiled one
bit by bit; sums of a backward may run in another order. Other backends run torch's own kernels.

    x + tanh(linear(x))   torch      linear -> bf16 -> tanh -> bf16 -> + -> bf16
                          Inductor   linear -> bf16 -> tanh ---------> + -> bf16

Cost: no bytes sent; seconds of compilation at the first step, and at the first of another length. A compiler
chooses what it saves for the backward, so memory differs from what `plan` says of operations: that of
`memory_budget` and `activation_offload` too, which work on what is there.
Limits: a block whose model collects outputs of its modules (router logits) runs uncompiled. Ranks of one host
compile each for itself; those that are threads of a process (`verify`) share torch's limit of graphs for the
functions that a block calls, and beyond it run these uncompiled, of which torch warns. Under context
parallelism, attention and convolutions over tokens run between two graphs, as they exchange tokens.
Refused: zero bubble schedules, as the backward of a graph is one unit, and its half for inputs would compute
the gradients of weights as well; strategies that look for single operations of a block (gist,
sync_batch_norm, outputs that checkpointing keeps): a graph has others. Modes of torch.compile with CUDA
graphs are not offered: several microbatches are under way.
Paper: Ansel et al. 2024, "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation
and Graph Compilation", ASPLOS.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, ClassVar, Literal

import torch
from torch import fx, nn
from torch.overrides import _get_current_function_mode_stack

from meshwright.model.hf.captured_outputs import capture_marks
from meshwright.model.rng.compiled_draws import draws_as_inputs, make_drawing_call
from meshwright.model.tensors.function_modes import call_unchanged, calls_are_intercepted
from meshwright.parallel.memory.block_patterns import matches_any, unmatched_patterns
from meshwright.parallel.memory.gist import is_encoded
from meshwright.plan.job.errors import Diagnostic, PlanError, suggest_name
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.memory.early_stop import run_reruns_whole
from meshwright.plan.step.memory.kept_outputs import kept_ops
from meshwright.plan.step.program import Program
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

logger = logging.getLogger(__name__)

LOCATION = "strategies.compile"
INDUCTOR = "inductor"
FOLDERS = str(Path(torch.__file__).parent), str(Path(__file__).parents[2])  # not those of the model's code
DYNAMIC = {"auto": None, "always": True, "never": False}
FIRST_STEPS = 2  # of a run, in which blocks are compiled: a second length may come in the second
GRAPHS_PER_BLOCK = 4  # training and evaluation, one length and all lengths
CHANGES_OPERATIONS = "it changes the operations inside blocks, which a compiler replaces"
Forward = Callable[..., Any]


@dataclass(frozen=True)
class CompiledBlocks(Strategy):
    """Compiles the blocks that match one of `blocks` (without `blocks`: all) by torch.compile.

    `backend` is one of torch._dynamo.list_backends(); `inductor_mode` is that of the backend "inductor".
    `dynamic`: whether one graph serves several sizes; "auto": from the second size on. With
    `emulate_precision_casts` Inductor rounds in half precision where uncompiled blocks do.
    """

    name: ClassVar[str] = "compile"
    phase: ClassVar[StrategyPhase] = "comm"  # once it is known what blocks keep, and how
    excludes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "gist": CHANGES_OPERATIONS,
            "sync_batch_norm": CHANGES_OPERATIONS,
            "tiled_mlp": CHANGES_OPERATIONS,
            "compress_activations": CHANGES_OPERATIONS,
            "partitioned_activations": "inputs of blocks that are parts were not tried compiled",
            "loss_free_balancing": "it counts choices of routers inside blocks, which was not tried compiled",
        }
    )
    blocks: tuple[str, ...] = ()
    backend: str = INDUCTOR
    inductor_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    dynamic: Literal["auto", "always", "never"] = "auto"
    emulate_precision_casts: bool = False

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from unmatched_patterns(self.blocks, sharding.model_spec, f"{LOCATION}.blocks")
        yield from self._backend_diagnostics()
        names = {block_of(call) for call in sharding.model_spec.block_calls}
        for outer in sorted(names):
            inner = next((each for each in sorted(names) if each.startswith(f"{outer}.")), None)
            if inner is not None and self._is_selected(outer):
                text = f"the block '{outer}' holds the block '{inner}', and the engine runs between the two"
                yield Diagnostic(text, f"leave '{outer}' out of `blocks`", f"{LOCATION}.blocks")

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        if "W" in program.kinds:
            text = "the schedule splits backwards, and that of a compiled block is one unit"
            raise PlanError(text, fix='choose another schedule: "1f1b", say', location=LOCATION)
        for action in (action for role in program.roles for action in role.actions):
            if self._is_selected(action.subject) and (kept_ops(action) or is_encoded(action)):
                text = f"of single operations in '{action.subject}' the results are "
                text += f"{'kept' if kept_ops(action) else 'encoded'}, and a compiled block has others"
                fix = "leave the block out of `blocks` here, or in the strategy that keeps or encodes them"
                raise PlanError(text, fix=fix, location=LOCATION)
        return program.edit(lambda actions: run_reruns_whole(actions, self._is_selected))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        calls = runtime.state.plan.view.model_spec.block_calls
        names = dict.fromkeys(block_of(call) for call in calls if self._is_selected(call))
        runtime.state.patches.compile_forwards(names, BlockCompiler(self, runtime))
        runtime.state.sequence_runner.set_exchange_call(
            torch.compiler.disable(call_unchanged, reason="ranks exchange tokens between graphs")
        )
        return {}

    def inductor_options(self) -> dict[str, Any]:
        """Returns the options that differ from those of torch._inductor.config, by name."""
        options = dict[str, Any]()
        if self.inductor_mode != "default":
            options |= torch._inductor.list_mode_options(self.inductor_mode, DYNAMIC[self.dynamic])
        if self.emulate_precision_casts:
            options["emulate_precision_casts"] = True
        return options

    def _is_selected(self, block_call: str) -> bool:
        return not self.blocks or matches_any(block_call, self.blocks)

    def _backend_diagnostics(self) -> Iterator[Diagnostic]:
        if "recompile_limit" not in inspect.signature(torch.compile).parameters:
            yield Diagnostic(
                f"torch {torch.__version__} has no limit of graphs per call of torch.compile",
                "install torch 2.13 or later, or remove the strategy",
                LOCATION,
            )
            return
        backend, is_inductor = self.backend, self.backend == INDUCTOR
        if backend not in (known := known_backends()):
            text = f"torch.compile has no backend '{backend}'"
            yield Diagnostic(text, suggest_name(backend, known), f"{LOCATION}.backend")
        elif is_inductor and not torch.accelerator.is_available() and (missing := missing_compiler()):
            fix = "install g++ or clang++, name it in the environment variable CXX, or remove the strategy"
            yield Diagnostic(f"Inductor needs a C++ compiler, and {missing}", fix, LOCATION)
        for name, differs in (
            ("inductor_mode", self.inductor_mode != "default"),
            ("emulate_precision_casts", self.emulate_precision_casts),
        ):
            if differs and not is_inductor:
                text = f"{name} is an option of Inductor, and the backend is '{backend}'"
                yield Diagnostic(text, f'set backend = "{INDUCTOR}", or leave it out', f"{LOCATION}.{name}")


@cache
def known_backends() -> tuple[str, ...]:
    """Returns the backends of torch.compile, those for debugging among them."""
    import torch._dynamo  # takes seconds

    return tuple(torch._dynamo.list_backends(exclude_tags=()))


def missing_compiler() -> str:
    """Returns what torch says of the C++ compiler that Inductor would call; "" if there is one."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes seconds
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error).strip().splitlines()[0]
    return ""


@dataclass
class CompiledGraphs:
    """What was compiled of the blocks of a rank: names of blocks, one for each graph, and where a graph ended
    early, by block, with the cause and the line.
    """

    blocks: list[str] = field(default_factory=list)
    breaks: list[tuple[str, str]] = field(default_factory=list)
    num_late: int = 0  # compiled after the first steps


class BlockCompiler:
    """Compiles the forwards of one rank's blocks, at their first calls: blocks of one class share graphs."""

    def __init__(self, strategy: CompiledBlocks, runtime: Runtime) -> None:
        import torch._dynamo  # takes seconds

        self._strategy, self._state = strategy, runtime.state
        self._num_blocks = len(runtime.state.trained_module.blocks)
        self._compiled: dict[Any, Forward] = {}  # by the function of a class
        self._excluded: dict[nn.Module, Forward] = {}
        self._run_excluded = torch.compiler.disable(
            self._call_excluded, reason="what a strategy replaces or counts runs uncompiled"
        )
        self._current_block, self._is_training = "", False
        self._mode_types = set[type]()
        self._first_step: int | None = None
        self._cause = ""
        self.graphs = CompiledGraphs()
        options = strategy.inductor_options()
        self._backend: Callable[..., Forward] = partial(
            torch._dynamo.lookup_backend(strategy.backend), **({"config_patches": options} if options else {})
        )

    def compile(self, name: str, forward: Forward) -> Forward:
        """Returns `forward`, of the block `name`, compiled; one set on the instance runs as it is."""
        if not isinstance(forward, MethodType):
            return forward
        function = forward.__func__
        if function not in self._compiled:
            self._compiled[function] = torch._dynamo.optimize(
                self._compile_graph,
                dynamic=DYNAMIC[self._strategy.dynamic],
                guard_fail_fn=self._note_cause,
                recompile_limit=GRAPHS_PER_BLOCK * self._num_blocks,
            )(_with_own_code(function))
        return partial(self._run, name, self._compiled[function], forward)

    def exclude(self, module: nn.Module, forward: Forward) -> Forward:
        """Returns a forward that runs `forward` uncompiled inside a compiled block."""
        self._excluded[module] = forward
        # one function for all modules: blocks would not share graphs that call different ones
        return MethodType(self._run_excluded, module)

    def _call_excluded(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._excluded[module](*args, **kwargs)

    def _run(self, name: str, compiled: Forward, forward: MethodType, /, *args: Any, **kwargs: Any) -> Any:
        # a pipeline stage looks, once, at what its blocks compute with; no graph appends to a side channel
        if calls_are_intercepted() or capture_marks():
            return forward(*args, **kwargs)
        self._run_modes_uncompiled()
        self._current_block, self._is_training = name, torch.is_grad_enabled()
        if self._first_step is None:
            self._first_step = self._state.step.number
        try:
            return compiled(forward.__self__, *args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = str(error).strip().splitlines()[0]
            text = f"the block '{name}' cannot be compiled by {self._strategy.backend}: {cause}"
            fix = "leave it out of the strategy's `blocks`, or try another backend"
            raise PlanError(text, fix=fix, location=LOCATION) from error

    def _run_modes_uncompiled(self) -> None:
        """Keeps Dynamo from compiling what function modes do for calls between graphs: a graph for each."""
        for kind in {type(mode) for mode in _get_current_function_mode_stack()} - self._mode_types:
            self._mode_types.add(kind)
            frames = torch._dynamo.eval_frame
            skip = frames.FrameExecStrategy(frames.FrameAction.SKIP, frames.FrameAction.SKIP)
            frames.set_code_exec_strategy(kind.__torch_function__.__code__, skip)

    def _compile_graph(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Forward:
        self._note_graph(graph_module)
        graph, draws = draws_as_inputs(graph_module)
        if not draws:
            return self._backend(graph, inputs)
        return make_drawing_call(graph, draws, self._backend, inputs, self._rng)

    def _rng(self) -> Any:
        return self._state.step_rng.stateless_rng

    def _note_cause(self, failure: Any) -> None:
        self._cause = failure.reason.strip().splitlines()[0]

    def _note_graph(self, graph_module: fx.GraphModule) -> None:
        self.graphs.blocks.append(self._current_block)
        reason = vars(graph_module)["compile_subgraph_reason"]
        if reason.graph_break:
            lines = [each for each in reason.user_stack if not each.filename.startswith(FOLDERS)]
            place = f" at {lines[-1].filename}:{lines[-1].lineno}" if lines else ""
            self.graphs.breaks.append((self._current_block, f"{reason.reason.splitlines()[0]}{place}"))
        step, first = self._state.step.number, self._first_step
        if self._is_training and first is not None and step - first >= FIRST_STEPS:
            self.graphs.num_late += 1
            if self.graphs.num_late == 1:
                logger.warning(
                    "the block '%s' is compiled again in step %d: %s; later ones are not reported",
                    *(self._current_block, step, self._cause or "it takes a branch that it did not before"),
                )


def _with_own_code(function: FunctionType) -> FunctionType:
    """Returns `function` with a code object of its own: Dynamo keeps its graphs there, and other models of
    this class, or other ranks of this process, have theirs.
    """
    if function.__module__.startswith("torch."):  # Dynamo compiles those only inside others
        function = _calling(function)
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _calling(function: FunctionType) -> FunctionType:
    def call_forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    return call_forward  # type: ignore[return-value]
