"""Activation offload at run time: the bits of the plan without it, copies to the byte, nothing that stays."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.api import analyze, default_strategies, make_plan, parallelize, trace, verify
from meshwright.comm.backends.threads import single_rank_world
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.parallel.memory.tiers.kept_tensor_copies import SavedStorage
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import LossGuard, OptimizerConfig, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.memory.activation_copies import ACTIVATION_COPIES
from meshwright.plan.step.memory.activation_files import ACTIVATION_FILE_KINDS
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.engine.one_device import bits
from tests.parallel.expert.mixture_model import analyzed_mixtral, batch_of, expert_strategies, sgd_job
from tests.parallel.memory.test_gist import images
from tests.parallel.memory.tiers.test_offload_combinations import MIXED, job
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
from tests.tiny_model import NUM_SAMPLES, analyzed_model, executor_of, tiny_job, token_samples

CPU = torch.device("cpu")
ALL = ActivationCheckpointing(blocks=("*",))
OFFLOAD = ActivationOffload(prefetch=0)
KEPT = {"saved": (OFFLOAD,), "inputs": (ALL, OFFLOAD)}
FLOAT64 = PrecisionConfig("float64", "float64", "float64")
PRECISIONS = {"float64": FLOAT64, "float32": PrecisionConfig(), "mixed": MIXED}


def without_offload(strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    return tuple(each for each in strategies if not isinstance(each, ActivationOffload))


def trained(
    analyzed: AnalyzedModel, plan: Plan, data: list[dict[str, torch.Tensor]]
) -> list[tuple[dict[str, bytes], dict[str, int]]]:
    """Per rank the bits of the model, losses and norms after training, and the bytes that a step copies."""

    def body(world: World) -> tuple[dict[str, bytes], dict[str, int]]:
        with parallelize(analyzed, plan, world=world) as engine:
            before = dict[str, int]()
            numbers = list[tuple[float, float]]()
            for batch in data:
                before = dict(world.ledger.copied_nbytes)
                metrics = engine.step(engine.local_batch(batch))
                numbers.append((metrics.loss, metrics.grad_norm))
            after = dict(world.ledger.copied_nbytes)
            evaluated = engine.evaluate([engine.local_batch(data[0])])
            assert dict(world.ledger.copied_nbytes) == after, "an evaluation copies"
            found = bits(
                {
                    **engine.executor.gather_parameters(use_masters=True),
                    "numbers": torch.tensor(numbers, dtype=torch.float64),
                    "evaluation": torch.tensor(evaluated.loss, dtype=torch.float64),
                }
            )
        return found, {name: nbytes - before.get(name, 0) for name, nbytes in after.items()}

    return run_on_threads(body, plan.mesh)


def planned_copies(plan: Plan, rank: int) -> dict[str, int]:
    return {
        action.name: action.transfer.nbytes
        for action in plan.for_rank(rank).actions
        if action.kind in (*ACTIVATION_COPIES, *ACTIVATION_FILE_KINDS) and action.transfer
    }


def assert_same_bits_and_planned_bytes(
    analyzed: AnalyzedModel,
    make: Callable[[tuple[Strategy, ...]], Plan],
    strategies: tuple[Strategy, ...],
    data: list[dict[str, torch.Tensor]],
    *,
    exact: bool = True,
) -> None:
    plan, plain = make(strategies), make(without_offload(strategies))
    assert static_checks(plan) == []
    found, wanted = trained(analyzed, plan, data), trained(analyzed, plain, data)
    assert [each for each, _ in found] == [each for each, _ in wanted]
    for rank, (_, copied) in enumerate(found):
        names = planned_copies(plan, rank)
        assert names
        assert {
            name: nbytes for name, nbytes in copied.items() if "_ACTIVATIONS" in name
        }.keys() == names.keys()
        if exact:
            assert {name: copied[name] for name in names} == names
        out, back = (
            sum(nbytes for name, nbytes in copied.items() if name.startswith(kind))
            for kind in ("OFFLOAD_ACTIVATIONS", "FETCH_ACTIVATIONS")
        )
        assert out == back > 0


STORES = {
    "ddp": (BatchSplit(), DDP(bucket_mb=300 / 2**20)),
    **{f"zero {stage}": (BatchSplit(), ZeRO(axis="dp_replicate", stage=stage)) for stage in (1, 2, 3)},
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize(
    ("store", "precision"),
    [*((store, "mixed") for store in STORES), ("zero 3", "float64"), ("ddp", "float32")],
)
def test_it_changes_no_bit(store: str, precision: str, kept: str):
    analyzed = analyzed_model(p=0.2)
    adamw = OptimizerConfig("adamw", lr=0.01)

    def make(strategies: tuple[Strategy, ...]) -> Plan:
        return make_plan(
            analyzed,
            tiny_job(precision=PRECISIONS[precision], optimizer=adamw),
            Mesh(dp_replicate=3),
            strategies,
            2,
        )

    data = [{key: value[:12] for key, value in token_samples(NUM_SAMPLES).items()}] * 3
    assert_same_bits_and_planned_bytes(
        analyzed, make, (*STORES[store], *KEPT[kept]), data, exact=kept == "inputs"
    )


SPLIT = BatchSplit("dp_replicate")
LAYERS = ActivationOffload(("model.layers.*",), prefetch=0)
CASES: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "tp 3": (Mesh(tp=3), (TensorParallel(), VocabParallel())),
    "tp 3, sequence, zero 3": (
        Mesh(dp_replicate=2, tp=3),
        (SPLIT, TensorParallel(), SequenceParallel(), ZeRO("dp_replicate", 3)),
    ),
    "pp 2, gpipe": (Mesh(pp=2), (Pipeline(schedule="gpipe"),)),
    "pp 2, 1f1b, zero 2": (
        Mesh(pp=2, dp_replicate=2),
        (SPLIT, Pipeline(schedule="1f1b"), ZeRO("dp_replicate", 2)),
    ),
    "pp 2, zb_h1": (Mesh(pp=2), (Pipeline(schedule="zb_h1"),)),
    "pp 2, interleaved": (Mesh(pp=2), (Pipeline(schedule="interleaved", virtual_stages=2),)),
    "cp 3": (Mesh(cp=3), (RingAttention(), DDP("cp"))),
    "chunked loss, offload": (Mesh(), (ChunkedLoss(2), Offload())),
}


@pytest.mark.parametrize("kept", ["saved", "inputs"])
@pytest.mark.parametrize("case", CASES)
def test_beside_other_techniques_it_changes_no_bit(case: str, kept: str):
    mesh, strategies = CASES[case]
    analyzed = analyzed_llama(num_hidden_layers=8 if "interleaved" in case else 4)
    strategies = (*strategies, *([ALL] if kept == "inputs" else []), LAYERS)

    def make(chosen: tuple[Strategy, ...]) -> Plan:
        return make_plan(analyzed, job(FLOAT64), mesh, chosen, 2)

    exact = kept == "inputs"
    assert_same_bits_and_planned_bytes(analyzed, make, strategies, batches(2, 12), exact=exact)


def test_saved_activations_are_copied_as_the_trial_has_measured_them():
    analyzed = analyzed_llama(num_hidden_layers=3)

    def make(chosen: tuple[Strategy, ...]) -> Plan:
        return make_plan(analyzed, job(PrecisionConfig()), Mesh(), chosen, 2)

    assert_same_bits_and_planned_bytes(analyzed, make, (LAYERS,), batches(2, 12))


@pytest.mark.parametrize("kept", KEPT)
def test_experts_are_copied_too(kept: str):
    mesh = Mesh(ep=2)
    strategies = (*expert_strategies(ZeRO("dp_shard", 2)), *KEPT[kept])

    def make(chosen: tuple[Strategy, ...]) -> Plan:
        unguarded = replace(job(PrecisionConfig()), guard=LossGuard())
        return make_plan(analyzed_mixtral(), unguarded, mesh, chosen, 3)

    data = [batch_of(12, seed) for seed in range(2)]
    assert_same_bits_and_planned_bytes(analyzed_mixtral(), make, strategies, data, exact=False)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize(
    ("mesh", "more"), [(Mesh(dp_shard=3), ()), (Mesh(pp=2), (Pipeline(schedule="zb_h1"),))]
)
def test_a_model_with_convolutions_equals_one_device(mesh: Mesh, more: tuple[Strategy, ...], kept: str):
    base = sgd_job()
    base = replace(base, train=replace(base.train, batch=6))
    strategies = (*(more or default_strategies(mesh, images().model_spec)), *KEPT[kept])
    plan = make_plan(images(), base, mesh, strategies, 2)
    batch = {"pixel_values": torch.randn(6, 3, 16, 16), "labels": torch.arange(6) % 5}
    verdict = verify(images(), plan, [batch, batch])
    assert verdict.passed, verdict


@pytest.mark.parametrize("kept", KEPT)
def test_a_trace_on_fake_tensors_copies(kept: str):
    analyzed = analyzed_model(tied=True)
    strategies = (BatchSplit(axis="dp_shard"), ZeRO(), *KEPT[kept])
    plan = make_plan(analyzed, tiny_job(1024), Mesh(dp_shard=512), strategies, 1)
    traced = trace(analyzed, plan, [0, 511])
    assert traced.passed, str(traced)


class Watched:
    """An executor of the tiny model that notes the storages of what its linear layers take."""

    def __init__(self, strategies: tuple[Strategy, ...]) -> None:
        analyzed = analyzed_model()
        plan = make_plan(analyzed, tiny_job(), Mesh(), strategies)
        self.batch = {key: value[: plan.local_batch] for key, value in token_samples().items()}
        self.executor = executor_of(analyzed, plan, single_rank_world(CPU))
        self.storages: dict[str, StorageWeakRef] = {}
        self.alive: list[str] = []  # when the loss is computed
        self.fails = False
        module = self.executor.state.trained_module.module
        for name in [f"layers.{i}.linear" for i in range(3)]:
            module.get_submodule(name).register_forward_hook(self._noting(name))
        loss = self.executor._actions.handlers["LOSS"]

        def watched(action: Action) -> None:
            self.alive = [name for name, storage in self.storages.items() if not storage.expired()]
            if self.fails:
                raise KeyboardInterrupt
            loss(action)

        self.executor._entries = [
            (action, watched if action.kind == "LOSS" else handler, waits)
            for action, handler, waits in self.executor._entries
        ]

    def _noting(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
            self.storages.setdefault(name, StorageWeakRef(args[0].untyped_storage()))  # it saves this

        return note

    def step(self) -> float:
        self.storages.clear()
        return self.executor.step(self.batch).loss


def test_what_has_left_is_gone_from_the_device_when_the_loss_is_computed():
    plain, saved = Watched(()), Watched((OFFLOAD,))
    assert plain.step() == saved.step()
    assert plain.alive == ["layers.0.linear", "layers.1.linear", "layers.2.linear"]
    assert saved.alive == []  # the head alone stays
    few = Watched((ActivationOffload(("layers.1",), prefetch=0),))
    few.step()
    assert few.alive == ["layers.0.linear", "layers.2.linear"]
    for watched in (plain, saved, few):
        watched.executor.close()


@pytest.fixture
def host_tensors(monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
    """The storages to which activations move, on the host and back."""
    found: list[StorageWeakRef] = []
    move = SavedStorage.move

    def noted(self: SavedStorage, flat: torch.Tensor, *, to_host: bool) -> None:
        found.append(StorageWeakRef(flat.untyped_storage()))
        move(self, flat, to_host=to_host)

    monkeypatch.setattr(SavedStorage, "move", noted)
    return found


def test_nothing_stays_after_a_step_an_evaluation_or_a_step_that_failed(host_tensors: list[StorageWeakRef]):
    watched = Watched((OFFLOAD,))
    first = watched.step()
    moved = len(host_tensors)
    assert moved >= 2 * 3  # out and back, of each layer at least one
    assert all(each.expired() for each in (*host_tensors, *watched.storages.values()))
    watched.executor.evaluate([watched.batch])
    assert len(host_tensors) == moved
    watched.fails = True
    with pytest.raises(KeyboardInterrupt):
        watched.step()
    assert len(host_tensors) == moved + moved // 2  # they have left
    watched.executor.evaluate([watched.batch])
    assert all(each.expired() for each in (*host_tensors, *watched.storages.values()))
    watched.fails = False
    assert watched.step() < first
    assert all(each.expired() for each in host_tensors)
    watched.executor.close()


class WritesLater(nn.Module):
    """Writes in place into a tensor that an operation has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).exp()
        z = y * 2
        y.add_(1)
        return z + x


class Chain(nn.Module):
    """Blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), WritesLater(), nn.Linear(6, 6), nn.Linear(6, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_write_into_what_was_saved_is_an_error_as_without_it(monkeypatch: pytest.MonkeyPatch):
    batch = {"x": torch.randn(4, 6), "labels": torch.arange(4)}
    with monkeypatch.context() as patched:
        patched.setattr(WritesLater, "forward", lambda self, x: self.linear(x).exp() + x)
        analyzed = analyze(Chain, batch, loss=token_cross_entropy())
    base = sgd_job()
    base = replace(base, train=replace(base.train, batch=4))
    plan = make_plan(analyzed, base, Mesh(), (ActivationOffload(("layers.1",), prefetch=0),))
    executor = executor_of(analyzed, plan, single_rank_world(CPU))
    with pytest.raises(PlanError, match="was written in place after an operation had saved it"):
        executor.step(batch)
    executor.close()


def test_values_that_several_blocks_take_stay_and_the_others_leave():
    config = transformers.T5Config(
        **{"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 3, "num_heads": 2},
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    ids = torch.randint(1, 20, (4, 5), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    analyzed = analyze(transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids})
    base = replace(job(FLOAT64), train=replace(job().train, batch=4))

    def make(chosen: tuple[Strategy, ...]) -> Plan:
        return make_plan(analyzed, base, Mesh(), chosen, 2)

    data = [{"input_ids": ids, "labels": ids}] * 2
    assert_same_bits_and_planned_bytes(analyzed, make, (ALL, OFFLOAD), data)
