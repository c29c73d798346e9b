"""The techniques, one file each, and the table of their names."""

from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.tiled_compute import ChunkedLoss
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.tensor.cube_3d import TensorParallel3D
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.tesseract_25d import TensorParallel25D
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        BatchSplit,
        DataParallelMaster,
        NaiveDDP,
        DDP,
        ZeRO,
        TensorParallel,
        SequenceParallel,
        TensorParallel2D,
        TensorParallel25D,
        TensorParallel3D,
        VocabParallel,
        RingAttention,
        Ulysses,
        HybridContextParallel,
        Pipeline,
        PipeDream,
        ActivationCheckpointing,
        ChunkedLoss,
    )
}
