"""Compiles the forwards of the blocks of one rank, at their first calls: blocks of one class share graphs.

It notes what Dynamo makes of them (plan/compiled_graphs.py): each graph, the line of a graph break, and why
graphs that were there did not fit. Dynamo gives up a function that it can neither trace nor cut, and one that
has as many graphs as it may have; that runs uncompiled from then on, and torch counts the cause:

    y = linear(x); print(y); return y * 2        two graphs, and print between them
    for i in range(3): x = f(x, x.item())        no graph: a loop is not cut
    self.calls += 1                              a graph for each number, until there are too many
"""

import errno
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.overrides import _get_current_function_mode_stack

from meshwright.model.hf.captured_outputs import capture_marks
from meshwright.model.rng.compiled_draws import draws_as_inputs, make_drawing_call
from meshwright.model.tensors.function_modes import calls_are_intercepted
from meshwright.plan.compiled_graphs import CompiledGraph, CompiledGraphs
from meshwright.plan.job.errors import PlanError

if TYPE_CHECKING:  # no strategy imports the engine
    from meshwright.engine.runtime.rank_state import RankState

logger = logging.getLogger(__name__)

LOCATION = "strategies.compile"
FOLDERS = str(Path(torch.__file__).parent), str(Path(__file__).parents[2])  # not those of the model's code
STANDARD_LIBRARY, PACKAGES = str(Path(logging.__file__).parents[1]), "site-packages"
FIRST_STEPS = 2  # of a run, in which blocks are compiled: a second length may come in the second
GRAPHS_PER_BLOCK = 4  # training and evaluation, one length and all lengths
MAX_LATE_CALLS = 16  # that compile a class of blocks after the first steps; further ones run it uncompiled
EXCLUDED = "what a strategy replaces or counts runs uncompiled"
COLLECTED = "the model collects outputs of its modules, such as router logits, which no graph does"
TOO_OFTEN = f"it was compiled again in {MAX_LATE_CALLS} calls"
NEW_BRANCH = "it takes a branch that it did not before"
BLOCK_FIX = "leave it out of the strategy's `blocks`, or try another backend"
DISK_FIX = (
    "make room in torch's cache folder, and let this user write to it; or name another folder in the "
    "environment variable TORCHINDUCTOR_CACHE_DIR, and in TMPDIR (compiled headers always lie in the folder "
    "for temporary files)"
)
DISK_TEXTS = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)))
EXPLANATION, COMPILER_ERROR = "Explanation: ", "error: "
BRANCH = "a branch depends on the value of a tensor"
Forward = Callable[..., Any]


@dataclass
class _BlockClass:
    """The compiled forward of a class of blocks, and where it begins; `num_late_calls` are those that
    compiled it after the first steps, and `given_up` is why a call ran without a graph.
    """

    compiled: Forward
    place: str
    num_late_calls: int = 0
    given_up: str = ""


class BlockCompiler:
    """Compiles the forwards of the blocks of one rank by the function `backend`, which is called `name`.

    `dynamic` is that of torch.compile.
    """

    def __init__(self, backend: Callable[..., Any], name: str, dynamic: bool | None, state: "RankState"):
        import torch._dynamo  # takes seconds

        self._backend, self._name, self._dynamic, self._state = backend, name, dynamic, state
        self._max_graphs = GRAPHS_PER_BLOCK * len(state.trained_module.blocks)
        self._classes: dict[Any, _BlockClass] = {}  # by the function of a class
        self._excluded: dict[nn.Module, Forward] = {}
        self._run_excluded = torch.compiler.disable(self._call_excluded, reason=EXCLUDED)
        self._current_block, self._is_training = "", False
        self._mode_types = set[type]()
        self._first_step: int | None = None
        self._failed_guard = self._last_cause = ""
        self._num_graph_calls = 0
        self._given_up = _GivenUpFunctions()
        self.graphs = CompiledGraphs()

    def compile(self, name: str, forward: Forward) -> Forward:
        """Returns `forward`, of the block `name`, compiled; one set on the instance runs as it is."""
        if not isinstance(forward, MethodType):
            return forward
        function = forward.__func__
        if function not in self._classes:
            compiled = torch._dynamo.optimize(
                self._compile_graph,
                dynamic=self._dynamic,
                guard_fail_fn=self._note_failed_guard,
                recompile_limit=self._max_graphs,
            )(_with_own_code(function))
            code = function.__code__
            self._classes[function] = _BlockClass(compiled, f"{code.co_filename}:{code.co_firstlineno}")
        self.graphs.classes[name] = type(forward.__self__).__name__
        return partial(self._run, name, self._classes[function], forward)

    def exclude(self, module: nn.Module, forward: Forward) -> Forward:
        """Returns a forward that runs `forward` uncompiled inside a compiled block."""
        self._excluded[module] = forward
        # one function for all modules: blocks would not share graphs that call different ones
        return MethodType(self._run_excluded, module)

    def _call_excluded(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._excluded[module](*args, **kwargs)

    def _run(self, name: str, kind: _BlockClass, forward: MethodType, /, *args: Any, **kwargs: Any) -> Any:
        if calls_are_intercepted():  # a pipeline stage looks, once, at what its blocks compute with
            return forward(*args, **kwargs)
        if capture_marks() or kind.num_late_calls >= MAX_LATE_CALLS:  # no graph appends to a side channel
            self._note_uncompiled(name, COLLECTED if capture_marks() else f"{TOO_OFTEN}: {self._last_cause}")
            return forward(*args, **kwargs)
        self._run_modes_uncompiled()
        self._current_block, self._is_training = name, torch.is_grad_enabled()
        if self._first_step is None:
            self._first_step = self._state.step.number
        graphs, num_calls = self.graphs, self._num_graph_calls
        num_graphs, num_late = len(graphs.graphs), graphs.num_late
        try:
            result = kind.compiled(forward.__self__, *args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            text = f"the block '{name}' cannot be compiled by {self._name}: {_failure(error)}"
            fix = DISK_FIX if _is_of_files(error) else BLOCK_FIX
            raise PlanError(text, fix=fix, location=LOCATION) from error
        kind.num_late_calls += graphs.num_late > num_late
        if self._num_graph_calls == num_calls:
            self._note_uncompiled(name, "" if name in graphs.uncompiled else self._why_uncompiled(kind))
        elif len(graphs.graphs) > num_graphs:
            self._note_uncompiled_part(name)
        return result

    def _note_uncompiled_part(self, name: str) -> None:
        cause = self._given_up.find_cause()
        if SKIPPED in cause or cause.startswith(LIMIT):
            self.graphs.uncompiled.setdefault(name, f"a part of it: {cause}")

    def _why_uncompiled(self, kind: _BlockClass) -> str:
        cause = self._given_up.find_cause()
        if cause.startswith(LIMIT):
            kind.given_up = f"its code has {self._max_graphs} graphs, which is the limit: {self._last_cause}"
        elif cause:
            kind.given_up = cause if SKIPPED in cause else f"{cause}, in the forward at {kind.place}"
        return kind.given_up or f"torch compiles nothing of the forward at {kind.place}, and gives no reason"

    def _note_uncompiled(self, name: str, cause: str) -> None:
        """Counts a call in which no graph ran, and warns of the first."""
        self.graphs.num_uncompiled_calls += 1
        if self.graphs.num_uncompiled_calls == 1:
            text = "the block '%s' runs uncompiled: %s; others are not reported here, but in the run's report"
            logger.warning(text, name, cause)
        self.graphs.uncompiled.setdefault(name, cause)

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
        compiled = (
            make_drawing_call(graph, draws, self._backend, inputs, self._rng)
            if draws
            else self._backend(graph, inputs)
        )

        def run_graph(*inputs: Any) -> Any:
            self._num_graph_calls += 1
            return compiled(*inputs)

        return run_graph

    def _rng(self) -> Any:
        return self._state.step_rng.stateless_rng

    def _note_failed_guard(self, failure: Any) -> None:
        reason = failure.reason.strip().splitlines()[0]
        reason = re.sub(r"^\d+/\d+: ", "", reason).partition(" (HINT")[0]
        self._failed_guard = " ".join(reason.split())

    def _note_graph(self, graph_module: fx.GraphModule) -> None:
        cause, self._failed_guard = self._failed_guard, ""
        step, first = self._state.step.number, self._first_step
        broken = _describe_break(vars(graph_module)["compile_subgraph_reason"])
        num_operations = sum(node.op.startswith("call") for node in graph_module.graph.nodes)
        self.graphs.graphs.append(CompiledGraph(self._current_block, step, cause, broken, num_operations))
        self._last_cause = cause or NEW_BRANCH
        if self._is_training and first is not None and step - first >= FIRST_STEPS:
            self.graphs.num_late += 1
            if self.graphs.num_late == 1:
                self.graphs.late_cause = f"{self._current_block}: {self._last_cause}"
                logger.warning(
                    "the block '%s' is compiled again in step %d: %s; later ones are not reported here, but "
                    "in the run's report",
                    *(self._current_block, step, self._last_cause),
                )


LIMIT, SKIPPED = "Dynamo recompile limit exceeded", "in a loop of the function "


class _GivenUpFunctions:
    """Finds why Dynamo gave up a function since it was last asked, among the causes that torch counts."""

    def __init__(self) -> None:
        from torch._dynamo.utils import counters  # takes seconds

        self._counters = counters
        self._seen = Counter(counters["unimplemented"])

    def find_cause(self) -> str:
        """Returns the last cause, with its line where torch knows it; "" if there is none."""
        now = Counter(self._counters["unimplemented"])
        causes, self._seen = list(now - self._seen), now
        if not causes:
            return ""
        function = re.search(r"frame skipped: (\S+) \((.+) line (\d+)\)", causes[-1])
        first_line = causes[-1].splitlines()[0]
        if function is None:
            return first_line
        name = re.sub(r"^torch_dynamo_resume_in_(.*)_at_\d+$", r"\1", function[1])
        return f"{first_line}, {SKIPPED}{name} at {function[2]}:{function[3]}"


def _failure(error: BaseException) -> str:
    """Returns what failed in a compilation, and what torch, or the C++ compiler, says of it."""
    lines = [each.strip() for each in str(error).strip().splitlines()]
    first = next((each for each in lines if not each.endswith(" raised:")), lines[0])
    told = next((each for each in lines if each.startswith(EXPLANATION) or COMPILER_ERROR in each), "")
    return f"{first}: {told.removeprefix(EXPLANATION)}" if told and told != first else first


def _is_of_files(error: BaseException) -> bool:
    """Returns whether `error` comes from a file that could not be written or read, such as on a full disk,
    also where the C++ compiler says so in its output.
    """
    return any(
        isinstance(each, OSError) or any(text in str(each) for text in DISK_TEXTS) for each in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields `error`, and those that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _describe_break(reason: Any) -> str:
    """Returns the cause and the line of the graph break that ends a graph; "" if there is none."""
    if not reason.graph_break:
        return ""
    cause = reason.reason.splitlines()[0]
    if cause.startswith("generic_jump"):
        cause = BRANCH
    elif EXCLUDED in reason.reason:
        cause = EXCLUDED
    lines = [each for each in reason.user_stack if _is_model_code(each.filename)]
    return f"{cause} at {lines[-1].filename}:{lines[-1].lineno}" if lines else cause


def _is_model_code(file: str) -> bool:
    in_library = file.startswith(STANDARD_LIBRARY) and PACKAGES not in file
    return not (file.startswith(FOLDERS) or in_library)


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
