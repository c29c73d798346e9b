"""What a code base holds in memory, in bytes per element: the same tensors exist everywhere, but not at the same time.

A layer of hidden size h and inner size f, on T tokens of a micro-batch, keeps for its backward, on one of t tensor ranks:

    stream    T h        what flows past the blocks, as two norms take it in: 4; with norms of several kernels, `unfused` more
    whole     T h        what the matrices take in: 4; divided like the stream where tokens lie on tensor ranks, unless `gathered`
    inner     T h / t    q, k, v and what attention gives out: 8; fewer k and v in groups; `flash` more with a fused kernel
    plain     T f / t    inside the MLP: 4; with a gate `gated`, 8, compiled 2 less: what joins the halves is not kept
    eager     b a s s / t    scores: softmax in float32 and its 16-bit copy, 6
    softmax   b a s s / t    one kernel for them, and a mask of dropout, 5; no scores with a fused kernel

and the step beside it:

    weights    per weight; so are gradients, and moments, those of a float32 master with it; `shared` comes with shards of moments
    logit      T V / t, at the loss's worst moment: 16-bit 2, float32 4, log-softmax 4, its gradient 4; `across` more where words
               are divided, `waiting` more while another micro-batch's wait; whole on each rank unless `divided`
    inside     of a block's backward: gradients of its parts, 6 T f / t + 4 T h, so many times
    ahead      layers gathered at once where weights lie in shards, and `behind` those whose gradients are whole at once; `ends`:
               embedding and head stay gathered for the whole step; `stays`: with ranks along pp so do all layers, with the sums
               of their gradients
    fixed      bytes of buffers, whatever the model is
    gaps       what an allocator has reserved over what lives; `pinned` bytes per logit more: halves of pieces that live; `split`
               more without a fused kernel: freed pieces of scores, too short for logits, in which something small lives
    context    of the driver and of communicators: always, more on tensor ranks, more along pp; no counter of torch has them
    handed     what goes to the next rank along pp, 2 T h, is whole even where tokens lie on tensor ranks
    cut        how layers are dealt along pp (planner/stages.py)

The values that stand here are those of this library's own engine. Contexts were bracketed on 80 GB A100s by pairs of runs of
which one fitted (Aleph-Alpha 2023): 0.7, 0.6 and 0.9 GiB; reserved over allocated, 1.015 to 1.02, there and on H100s.

Paper: V. Korthikanti et al. 2022, arXiv 2205.05198, table 2: the default is its layer without dropout
and with fused attention.
"""

from dataclasses import dataclass
from typing import Literal

GIB = 2**30

LayerSplit = Literal["layers", "ends", "norm", "cost"]


@dataclass(frozen=True)
class FrameworkMemory:
    """Bytes per element (see the module). `gradients` None: those that the layout sums. `opwise`: of what is rerun as attention
    every second product is kept, and all else rerun.
    """

    weights: float = 2
    gradients: float | None = None
    optimizer_states: float = 12
    sharded_optimizer_extra: float = 0
    residual: float = 4
    unfused_norm_extra: float = 8
    matmul_inputs: float = 4
    keeps_gathered_inputs: bool = False
    attention_qkv: float = 8
    flash_attention_extra: float = 0
    mlp: float = 4
    gated_mlp: float = 8
    eager_scores: float = 6
    fused_softmax_scores: float = 5
    recomputes_per_operator: bool = False
    logits: float = 14
    sharded_logits_extra: float = 0
    waiting_logits: float = 0
    shards_logits: bool = True
    block_backward: float = 1
    prefetched_layers: float = 2
    unreduced_layers: float = 2
    keeps_ends_gathered: bool = False
    keeps_layers_gathered: bool = False
    fixed_buffers: float = 0
    fragmentation: float = 1.02
    logits_fragmentation: float = 0
    score_fragmentation: float = 0
    driver_context: tuple[float, float, float] = (0.7 * GIB, 0.6 * GIB, 0.9 * GIB)
    full_boundary: bool = False
    layer_split: LayerSplit = "layers"


MESHWRIGHT_MEMORY = FrameworkMemory()
