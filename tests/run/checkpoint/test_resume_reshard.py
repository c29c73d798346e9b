"""Resharding: a checkpoint saved under any plan is loaded under any other, optimizer states included,
bitwise.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from meshwright.api import Trainer, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.engine.optim.sharded_state_dict import TensorShard
from meshwright.engine.step import executor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.tensors.lazy_mapping import LazyTensors, Region, read_region
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import Job, OptimizerConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.checkpoint.distributed_checkpoint import compare_checkpoints, load_tensors, newest_valid
from meshwright.run.checkpoint.manifest import read_manifest
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.testing.ranks import ProcessPool, run_on_threads
from tests.run.checkpoint.awkward_states import bits
from tests.tiny_model import analyzed_model, tiny_job, token_samples

SHARD = BatchSplit(axis="dp_shard")
HYBRID = (BatchSplit(), SHARD)
LAYOUTS: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "one device": (Mesh(), ()),
    **{f"copies on {n}": (Mesh(dp_replicate=n), (BatchSplit(), DDP())) for n in (2, 3)},
    **{
        f"stage {stage} on {n}": (Mesh(dp_shard=n), (SHARD, ZeRO(stage=stage)))
        for stage in (1, 2, 3)
        for n in (2, 3)
    },
    "stage 2 on 2 x 2": (
        Mesh(dp_replicate=2, dp_shard=2),
        (*HYBRID, ZeRO(stage=2, replicate_axis="dp_replicate")),
    ),
    "stage 3 on 3, aligned": (Mesh(dp_shard=3), (SHARD, ZeRO())),
    "stage 3 on 2 x 3": (Mesh(dp_replicate=2, dp_shard=3), (*HYBRID, ZeRO(replicate_axis="dp_replicate"))),
}
OPTIMIZERS = {"sgd": OptimizerConfig("sgd", lr=0.1, momentum=0.9), "adamw": OptimizerConfig("adamw", lr=0.01)}
ANALYZED = analyzed_model(tied=True, spare=True)
SAVED, LAST = 2, 4  # steps


@dataclass(frozen=True)
class Left:
    """The files that a run left on its rank 0: the checkpoints of steps 2 and 4."""

    middle: Path
    end: Path


def job_of(optimizer: str) -> Job:
    return tiny_job(optimizer=OPTIMIZERS[optimizer])


def plan_of(layout: str, job: Job, analyzed: AnalyzedModel = ANALYZED) -> Plan:
    mesh, strategies = LAYOUTS[layout]
    micro_batch = 1 if mesh.world_size == 4 else 2  # of 4 ranks each has 3 rows
    align_bytes = 128 if "aligned" in layout else 1
    return make_plan(analyzed, job, mesh, strategies, micro_batch, align_bytes=align_bytes)


def play(engine: Trainer, plan: Plan, world: World, last: int) -> None:
    local_batches = open_local_batches(ExampleDataset(token_samples()), plan, world.rank)
    while engine.steps_done < last:
        engine.step(local_batches.batch(engine.steps_done))


def assert_holds(engine: Trainer, saved: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Each tensor, or share, that this rank has is the saved one, to the last bit; returns the names of those
    it has.
    """
    held = engine.executor.state_dict()
    for name, whole in saved:
        mine = held.get(name)
        if isinstance(mine, TensorShard) and mine.shape == tuple(whole.shape):
            whole, mine = whole.reshape(-1)[mine.start : mine.start + mine.values.numel()], mine.values
        elif isinstance(mine, TensorShard):
            mine = mine.values
        assert mine is None or bits(mine) == bits(whole), name
    return set(held)


@pytest.fixture(scope="module", params=OPTIMIZERS)
def left(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Left]]:
    """Under every layout, a run that was not interrupted."""
    found = {}
    for layout in LAYOUTS:
        plan, folder = plan_of(layout, job_of(request.param)), tmp_path_factory.mktemp("run")

        def rank(world: World, plan: Plan = plan, folder: Path = folder) -> Left:
            with parallelize(ANALYZED, plan, world=world) as engine:
                play(engine, plan, world, SAVED)
                middle = engine.save(folder)
                play(engine, plan, world, LAST)
                return Left(middle, engine.save(folder / "end"))

        found[layout] = run_on_threads(rank, plan.mesh)[0]
    return request.param, found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_any_layout_is_loaded_bitwise_and_training_continues_unchanged(
    layout: str, left, tmp_path: Path
):
    optimizer, runs = left
    plan = plan_of(layout, job_of(optimizer))
    ended, _ = load_tensors(runs[layout].end)

    def rank(world: World) -> list[tuple[str, set[str], Path]]:
        found = []
        with parallelize(ANALYZED, plan, world=world) as engine:
            for other, run in runs.items():
                assert engine.load(run.middle) == SAVED
                names = assert_holds(engine, load_tensors(run.middle)[0].items())
                play(engine, plan, world, LAST)
                found.append((other, names, engine.save(tmp_path / other)))
        return found

    told = run_on_threads(rank, plan.mesh)
    for index, (other, _, place) in enumerate(told[0]):
        names = set().union(*(each[index][1] for each in told))
        assert names == set(read_manifest(runs[other].middle).entries), (
            "nothing that was saved is held by no rank"
        )
        if other == layout:
            assert compare_checkpoints(place, runs[layout].end) == []
        for name, tensor in load_tensors(place)[0].items():
            expected = ended[name].double()
            error = (tensor.double() - expected).abs().max().item()
            assert error <= 1e-10 * max(expected.abs().max().item(), 1e-3), (other, name)


def test_missing_optimizer_states_are_noticed(left, monkeypatch: pytest.MonkeyPatch):
    _, runs = left
    monkeypatch.setattr(executor, "load_optimizer_state", lambda *_: None)
    plan = plan_of("stage 3 on 2", job_of("adamw"))

    def rank(world: World) -> bool:
        with parallelize(ANALYZED, plan, world=world) as engine:
            engine.load(runs["one device"].middle)
            names = assert_holds(engine, load_tensors(runs["one device"].middle)[0].items())
            return any(name.startswith("optimizer/") for name in names)

    assert run_on_threads(rank, plan.mesh) == [False, False]


def test_a_checkpoint_of_shards_is_judged_like_any_other(left):
    _, runs = left
    place = runs["stage 3 on 2 x 3"].middle
    found, manifest, rejected = newest_valid(place.parent)
    assert (found, rejected) == (place, [])
    writers = {box.file for entry in manifest.entries.values() for box in entry.slices}
    assert len(writers) >= 3, "each shard is written by a rank that has it"
    same = {name for name in manifest.entries if name.startswith("model/")}
    assert same <= set(read_manifest(runs["one device"].middle).entries)
    assert compare_checkpoints(place, place) == []


def test_frozen_weights_and_buffers_of_nobody_in_particular_come_back(tmp_path: Path):
    analyzed = analyzed_model(frozen=True)
    first, then = (plan_of(layout, job_of("adamw"), analyzed) for layout in ("stage 3 on 3", "stage 3 on 2"))

    def save(world: World) -> Path:
        with parallelize(analyzed, first, world=world) as engine:
            play(engine, first, world, 1)
            return engine.save(tmp_path)

    (place, *_) = run_on_threads(save, first.mesh)
    assert tuple(read_manifest(place).entries["model/embed.weight"].shape) == (13, 6)

    def resume(world: World) -> dict[str, torch.Tensor]:
        with parallelize(analyzed, then, world=world) as engine:
            engine.load(place)
            return engine.executor.gather_parameters()

    for found in run_on_threads(resume, then.mesh):
        for name, tensor in found.items():
            assert bits(tensor) == bits(load_tensors(place)[0][f"model/{name}"]), name


def on_a_process(world: World, folder: Path, layout: str, start: Path | None) -> Path:
    plan = plan_of(layout, job_of("adamw"))
    with parallelize(ANALYZED, plan, world=world) as engine:
        if start is not None:
            engine.load(start)
        play(engine, plan, world, engine.steps_done + SAVED)
        return engine.save(folder)


def test_processes_save_and_load_the_same(tmp_path: Path, process_pool: ProcessPool, left):
    optimizer, runs = left
    if optimizer != "adamw":
        return
    (place, *_) = process_pool.run(on_a_process, Mesh(dp_shard=3), tmp_path / "a", "stage 3 on 3", None)
    assert compare_checkpoints(place, runs["stage 3 on 3"].middle) == []
    (end, *_) = process_pool.run(on_a_process, Mesh(dp_shard=2), tmp_path / "b", "stage 2 on 2", place)
    ended, _ = load_tensors(runs["stage 2 on 2"].end)
    for name, tensor in load_tensors(end)[0].items():
        torch.testing.assert_close(tensor, ended[name], rtol=1e-9, atol=1e-12)


def test_a_rank_reads_every_element_of_its_own_once_and_none_of_others(tmp_path: Path, left):
    """Stage 3 on 12 ranks: most have a piece of few weights."""
    _, runs = left
    job = replace(job_of("adamw"), train=replace(job_of("adamw").train, batch=24))
    plan = make_plan(ANALYZED, job, Mesh(dp_shard=12), (SHARD, ZeRO()))
    whole, _ = load_tensors(runs["one device"].middle)

    def rank(world: World) -> tuple[int, int]:
        read: dict[str, int] = defaultdict(int)

        def region(name: str, region: Region = ()) -> torch.Tensor:
            part = read_region(whole, name, region)
            read[name] += part.numel()
            return part

        with parallelize(ANALYZED, plan, world=world) as engine:
            tensors = LazyTensors(whole, region, region, lambda name: tuple(whole[name].shape))
            engine.executor.load_state_dict(tensors, SAVED)
            assert_holds(engine, whole.items())
            shards = [
                group.param_shards for group in engine.executor.state.flat_params.by_param_group.values()
            ]
        keeps = sum(shard.numel for group in shards for shard in group)
        return sum(numel for name, numel in read.items() if name.startswith("model/")), keeps

    assert all(read == keeps for read, keeps in run_on_threads(rank, plan.mesh))
