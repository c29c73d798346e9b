"""What a start costs on paper against what ranks do: requests to the store, digests, shards, the manifest."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.data_parallel.small_llamas import TOKENS, analyzed_model, random_samples
from benchmarks.recovery.restore_bytes import LAYOUTS, kept_nbytes, make_layout_plan
from meshwright.api import make_plan, parallelize
from meshwright.comm import rendezvous
from meshwright.comm.collectives.group import World
from meshwright.comm.watchdog.desync_check import CHECK_ACTION
from meshwright.comm.watchdog.peer_statuses import PeerStatuses
from meshwright.comm.watchdog.process_probe import ProcessProbe
from meshwright.comm.watchdog.timeout_store_client import StoreClient
from meshwright.engine.optim.sharded_state_dict import SavedTensor
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.checkpoint import distributed_checkpoint
from meshwright.run.checkpoint import manifest as run_manifest
from meshwright.run.checkpoint.distributed_checkpoint import open_tensors
from meshwright.run.checkpoint.manifest import CheckpointError, Manifest, ShardFile, read_manifest
from meshwright.run.checkpoint.write_plan import list_shards
from meshwright.run.doctor.start_up import (
    SavedState,
    agreement_nbytes,
    count_start_up,
    store_requests,
)
from meshwright.run.launch.join_world import check_same_plan
from meshwright.testing.ranks import ProcessPool, run_on_threads


class CountingStore:
    """A store that counts requests; a rank looks for its token when it is there."""

    def __init__(self, store: dist.HashStore, counts: Counter[str], who: str) -> None:
        self._store, self._counts, self._who = store, counts, who

    def set(self, key: str, value: str) -> None:
        self._counts[self._who] += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._counts[self._who] += 1
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        self._counts[self._who] += 1
        if keys[0].startswith("go/"):
            self._store.wait(keys)
        return self._store.check(keys)


class Patience:
    """Waits until all ranks are here."""

    def __init__(self, threads: list[threading.Thread]) -> None:
        self._threads = threads

    def wait(self, awaited: str) -> None:
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize(("world", "per_host"), [(3, 1), (12, 4)])
def test_requests_to_the_store_are_those_of_ranks_that_have_come(
    world: int, per_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, counts = dist.HashStore(), Counter[str]()
    threads: list[threading.Thread] = []
    others = [
        threading.Thread(
            target=rendezvous._request_admission,
            args=(CountingStore(store, counts, f"rank {rank}"), rank, Patience(threads)),
        )
        for rank in range(1, world)
    ]
    threads += others
    for thread in others:
        thread.start()
    while not all(store.check([f"come/{rank}"]) for rank in range(1, world)):
        pass
    rendezvous._admit_ranks(CountingStore(store, counts, "rank 0"), world, Patience(threads))
    usual = StoreClient._request

    def counting(client: StoreClient, request: Callable[[], object]) -> object:
        counts["watch"] += 1
        return usual(client, request)

    monkeypatch.setattr(StoreClient, "_request", counting)
    clients = [StoreClient(store) for _ in range(world)]
    peers = [
        PeerStatuses(clients[rank], rank, world, ProcessProbe(f"host {rank // per_host}", 1, 0))
        for rank in range(world)
    ]
    for each in peers:
        each.register()
    for each in peers:
        each.find_neighbours()
    for client in clients:
        client.close()
    counts["watch"] += world  # StoreClient.for_rank asks which of several worlds this is
    rank_0, every = store_requests(world, per_host)
    assert counts["rank 0"] + counts["watch"] / world == rank_0
    assert counts.total() == every


def zero_plan(num_ranks: int) -> Plan:
    return make_layout_plan(f"ZeRO 3 on {num_ranks}", analyzed_model("tiny"), "float32")


def compared_nbytes(world: World) -> int:
    plan, ledger = zero_plan(3), world.ledger
    ledger.is_recording = True
    check_same_plan(world, plan, "data")
    with parallelize(analyzed_model("tiny"), plan, world=world) as trainer:
        trainer.step(trainer.local_batch(random_samples(12)))
        trainer.step(trainer.local_batch(random_samples(12)))
    return sum(
        each.nbytes * each.group_size for each in ledger.entries if each.action in (CHECK_ACTION, "START")
    )


def test_bytes_of_agreement_are_those_that_ranks_receive_in_their_first_step(
    process_pool: ProcessPool,
) -> None:
    assert process_pool.run(compared_nbytes, Mesh(dp_shard=3)) == [agreement_nbytes(zero_plan(3))] * 3


def pipeline_plan() -> Plan:
    job = Job(
        ModelConfig("llama"),
        DataConfig("example", sequence=TOKENS),
        TrainConfig(batch=12),
        optimizer=OptimizerConfig("adamw", lr=0.01),
    )
    return make_plan(analyzed_model("tiny"), job, Mesh(pp=3), (Pipeline(schedule="1f1b"),), 1)


def saved(plan: Plan, folder: Path) -> tuple[Manifest, list[int], list[bytes]]:
    """Returns the manifest of a checkpoint that ranks save after a step, the bytes that each keeps, and the
    lists of shards.
    """
    lists = dict[bytes, None]()

    def save(world: World) -> tuple[Path, int]:
        with parallelize(analyzed_model("tiny"), plan, world=world) as trainer:
            trainer.step(trainer.local_batch(random_samples(12)))
            path = trainer.save(folder)
            world.group(plan.mesh.as_dict()).barrier()
            stored = open_tensors(path, read_manifest(path).entries)
            return path, 0 if plan.mesh.size("pp") > 1 else kept_nbytes(trainer, stored)

    def listing(tensors: Mapping[str, SavedTensor]) -> bytes:
        listed = list_shards(tensors)
        lists[listed] = None
        return listed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_checkpoint, "list_shards", listing)
        ranks = run_on_threads(save, plan.mesh)
    return read_manifest(ranks[0][0]), [nbytes for _, nbytes in ranks], list(lists)


NAMES = ["ZeRO 1 on 3", "HSDP on 2 x 2", "TP x ZeRO 3 on 2 x 2"]


def of_kinds(listing: bytes, kinds: tuple[str, ...]) -> int:
    """Returns the bytes of the rows of a list of shards whose names begin with one of `kinds`."""
    rows = [row for row in json.loads(listing or b"[]") if row[0].startswith(kinds)]
    return len(json.dumps(rows, separators=(",", ":"))) if rows else 0


@pytest.mark.parametrize("name", [*NAMES, "pipeline"])
def test_shards_and_manifest_are_those_that_ranks_save(name: str, tmp_path: Path) -> None:
    plan = make_layout_plan(name, analyzed_model("tiny"), "float32") if name in LAYOUTS else pipeline_plan()
    manifest, kept, lists = saved(plan, tmp_path)
    paper, kinds = SavedState(plan), ("model/", "optimizer/")
    entries = {name: entry for name, entry in manifest.entries.items() if name.startswith(kinds)}
    writers = {each.file for entry in entries.values() for each in entry.slices}
    files = dict.fromkeys(writers, ShardFile(1 << 40, "0" * 64))
    assert paper.manifest_nbytes == len(Manifest(0, entries, files, {}).dump())
    assert paper.num_slices == sum(len(entry.slices) for entry in entries.values())
    assert set(paper.listings_nbytes) == {of_kinds(listing, kinds) for listing in lists}
    assert paper.total_nbytes == sum(4 * prod(entry.shape) for entry in entries.values())
    assert name == "pipeline" or paper.kept_nbytes == pytest.approx(kept, abs=64)
    assert count_start_up(plan).kept_nbytes == max(paper.kept_nbytes)


def test_a_manifest_that_could_not_be_read_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_manifest, "MAX_MANIFEST_NBYTES", 10_000)
    with pytest.raises(CheckpointError, match=r"a manifest of .* can be read back"):
        count_start_up(zero_plan(3))
