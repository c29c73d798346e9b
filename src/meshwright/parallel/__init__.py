"""The parallelism techniques, one file each, and the registry that finds them by name and mode.

data        samples: splitting the batch, DDP, ZeRO / FSDP
tensor      matrices: tensor parallelism in 1, 2, 2.5 and 3 dimensions, sequence and vocabulary parallelism
context     the tokens of a sample: ring attention, Ulysses, both together
expert      experts of a mixture of experts
embedding   tables of embeddings, whose rows lie on ranks of their own
pipeline    layers: pipeline schedules and PipeDream
compression fewer bytes: gradients and activations that travel as codes
outer       sites that train apart and meet in rounds: local SGD, DiLoCo
server      ranks that keep and step parameters for others: parameter servers, synchronous or not
observer    ranks that run a function of the user on the weights, and train nothing
memory      memory for compute or copies: activation checkpointing, chunked loss, tiled MLPs, offload;
            compiled blocks
precision   products in fewer bits: float8
"""

from collections.abc import Iterable, Mapping

from meshwright.parallel.compression.activation_compression import ActivationCompression
from meshwright.parallel.compression.codecs.cast import CastCompression
from meshwright.parallel.compression.codecs.int4 import Int4Compression
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.compression.codecs.powersgd import PowerSGDCompression
from meshwright.parallel.compression.codecs.sign import SignCompression
from meshwright.parallel.compression.codecs.topk import TopKCompression
from meshwright.parallel.compression.codecs.two_level_sums import QgZCompression
from meshwright.parallel.compression.quantized_weights import QuantizedWeights
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.parallel.data.hierarchical_partition import HierarchicalPartition
from meshwright.parallel.data.sync_batch_norm import SyncBatchNorm
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.embedding.embedding_host import EmbeddingHost
from meshwright.parallel.expert.expert_parallel import ExpertParallel
from meshwright.parallel.expert.expert_tensor_parallel import ExpertTensorParallel
from meshwright.parallel.expert.loss_free_balancing import LossFreeBalancing
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.compiled_blocks import CompiledBlocks
from meshwright.parallel.memory.gist import Gist
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.memory.partitioned_activations import PartitionedActivations
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.observer.observer import Observer
from meshwright.parallel.outer.diloco import DiLoCo
from meshwright.parallel.outer.local_sgd import LocalSGD
from meshwright.parallel.outer.streaming_diloco import StreamingDiLoCo
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.precision.fp8 import Float8Products
from meshwright.parallel.server.parameter_server import ParameterServer
from meshwright.parallel.server.stale_server import StaleServer
from meshwright.parallel.tensor.cube_3d import TensorParallel3D
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.tesseract_25d import TensorParallel25D
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.strategy_interface import Strategy


def by_name_and_mode(classes: Iterable[type[Strategy]]) -> dict[str, dict[str, type[Strategy]]]:
    """Returns the classes by name, then by mode; the first mode of a name is its default."""
    registry: dict[str, dict[str, type[Strategy]]] = {}
    for each in classes:
        registry.setdefault(each.name, {})[each.mode] = each
    return registry


STRATEGIES: Mapping[str, Mapping[str, type[Strategy]]] = by_name_and_mode(
    (
        BatchSplit,
        DataParallelMaster,
        SyncBatchNorm,
        NaiveDDP,
        DDP,
        ZeRO,
        HierarchicalPartition,
        ParameterServer,
        StaleServer,
        EmbeddingHost,
        Observer,
        TensorParallel,
        TensorParallel2D,
        TensorParallel25D,
        TensorParallel3D,
        SequenceParallel,
        VocabParallel,
        RingAttention,
        Ulysses,
        HybridContextParallel,
        ExpertParallel,
        ExpertTensorParallel,
        LossFreeBalancing,
        Pipeline,
        PipeDream,
        ActivationCheckpointing,
        ActivationOffload,
        PartitionedActivations,
        MemoryBudget,
        ChunkedLoss,
        CompiledBlocks,
        Gist,
        TiledMLP,
        Offload,
        DiskOffload,
        Int8Compression,
        Int4Compression,
        CastCompression,
        SignCompression,
        PowerSGDCompression,
        TopKCompression,
        QgZCompression,
        QuantizedWeights,
        ActivationCompression,
        Float8Products,
        LocalSGD,
        DiLoCo,
        StreamingDiLoCo,
    )
)
