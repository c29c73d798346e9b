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
length is compiled for all. A run warns once of a block that is compiled after the first two steps, and once
of one in which no graph runs; `report` counts both. Of a class that is compiled anew in 16 calls after these
steps the blocks run uncompiled from then on. `plan --explain-model` counts graphs before a run, and
`plan --compile` compiles them into torch's cache, from which ranks and later runs load them.

In half precision Inductor keeps float32 between the operations that it fuses, where torch rounds the result
of each: fewer roundings, so another loss in the first digits that bfloat16 does not hold (2e-4 of it, on a
tiny model). With `emulate_precision_casts` it rounds where torch does, and a forward equals an uncompiled one
bit by bit; sums of a backward may run in another order. Other backends run torch's own kernels.

    x + tanh(linear(x))   torch      linear -> bf16 -> tanh -> bf16 -> + -> bf16
                          Inductor   linear -> bf16 -> tanh ---------> + -> bf16

Cost: no bytes sent; seconds of compilation at the first step, and at the first of another length. A compiler
chooses what it saves for the backward, so memory differs from what `plan` says of operations: that of
`memory_budget` and `activation_offload` too, which work on what is there.
Of the ranks and jobs with one cache folder (TORCHINDUCTOR_CACHE_DIR), one compiles a graph, and the others
wait and load it; if that one is killed, the next compiles.
Limits: a block whose model collects outputs of its modules (router logits) runs uncompiled. Ranks that are
threads of a process (`verify`) share torch's limit of graphs for the functions that a block calls, and beyond
it run these uncompiled, of which torch warns. Under context parallelism, attention and convolutions over
tokens run between two graphs, as they exchange tokens.
Refused: zero bubble schedules, as the backward of a graph is one unit, and its half for inputs would compute
the gradients of weights as well; strategies that look for single operations of a block (gist,
sync_batch_norm, outputs that checkpointing keeps): a graph has others. Modes of torch.compile with CUDA
graphs are not offered: several microbatches are under way.
Paper: Ansel et al. 2024, "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation
and Graph Compilation", ASPLOS.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from meshwright.model.tensors.function_modes import call_unchanged
from meshwright.parallel.memory.block_compiler import DISK_FIX, LOCATION, BlockCompiler
from meshwright.parallel.memory.gist import is_encoded
from meshwright.plan.job.errors import Diagnostic, PlanError, suggest_name
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.block_patterns import matches_any, unmatched_patterns
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.memory.early_stop import run_reruns_whole
from meshwright.plan.step.memory.kept_outputs import kept_ops
from meshwright.plan.step.program import Program
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

INDUCTOR = "inductor"
DYNAMIC = {"auto": None, "always": True, "never": False}
CHANGES_OPERATIONS = "it changes the operations inside blocks, which a compiler replaces"


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
            if inner is not None and self.is_selected(outer):
                text = f"the block '{outer}' holds the block '{inner}', and the engine runs between the two"
                yield Diagnostic(text, f"leave '{outer}' out of `blocks`", f"{LOCATION}.blocks")

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        if "W" in program.kinds:
            text = "the schedule splits backwards, and that of a compiled block is one unit"
            raise PlanError(text, fix='choose another schedule: "1f1b", say', location=LOCATION)
        for action in (action for role in program.roles for action in role.actions):
            if self.is_selected(action.subject) and (kept_ops(action) or is_encoded(action)):
                text = f"of single operations in '{action.subject}' the results are "
                text += f"{'kept' if kept_ops(action) else 'encoded'}, and a compiled block has others"
                fix = "leave the block out of `blocks` here, or in the strategy that keeps or encodes them"
                raise PlanError(text, fix=fix, location=LOCATION)
        return program.edit(lambda actions: run_reruns_whole(actions, self.is_selected))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        calls = runtime.state.plan.view.model_spec.block_calls
        names = dict.fromkeys(block_of(call) for call in calls if self.is_selected(call))
        compiler = BlockCompiler(self.make_backend(), self.backend, DYNAMIC[self.dynamic], runtime.state)
        runtime.state.compiled_graphs = compiler.graphs
        runtime.state.patches.compile_forwards(names, compiler)
        runtime.state.sequence_runner.set_exchange_call(
            torch.compiler.disable(call_unchanged, reason="ranks exchange tokens between graphs")
        )
        return {}

    @property
    def has_cache(self) -> bool:
        """Whether compiled graphs are kept on disk."""
        return self.backend == INDUCTOR

    def make_backend(self) -> Callable[..., Any]:
        """Returns the backend of torch.compile, with its options."""
        import torch._dynamo  # takes seconds

        options = self.inductor_options()
        found: Callable[..., Any] = torch._dynamo.lookup_backend(self.backend)
        if options:
            found = partial(found, config_patches=options)
        return partial(compile_once_per_cache, found) if self.has_cache else found

    def inductor_options(self) -> dict[str, Any]:
        """Returns the options that differ from those of torch._inductor.config, by name."""
        options = dict[str, Any]()
        if self.inductor_mode != "default":
            options |= torch._inductor.list_mode_options(self.inductor_mode, DYNAMIC[self.dynamic])
        if self.emulate_precision_casts:
            options["emulate_precision_casts"] = True
        return options

    def is_selected(self, block_call: str) -> bool:
        """Returns whether the block of `block_call` is compiled."""
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
        elif is_inductor and (fault := cache_fault()):
            yield Diagnostic(
                f"Inductor writes to its cache folder, and it cannot: {fault}", DISK_FIX, LOCATION
            )
        for name, differs in (
            ("inductor_mode", self.inductor_mode != "default"),
            ("emulate_precision_casts", self.emulate_precision_casts),
        ):
            if differs and not is_inductor:
                text = f"{name} is an option of Inductor, and the backend is '{backend}'"
                yield Diagnostic(text, f'set backend = "{INDUCTOR}", or leave it out', f"{LOCATION}.{name}")


def graphs_only(strategies: Iterable[Strategy]) -> tuple[Strategy, ...]:
    """Returns `strategies` with blocks that are traced into graphs, which torch runs as they are; without
    this strategy among them, with all blocks.
    """
    given = tuple(strategies)
    if not any(isinstance(each, CompiledBlocks) for each in given):
        given = (*given, CompiledBlocks())
    return tuple(
        replace(each, backend="eager", inductor_mode="default", emulate_precision_casts=False)
        if isinstance(each, CompiledBlocks)
        else each
        for each in given
    )


def compile_once_per_cache(
    compile_graph: Callable[..., Any], graph: fx.GraphModule, inputs: Sequence[Any]
) -> Any:
    """Returns what `compile_graph(graph, inputs)` returns. Of the processes with one cache folder that have
    an equal graph at a time, one compiles it, and the others wait and load it from there.

    The backward is compiled here too, and not at the first backward: it lies behind the same lock.
    """
    from torch._functorch import config  # takes seconds
    from torch._inductor.codecache import get_lock_dir
    from torch.utils._filelock import FileLock

    name = f"meshwright-{sha256(graph.code.encode()).hexdigest()}.lock"
    with ExitStack() as stack:
        with suppress(FileNotFoundError):  # somebody clears the folder just now: compiled without waiting
            # a lock ends with the process that holds it
            stack.enter_context(FileLock(Path(get_lock_dir()) / name))
        stack.enter_context(config.patch(force_non_lazy_backward_lowering=True))
        return compile_graph(graph, inputs)


@cache
def known_backends() -> tuple[str, ...]:
    """Returns the backends of torch.compile, those for debugging among them."""
    import torch._dynamo  # takes seconds

    return tuple(torch._dynamo.list_backends(exclude_tags=()))


def cache_fault() -> str:
    """Returns why torch's cache folder cannot be made or written to; "" if it can."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        with TemporaryFile(dir=cache_dir()):
            return ""
    except OSError as error:
        return str(error)


def missing_compiler() -> str:
    """Returns what torch says of the C++ compiler that Inductor would call; "" if there is one."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes seconds
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error).strip().splitlines()[0]
    return ""
