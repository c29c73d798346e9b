"""Sequence parallelism: results of one device, bytes of the paper, and refusals where blocks mix tokens."""

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, parallelize, trace, verify
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor import sharded_layer
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.paper_model import FIRST_ROLE
from tests.parallel.tensor.exactness import assert_exact
from tests.parallel.tensor.odd_llama import NUM_SAMPLES, SIZES, analyzed_llama, batches, planned

LENGTH = 12
KEPT, ANEW = (TensorParallel(), SequenceParallel()), (TensorParallel(), SequenceParallel(regather=True))
SHARDED = BatchSplit(axis="dp_shard")
CASES = {
    "2 ranks": (Mesh(tp=2), KEPT, 0),
    "3 ranks": (Mesh(tp=3), KEPT, 2),
    "regathered": (Mesh(tp=3), ANEW, 2),
    "named first or last, with ddp": (
        Mesh(dp_replicate=2, tp=2),
        (SequenceParallel(), BatchSplit(), DDP(), TensorParallel()),
        1,
    ),
    "stage 1": (Mesh(dp_shard=2, tp=2), (*KEPT, SHARDED, ZeRO(stage=1)), 0),
    "stage 3": (Mesh(dp_shard=2, tp=2), (*ANEW, SHARDED, ZeRO(stage=3)), 1),
    "activation_checkpointing": (Mesh(tp=3), (*KEPT, ActivationCheckpointing()), 2),
    "activation_checkpointing and regather": (
        Mesh(dp_shard=2, tp=2),
        (*ANEW, SHARDED, ZeRO(), ActivationCheckpointing()),
        1,
    ),
    "vocab_parallel": (Mesh(tp=2), (*KEPT, VocabParallel()), 0),
    "vocab_parallel, named first, and regather": (Mesh(tp=3), (VocabParallel(), *ANEW), 2),
}


def planned_sequence_parallel(
    mesh: Mesh, strategies: tuple, micro: int = 0, **more: object
) -> tuple[AnalyzedModel, Plan]:
    return planned(analyzed_llama(LENGTH, **more), mesh, strategies, micro, length=LENGTH)


def inner(plan: Plan, kind: str, subject: str) -> list[tuple[str, int]]:
    """The collectives within that action of the first microbatch, and the bytes put in."""
    actions = [
        each
        for each in plan.program.actions(FIRST_ROLE)
        if (each.kind, each.subject, each.microbatch) == (kind, subject, 0)
    ]
    return [(move.collective, move.nbytes) for action in actions for move in action.inner_transfers]


@pytest.mark.parametrize("case", CASES)
def test_it_equals_one_device(case: str):
    mesh, strategies, micro = CASES[case]
    analyzed, plan = planned_sequence_parallel(
        mesh, strategies, micro, attention_bias=True, mlp_bias=case == "2 ranks"
    )
    assert_exact(
        analyzed, plan, batches(2, length=LENGTH), fake=case == "activation_checkpointing and regather"
    )


@pytest.mark.parametrize(("strategies", "factor"), [(KEPT, 4), (ANEW, 5)], ids=["kept", "regather"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_layer_sends_the_papers_bytes(ranks: int, strategies: tuple, factor: int):
    _, plan = planned_sequence_parallel(Mesh(tp=ranks), strategies)
    width, layer = SIZES["hidden_size"], "model.layers.1"
    k, stream, norm = 2, NUM_SAMPLES * LENGTH * width * 4, width * 4
    found = inner(plan, "F", layer) + inner(plan, "B", layer)
    moved = [(each, nbytes) for each, nbytes in found if each != "all_reduce"]
    assert len(moved) == factor * k
    put_in = {"all_gather": stream // ranks, "reduce_scatter": stream}
    assert all(nbytes == put_in[each] for each, nbytes in moved)
    received = {"all_gather": (ranks - 1) * stream // ranks, "reduce_scatter": (ranks - 1) * stream // ranks}
    assert sum(received[each] for each, _ in moved) == factor * k * stream * (ranks - 1) // ranks
    assert [each for each in found if each[0] == "all_reduce"] == [
        ("all_reduce", norm)
    ] * 2  # two norms, each of one weight


def test_the_stream_is_scattered_at_the_first_layer_and_gathered_after_the_last_norm():
    _, plan = planned_sequence_parallel(Mesh(tp=3), KEPT)
    slice_, norm = NUM_SAMPLES * LENGTH * SIZES["hidden_size"] * 4 // 3, SIZES["hidden_size"] * 4
    assert inner(plan, "F", "model.norm") == [("all_gather", slice_)]
    assert inner(plan, "B", "model.norm") == [("all_reduce", norm)]
    assert inner(plan, "B", "model.layers.0")[-1] == ("all_gather", slice_)
    assert inner(plan, "F", "model.embed_tokens") == inner(plan, "F", "lm_head") == []


def test_a_vocab_parallel_head_takes_slices():
    _, plan = planned_sequence_parallel(Mesh(tp=3), (*KEPT, VocabParallel()))
    stream = NUM_SAMPLES * LENGTH * SIZES["hidden_size"] * 4
    assert inner(plan, "F", "model.norm") == []
    assert inner(plan, "F", "lm_head") == [("all_gather", stream // 3)]
    assert inner(plan, "B", "lm_head") == [("reduce_scatter", stream)]
    assert inner(plan, "F", "model.embed_tokens") == [("all_reduce", stream)]


@pytest.mark.parametrize("strategies", [KEPT, ANEW], ids=["kept", "regather"])
def test_half_precision_is_sent_in_half_but_the_stream_itself_is_not(strategies: tuple):
    mesh = Mesh(dp_shard=2, tp=2)
    said = {"length": LENGTH, "precision": PrecisionConfig(compute="bfloat16")}
    analyzed, plan = planned(analyzed_llama(LENGTH), mesh, (*strategies, SHARDED, ZeRO()), **said)
    assert dtypes(plan, "model.layers.1") == {"bfloat16", "float32"}  # the latter: of norms
    assert dtypes(plan, "model.norm") == {"float32"}
    traced = trace(analyzed, plan, fake=False)
    assert traced.passed, str(traced)
    losses = run_on_threads(lambda world: losses_of(world, analyzed, plan), mesh)
    assert all(each == losses[0] for each in losses)
    analyzed, plan = planned(analyzed_llama(LENGTH), mesh, (TensorParallel(), SHARDED, ZeRO()), **said)
    whole = run_on_threads(lambda world: losses_of(world, analyzed, plan), mesh)
    assert losses[0] == pytest.approx(whole[0], rel=2e-2)


def dtypes(plan: Plan, block_call: str) -> set[str]:
    return {
        move.dtype
        for action in plan.program.actions(FIRST_ROLE)
        if action.subject == block_call
        for move in action.inner_transfers
    }


def losses_of(world: World, analyzed: AnalyzedModel, plan: Plan) -> tuple[float, float]:
    """Of a step, and of an evaluation behind it on the same samples."""
    with parallelize(analyzed, plan, world=world) as engine:
        batch = batches(1, length=LENGTH)[0]
        first = engine.step(engine.local_batch(batch)).loss
        return first, engine.evaluate([engine.local_batch(batch)]).loss


def test_an_evaluation_with_sequence_parallel_equals_one_device():
    found = []
    for mesh, strategies in ((Mesh(tp=3), ANEW), (Mesh(), ())):
        analyzed, plan = planned_sequence_parallel(mesh, strategies)
        found += run_on_threads(
            lambda world, analyzed=analyzed, plan=plan: losses_of(world, analyzed, plan), mesh
        )[:1]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize(("strategies", "whole"), [(KEPT, 1 + 2 * 5), (ANEW, 1)], ids=["kept", "regather"])
def test_saved_activations_are_slices_except_inputs_of_column_parallel_layers(strategies: tuple, whole: int):
    analyzed, plan = planned(analyzed_llama(15), Mesh(tp=3), strategies, length=15)
    width = SIZES["hidden_size"]
    for saved in run_on_threads(lambda world: saved_of(world, analyzed, plan), plan.mesh):
        assert (NUM_SAMPLES, 5, width) in saved  # by norms
        assert (NUM_SAMPLES, 15, width) not in saved
        assert (
            saved.count((NUM_SAMPLES * 15, width)) == whole
        )  # by the head, and by q, k, v, gate and up of two layers


def saved_of(world: World, analyzed: AnalyzedModel, plan: Plan) -> list[tuple[int, ...]]:
    """The shapes of what autograd keeps in a step of one rank, but for what it is told to make anew."""
    found: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tuple(tensor.shape))
        return tensor

    with (
        parallelize(analyzed, plan, world=world) as engine,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        engine.step(engine.local_batch(batches(1, length=15)[0]))
    return found


def test_a_norm_whose_gradient_is_not_summed_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sharded_layer, "R", sharded_layer.I)  # what is shared is taken for used alike
    analyzed, plan = planned_sequence_parallel(Mesh(tp=2), KEPT)
    verdict = verify(analyzed, plan, batches(2, length=LENGTH))
    assert not verdict.passed
    assert verdict.first_difference.name.endswith("norm.weight")


def test_without_tensor_parallel_pairs_it_is_refused():
    said = r'no strategy shards layers along tp\n.*name = "tensor_parallel", or leave'
    with pytest.raises(PlanError, match=said):
        planned_sequence_parallel(Mesh(tp=2), (SequenceParallel(),))
    with pytest.raises(PlanError, match=said):  # a stream that is divided by width
        planned_sequence_parallel(Mesh(dp_shard=2, tp=2), (TensorParallel2D(), SequenceParallel()))


def test_a_length_that_does_not_divide_is_refused_with_those_that_do():
    with pytest.raises(
        PlanError, match=r"12 tokens do not divide by the 5 ranks of tp\n.*set data.sequence = 10 or 15"
    ):
        planned_sequence_parallel(Mesh(tp=5), KEPT, num_attention_heads=6, num_key_value_heads=6)


def test_another_axis_is_refused():
    with pytest.raises(PlanError, match=r"sequence_parallel\.axis: .*; needed is 'tp'\n.*write axis"):
        planned_sequence_parallel(
            Mesh(dp_shard=2, tp=2), (TensorParallel(), SequenceParallel(axis="dp_shard"), SHARDED, ZeRO())
        )


class Mixing(nn.Module):
    """A pair, and what `mixes` tokens beside it."""

    def __init__(self, mixes: str) -> None:
        super().__init__()
        self.mixes = mixes
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.mix, self.scale = nn.Conv1d(8, 8, 3, padding=1, groups=8), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        if self.mixes == "convolution":
            h = self.mix(h.transpose(1, 2)).transpose(1, 2)
        if self.mixes == "mean":
            h = h - h.mean(1, keepdim=True)
        if self.mixes == "scale":
            h = h * self.scale
        if self.mixes == "positions":
            h = h + torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return x + self.down(torch.tanh(self.up(h)))


class Mixed(nn.Module):
    """Layers that mix tokens."""

    def __init__(self, mixes: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)
        self.layers = nn.ModuleList(Mixing(mixes) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mixed(mixes: str, strategies: tuple = KEPT) -> tuple[AnalyzedModel, Plan]:
    sockets = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    tokens = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(0))
    analyzed = analyze(
        lambda: Model(Mixed(mixes), layer_roles=sockets), {"input_ids": tokens, "labels": tokens.roll(1, 1)}
    )
    job = Job(ModelConfig("mixed"), DataConfig("random", sequence=6), TrainConfig(batch=4))
    return analyzed, make_plan(analyzed, job, Mesh(tp=2), strategies)


@pytest.mark.parametrize(
    ("mixes", "why"),
    [
        ("convolution", "layers.0 computes 'transpose' with it"),
        ("mean", "layers.0 takes mean over tokens"),
        ("scale", "layers.0 uses layers.0.scale on it"),
        ("positions", "layers.0 computes 'add' of it and of a tensor of all tokens"),
    ],
)
def test_a_block_that_mixes_tokens_is_refused_by_name(mixes: str, why: str):
    with pytest.raises(PlanError) as caught:
        mixed(mixes)
    assert f"the block 'layers.0' cannot run on a slice of the tokens: {why}" in str(caught.value)


class Pooled(nn.Module):
    """Adds the mean over tokens of what `norm` returns, so it needs all tokens."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(x).mean(1, keepdim=True)


class Shared(Mixed):
    """One norm for all layers; `twice`: also of a layer that needs all tokens."""

    def __init__(self, *, twice: bool = False) -> None:
        super().__init__("")
        for layer in self.layers:
            layer.norm = self.layers[0].norm
        if twice:
            self.layers.append(Pooled(self.layers[0].norm))


def shared(*, twice: bool = False) -> tuple[AnalyzedModel, Plan, dict[str, torch.Tensor]]:
    tokens = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens.roll(1, 1)}
    sockets = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    analyzed = analyze(lambda: Model(Shared(twice=twice), layer_roles=sockets), batch)
    job = Job(ModelConfig("shared"), DataConfig("random", sequence=6), TrainConfig(batch=4))
    return analyzed, make_plan(analyzed, job, Mesh(tp=3), KEPT), batch


def test_a_norm_that_all_layers_share_is_summed_in_each():
    analyzed, plan, batch = shared()
    assert_exact(analyzed, plan, [batch, batch])


def test_a_norm_on_slices_and_on_all_tokens_is_refused():
    with pytest.raises(
        PlanError, match=r"layers\.0\.norm is called on the residual stream and on another tensor"
    ):
        shared(twice=True)
