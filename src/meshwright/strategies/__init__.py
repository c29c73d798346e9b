"""The techniques, one file each, and the table of their names."""

from meshwright.core.strategy import Strategy
from meshwright.strategies.data.batch import Batch
from meshwright.strategies.data.master import Master
from meshwright.strategies.data.naive import Naive
from meshwright.strategies.data.replicate import Replicate
from meshwright.strategies.data.zero import Zero
from meshwright.strategies.memory.recompute import Recompute
from meshwright.strategies.memory.tiles import Tiles
from meshwright.strategies.pipeline.pipedream import PipeDream
from meshwright.strategies.pipeline.pipeline import Pipeline
from meshwright.strategies.sequence.hybrid import Hybrid
from meshwright.strategies.sequence.ring import Ring
from meshwright.strategies.sequence.ulysses import Ulysses
from meshwright.strategies.tensor.cube import Cube
from meshwright.strategies.tensor.grid import Grid
from meshwright.strategies.tensor.grid25 import Grid25
from meshwright.strategies.tensor.line import Line
from meshwright.strategies.tensor.sequence import Sequence
from meshwright.strategies.tensor.vocabulary import Vocabulary

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        Batch,
        Master,
        Naive,
        Replicate,
        Zero,
        Line,
        Sequence,
        Grid,
        Grid25,
        Cube,
        Vocabulary,
        Ring,
        Ulysses,
        Hybrid,
        Pipeline,
        PipeDream,
        Recompute,
        Tiles,
    )
}
