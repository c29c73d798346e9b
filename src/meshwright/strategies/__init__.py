"""The techniques, one file each, and the table of their names."""

from meshwright.core.strategy import Strategy
from meshwright.strategies.data.batch import Batch
from meshwright.strategies.data.master import Master
from meshwright.strategies.data.naive import Naive
from meshwright.strategies.data.replicate import Replicate
from meshwright.strategies.data.zero import Zero
from meshwright.strategies.memory.recompute import Recompute
from meshwright.strategies.tensor.line import Line

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy for strategy in (Batch, Master, Naive, Replicate, Zero, Line, Recompute)
}
