"""Activation checkpointing equals one device under every data-parallel strategy, and is bitwise equal to a
run without it.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, make_plan, verify
from meshwright.comm.backends.threads import single_rank_world
from meshwright.engine.runtime.build_module import make_stateless_rng
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.engine.one_device import bits
from tests.model.hf.test_captured_outputs import EXAMPLE_BATCH as ROUTED
from tests.model.hf.test_captured_outputs import build as router
from tests.model.hf.test_captured_outputs import with_z
from tests.tiny_model import (
    VOCABULARY,
    WIDTH,
    analyzed_model,
    case_of,
    executor_of,
    first_of,
    tiny_job,
    token_samples,
    verdict_of,
)

ALL = ActivationCheckpointing(blocks=("*",))
STORES: dict[str, tuple[Strategy, ...]] = {
    "ddp": (BatchSplit(axis="dp_shard"), DDP(axis="dp_shard")),
    **{f"zero {stage}": (BatchSplit(axis="dp_shard"), ZeRO(stage=stage)) for stage in (1, 2, 3)},
}
OPTIONS = [{}, {"tied": True, "p": 0.3}, {"frozen": True}, {"spare": True}]
CPU = torch.device("cpu")


def planned(
    analyzed: AnalyzedModel,
    ranks: int = 1,
    store: str = "",
    micro_batch: int = 0,
    mine: tuple[Strategy, ...] = (ALL,),
) -> Plan:
    strategies = STORES[store] if store else ()
    return make_plan(analyzed, tiny_job(), Mesh(dp_shard=ranks), (*strategies, *mine), micro_batch)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 0), (3, 2)])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_equals_one_device(options: dict[str, float | bool], store: str, ranks: int, micro_batch: int):
    analyzed = analyzed_model(**options)
    plan = planned(analyzed, ranks, store, micro_batch)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)


def trained(analyzed: AnalyzedModel, plan: Plan, steps: int = 3) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Parameters and buffers after some steps on one device."""
    executor = executor_of(analyzed, plan, single_rank_world(CPU))
    for _ in range(steps):
        executor.step({key: value[: plan.local_batch] for key, value in token_samples().items()})
    found = (
        bits(executor.gather_parameters()),
        bits(dict(executor.state.trained_module.module.named_buffers())),
    )
    executor.close()
    return found


def assert_bitwise_equal_without(
    build: Callable[[], nn.Module], micro_batch: int = 0, precision: PrecisionConfig | None = None
) -> Plan:
    """The plan with recompute, after it was seen to end with the same bits as without."""
    analyzed = analyze(build, token_samples(2), loss=token_cross_entropy())
    job = tiny_job() if precision is None else replace(tiny_job(), precision=precision)
    lean, usual = (make_plan(analyzed, job, Mesh(), mine, micro_batch) for mine in ((ALL,), ()))
    assert {action.kind for role in lean.program.roles for action in role.actions} >= {
        "F_CHECKPOINTED",
        "RECOMPUTE",
    }
    assert trained(analyzed, lean) == trained(analyzed, usual)
    return lean


class Counting(nn.Module):
    """Batch norm if asked for, dropout, a counter in a buffer, one in an attribute, a scale that it reads and
    moves itself.
    """

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if whole else nn.GroupNorm(2, WIDTH)
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(()))
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.seen += 1
        self.scale = self.scale * 1.01
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.drop(self.linear(y).tanh()) * self.scale * (1 + self.seen % 2)


class Stateful(nn.Module):
    """Two blocks that write, between an embedding and a head; the first of them is visited twice."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Counting(whole=whole) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](self.embed(input_ids)))
        return self.head(self.layers[0](x))


@pytest.mark.parametrize("micro_batch", [0, 4])
def test_buffers_are_written_once_and_restored_for_recomputation(micro_batch: int):
    whole = not micro_batch  # batch norm takes the whole batch
    assert_bitwise_equal_without(lambda: Stateful(whole=whole), micro_batch)
    analyzed = analyze(lambda: Stateful(whole=whole), token_samples(2))
    plan = make_plan(analyzed, tiny_job(), Mesh(), (ALL,), micro_batch)
    executor = executor_of(analyzed, plan, single_rank_world(CPU))
    executor.step({key: value[:12] for key, value in token_samples().items()})
    layers = executor.state.trained_module.module.layers
    assert [(layer.calls.item(), layer.seen) for layer in layers] == [
        (2 * plan.num_microbatches,) * 2,
        (plan.num_microbatches,) * 2,
    ]
    if whole:
        assert [layer.norm.num_batches_tracked.item() for layer in layers] == [2, 1]


class Branch(nn.Module):
    """A branch whose backward does not need what it took in."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.linear = nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.drop(x)).tanh() * 0.5


class InPlace(nn.Module):
    """Glue that adds into the stream in place: what a block took in is gone when its backward comes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Branch() for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x += layer(x)
        return self.head(x)


def test_a_model_that_writes_in_place():
    assert assert_bitwise_equal_without(InPlace).model_spec.writes_in_place


def llama(seed: int = 0, **more: object) -> Callable[[], nn.Module]:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 24,
    }
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, use_cache=False, attention_dropout=0.1, **more
    )
    return lambda: transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("store", ["ddp", "zero 3"])
def test_a_llama_with_dropout_equals_one_device(store: str):
    analyzed = analyze(llama(tie_word_embeddings=True), token_samples(2), loss=token_cross_entropy())
    plan = make_plan(analyzed, tiny_job(), Mesh(dp_shard=3), (*STORES[store], ActivationCheckpointing()), 2)
    assert [a.subject for role in plan.program.roles for a in role.actions if a.kind == "F_CHECKPOINTED"][
        :3
    ] == [f"model.layers.{i}" for i in range(3)]
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    "precision",
    [PrecisionConfig(), PrecisionConfig(compute="bfloat16")],
    ids=lambda precision: precision.compute,
)
def test_a_llama_ends_with_the_same_bits_also_under_autocast(precision: PrecisionConfig):
    assert_bitwise_equal_without(llama(), 4, precision)


def test_submodules_declared_as_blocks_are_selected_by_name():
    parts = [f"model.layers.{i}.{part}" for i in range(3) for part in ("self_attn", "mlp")]
    analyzed = analyze(
        lambda: Model(llama()(), blocks=["model.embed_tokens", *parts, "lm_head"]),
        token_samples(2),
        loss=token_cross_entropy(),
    )
    plan = make_plan(
        analyzed,
        tiny_job(),
        Mesh(dp_shard=3),
        (*STORES["zero 3"], ActivationCheckpointing(blocks=("*.self_attn",))),
    )
    leans = [a.subject for role in plan.program.roles for a in role.actions if a.kind == "F_CHECKPOINTED"]
    assert leans == [f"model.layers.{i}.self_attn" for i in range(3)]
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)


def test_dropout_masks_that_are_redrawn_are_noticed():
    class Forgetful(StatelessRNG):
        """Dice that take a second run for another step."""

        def enter_block(self, block_call: str) -> None:
            super().enter_block(block_call)
            entered[block_call] = entered.get(block_call, 0) + 1
            self._step = (
                1000 if entered[block_call] % 2 == 0 and block_call.startswith("layers") else self._step
            )

    entered: dict[str, int] = {}
    analyzed = analyzed_model(p=0.3)
    case = case_of(analyzed, planned(analyzed))
    usual = verdict_of(case)
    assert usual.passed, str(usual)
    made = make_stateless_rng(analyzed, case.plan)
    forgetful = replace(case, make_rng=lambda: Forgetful(case.plan.job.train.seed, made.sites))
    verdict = verdict_of(case, on_rank=lambda case, world: forgetful)
    assert first_of(verdict)[:2] == (0, "gradient")


def test_rank_threads_recompute_concurrently():
    analyzed = analyzed_model(p=0.3, tied=True)
    lean, usual = (planned(analyzed, 3, "zero 3", 2, mine) for mine in ((ALL,), ()))

    def played(plan: Plan) -> list[dict[str, bytes]]:
        def play(world) -> dict[str, bytes]:
            executor = executor_of(analyzed, plan, world)
            for _ in range(2):
                executor.step({key: value[: plan.local_batch] for key, value in token_samples().items()})
            return bits(executor.gather_parameters())

        return run_on_threads(play, plan.mesh)

    assert played(lean) == played(usual)


def test_router_logits_are_captured_once_and_keep_their_gradient():
    loss = Loss(with_z, token_cross_entropy().count)
    analyzed = analyze(lambda: Model(router(), loss=loss), ROUTED, loss=loss)
    plan = make_plan(analyzed, tiny_job(6), Mesh(dp_replicate=3), (BatchSplit(), DDP(), ALL))
    verdict = verify(analyzed, plan, [ROUTED, ROUTED], loss=loss)
    assert verdict.passed, str(verdict)
