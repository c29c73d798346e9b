"""Models with token convolutions under context parallelism: results of one device in float64, and only the
bytes that the program states.
"""

from functools import cache

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
import transformers
from torch import nn

from meshwright.api import analyze, make_plan, trace, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.context_parallel import conv_call
from meshwright.model.loading.loader import Model
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.sequence_sharding import MIN_TOKENS
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.static_checks import static_checks
from tests.argument_names import argument_name
from tests.parallel.context.test_context_parallel_strategy_in_pipelines import found, planned
from tests.parallel.context.test_ring_models import NUM_SAMPLES, REPLICAS, Attention, padded
from tests.parallel.tensor.odd_llama import batches

WIDTH, WORDS = 8, 67


class Short(nn.Module):
    """A causal convolution, channel by channel, between gates; padded on both sides and cut, as transformers
    has it.
    """

    def __init__(self, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.norm, self.into, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        reach = (kernel - 1) * dilation
        self.conv = nn.Conv1d(WIDTH, WIDTH, kernel, padding=reach, dilation=dilation, groups=WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.into(self.norm(x)).transpose(-1, -2).chunk(2, dim=-2)
        made = F.silu(self.conv(gate * value)[..., : x.shape[1]])
        return x + self.out(made.transpose(-1, -2))


class Even(nn.Module):
    """A convolution that looks back and ahead, dropout, and one that is padded before: of all channels."""

    def __init__(self, kernel: int, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(p)
        self.one = nn.Conv1d(WIDTH, 2 * WIDTH, kernel, padding=kernel // 2)
        self.two = nn.Conv1d(2 * WIDTH, WIDTH, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(F.gelu(self.one(self.norm(x).transpose(1, 2))))
        return x + self.two(F.pad(y, (3, 0))).transpose(1, 2)


class Mixed(nn.Module):
    """Convolutions and attention in turn."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList([Short(3), Attention(WIDTH), Even(7, p), Short(4, dilation=2)])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def lfm2(**more: object) -> nn.Module:
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 29, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "block_auto_adjust_ff_dim": False}
    kinds = {"layer_types": ["conv", "full_attention", "conv"], "use_cache": False}
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**{**sizes, **heads, **kinds, **more}))


def equal(
    analyzed: AnalyzedModel, mesh: Mesh, *strategies: Strategy, micro_batch: int = 2, length: int = 9
) -> None:
    """Check that the plan's program can work, is what is issued, and gives what one device gives."""
    source, train = DataConfig("random", sequence=length), TrainConfig(batch=NUM_SAMPLES, clip=0.5)
    job = Job(ModelConfig("mixed"), source, train, OptimizerConfig("adamw", lr=0.1, weight_decay=0.1))
    plan = make_plan(analyzed, job, mesh, strategies, micro_batch)
    assert not static_checks(plan)
    verdict = verify(analyzed, plan, batches(2, NUM_SAMPLES, length))
    assert verdict.passed, verdict
    traced = trace(analyzed, plan, fake=mesh.size("pp") == 1)  # what a part receives is real
    assert traced.passed, traced


@cache
def made(make, length: int = 9) -> AnalyzedModel:
    """The analyzed model, cached."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return analyze(make(), batches(1, NUM_SAMPLES, length)[0])


WAYS = [
    (2, RingAttention()),
    (3, RingAttention()),
    (4, RingAttention()),
    (2, Ulysses()),
    (4, HybridContextParallel()),
]


@pytest.mark.parametrize(
    ("make", "ranks", "strategy"),
    [*((Mixed, *way) for way in WAYS), (lfm2, 3, RingAttention()), (lfm2, 4, HybridContextParallel())],
    ids=argument_name,
)
def test_convolutions_and_attention_on_ranks(make, ranks: int, strategy: Strategy) -> None:
    equal(made(make), Mesh(cp=ranks), strategy, REPLICAS)


@pytest.mark.parametrize(("make", "length"), [(Mixed, 2), (lfm2, 3), (Mixed, 5)], ids=argument_name)
def test_there_may_be_more_ranks_than_tokens(make, length: int) -> None:
    equal(made(make, length), Mesh(cp=4), RingAttention(), REPLICAS, length=length)


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (
            Mesh(dp_shard=2, cp=2),
            (BatchSplit(axis="dp_shard"), RingAttention(), ZeRO(stage=3), ActivationCheckpointing()),
        ),
        (Mesh(cp=3), (RingAttention(), ZeRO(axis="cp"))),
        (
            Mesh(pp=2, cp=3),
            (Pipeline(schedule="zb_h1"), RingAttention(), ActivationCheckpointing(), REPLICAS),
        ),
        (Mesh(cp=2, tp=2), (TensorParallel(), RingAttention(), REPLICAS)),
    ],
    ids=argument_name,
)
def test_with_other_strategies(mesh: Mesh, strategies: tuple[Strategy, ...]) -> None:
    equal(made(lfm2), mesh, *strategies, micro_batch=1)


def test_dropout_between_convolutions_draws_what_one_device_draws() -> None:
    equal(made(lambda: Mixed(0.2)), Mesh(cp=3), RingAttention(), REPLICAS)


def test_padding_in_a_batch_is_convolved_as_on_one_device() -> None:
    analyzed, samples = padded(lfm2(), 3)
    job = Job(
        ModelConfig("lfm2"),
        DataConfig("random", sequence=9),
        TrainConfig(batch=NUM_SAMPLES),
        OptimizerConfig("adamw", lr=0.1),
    )
    verdict = verify(analyzed, make_plan(analyzed, job, Mesh(cp=3), (RingAttention(), REPLICAS)), samples)
    assert verdict.passed, verdict


def test_evaluations_may_have_longer_sequences() -> None:
    plan, alone = (
        planned(made(Mixed), mesh, *more)
        for mesh, *more in ((Mesh(cp=3), RingAttention(), REPLICAS), (Mesh(),))
    )
    (expected,) = found(made(Mixed), alone, 13)
    for told, loss in found(made(Mixed), plan, 13):
        assert (told.loss, loss) == pytest.approx((expected[0].loss, expected[1]), rel=1e-5)


def test_a_block_that_does_not_crop_its_output_gets_all_tokens() -> None:
    class Wide(Even):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(F.pad(self.one(self.norm(x).transpose(1, 2)), (3, 2))).transpose(1, 2)

    class Own(Mixed):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2] = Wide(3)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.layers[1](self.embed(input_ids))
            return self.head(x + self.layers[2](x)[:, : x.shape[1]])

    analyzed = made(Own)
    assert analyzed.sequence_info is not None
    assert [each.is_replicated for each in analyzed.sequence_info.block_calls] == [False, False, True, False]
    assert analyzed.sequence_info.conv_calls == ()
    equal(analyzed, Mesh(cp=3), RingAttention(), REPLICAS)


def refused(make, *strategies: Strategy, ranks: int = 2) -> str:
    """Returns why there is no plan."""
    analyzed = analyze(lambda: Model(make()), batches(1, NUM_SAMPLES)[0])  # a GRU is not copied
    with pytest.raises(PlanError) as told:
        equal(analyzed, Mesh(cp=ranks), *strategies, REPLICAS)
    return " | ".join(f"{fault.problem} -> {fault.fix}" for fault in told.value.diagnostics)


def test_the_cache_of_a_built_model_is_turned_off_for_training() -> None:
    equal(made(lambda: lfm2(use_cache=True)), Mesh(cp=3), RingAttention(), REPLICAS)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rnn(x)[0]


class Shifts(nn.Module):
    """Mixes each token with the one before, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.linear = nn.ZeroPad2d((0, 0, 1, -1)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.shift(x))


class Scan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).cumsum(1)


class Caches(nn.Module):
    """Keeps the last tokens for a later call, as a cache of convolutions does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros(len(x), 2, WIDTH, dtype=x.dtype)
        kept.copy_(x[:, -2:])
        return x + self.linear(x)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Caches, "keeps some of the tokens (copy): if that is a cache, build the model with use_cache=False"),
        (Recurrent, "layers.*.rnn carries a state from token to token (gru)"),
        (Shifts, "layers.*.shift pads tokens"),
        (Scan, "layers.2 takes cumsum over tokens"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_recurrent_layers_are_refused_by_name(layer, message: str) -> None:
    class Own(Mixed):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2] = layer()

    said = refused(Own, RingAttention())
    assert message in said
    assert "mesh.cp = 1 and mesh.dp_shard = 2 are as many ranks" in said


def test_an_mlp_that_convolves_is_not_tiled() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.conv = nn.Conv1d(4 * WIDTH, 4 * WIDTH, 3, padding=1, groups=4 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.gelu(self.conv(self.up(x).transpose(1, 2)).transpose(1, 2)))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mlp(x)

    class Own(Mixed):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2] = Block()

    equal(made(Own), Mesh(cp=2), RingAttention(), REPLICAS)
    assert "remove the strategy tiled_mlp" in refused(Own, RingAttention(), TiledMLP(num_tiles=2))


def test_a_convolution_without_halos_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(self: conv_call.Conv1dMode, known, given, share) -> torch.Tensor:
        own = F.pad(
            given.input[..., known.pad_before : known.pad_before + max(MIN_TOKENS, share.num_tokens)],
            (known.left_halo, known.right_halo),
        )
        return F.pad(
            F.conv1d(own, given.weight, given.bias, 1, 0, given.dilation, given.groups),
            (0, known.num_extra_outputs),
        )

    monkeypatch.setattr(conv_call.Conv1dMode, "_call_impl", alone)
    with pytest.raises(AssertionError):
        equal(made(Mixed), Mesh(cp=3), RingAttention(), REPLICAS)
