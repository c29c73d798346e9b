"""Memory that a training framework keeps, in bytes per element.

The same tensors exist everywhere, but not at the same time. A layer of hidden size h and FFN size f, on T
tokens of a microbatch, saves for its backward, on one of t tensor ranks:

    residual                T h            inputs of two norms: 4; unfused norms: `unfused_norm_extra` more
    matmul_inputs           T h            inputs of matmuls: 4; sequence-sharded like the residual, unless
                                           `keeps_gathered_inputs`
    attention_qkv           T h / t        q, k, v and the attention output: 8; fewer k and v with grouped
                                           heads; `flash_attention_extra` more with a fused kernel
    mlp                     T f / t        inside the MLP: 4; `gated_mlp`, 8, with a gate, 2 less compiled
    eager_scores            b a s s / t    scores: softmax in float32 and its 16-bit copy, 6
    fused_softmax_scores    b a s s / t    one kernel for softmax and a dropout mask, 5; none with a fused
                                           kernel

and the step around it:

    weights              per weight; so are gradients, and optimizer_states (with a float32 master);
                         `sharded_optimizer_extra` comes with sharded optimizer states
    logits               T V / t, at the peak of the loss: 16-bit 2, float32 4, log-softmax 4, its gradient 4;
                         `sharded_logits_extra` more if the vocabulary is sharded, `waiting_logits` more while
                         those of another microbatch wait; unsharded unless `shards_logits`
    block_backward       gradients of a block's intermediates, 6 T f / t + 4 T h, times this factor
    prefetched_layers    layers unsharded at once with sharded weights; `unreduced_layers`: layers whose full
                         gradients exist at once
    keeps_ends_gathered  embedding and head stay unsharded for the whole step; `keeps_layers_gathered`: under
                         a pipeline so do all layers, with the sums of their gradients
    fixed_buffers        bytes, for any model
    fragmentation        reserved over allocated bytes; `logits_fragmentation` bytes per logit more;
                         `score_fragmentation` more without a fused kernel: freed blocks of scores that are
                         too short for the logits
    driver_context       bytes of the driver and of communicators: always, with tensor ranks, with a pipeline;
                         no counter of torch includes them
    full_boundary        the tensor sent to the next pp rank, 2 T h, is not sequence-sharded
    layer_split          how layers are assigned to pp ranks (closed_form_memory.py)

The defaults are those of this library's own engine. Contexts were bracketed on 80 GB A100s by pairs of runs
of which one fitted (Aleph-Alpha 2023): 0.7, 0.6 and 0.9 GiB; reserved over allocated, 1.015 to 1.02, there
and on H100s.

Paper: V. Korthikanti et al. 2022, arXiv 2205.05198, table 2: the default is its layer without dropout and
with fused attention.
"""

from dataclasses import dataclass
from typing import Literal

GIB = 2**30

LayerSplit = Literal["layers", "ends", "norm", "cost"]


@dataclass(frozen=True)
class FrameworkMemory:
    """Bytes per element (see the module).

    `gradients` None: the width in which the configuration reduces them. `recomputes_per_operator`: with
    attention recomputation every second matmul output is saved, and all else recomputed.
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
