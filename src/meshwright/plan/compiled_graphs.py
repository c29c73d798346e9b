"""What a compiler makes of the blocks of a rank: graphs, where they end, and calls that run without one.

CompiledGraphs   of a rank, as they are compiled; its run records them
PlannedGraphs    by kind of block, as they are counted before a run (run/measure/count_graphs.py)
GraphAhead       one that is compiled before a run (run/measure/compile_ahead.py)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CompiledGraph:
    """A graph that was compiled in `step`, from 0, when `block` was called.

    `recompiled` is why those that were there did not fit ("": there was none); `broken` is the cause and the
    line of the graph break that ends it ("": it ends with its function). `num_operations` are its calls of
    functions and methods.
    """

    block: str
    step: int
    recompiled: str = ""
    broken: str = ""
    num_operations: int = 0

    @property
    def cpu_seconds(self) -> float:
        """About how many seconds of a core Inductor takes on a CPU for the graph and its backward.

        Measured on one core of an AMD EPYC (torch 2.13, g++) over the graphs of Llama, GPT-2, Gemma 2 and OPT
        of 1 to 94 operations: within a factor of two of it.
        """
        return 2.5 + 0.35 * self.num_operations


@dataclass
class CompiledGraphs:
    """The graphs of the blocks of a rank, in the order in which they were compiled.

    `classes` has the class of each block that runs compiled, by its name; `uncompiled` why a call of a block
    ran without a graph, in whole or in part. `num_late` counts the graphs that were compiled for training
    after its first two steps, `num_uncompiled_calls` the calls of blocks in which no graph ran.
    """

    classes: dict[str, str] = field(default_factory=dict)
    graphs: list[CompiledGraph] = field(default_factory=list)
    uncompiled: dict[str, str] = field(default_factory=dict)
    late_cause: str = ""  # of the first
    num_late: int = 0
    num_uncompiled_calls: int = 0

    @property
    def blocks(self) -> list[str]:
        """The blocks whose calls were compiled, one for each graph."""
        return [graph.block for graph in self.graphs]

    @property
    def breaks(self) -> list[tuple[str, str]]:
        """The block, and the cause and line, of each graph that ends early."""
        return [(graph.block, graph.broken) for graph in self.graphs if graph.broken]

    def as_dict(self) -> Mapping[str, Any]:
        """Returns the counts and causes as plain values, for JSON."""
        return {
            "blocks": len(self.classes),
            "graphs": len(self.graphs),
            "breaks": len(self.breaks),
            "late": self.num_late,
            "late_cause": self.late_cause,
            "uncompiled_calls": self.num_uncompiled_calls,
            "uncompiled": dict(self.uncompiled),
        }


@dataclass
class BlockKindGraphs:
    """The graphs of the blocks of one class, `blocks`, on one rank: the most of any.

    `num_graphs` are those of the first step; `differences` says why some of them were needed beside the first
    ones of the class. `breaks` are the causes and lines at which graphs end early, `late` the causes of
    graphs in equal steps after the first, by step, `by_length` how many graphs each further length added, and
    `uncompiled` why blocks run without a graph.
    """

    class_name: str
    blocks: list[str] = field(default_factory=list)
    num_graphs: int = 0
    differences: list[str] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    late: dict[int, str] = field(default_factory=dict)
    by_length: list[int] = field(default_factory=list)
    uncompiled: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PlannedGraphs:
    """The graphs of a plan by kind of block. Without `is_planned` the plan compiles no block, and these are
    those that it would have.

    `as_written` are the blocks that no compiler sees: a strategy replaces their forward, or they are not
    selected. `lengths` are those of the sequences that were tried, that of the example first; `unknown` says
    what could not be counted, and why. `compile_s` are about the seconds in which a rank compiles the graphs
    of its first step on one core of a CPU: the most of any.
    """

    kinds: tuple[BlockKindGraphs, ...]
    as_written: tuple[str, ...]
    lengths: tuple[int, ...]
    is_planned: bool
    unknown: tuple[str, ...] = ()
    compile_s: float = 0.0


@dataclass(frozen=True)
class GraphAhead:
    """A graph of `rank`: the seconds until it was compiled, or loaded if the cache folder had all of it."""

    rank: int
    seconds: float
    is_loaded: bool
