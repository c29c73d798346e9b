"""A plan is refused with all its diagnostics, and its hash covers the choices that affect results."""

import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import ClassVar

import pytest

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.data_config import DataConfig, MixturePart
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import (
    Job,
    LRScheduleConfig,
    OptimizerConfig,
    ParamGroupConfig,
    PrecisionConfig,
    TrainConfig,
)
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.timeouts import WaitLimits
from meshwright.plan.model_spec.model_spec import ParamSpec
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import S
from meshwright.plan.strategy_interface import Strategy, StrategyPhase
from tests.paper_model import SyntheticModel

JOB = Job(ModelConfig("model.json"), DataConfig("text.txt"), TrainConfig(steps=10, batch=12))
MODEL = SyntheticModel().model_spec
PAIR = (BatchSplit(), DDP())
OTHER = {  # another value for every field of a job
    "model.source": "other.json",
    "model.overrides": {"num_hidden_layers": 2},
    "data.source": "other.txt",
    "data.include": ("*.py",),
    "data.exclude": ("a.txt",),
    "data.sequence": 128,
    "data.epochs": 2,
    "data.format": "jsonl",
    "data.tokenizer": "words",
    "data.column": "body",
    "data.chat": "messages",
    "data.split": "validation",
    "data.streaming": True,
    "data.mixture": (MixturePart("other.txt"),),
    "train.steps": 11,
    "train.batch": 24,
    "train.clip": 0.5,
    "train.seed": 1,
    "train.noise_scale": True,
    "optimizer.name": "sgd",
    "optimizer.lr": 1e-3,
    "optimizer.weight_decay": 0.2,
    "optimizer.betas": (0.8, 0.95),
    "optimizer.eps": 1e-6,
    "optimizer.momentum": 0.9,
    "optimizer.groups": (ParamGroupConfig("*.bias"),),
    "lr_schedule.name": "cosine",
    "lr_schedule.warmup": 2,
    "lr_schedule.decay": 3,
    "lr_schedule.floor": 0.1,
    "lr_schedule.power": 2.0,
    "lr_schedule.timescale": 7,
    "precision.parameters": "bfloat16",
    "precision.compute": "bfloat16",
    "precision.reduce": "bfloat16",
    "precision.master": "float32",
    "precision.gradients": "bfloat16",
    "precision.optimizer_states": "float32",
    "precision.tf32": True,
    "precision.loss_scale": 1024.0,
    "precision.loss_scale_window": 100,
    "model.frozen": ("embed.*",),
    "model.weights": "published",
    "model.revision": "main",
    "model.skip": ("head.*",),
    "model.trust_remote_code": True,
    "evaluate.source": "val.txt",
    "evaluate.split": "validation",
    "evaluate.hold_out": 5,
    "evaluate.every": 7,
    "evaluate.samples": 3,
    "evaluate.tasks": ("arc_easy",),
    "evaluate.include_path": "tasks/",
    "evaluate.limit": 5,
    "evaluate.patience": 2,
    "evaluate.min_delta": 0.1,
    "guard.action": "skip",
    "guard.factor": 3.0,
    "guard.window": 9,
}


@dataclass(frozen=True)
class Order(Strategy):
    name: ClassVar[str] = "ordered"
    phase: ClassVar[StrategyPhase] = "schedule"
    number: int = 0


@dataclass(frozen=True)
class Keep(Strategy):
    """Stands for whatever uses the axis tp, and stores whole weights everywhere."""

    name: ClassVar[str] = "kept"
    phase: ClassVar[StrategyPhase] = "storage"

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        return sharding.map_param_shardings(
            lambda param_sharding: ParamSharding(
                param_sharding.param, param_sharding.layout.with_placement("tp", S(0))
            )
        )


def plan(
    job: Job = JOB, mesh: Mesh | None = None, strategies: tuple[Strategy, ...] = PAIR, micro_batch: int = 0
) -> Plan:
    return Plan.make(job, mesh or Mesh(dp_replicate=3), MODEL, strategies, micro_batch)


def refused(**changes: object) -> list[str]:
    with pytest.raises(PlanError) as caught:
        plan(**changes)
    return [str(diagnostic) for diagnostic in caught.value.diagnostics]


def changed(job: Job, key: str, value: object) -> Job:
    table, name = key.split(".")
    return replace(job, **{table: replace(vars(job)[table], **{name: value})})


def test_the_table_of_other_values_covers_every_field_of_a_job():
    tables = {item.name: item.default_factory() for item in fields(Job)}
    assert all(is_dataclass(table) for table in tables.values())
    assert set(OTHER) == {f"{name}.{item.name}" for name, table in tables.items() for item in fields(table)}


@pytest.mark.parametrize("key", OTHER)
def test_the_hash_changes_with_every_field_of_the_job(key: str):
    other = replace(plan(), job=changed(JOB, key, OTHER[key]))
    assert other.hash != plan().hash
    assert other != plan()


@pytest.mark.parametrize(
    "other",
    [
        plan(mesh=Mesh(dp_replicate=2)),
        plan(micro_batch=2),
        Plan.make(JOB, Mesh(dp_replicate=3), MODEL, PAIR, align_bytes=128),
        plan(strategies=(BatchSplit(), NaiveDDP())),
        plan(strategies=(BatchSplit(), DDP(bucket_mb=1.0))),
        replace(plan(), strategies=(BatchSplit(), DDP(algorithm="ring"))),
        Plan.make(JOB, Mesh(dp_replicate=3), SyntheticModel(layers=4).model_spec, PAIR),
        Plan.make(JOB, Mesh(dp_replicate=3), SyntheticModel(numel=7).model_spec, PAIR),
        Plan.make(JOB, Mesh(dp_replicate=3), SyntheticModel(tied=True).model_spec, PAIR),
    ],
    ids=[
        "mesh",
        "micro_batch",
        "alignment",
        "strategy",
        "field of a strategy",
        "algorithm",
        "blocks",
        "shapes",
        "ties",
    ],
)
def test_the_hash_changes_with_every_other_choice(other: Plan):
    assert other.hash != plan().hash


def test_the_hash_covers_the_users_of_a_parameter_because_they_decide_its_bucket():
    params = (replace(MODEL.params[0], block_calls=("layer0", "layer1")), *MODEL.params[1:])
    assert Plan.make(JOB, Mesh(dp_replicate=3), replace(MODEL, params=params), PAIR).hash != plan().hash


@pytest.mark.parametrize("align_bytes", [0, 96, -128])
def test_an_alignment_is_a_power_of_two(align_bytes: int):
    with pytest.raises(PlanError, match=r"align_bytes: .* not a power of two\n *repair: write 128"):
        Plan.make(JOB, Mesh(dp_replicate=3), MODEL, PAIR, align_bytes=align_bytes)


@pytest.mark.parametrize(("dtype", "numel"), [("bfloat16", 64), ("float32", 32)])
def test_128_bytes_are_as_many_elements_as_the_narrowest_dtype_needs(dtype: str, numel: int):
    job = replace(JOB, precision=PrecisionConfig(dtype, dtype, master="float32"))
    aligned = Plan.make(job, Mesh(dp_replicate=3), MODEL, PAIR, align_bytes=128)
    assert aligned.sharding.align_numel == numel


def test_equal_plans_have_equal_hashes():
    assert plan() == plan()
    assert plan().hash == plan().hash
    assert len({plan(), plan()}) == 1
    assert plan(strategies=PAIR[::-1]).hash == plan().hash, "phases fix the order, not the user"
    assert plan(micro_batch=4).hash == plan().hash, "0 takes the whole local batch, which is 4"


def test_a_whole_number_hashes_as_the_same_number_with_a_point():
    one, point = (plan(replace(JOB, optimizer=OptimizerConfig(lr=lr))) for lr in (1, 1.0))
    assert one == point
    assert one.hash == point.hash


def test_options_outside_of_training_are_not_in_the_hash():
    other = RunConfig(
        "elsewhere", save_every=7, keep=9, keep_best=False, sample_prompt="class ", sample_tokens=5
    )
    other = replace(
        other, workers=3, cache="tokens", trackers=("wandb",), tracker_project="another", trace_steps=2
    )
    other = replace(other, limits=WaitLimits(step_s=5), check_collectives=True, shared_memory=False)
    other = replace(other, deterministic=True, hardware="h100", cluster="cluster.toml")
    assert all(vars(other)[item.name] != vars(RunConfig())[item.name] for item in fields(RunConfig))
    assert Plan.make(JOB, Mesh(dp_replicate=3), MODEL, PAIR, 0, other).hash == plan().hash


def test_the_hash_is_the_same_in_another_process():
    code = "from tests.plan.test_plan import plan; print(plan().hash)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == plan().hash


def test_a_plan_splits_the_batch_and_gives_every_rank_its_samples():
    cut = plan(micro_batch=2)
    assert (cut.num_data, cut.local_batch, cut.num_microbatches, cut.exact) == (3, 4, 2, True)
    assert [cut.data_index(rank) for rank in range(3)] == [0, 1, 2]


def test_the_samples_are_shared_over_all_data_axes_and_no_others():
    mesh = Mesh(dp_replicate=2, dp_shard=3, tp=2)
    two = Plan.make(JOB, mesh, MODEL, (BatchSplit("dp_shard"), BatchSplit("dp_replicate"), Keep()))
    assert (two.num_data, two.local_batch) == (6, 2)
    assert [two.data_index(rank) for rank in range(12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_a_plan_is_refused_with_every_diagnostic_at_once():
    found = refused(
        job=Job(train=TrainConfig(steps=0, batch=13)),
        strategies=(BatchSplit(), DDP("dp_shard"), Order(), Order(1)),
    )
    heads = [diagnostic.split("\n")[0] for diagnostic in found]
    assert heads == [
        "model.source: no model is named",
        "data.source: no data is named",
        "train.steps: steps = 0; needed is a whole number of at least 1",
        "strategies: ordered and ordered both decide the order of the step",
        "strategies.ddp: the replicas along dp_shard would all see the same samples: "
        "no strategy splits the batch there",
        "strategies: the gradients of 3 parameters (layer0.weight...) stay partial sums over dp_replicate",
        "train.batch: a global batch of 13 samples does not divide by 3 data-parallel ranks",
    ]
    assert all("\n  repair: " in diagnostic for diagnostic in found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"strategies": ()},
            "strategies: no strategy uses the axis dp_replicate: 3 ranks would do the same work"
            "\n  repair: give the axis",
        ),
        (
            {"strategies": PAIR, "mesh": Mesh(dp_replicate=3, pp=2)},
            "no strategy uses the axis pp: 2 ranks would do the same work"
            "\n  repair: give the axis a strategy (for runs of",
        ),
        (
            {"strategies": PAIR, "mesh": Mesh(dp_replicate=3, ep=2)},
            "no strategy uses the axis ep: 2 ranks would do the same work"
            "\n  repair: give the axis a strategy (for a mixture of experts",
        ),
        (
            {"strategies": PAIR, "mesh": Mesh(dp_replicate=3, outer=2)},
            "no strategy uses the axis outer: 2 ranks would do the same work"
            "\n  repair: give the axis a strategy (for sites that meet in rounds",
        ),
        (
            {"strategies": (BatchSplit(),)},
            'repair: add a strategy that reduces them along dp_replicate: [[strategies]] name = "ddp"',
        ),
        (
            {"strategies": (*PAIR, DDP())},
            "ddp (axis dp_replicate, bucket_mb 25.0, algorithm backend) is listed twice",
        ),
        (
            {"strategies": (*PAIR, DDP(bucket_mb=1.0))},
            "ddp and ddp both decide how parameters are stored along dp_replicate"
            "\n  repair: keep one of them",
        ),
        (
            {"strategies": (*PAIR, NaiveDDP())},
            "ddp and naive_ddp both decide how parameters are stored along dp_replicate",
        ),
        (
            {"micro_batch": -1},
            "micro_batch: micro_batch = -1\n  repair: write the samples per microbatch and rank, or 0",
        ),
        (
            {"micro_batch": 3},
            "a rank (12 over 3 ranks) do not divide by micro_batch = 3"
            "\n  repair: choose micro_batch from 1, 2, 4",
        ),
        (
            {"job": replace(JOB, train=TrainConfig(batch=2))},
            "a global batch of 2 samples is too small for 3 data-parallel ranks"
            "\n  repair: raise train.batch to at least 3",
        ),
        (
            {"job": replace(JOB, train=TrainConfig(batch=14))},
            "does not divide by 3 data-parallel ranks"
            "\n  repair: set train.batch to 12 or 15, or change the mesh",
        ),
        (
            {"job": replace(JOB, train=TrainConfig(batch=12, clip=-1.0))},
            "train.clip: clip = -1.0; needed is a number of at least 0",
        ),
    ],
)
def test_one_diagnostic_is_reported_once_with_its_repair(changes: dict[str, object], message: str):
    found = refused(**changes)
    assert len(found) == 1
    assert message in found[0]


def test_diagnostics_of_the_run_are_reported_too():
    with pytest.raises(PlanError, match=r"run\.keep: keep = 0; needed(?s:.*)no checkpoint would stay"):
        Plan.make(JOB, Mesh(), MODEL, (), 0, RunConfig(keep=0))


def test_a_model_in_which_nothing_is_trained_is_refused():
    frozen = replace(MODEL, params=tuple(replace(param, trainable=False) for param in MODEL.params))
    with pytest.raises(PlanError, match="model: none of the 3 parameters of paper is trained"):
        Plan.make(JOB, Mesh(), frozen)


@pytest.mark.timeout(10)
def test_a_hundred_thousand_ranks_are_planned_as_cheaply_as_three():
    wide = plan(replace(JOB, train=TrainConfig(batch=100_000)), Mesh(dp_replicate=100_000))
    assert wide.program.actions("pp0") != ()
    assert len(wide.program.roles) == 1
    assert wide.data_index(77_777) == 77_777


def test_plan_is_imported_without_torch():
    names = [
        "plan",
        "event_loop",
        "strategy_interface",
        "strategy_compatibility",
        "optimizer_per_param",
        "hardware.network_model",
        "sharding.stage_value_shards",
        "step.simulator",
        "step.weight_stashing",
    ]
    imports = "; ".join(f"import meshwright.plan.{name}" for name in names)
    code = f"import sys; {imports}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, check=True
    )
    assert done.stdout == b"False\n"


def test_a_weight_without_elements_is_planned():
    empty = replace(MODEL, params=(*MODEL.params, ParamSpec("layer0.empty", (0,), ("layer0",))))
    assert Plan.make(JOB, Mesh(dp_replicate=3), empty, PAIR).program.actions("pp0")


def test_precision_is_checked_against_the_strategies():
    job = replace(JOB, precision=PrecisionConfig(reduce="bfloat16"), lr_schedule=LRScheduleConfig("cosine"))
    assert (
        "gradients are sent in float32 here, and precision.reduce is bfloat16"
        in refused(job=job, strategies=(BatchSplit(), NaiveDDP()))[0]
    )
