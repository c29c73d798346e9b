"""The stream of whole tensors is what export writes, under every plan, one tensor in memory at a time."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.engine.params.flat_param import FlatParam
from meshwright.model.loading.safetensors_reader import SINGLE_FILE
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.run.export.adapter_export import ADAPTER_FILE
from meshwright.run.export.weight_source import WeightSource
from meshwright.testing.ranks import run_on_threads
from tests.model.hf.lora_models import QUIET, adapted_reading, stored_base
from tests.parallel.tensor.odd_llama import SIZES
from tests.tiny_model import tiny_job, token_samples

HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
MIXED = mw.PrecisionConfig("bfloat16", "bfloat16", "float32", master="float32")
BATCH = 12


@cache
def analyzed(family: str) -> mw.AnalyzedModel:
    """A model of odd sizes; cached, because nothing writes into it."""
    configs: dict[str, Any] = {
        "dense": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)),
        "tied": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True)
        ),
        "experts": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**{**SIZES, **HEADS, **EXPERTS})
        ),
    }
    return mw.analyze(configs[family], batch(2))


def batch(count: int = BATCH) -> dict[str, torch.Tensor]:
    """Tokens, the same at every call."""
    tokens = torch.randint(SIZES["vocab_size"], (count, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


SHARDED = mw.BatchSplit(axis="dp_shard")
OFFLOAD = mw.Offload(what=("optimizer_states", "weights"), step_on="host")
PLANS: dict[str, tuple[mw.Mesh, Any]] = {
    "copies": (mw.Mesh(dp_replicate=3), None),
    "zero 1": (mw.Mesh(dp_shard=3), (SHARDED, mw.ZeRO(stage=1))),
    "zero 3": (mw.Mesh(dp_shard=3), None),
    "hybrid": (mw.Mesh(dp_replicate=2, dp_shard=2), None),
    "slices": (mw.Mesh(tp=3), None),
    "slices of shards": (mw.Mesh(dp_shard=2, tp=3), None),
    "stages of shards": (mw.Mesh(pp=2, dp_shard=2), None),
    "sequence": (mw.Mesh(cp=2), None),
    "offloaded": (mw.Mesh(dp_shard=2), (SHARDED, mw.ZeRO(), OFFLOAD)),
    "experts": (mw.Mesh(ep=2), None),
}
DENSE = ("zero 1", "zero 3", "hybrid", "slices of shards", "stages of shards", "sequence", "offloaded")
CASES = [*(("dense", plan) for plan in DENSE), ("tied", "stages of shards"), ("experts", "experts")]


def planned(family: str, name: str, **changes: Any) -> mw.Plan:
    """The plan of a row of PLANS."""
    mesh, strategies = PLANS[name]
    return mw.make_plan(analyzed(family), tiny_job(batch=BATCH, **changes), mesh, strategies)


def train(trainer: mw.Trainer, steps: int = 1) -> None:
    for _ in range(steps):
        trainer.step(trainer.local_batch(batch()))


def kept(source: WeightSource) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in source}


def is_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value)
        for name, value in expected.items()
    )


@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_stream_is_what_export_writes_after_every_step(family: str, name: str, tmp_path: Path):
    plan = planned(family, name)

    def body(world: World) -> tuple[list[dict[str, torch.Tensor]], list[Any]]:
        with mw.parallelize(analyzed(family), plan, world=world) as trainer:
            source = trainer.weights()
            streams = [kept(source)]
            train(trainer)
            streams.append(kept(source))
            assert source.version == 1
            trainer.export(tmp_path / "out")
            return streams, source.metadata()

    for (before, after), metadata in run_on_threads(body, plan.mesh):
        assert is_same(after, load_file(tmp_path / "out" / SINGLE_FILE))
        assert before.keys() == after.keys()
        assert not is_same(before, after)
        described = [(each.name, each.dtype, each.shape) for each in metadata]
        assert described == [(key, each.dtype, tuple(each.shape)) for key, each in after.items()]


@pytest.mark.parametrize("name", ["copies", "zero 3", "stages of shards"])
def test_masters_are_streamed_in_the_dtype_that_is_asked_for(name: str, tmp_path: Path):
    plan = planned("dense", name, precision=MIXED)

    def body(world: World) -> dict[str, dict[str, torch.Tensor]]:
        with mw.parallelize(analyzed("dense"), plan, world=world) as trainer:
            train(trainer, 2)
            trainer.export(tmp_path / "None")
            trainer.export(tmp_path / "bfloat16", torch.bfloat16)
            rounded = trainer.weights(torch.bfloat16, rank=1)
            return {"None": kept(trainer.weights()), "bfloat16": kept(rounded)}

    for rank, found in enumerate(run_on_threads(body, plan.mesh)):
        assert is_same(found["None"], load_file(tmp_path / "None" / SINGLE_FILE))
        assert next(iter(found["None"].values())).dtype == torch.float32
        expected = load_file(tmp_path / "bfloat16" / SINGLE_FILE) if rank == 1 else {}
        assert is_same(found["bfloat16"], expected)


@QUIET
def test_of_an_adapted_model_the_adapter_is_streamed_as_it_is_exported(tmp_path: Path):
    stored_base(tmp_path)
    made, samples = adapted_reading(weights=tmp_path), token_samples(BATCH)
    plan = mw.make_plan(made, tiny_job(batch=BATCH), mw.Mesh(pp=2))

    def body(world: World) -> dict[str, torch.Tensor]:
        with mw.parallelize(made, plan, world=world) as trainer:
            trainer.step(trainer.local_batch(samples))
            trainer.export(tmp_path / "out")
            return kept(trainer.weights())

    for found in run_on_threads(body, plan.mesh):
        assert is_same(found, load_file(tmp_path / "out" / ADAPTER_FILE))


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that operations on this thread made and that were alive together."""

    def __init__(self) -> None:
        super().__init__()
        self._made = dict[int, tuple[StorageWeakRef, int]]()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_tensors((args, kwargs))}
        found = func(*args, **(kwargs or {}))
        for each in tree_tensors(found):
            storage = each.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: each for key, each in self._made.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._made.values()))
        return found


def peak_and_sizes(family: str, name: str) -> list[tuple[int, dict[str, int]]]:
    """The peak of each rank above training, and the bytes of each tensor of the stream."""
    plan = planned(family, name)

    def body(world: World) -> tuple[int, dict[str, int]]:
        with mw.parallelize(analyzed(family), plan, world=world) as trainer:
            train(trainer)
            source, sizes = trainer.weights(), {}
            with LiveBytes() as live:
                for key, tensor in source:
                    sizes[key] = tensor.nbytes
                    del tensor
            return live.peak, sizes

    return run_on_threads(body, plan.mesh)


SMALL = 256  # bytes with which ranks agree
PEAKS = {"zero 3": 1.0, "hybrid": 1.0, "offloaded": 1.0, "stages of shards": 1.0, "slices of shards": 5 / 3}


@pytest.mark.parametrize("name", PEAKS)
def test_one_tensor_is_in_memory_above_training_and_along_tp_two_slices(name: str):
    for peak, sizes in peak_and_sizes("dense", name):
        largest = max(sizes.values())
        assert largest <= peak <= PEAKS[name] * largest + SMALL


def test_experts_of_one_layer_are_in_memory_twice():
    for peak, sizes in peak_and_sizes("experts", "zero 3"):
        layer = sum(nbytes for key, nbytes in sizes.items() if "layers.0." in key and "experts" in key)
        assert peak <= 2 * layer + SMALL


def test_a_group_that_is_gathered_whole_is_noticed(monkeypatch):
    def whole_group(self: FlatParam, name: str, shard: torch.Tensor, dtype: Any, *, action: str) -> Any:
        full_tensor = shard.new_empty(self.spec.numel)
        self.gather(full_tensor, shard, action=action)
        start, numel = next((start, numel) for each, numel, start in self.spec.params if each == name)
        return full_tensor[start : start + numel]

    monkeypatch.setattr(FlatParam, "gather_param", whole_group)
    peak, sizes = peak_and_sizes("dense", "zero 3")[0]
    assert peak > 1.5 * max(sizes.values())


def leave_early(name: str, leave: Any) -> list[Any]:
    """Rank 1 leaves the loop at its third tensor; returns what each rank met, and its loss in a step then."""
    plan = planned("dense", name)

    def body(world: World) -> tuple[str, float]:
        met = ""
        with mw.parallelize(analyzed("dense"), plan, world=world) as trainer:
            train(trainer)
            try:
                for number, _ in enumerate(trainer.weights()):
                    if number == 2 and world.rank == 1:
                        leave()
                        break
            except (mw.PlanError, OSError) as error:
                met = str(error)
            return met, trainer.step(trainer.local_batch(batch())).loss

    return run_on_threads(body, plan.mesh)


def fail() -> None:
    raise OSError("the engine is gone")


@pytest.mark.parametrize("name", ["copies", "stages of shards"])
def test_ranks_are_told_when_one_leaves_the_loop_and_training_goes_on(name: str):
    plan = planned("dense", name)

    def undisturbed(world: World) -> float:
        with mw.parallelize(analyzed("dense"), plan, world=world) as trainer:
            train(trainer)
            return trainer.step(trainer.local_batch(batch())).loss

    expected = run_on_threads(undisturbed, plan.mesh)[0]
    for leave, own in ((lambda: None, ""), (fail, "the engine is gone")):
        for rank, (met, loss) in enumerate(leave_early(name, leave)):
            assert loss == expected
            assert met == own if rank == 1 else "rank 1 left the iteration over the weights" in met


def test_all_ranks_may_leave_at_one_tensor_and_a_step_ends_what_they_left():
    plan = planned("dense", "zero 3")

    def body(world: World) -> tuple[int, str]:
        with mw.parallelize(analyzed("dense"), plan, world=world) as trainer:
            source = trainer.weights()
            for last in (False, True):  # the last tensor needs no other rank
                left = iter(source)
                for _ in range(len(source.metadata()) if last else 3):
                    next(left)
                train(trainer)
                try:
                    next(left)
                    met = "another tensor"
                except mw.PlanError as error:
                    met = str(error)
                assert "the trainer went on before the last tensor" in met
            return len(kept(source)), met

    found = run_on_threads(body, plan.mesh)
    assert len({number for number, _ in found}) == 1


def test_what_an_engine_answers_is_compared_with_the_step():
    with mw.parallelize(analyzed("dense"), planned_alone()) as trainer:
        source = trainer.weights()
        source.check_version("0")
        train(trainer)
        source.check_version(1)
        for answer in ("0", "default"):
            with pytest.raises(mw.PlanError, match=f"answers weight version '{answer}'.*step 1") as caught:
                source.check_version(answer)
        assert caught.value.diagnostics[0].fix.endswith("weight_version='1'")
        with pytest.raises(mw.PlanError, match="rank = 1, and the ranks of the plan are 0 to 0"):
            trainer.weights(rank=1)


def planned_alone() -> mw.Plan:
    return mw.make_plan(analyzed("dense"), tiny_job(batch=BATCH), mw.Mesh())


def test_servers_are_refused():
    mesh = mw.Mesh(dp_replicate=3)
    server = (mw.BatchSplit(axis="dp_replicate"), mw.ParameterServer(dedicated=True))
    plan = mw.make_plan(analyzed("dense"), tiny_job(batch=BATCH), mesh, server)

    def body(world: World) -> str:
        with mw.parallelize(analyzed("dense"), plan, world=world) as trainer:
            with pytest.raises(mw.PlanError, match="the last 1 ranks only serve") as caught:
                trainer.weights()
            return caught.value.diagnostics[0].location

    assert set(run_on_threads(body, mesh)) == {"weights"}
