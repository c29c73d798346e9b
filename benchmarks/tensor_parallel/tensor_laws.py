"""The laws of what divided matrices send, and the cases that `tensor_bytes` holds against them.

    1-D, per layer and microbatch, t ranks, S = b s h elements of the stream, w bytes each on the wire:
        m forward sums, d backward ones, each 2 S w (t-1)/t: m sums end in the stream, and d tensors are
            taken in by columns
        layers. Llama, GPT-2 2 and 2; parallel residuals 1 and as many as there are norms: NeoX and Falcon
            with a norm for each
        1 and 2, Falcon 7B 1 and 1; a T5 decoder 3 and 4: the keys and values of the encoder give its
            stream a gradient. In the
        paper's words 4 k b s h (t-1)/t elements, k = (m + d)/2
        with a divided sequence, m + d gathers and scatters either way, S w (t-1)/t each: as many bytes; d
            more where inputs are
        gathered again. Each layer's norms and whole biases, n elements: 2 n w' (t-1)/t, w' bytes of a
            gradient. The encoder's
        stream, which a T5 decoder takes whole, is summed as in 1-D
        of fewer keys than ranks: 2 n w' (t-1)/t, n the elements of their weights
        recompute: the forward once more
    grids, per layer and microbatch, |X| = b s times the widths that its linears take in, b of the global
        batch, |Y| give out:
        2-D     3 (q-1)/q^2 (|X| + |W|)
        2.5-D   3 (q-1)/q^2 (|X|/d + |W|) + 2 (d-1)/(d q^2) |W|
        3-D     2 (q-1)/q^3 (|X| + |W| + |Y|)
        |W| are all elements of a layer, in equal shards, and so rounded up; besides, a norm has every
            slice of the width tell
        every other one number per token forward, and its gradient backward

What several layers take in or give a gradient for at once is moved once: q, k and v count as one in |X|. The
second layer of three is looked at, whose borders are layers too.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from benchmarks.tensor_parallel.tensor_families import (
    EVEN,
    ODD,
    TOKENS,
    Family,
    batches,
    loss_of,
    model_of,
    named,
)
from benchmarks.tensor_parallel.tensor_parity import SQUARES
from meshwright.api import analyze, make_plan
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.plan.job.data_source import DataConfig, ModelConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy import Strategy

HALF = PrecisionConfig(compute="bfloat16")
Amount = Callable[["Case"], Fraction]


@dataclass(frozen=True)
class Layer:
    """The block of a family that is looked at: its name, the sums of a forward and of a backward, and what
    ranks share of it.

    `shared` are the elements of norms and of biases that are added to sums, `whole` those of weights of which
    ranks use the same rows. `kind` is what is special about the family, and `layers` the fields of its config
    that say so.
    """

    family: str
    name: str
    layers: Mapping[str, object]
    forward: int
    backward: int
    shared: int
    alone: int = 0  # of `backward`, those of tensors that no slice is taken of
    whole: int = 0
    kind: str = ""


H, INNER = ODD["hidden"], ODD["inner"]
LAYERS = (
    Layer("llama", "model.layers.1", {"num_hidden_layers": 3}, 2, 2, 2 * H),
    Layer("gpt2", "transformer.h.1", {"n_layer": 3}, 2, 2, 6 * H),
    Layer("gpt-neox", "gpt_neox.layers.1", {"num_hidden_layers": 3}, 1, 2, 6 * H),
    Layer("falcon", "transformer.h.1", {"num_hidden_layers": 3}, 1, 2, 6 * H),
    Layer(
        *(
            "falcon",
            "transformer.h.1",
            {"num_hidden_layers": 3, "new_decoder_architecture": False, "multi_query": True},
            1,
            1,
        ),
        shared=4 * H,
        whole=(ODD["heads"] + 2)
        * ODD["head"]
        * (H + 1),  # one key for all heads: q, k and v lie in one weight, with its bias
        kind="7B",
    ),
    Layer("t5", "decoder.block.1", {"num_layers": 3}, 3, 4, 3 * H, alone=1),
)


@dataclass(frozen=True)
class Case:
    """One plan of one family, and the law of the bytes that a rank sends for a layer, by the part of it."""

    layer: Layer
    how: str
    mesh: Mesh
    strategies: tuple[Strategy, ...]
    law: Mapping[str, Amount] = field(hash=False)
    micros: int = 1
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    even: bool = False

    def __str__(self) -> str:
        micros = f", {self.micros} microbatches" if self.micros > 1 else ""
        wire = f", {self.precision.compute}" if self.precision.compute else ""
        kind = f" {self.layer.kind}" if self.layer.kind else ""
        return f"{self.layer.family}{kind}, {self.how}, {self.mesh.world_size} ranks{micros}{wire}"

    @property
    def family(self) -> Family:
        """The family of its layer."""
        return named(self.layer.family)

    @property
    def rows(self) -> int:
        """The samples of a global batch: two per rank that has samples of its own, and microbatch."""
        return 2 * self.mesh.dp_shard * self.mesh.dp_replicate * self.micros

    @property
    def stream(self) -> int:
        """The elements of the stream, of a rank's samples of the whole step."""
        sizes = EVEN if self.even else ODD
        return self.rows // (self.mesh.dp_shard * self.mesh.dp_replicate) * TOKENS * sizes["hidden"]

    @property
    def width(self) -> int:
        """Bytes of an element on the wire."""
        return FLOAT_NBYTES[self.precision.compute or self.precision.parameters]

    def reading(self) -> AnalyzedModel:
        """What its model is made of."""
        family = self.family
        made = model_of(family, even=self.even, **self.layer.layers)
        return analyze(made, batches(family, 1, 2)[0], loss=loss_of(family))

    def plan(self, reading: AnalyzedModel) -> Plan:
        """What its ranks play. Raises PlanError where it is refused."""
        data, train = DataConfig("random", sequence=TOKENS), TrainConfig(batch=self.rows)
        job = Job(ModelConfig(self.family.name), data, train, precision=self.precision)
        return make_plan(reading, job, self.mesh, self.strategies, 2)


def cases() -> Iterator[Case]:
    """All that are compared."""
    for layer in LAYERS:
        for ranks in (2, 3):
            for micros, precision in ((1, PrecisionConfig()), (2, PrecisionConfig()), (1, HALF)):
                mesh = Mesh(tp=ranks)
                yield Case(
                    layer, "line", mesh, (TensorParallel(),), {"F": forward, "B": backward}, micros, precision
                )
                for again in (False, True):
                    how = "sequence, gathered again" if again else "sequence"
                    law = {"F": forward_in_slices, "B": backward_again if again else backward_in_slices}
                    yield Case(
                        layer,
                        how,
                        mesh,
                        (TensorParallel(), SequenceParallel(regather=again)),
                        law,
                        micros,
                        precision,
                    )
        law = {"F_CHECKPOINTED": forward, "RECOMPUTE": forward, "B": backward}
        yield Case(layer, "line, recompute", Mesh(tp=3), (TensorParallel(), ActivationCheckpointing()), law)
    llama = LAYERS[0]
    law = {"F": forward, "B": lambda case: backward(case) + keys(case)}
    yield Case(llama, "line, fewer keys than ranks", Mesh(tp=6), (TensorParallel(),), law)
    for how, (mesh, strategies) in SQUARES.items():
        yield Case(llama, how, mesh, strategies, GRIDS[how.partition(",")[0]], even=True)


def forward(case: Case) -> Fraction:
    """The sums of forwards."""
    return case.layer.forward * _streams(case)


def backward(case: Case) -> Fraction:
    """The sums of backwards, and those of the gradients of weights that ranks share."""
    return case.layer.backward * _streams(case) + _gradients(case, case.layer.whole)


def forward_in_slices(case: Case) -> Fraction:
    """A scatter of every sum, and a gather of what columns layers take in slices of: half of a sum of all
    either.
    """
    return (case.layer.forward + _taken(case)) * _streams(case) / 2


def backward_in_slices(case: Case) -> Fraction:
    """Their gradients, the other way round, what is summed whole, and the gradients of norms and of whole
    biases.
    """
    return (
        forward_in_slices(case)
        + case.layer.alone * _streams(case)
        + _gradients(case, case.layer.whole + case.layer.shared)
    )


def backward_again(case: Case) -> Fraction:
    """The same, and what columns layers take in, gathered again."""
    return backward_in_slices(case) + _taken(case) * _streams(case) / 2


def keys(case: Case) -> Fraction:
    """The gradients of keys and values that ranks share."""
    return _gradients(case, 2 * ODD["keys"] * ODD["head"] * H)


def _taken(case: Case) -> int:
    """How many tensors columns layers take slices of."""
    return case.layer.backward - case.layer.alone


def _streams(case: Case) -> Fraction:
    """A sum of the whole stream."""
    return _summed(case.stream * case.width, case.mesh.tp)


def _gradients(case: Case, numel: int) -> Fraction:
    """Sums of the gradients of so many elements, per microbatch."""
    return case.micros * _summed(numel * FLOAT_NBYTES[case.precision.parameters], case.mesh.tp)


def _summed(nbytes: int, ranks: int) -> Fraction:
    return Fraction(2 * nbytes * (ranks - 1), ranks)


def _inputs(case: Case) -> int:
    """|X| of a Llama's layer: q, k and v take in one tensor, gate and up another."""
    return case.rows * TOKENS * (EVEN["hidden"] * 3 + EVEN["inner"])


def _outputs(case: Case) -> int:
    """|Y|: q, k, v, o, gate, up, down."""
    head = EVEN["head"]
    return (
        case.rows
        * TOKENS
        * (head * (EVEN["heads"] + 2 * EVEN["keys"]) + 2 * EVEN["hidden"] + 2 * EVEN["inner"])
    )


def _weights(ranks: int) -> int:
    """A rank's shard of the weights of a layer, of `ranks` equal ones."""
    hidden, inner, head = EVEN["hidden"], EVEN["inner"], EVEN["head"]
    numel = 2 * hidden * head * (EVEN["heads"] + EVEN["keys"]) + 3 * hidden * inner + 2 * hidden
    return -(-numel // ranks)


def _norms(case: Case, ranks: int) -> Fraction:
    """Of two norms, a number per token, gathered forward, and its gradient scattered backward."""
    tokens = case.rows // (case.mesh.dp_shard * case.mesh.dp_replicate) * TOKENS
    return Fraction(2 * 2 * tokens * (ranks - 1) * case.width)


def _square_streams(case: Case) -> Fraction:
    q = case.mesh.tp
    return Fraction(3 * (q - 1) * _inputs(case), q**2 * case.mesh.dp_replicate) * case.width + _norms(case, q)


def _square_weights(case: Case) -> Fraction:
    q, d = case.mesh.tp, case.mesh.dp_replicate
    return (3 * (q - 1) + Fraction(2 * (d - 1), d)) * _weights(q**2) * case.width


def _cube_streams(case: Case) -> Fraction:
    q = case.mesh.tp
    return Fraction(2 * (q - 1) * (_inputs(case) + _outputs(case)), q**3) * case.width + _norms(case, q**2)


def _cube_weights(case: Case) -> Fraction:
    q = case.mesh.tp
    return Fraction(2 * (q - 1) * _weights(q**3)) * case.width


SQUARE: Mapping[str, Amount] = {"streams": _square_streams, "weights": _square_weights}
GRIDS: Mapping[str, Mapping[str, Amount]] = {
    "2-D": SQUARE,
    "2.5-D": SQUARE,
    "3-D": {"streams": _cube_streams, "weights": _cube_weights},
}
