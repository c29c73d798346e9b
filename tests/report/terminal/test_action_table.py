"""The plan table: complete at 80 columns, with every strategy, kind of action and number of bytes."""

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from rich.console import Console

from docs.generate import essays, kinds
from meshwright.api import make_plan
from meshwright.parallel import STRATEGIES
from meshwright.parallel.compression.activation_compression import ActivationCompression
from meshwright.parallel.compression.codecs.two_level_sums import QgZCompression
from meshwright.parallel.compression.quantized_weights import QuantizedWeights
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.parallel.data.hierarchical_partition import HierarchicalPartition
from meshwright.parallel.data.sync_batch_norm import SyncBatchNorm
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.expert.expert_tensor_parallel import ExpertTensorParallel
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.compiled_blocks import CompiledBlocks
from meshwright.parallel.memory.gist import Gist
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.memory.partitioned_activations import PartitionedActivations
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.outer.diloco import DiLoCo
from meshwright.parallel.outer.local_sgd import LocalSGD
from meshwright.parallel.outer.streaming_diloco import StreamingDiLoCo
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.precision.fp8 import Float8Products
from meshwright.parallel.server.parameter_server import ParameterServer
from meshwright.parallel.server.stale_server import StaleServer
from meshwright.parallel.tensor.cube_3d import TensorParallel3D
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.tesseract_25d import TensorParallel25D
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.generation_program import Rollout, generation_program
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.job.job import Job, OptimizerConfig, PrecisionConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.model_spec.model_spec import ROOT, ModelSpec, ParamSpec
from meshwright.plan.model_spec.param_dim_split import DimSplit
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.report.terminal.action_table import KIND_TEXTS, plan_details
from tests.model.loss import test_load_balancing_loss
from tests.paper_model import SyntheticModel
from tests.parallel.embedding.host_plans import host_plan
from tests.parallel.expert import test_loss_free_balancing
from tests.parallel.expert.mixture_model import analyzed_mixtral, expert_strategies, sgd_job
from tests.parallel.observer.observer_plans import observer_plan
from tests.parallel.tensor.even_llama import even_llama
from tests.parallel.tensor.odd_llama import planned
from tests.tiny_model import analyzed_model, tiny_job

JOB = Job(ModelConfig("model.json"), DataConfig("text.txt", sequence=64), TrainConfig(batch=12))
DEEP = tuple(
    f"model.language_model.decoder.transformer.h.{i}.a_rather_long_name_of_a_mixture_of_experts"
    for i in range(3)
)
STORES = {
    "ddp": DDP(),
    "many buckets": DDP(bucket_mb=1e-9),
    "naive_ddp": NaiveDDP(),
    "data_parallel_master": DataParallelMaster(),
    "parameter_server": ParameterServer(servers=2),
}


def plan_of(
    store: Strategy | None = None,
    model_spec: ModelSpec | None = None,
    precision: PrecisionConfig | None = None,
    ranks: int = 3,
) -> Plan:
    strategies = (BatchSplit(), store or DDP()) if ranks > 1 else ()
    job = replace(JOB, precision=precision or PrecisionConfig())
    micro_batch = 0 if isinstance(store, DataParallelMaster) else 2
    return Plan.make(
        job, Mesh(dp_replicate=ranks), model_spec or SyntheticModel().model_spec, strategies, micro_batch
    )


def deep_model_spec() -> ModelSpec:
    weights = tuple(ParamSpec(f"{block_call}.weight", (10,), (block_call,)) for block_call in DEEP)
    return ModelSpec(
        "deep",
        DEEP,
        weights,
        (1,) * 3,
        (1,) * 3,
        notes=("no chain of blocks was found: " + "so it goes " * 20,),
    )


def shown(plan: Plan, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(plan_details(plan))
    return capture.get()


def words(text: str) -> str:
    """`text` without the breaks and the padding that a table puts in."""
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize(
    "model_spec",
    [SyntheticModel().model_spec, SyntheticModel(layers=40).model_spec, deep_model_spec()],
    ids=["small", "tall", "deep"],
)
@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_nothing_is_cut_off_at_80_columns(store: Strategy, model_spec: ModelSpec):
    text = shown(plan_of(store, model_spec))
    assert "\u2026" not in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())


def columns(text: str) -> list[str]:
    """The three columns of the action table, each as one text without breaks."""
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("stream"))
    starts = [0, lines[head].index("action"), lines[head].index("what happens"), None]
    return [words("".join(line[a:b] for line in lines[head + 1 :])) for a, b in pairwise(starts)]


def test_long_names_are_folded_not_lost():
    text = shown(plan_of(NaiveDDP(), deep_model_spec()))
    _, actions, details = columns(text)
    assert f"forwardof{DEEP[0]}..{DEEP[2]}" in details
    assert f"REDUCE{DEEP[0].replace('.0.', '.[m].')}.weight" in actions
    assert words(deep_model_spec().notes[0]) in words(text)


def test_names_in_brackets_are_names_not_markup():
    """A ModuleDict may have any text as a key."""
    block_calls = ("experts.[red]", "experts.[/b]")
    weights = tuple(ParamSpec(f"{block_call}.weight", (10,), (block_call,)) for block_call in block_calls)
    model_spec = ModelSpec("[bold]", block_calls, weights, (1, 1), (1, 1), notes=("see [/i]",))
    text = shown(plan_of(NaiveDDP(), model_spec), 200)
    assert all(f"REDUCE {block_call}.weight" in text for block_call in block_calls)
    assert f"forward of {block_calls[0]} .. {block_calls[1]}" in text
    assert "[bold]: 20 parameters" in text
    assert "see [/i]" in text


@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_every_strategy_stands_with_its_fields(store: Strategy):
    text = words(shown(plan_of(store)))
    for strategy in (BatchSplit(), store):
        assert words(str(strategy)) in text


@cache
def tensor_and_context_parallel_programs() -> tuple[Plan, ...]:
    """Of a small Llama: the stream in slices of tokens, over a square, squares and a cube of ranks, and its
    tokens dealt.
    """
    rows = BatchSplit(axis="dp_shard")
    ways = {
        Mesh(tp=3): (TensorParallel(), VocabParallel(), SequenceParallel(), ChunkedLoss(2)),
        Mesh(dp_shard=2, tp=2): (TensorParallel2D(), rows, ZeRO()),
        Mesh(dp_replicate=2, dp_shard=2, tp=2): (
            TensorParallel25D(),
            BatchSplit(),
            rows,
            ZeRO(replicate_axis="dp_replicate"),
        ),
        Mesh(dp_shard=2, tp_depth=2, tp=2): (TensorParallel3D(), rows, ZeRO(gather="microbatch")),
        **{
            Mesh(cp=n): (strategy, TiledMLP(2), Gist(backward_dtype="bfloat16"), DDP(axis="cp"))
            for n, strategy in {3: RingAttention(), 2: Ulysses(), 4: HybridContextParallel()}.items()
        },
    }
    return tuple(
        planned(even_llama(num_hidden_layers=1), mesh, strategies)[1] for mesh, strategies in ways.items()
    )


@cache
def pipeline_programs() -> tuple[Plan, ...]:
    """Of models in parts: backwards whole and in halves, a weight that two parts share, values that are sent
    in pieces.
    """
    tiny, tied, llama = analyzed_model(), analyzed_model(tied=True), even_llama(num_hidden_layers=2)
    halves = make_plan(tiny, tiny_job(), Mesh(pp=2), (Pipeline(schedule="zb_h1"),), 4)
    plans = [make_plan(each, tiny_job(), Mesh(pp=2), (Pipeline(),), 4) for each in (tiny, tied)]
    stale = make_plan(tiny, tiny_job(train=TrainConfig(batch=12, clip=0.0)), Mesh(pp=2), (PipeDream(),), 2)
    parts = ActivationCheckpointing(("*",)), PartitionedActivations(prefetch=0)
    kept, filed = (
        make_plan(tiny, tiny_job(), Mesh(), (ActivationOffload(("layers.*",), prefetch=0, folder=folder),), 4)
        for folder in ("", "folder")
    )
    return (
        *plans,
        halves,
        stale,
        kept,
        filed,
        planned(llama, Mesh(pp=2, tp=2), (TensorParallel(), Pipeline(scatter=True)))[1],
        planned(llama, Mesh(tp=2), (TensorParallel(), *parts))[1],
    )


@cache
def offloaded_programs() -> tuple[Plan, ...]:
    """Optimizer states that the device steps in turn, those that the host steps, and those on disk, with
    weights.
    """
    spec, rows = SyntheticModel().model_spec, BatchSplit(axis="dp_shard")
    return tuple(
        Plan.make(JOB, Mesh(dp_shard=3), spec, (rows, ZeRO(stage=stage), offload), 2)
        for stage, offload in (
            (2, Offload()),
            (2, Offload(step_on="host")),
            (3, DiskOffload("folder", what=("optimizer_states", "weights"))),
        )
    )


def listed(plan: Plan) -> list[Action]:
    return [action for role in plan.program.roles for action in role.actions]


def lossy_programs() -> list[Plan]:
    return [
        *(
            make_plan(analyzed_model(), tiny_job(), Mesh(dp_replicate=4), (BatchSplit(), DDP(), codec))
            for codec in (
                modes(ranks_per_host=2) if modes is QgZCompression else modes()
                for modes in STRATEGIES["compress"].values()
            )
        ),
        *(
            make_plan(
                analyzed_model(), tiny_job(), Mesh(dp_shard=4), (BatchSplit("dp_shard"), ZeRO(), beside)
            )
            for beside in (HierarchicalPartition(2), QuantizedWeights())
        ),
        make_plan(analyzed_model(), tiny_job(), Mesh(pp=2), (Pipeline(), ActivationCompression())),
        *(
            make_plan(analyzed_model(), tiny_job(), Mesh(outer=2), (rounds(sync_every=4),))
            for rounds in (LocalSGD, DiLoCo)
        ),
        make_plan(
            analyzed_model(),
            tiny_job(),
            Mesh(outer=2),
            (StreamingDiLoCo(sync_every=4, fragments=2, delay=1),),
        ),
        make_plan(
            analyzed_model(),
            tiny_job(),
            Mesh(outer=2, site=2),
            (LocalSGD("site", sync_every=2), LocalSGD(sync_every=4)),
        ),
    ]


def all_programs() -> list[Plan]:
    papers = [SyntheticModel(), SyntheticModel(tied=True)]
    precisions = [PrecisionConfig(), PrecisionConfig(reduce="bfloat16")]
    plans = [plan_of(store, paper.model_spec) for store in STORES.values() for paper in papers]
    noisy_job = replace(JOB, train=replace(JOB.train, noise_scale=True))
    noisy = Plan.make(noisy_job, Mesh(dp_replicate=3), SyntheticModel().model_spec, (BatchSplit(), DDP()))
    cut = Plan.make(
        JOB, Mesh(dp_shard=3), SyntheticModel().model_spec, (BatchSplit(axis="dp_shard"), ZeRO()), 2
    )
    rooted = replace(
        SyntheticModel().model_spec,
        params=(*SyntheticModel().model_spec.params, ParamSpec("scale", (3,), (ROOT,))),
    )
    glued = Plan.make(JOB, Mesh(dp_shard=3), rooted, (BatchSplit(axis="dp_shard"), ZeRO()), 2)
    up, down = (
        ParamSpec("up", (4, 2), ("layer0",), role="colwise", dim_splits=(DimSplit(0, 4, (4,)),)),
        ParamSpec("down", (2, 4), ("layer0",), role="rowwise", dim_splits=(DimSplit(1, 4, (4,), "in"),)),
    )
    pair = LayerCall("up", "layer0", "colwise", 0, 2, 4), LayerCall("down", "layer0", "rowwise", 1, 4, 2)
    divided = replace(
        SyntheticModel().model_spec, params=(*SyntheticModel().model_spec.params, up, down), layer_calls=pair
    )
    return [
        *plans,
        Plan.make(JOB, Mesh(tp=3), divided, (TensorParallel(),)),
        Plan.make(
            replace(JOB, optimizer=OptimizerConfig("adafactor")), Mesh(tp=3), divided, (TensorParallel(),)
        ),
        noisy,
        cut,
        *offloaded_programs(),
        glued,
        Plan.make(
            JOB,
            Mesh(dp_replicate=3),
            SyntheticModel().model_spec,
            (SyncBatchNorm(), BatchSplit(), DDP(), ActivationCheckpointing()),
        ),
        *(plan_of(DDP(), SyntheticModel().model_spec, precision) for precision in precisions),
        plan_of(ranks=1),
        make_plan(analyzed_model(), tiny_job(), Mesh(outer=4), (StaleServer(),)),
        observer_plan(),
        host_plan(),
        make_plan(analyzed_mixtral(), sgd_job(), Mesh(ep=3), expert_strategies()),
        make_plan(analyzed_mixtral(), sgd_job(), Mesh(tp=2), (ExpertTensorParallel(),)),
        test_loss_free_balancing.plan_of("ep"),
        make_plan(test_load_balancing_loss.analyzed(), sgd_job(), Mesh(ep=3)),
        *tensor_and_context_parallel_programs(),
        *pipeline_programs(),
        make_plan(analyzed_model(), tiny_job(), Mesh(), (MemoryBudget(),)),
        make_plan(analyzed_model(), tiny_job(), Mesh(), (CompiledBlocks(backend="eager"),)),
        *lossy_programs(),
    ]


def test_every_kind_that_a_program_can_hold_has_a_meaning():
    kinds_listed = {action.kind for plan in all_programs() for action in listed(plan)}
    generating = make_plan(analyzed_mixtral(), sgd_job(), Mesh(pp=2, ep=3))
    kinds_listed |= generation_program(generating, Rollout(2, 5, 2)).kinds
    used = {type(strategy) for plan in all_programs() for strategy in plan.strategies}
    known = {each for modes in STRATEGIES.values() for each in modes.values()}
    assert used == known - {Float8Products}  # its library is an extra, and it adds no action
    assert kinds_listed == set(KIND_TEXTS)


def test_every_kind_of_action_has_a_meaning():
    """COMPARE apart: the verifier puts it in when it plays a program, and no plan shows it."""
    assert {kind.name for kind in kinds(essays())} - {"COMPARE"} == set(KIND_TEXTS)


@pytest.mark.parametrize(
    "plan", all_programs(), ids=lambda plan: " ".join(strategy.name for strategy in plan.strategies)
)
def test_every_action_is_drawn_with_its_meaning(plan: Plan):
    text = words(shown(plan, 300))  # wide enough for names of what goes from part to part
    for action in listed(plan):
        assert action.kind in text
        assert words(KIND_TEXTS[action.kind]) in text


def test_equal_blocks_are_one_row_or_a_loop():
    text = shown(plan_of(STORES["many buckets"], model_spec=SyntheticModel(layers=40).model_spec), 200)
    assert len(text.splitlines()) < 60
    assert "F x40 microbatch 0" in text
    assert re.search(r"40 times, m = 39 .. 0: *\n.*backward of layer\[m\]", text)
    assert re.search(r"40 times, m = 0 .. 39: *\n.*backward of layer\[39-m\].*\n.*REDUCE m", text)


def test_equal_microbatches_are_a_loop_with_the_layers_of_each_inside():
    paper = SyntheticModel(layers=40, numel=2**20)
    job = replace(JOB, train=TrainConfig(batch=48))
    strategies = (BatchSplit(axis="dp_shard"), ZeRO(gather="microbatch"))
    text = shown(Plan.make(job, Mesh(dp_shard=3), paper.model_spec, strategies, 2), 200)
    assert len(text.splitlines()) < 140
    assert re.search(r"5 times, m = 2 .. 6: *\n.*37 times, n = 37 .. 1:", text)
    assert "REDUCE microbatch m layer[n]" in text


def test_bytes_are_those_of_the_program():
    plan = plan_of(model_spec=SyntheticModel(layers=4, numel=2**20).model_spec)
    text = shown(plan, 200)
    assert "all_reduce 16 MiB float32 over dp_replicate (backend)" in text
    assert re.search(r"sent per rank and step +21.3 MiB", text), "2 (n-1)/n of 16 MiB over 3 ranks"
    assert re.search(
        r"states per rank +64 MiB \(parameters 16 MiB, gradients 16 MiB, optimizer_states 32 MiB\)", text
    )


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("ring", "21.3 MiB"),
        ("recursive_halving", "21.3 MiB"),
        ("one_shot", "32 MiB"),
        ("tree", "32 MiB by the busiest rank, 16 MiB by the one that sends least"),
        ("recursive_doubling", "32 MiB by the busiest rank, 16 MiB by the one that sends least"),
    ],
)
def test_bytes_are_those_of_the_algorithm_at_its_busiest_rank(algorithm: str, message: str):
    plan = plan_of(
        DDP(algorithm=f"{algorithm} <= 16 MiB, else ring"),
        model_spec=SyntheticModel(layers=4, numel=2**20).model_spec,
    )
    text = shown(plan, 200)
    assert f"all_reduce 16 MiB float32 over dp_replicate ({algorithm})" in text
    assert re.search(rf"sent per rank and step +{message}\n", re.sub(r" +\n", "\n", text))


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (OptimizerConfig("sgd"), "32 MiB"),
        (OptimizerConfig("sgd", momentum=0.9), "48 MiB"),
        (OptimizerConfig(), "64 MiB"),
    ],
)
def test_state_bytes_include_the_optimizer_states(optimizer: OptimizerConfig, states: str):
    plan = Plan.make(
        replace(JOB, optimizer=optimizer), Mesh(), SyntheticModel(layers=4, numel=2**20).model_spec
    )
    assert re.search(rf"states per rank +{states} ", shown(plan, 200))


def test_the_summary_says_what_is_trained_on_what():
    text = shown(plan_of(), 200)
    assert "paper: 300 parameters in 3 blocks" in text
    assert "dp_replicate 3 (3 ranks)" in text
    assert "12 samples = 3 ranks x 2 microbatches of 2; 64 tokens each" in text
    assert plan_of().hash in text
    assert "one device" in shown(plan_of(ranks=1), 200)


def test_a_row_says_what_waits_for_the_other_stream():
    text = shown(plan_of(), 200)
    assert re.search(r"compute +CLIP .*waits for REDUCE\(0\)", text)
    assert re.search(r"comm +REDUCE 0 .*waits for B\(layer0, 1\) and 3 more", text)


@pytest.mark.parametrize(
    ("nbytes", "message"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "0.999 KiB"),
        (1024, "1 KiB"),
        (3 * 2**20, "3 MiB"),
        (2**40, "1 TiB"),
        (2**51, "2,048 TiB"),
    ],
)
def test_sizes_have_units(nbytes: int, message: str):
    assert format_nbytes(nbytes) == message
