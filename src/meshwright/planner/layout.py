"""How the work is laid out, as a planner counts it: so many ranks along each axis, and what runs on each.

A layout is a plan before it is one: sizes without weights, so that thousands of them are priced in a second. The one that is
chosen becomes a plan (mesh, strategies, program), which is checked, priced action by action and proved.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.core.errors import Fault
from meshwright.planner.shapes import Shape

Kernel = Literal["eager", "softmax", "flash1", "flash2"]  # scores by torch; with one kernel for their softmax; never written out
Rerun = Literal["none", "attention", "layers"]


@dataclass(frozen=True)
class Order:
    """How ranks along pp take turns: what they wait, (pp - 1) (f F + b B + w W), where all of B is I + W.

    `held` is how many micro-batches the first of them keeps at once, in units of pp; `even`: all of them keep as many;
    `folded`: chunks go there and back, and the first rank has the head as well as the embedding.
    """

    f: float = 1.0
    b: float = 1.0
    w: float = 0.0
    held: float = 1.0
    even: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Layout:
    """Ranks by axis (`dp`: copies, `tp`, `pp`, `cp`), `chunks` of layers per rank along pp, and the micro-batches.

    `micro_batch` rows go through at once, `micros` times per step. Of what copies hold alike, each keeps a share: with `shards` 1
    of moments, with 2 of gradients too, with 3 of weights too. `sequence`: between matrices tokens lie on tensor ranks. `dtype`
    is what products are made in, `sums` the bytes of a gradient that is summed over copies, `gathers` those of a weight
    that is gathered. `kernel` of attention, `fused`: norms
    are one kernel, `compiled`: so is what lies between products. `reruns`: what backward computes once more, in `rerun_share` of
    the layers. `hidden`: transfers of tensor ranks and of copies run beside the products.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    shards: int = 0
    chunks: int = 1
    micro_batch: float = 1
    micros: float = 1
    reruns: Rerun = "none"
    sequence: bool = False
    order: Order = Order()
    dtype: str = "bfloat16"
    sums: int = 2
    gathers: int = 2
    kernel: Kernel = "flash2"
    fused: bool = True
    compiled: bool = False
    hidden: bool = False
    rerun_share: float = 1.0

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def sharers(self) -> int:
        """The ranks that hold the same weights and sum their gradients."""
        return self.dp * self.cp

    def tokens(self, shape: Shape) -> float:
        """Of a micro-batch, on one rank along cp."""
        return self.micro_batch * shape.sequence / self.cp

    def layers(self, shape: Shape) -> float:
        """Of the rank along pp that has most; the embedding and the head count as a layer each where that comes out even."""
        if shape.layers % self.pp == 0:
            return shape.layers / self.pp
        both = shape.layers + 2
        return both / self.pp if both % self.pp == 0 else shape.layers // self.pp + 1

    def faults(self, shape: Shape) -> Iterator[Fault]:
        """What keeps it from being a plan for `shape`."""
        if shape.heads % self.tp:
            text = f"tp {self.tp} ranks share {shape.heads} heads"
            yield Fault(text, "each takes as many: choose a divisor of the heads", "tp")
        if self.pp * self.chunks > shape.layers:
            text = f"pp {self.pp} x {self.chunks} chunks for {shape.layers} layers"
            yield Fault(text, "each chunk has a layer: choose fewer", "pp")
        if self.chunks > 1 and self.micros % self.pp:
            text = f"{self.micros:g} micro-batches in chunks on pp {self.pp}"
            yield Fault(text, "interleaving takes a multiple of pp", "micros")
