"""The techniques, one file each, and the table of their names."""

from meshwright.parallel.context.hybrid import Hybrid
from meshwright.parallel.context.ring import Ring
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import Batch
from meshwright.parallel.data.data_parallel_master import Master
from meshwright.parallel.data.ddp import Replicate
from meshwright.parallel.data.ddp_naive import Naive
from meshwright.parallel.data.zero import Zero
from meshwright.parallel.memory.activation_checkpointing import Recompute
from meshwright.parallel.memory.tiled_compute import Tiles
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.tensor.cube_3d import Cube
from meshwright.parallel.tensor.megatron_1d import Line
from meshwright.parallel.tensor.optimus_2d import Grid
from meshwright.parallel.tensor.sequence_parallel import Sequence
from meshwright.parallel.tensor.tesseract_25d import Grid25
from meshwright.parallel.tensor.vocab_parallel import Vocabulary
from meshwright.plan.strategy import Strategy

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
