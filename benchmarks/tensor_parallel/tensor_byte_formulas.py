"""The formulas of the bytes that tensor parallelism sends, and the cases that `tensor_bytes` compares with
them.

1d, per layer and microbatch; t ranks, S = b s h elements of the residual stream, w bytes each on the wire:

    1d                  m all-reduces forward and d backward, each 2 S w (t-1)/t. m outputs of rowwise layers
                        are summed into the stream; d tensors are inputs of colwise layers.
                            Llama, GPT-2                    m = 2, d = 2
                            NeoX, Falcon (two norms)        m = 1, d = 2    parallel residuals: d is the
                            Falcon 7B (one norm)            m = 1, d = 1    number of norms
                            T5 decoder                      m = 3, d = 4    keys and values of the encoder
                                                                            give its stream a gradient
                        In the paper's notation: 4 k b s h (t-1)/t elements, k = (m + d)/2.
    sequence_parallel   m + d all-gathers and reduce-scatters in either direction, S w (t-1)/t each: the same
                        bytes; d more where inputs are gathered again (`regather`). Norms and replicated
                        biases of a layer, n elements: 2 n w' (t-1)/t, w' bytes of a gradient. The
                        encoder's stream, which a T5 decoder takes whole, is all-reduced as in 1d.
    fewer KV heads      2 n w' (t-1)/t, n the elements of the key and value weights that ranks share
    than ranks
    checkpointing       the forward once more

2d, 2.5d and 3d, per layer and microbatch; |X| = b s times the input widths of its linear layers, |Y| the same
of the output widths, b of the global batch:

    2d      3 (q-1)/q^2 (|X| + |W|)
    2.5d    3 (q-1)/q^2 (|X|/d + |W|) + 2 (d-1)/(d q^2) |W|
    3d      2 (q-1)/q^3 (|X| + |W| + |Y|)

|W| are all elements of a layer, in equal shards, and therefore rounded up. In addition, a norm all-gathers
one number per token from every slice of the width in forward, and reduce-scatters its gradient in backward.

A tensor that several layers take as input, or for which several layers compute a gradient, is sent once: q, k
and v count as one in |X|. The layer that is compared is the second of three, so that both of its neighbours
are layers too.
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
from benchmarks.tensor_parallel.tensor_parity import MULTI_DIM
from meshwright.api import analyze, make_plan
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

HALF = PrecisionConfig(compute="bfloat16")
Formula = Callable[["Case"], Fraction]


@dataclass(frozen=True)
class Layer:
    """The block of a family that is compared: its name, the all-reduces of a forward and of a backward, and
    the elements that ranks share.

    `shared` are the elements of norms and of biases that are added to sums, `replicated` those of weights of
    which ranks use the same slice. `variant` is the variant of the family, and `config_fields` are the
    fields of its config that select it.
    """

    family: str
    name: str
    config_fields: Mapping[str, object]
    forward: int
    backward: int
    shared: int
    unsharded: int = 0  # of `backward`, those of tensors that are not sequence-sharded
    replicated: int = 0
    variant: str = ""


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
        replicated=(ODD["heads"] + 2)
        * ODD["head"]
        * (H + 1),  # multi-query attention: q, k and v lie in one weight, with its bias
        variant="7B",
    ),
    Layer("t5", "decoder.block.1", {"num_layers": 3}, 3, 4, 3 * H, unsharded=1),
)


@dataclass(frozen=True)
class Case:
    """One plan of one family, and the formulas of the bytes that a rank sends for a layer, by action kind."""

    layer: Layer
    label: str
    mesh: Mesh
    strategies: tuple[Strategy, ...]
    formulas: Mapping[str, Formula] = field(hash=False)
    micros: int = 1
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    even: bool = False

    def __str__(self) -> str:
        micros = f", {self.micros} microbatches" if self.micros > 1 else ""
        wire = f", {self.precision.compute}" if self.precision.compute else ""
        variant = f" {self.layer.variant}" if self.layer.variant else ""
        return f"{self.layer.family}{variant}, {self.label}, {self.mesh.world_size} ranks{micros}{wire}"

    @property
    def family(self) -> Family:
        """The family of the layer."""
        return named(self.layer.family)

    @property
    def num_samples(self) -> int:
        """The samples of a global batch: two per data-parallel rank and microbatch."""
        return 2 * self.mesh.dp_shard * self.mesh.dp_replicate * self.micros

    @property
    def stream_numel(self) -> int:
        """The elements of the residual stream for a rank's samples of the whole step."""
        sizes = EVEN if self.even else ODD
        return self.num_samples // (self.mesh.dp_shard * self.mesh.dp_replicate) * TOKENS * sizes["hidden"]

    @property
    def element_nbytes(self) -> int:
        """Bytes of an element in a message."""
        return FLOAT_NBYTES[self.precision.compute or self.precision.parameters]

    def analyzed_model(self) -> AnalyzedModel:
        """Returns the analyzed model."""
        family = self.family
        model = model_of(family, even=self.even, **self.layer.config_fields)
        return analyze(model, batches(family, 1, 2)[0], loss=loss_of(family))

    def plan(self, analyzed: AnalyzedModel) -> Plan:
        """Returns the plan. Raises PlanError where it is refused."""
        data, train = DataConfig("random", sequence=TOKENS), TrainConfig(batch=self.num_samples)
        job = Job(ModelConfig(self.family.name), data, train, precision=self.precision)
        return make_plan(analyzed, job, self.mesh, self.strategies, 2)


def cases() -> Iterator[Case]:
    """Yields all cases that are compared."""
    for layer in LAYERS:
        for ranks in (2, 3):
            for micros, precision in ((1, PrecisionConfig()), (2, PrecisionConfig()), (1, HALF)):
                mesh = Mesh(tp=ranks)
                yield Case(
                    layer, "1d", mesh, (TensorParallel(),), {"F": forward, "B": backward}, micros, precision
                )
                for regather in (False, True):
                    formulas = {
                        "F": sequence_parallel_forward,
                        "B": regather_backward if regather else sequence_parallel_backward,
                    }
                    yield Case(
                        layer,
                        "1d, sequence_parallel, regather" if regather else "1d, sequence_parallel",
                        mesh,
                        (TensorParallel(), SequenceParallel(regather=regather)),
                        formulas,
                        micros,
                        precision,
                    )
        formulas = {"F_CHECKPOINTED": forward, "RECOMPUTE": forward, "B": backward}
        checkpointed = (TensorParallel(), ActivationCheckpointing())
        yield Case(layer, "1d, activation_checkpointing", Mesh(tp=3), checkpointed, formulas)
    llama = LAYERS[0]
    formulas = {"F": forward, "B": lambda case: backward(case) + shared_kv_gradients(case)}
    yield Case(llama, "1d, fewer KV heads than ranks", Mesh(tp=6), (TensorParallel(),), formulas)
    for label, (mesh, strategies) in MULTI_DIM.items():
        yield Case(llama, label, mesh, strategies, FORMULAS_BY_MODE[label.partition(",")[0]], even=True)


def forward(case: Case) -> Fraction:
    """Returns the bytes of the all-reduces of forwards."""
    return case.layer.forward * _stream_all_reduce(case)


def backward(case: Case) -> Fraction:
    """Returns the bytes of the all-reduces of backwards, and of gradients of weights that ranks share."""
    return case.layer.backward * _stream_all_reduce(case) + _gradients(case, case.layer.replicated)


def sequence_parallel_forward(case: Case) -> Fraction:
    """Returns the bytes of a reduce-scatter per sum, and of an all-gather per sequence-sharded input of
    colwise layers: half of an all-reduce each.
    """
    return (case.layer.forward + _num_sharded_inputs(case)) * _stream_all_reduce(case) / 2


def sequence_parallel_backward(case: Case) -> Fraction:
    """Returns the bytes of the adjoint collectives, of the all-reduces of unsharded inputs, and of the
    gradients of norms and replicated biases.
    """
    return (
        sequence_parallel_forward(case)
        + case.layer.unsharded * _stream_all_reduce(case)
        + _gradients(case, case.layer.replicated + case.layer.shared)
    )


def regather_backward(case: Case) -> Fraction:
    """Returns the same, with the inputs of colwise layers gathered again."""
    return sequence_parallel_backward(case) + _num_sharded_inputs(case) * _stream_all_reduce(case) / 2


def shared_kv_gradients(case: Case) -> Fraction:
    """Returns the bytes of the gradients of key and value weights that ranks share."""
    return _gradients(case, 2 * ODD["keys"] * ODD["head"] * H)


def _num_sharded_inputs(case: Case) -> int:
    """Returns the number of sequence-sharded inputs of colwise layers."""
    return case.layer.backward - case.layer.unsharded


def _stream_all_reduce(case: Case) -> Fraction:
    """Returns the bytes of an all-reduce of the whole residual stream."""
    return _all_reduce(case.stream_numel * case.element_nbytes, case.mesh.tp)


def _gradients(case: Case, numel: int) -> Fraction:
    """Returns the bytes of all-reduces of `numel` gradient elements, one per microbatch."""
    return case.micros * _all_reduce(numel * FLOAT_NBYTES[case.precision.parameters], case.mesh.tp)


def _all_reduce(nbytes: int, ranks: int) -> Fraction:
    return Fraction(2 * nbytes * (ranks - 1), ranks)


def _inputs(case: Case) -> int:
    """Returns |X| of a Llama's layer: q, k and v have one input, gate and up another."""
    return case.num_samples * TOKENS * (EVEN["hidden"] * 3 + EVEN["inner"])


def _outputs(case: Case) -> int:
    """Returns |Y|: the outputs of q, k, v, o, gate, up, down."""
    head = EVEN["head"]
    return (
        case.num_samples
        * TOKENS
        * (head * (EVEN["heads"] + 2 * EVEN["keys"]) + 2 * EVEN["hidden"] + 2 * EVEN["inner"])
    )


def _weights(ranks: int) -> int:
    """Returns the elements of one of `ranks` equal shards of the weights of a layer."""
    hidden, inner, head = EVEN["hidden"], EVEN["inner"], EVEN["head"]
    numel = 2 * hidden * head * (EVEN["heads"] + EVEN["keys"]) + 3 * hidden * inner + 2 * hidden
    return -(-numel // ranks)


def _norms(case: Case, ranks: int) -> Fraction:
    """Bytes of two norms: a number per token, gathered forward; its gradient, scattered backward."""
    tokens = case.num_samples // (case.mesh.dp_shard * case.mesh.dp_replicate) * TOKENS
    return Fraction(2 * 2 * tokens * (ranks - 1) * case.element_nbytes)


def _streams_2d(case: Case) -> Fraction:
    q = case.mesh.tp
    return Fraction(
        3 * (q - 1) * _inputs(case), q**2 * case.mesh.dp_replicate
    ) * case.element_nbytes + _norms(case, q)


def _weights_2d(case: Case) -> Fraction:
    q, d = case.mesh.tp, case.mesh.dp_replicate
    return (3 * (q - 1) + Fraction(2 * (d - 1), d)) * _weights(q**2) * case.element_nbytes


def _streams_3d(case: Case) -> Fraction:
    q = case.mesh.tp
    return Fraction(2 * (q - 1) * (_inputs(case) + _outputs(case)), q**3) * case.element_nbytes + _norms(
        case, q**2
    )


def _weights_3d(case: Case) -> Fraction:
    q = case.mesh.tp
    return Fraction(2 * (q - 1) * _weights(q**3)) * case.element_nbytes


FORMULAS_2D: Mapping[str, Formula] = {"streams": _streams_2d, "weights": _weights_2d}
FORMULAS_BY_MODE: Mapping[str, Mapping[str, Formula]] = {
    "2d": FORMULAS_2D,
    "2.5d": FORMULAS_2D,
    "3d": {"streams": _streams_3d, "weights": _weights_3d},
}
