"""What is wrong with a job, a space and strategies together, and how to repair it: what no strategy can see by itself."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.strategy import Strategy

EXAMPLE_STRATEGIES: Mapping[str, str] = MappingProxyType(
    {
        "pp": 'for runs of layers: "pipeline"',
        "cp": 'for tokens of a sample: "ring"',
        "tp": 'for tensor parallelism: "line"',
    }
)


def model_diagnostics(model_spec: ModelSpec) -> Iterator[Diagnostic]:
    """What is wrong with the model for any plan."""
    if not model_spec.trainable:
        text = f"none of the {len(model_spec.params)} parameters of {model_spec.name} is trained"
        yield Diagnostic(text, "leave requires_grad set on those that shall be trained", "model")


def strategy_choice_diagnostics(strategies: tuple[Strategy, ...]) -> Iterator[Diagnostic]:
    """Strategies that cannot stand beside each other."""
    order = [strategy.name for strategy in strategies if strategy.phase == "schedule"]
    if len(order) > 1:
        yield Diagnostic(
            f"{' and '.join(order)} both decide the order of the step", "keep one of them", "strategies"
        )
    stores: dict[str, list[str]] = {}
    for strategy in dict.fromkeys(strategies):
        if strategy.phase == "storage":
            stores.setdefault(strategy.as_dict().get("axis", ""), []).append(strategy.name)
    for axis, names in stores.items():
        if len(names) > 1:
            yield Diagnostic(
                f"{' and '.join(names)} both decide how weights are stored along {axis}",
                "keep one of them",
                "strategies",
            )
    for name in sorted({str(strategy) for strategy in strategies if strategies.count(strategy) > 1}):
        yield Diagnostic(f"{name} stands twice in the list", "remove one", "strategies")
    shards: dict[tuple[str, str], set[str]] = {}
    for strategy in (each for each in strategies if each.phase == "shard"):
        shards.setdefault((strategy.name, strategy.as_dict().get("axis", "")), set()).add(str(strategy))
    for (name, axis), said in shards.items():
        if len(said) > 1:
            text = f"{name} stands twice for {axis}, with other options: {'; '.join(sorted(said))}"
            yield Diagnostic(text, "keep one of them", "strategies")


def sharding_diagnostics(sharding: ShardingPlan, strategies: tuple[Strategy, ...]) -> Iterator[Diagnostic]:
    """Sums that nobody takes, and ranks that nobody uses."""
    pending = list(sharding.unreduced_params())
    if pending:
        axes = ", ".join(sorted({axis for home in pending for axis in home.grad_layout.axes_with("P")}))
        text = f"the gradients of {len(pending)} parameters ({pending[0].param.name}...) stay pending sums over {axes}"
        fix = f'add a strategy that stores weights along {axes}: [[strategies]] name = "ddp"'
        if any(
            home.flat_shard_axes for home in pending
        ):  # who cuts them into shards must hand those out along other axes too
            fix = f'have the shards copied along {axes}: replicate_axis = "{axes}" in the strategy that makes them'
        yield Diagnostic(text, fix, "strategies")
    meant = {
        strategy.as_dict().get("axis", "") for strategy in strategies
    }  # one that cannot use its axis says why itself
    idle = [
        axis
        for axis in AXES
        if sharding.mesh.size(axis) > 1 and axis not in meant and not _used(sharding, axis)
    ]
    if idle:
        ranks = " x ".join(str(sharding.mesh.size(axis)) for axis in idle)
        text = f"no strategy uses the axis {' and '.join(idle)}: {ranks} ranks would do the same work"
        such = "; ".join(
            dict.fromkeys(
                EXAMPLE_STRATEGIES.get(axis, 'for data parallelism: "batch" and "replicate"') for axis in idle
            )
        )
        yield Diagnostic(text, f"give the axis a strategy ({such}), or set its size to 1", "strategies")


def precision_diagnostics(job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
    """Sums are kept in a dtype of their own only where they are shards; elsewhere they stay where backward leaves them."""
    roles = job.precision.effective
    whole = [home for home in sharding.param_shardings if home.param.trainable and not home.flat_shard_axes]
    if whole and roles.gradients != roles.parameters:
        which = f"those of {len(whole)} parameters ({whole[0].param.name}...)"
        text = f"gradients in {roles.gradients}, and {which} are not cut into shards: they stay in {roles.parameters}"
        yield Diagnostic(
            text,
            "remove precision.gradients, or cut weights into shards over several ranks",
            "precision.gradients",
        )
    if sharding.primary_rank_axes and roles.scales_loss:
        text = "the loss is scaled for float16, and one rank alone would know of an overflow: it steps for the others"
        yield Diagnostic(text, 'use compute = "bfloat16"', "precision.compute")


def _used(sharding: ShardingPlan, axis: str) -> bool:
    layouts = [sharding.batch_layout, *(home.layout for home in sharding.param_shardings)]
    return any(axis in dict(layout.placements) for layout in layouts)


def batch_diagnostics(job: Job, sharding: ShardingPlan, micro_batch: int) -> Iterator[Diagnostic]:
    """A batch that cannot be dealt out to the ranks, or cut into micro-batches."""
    num_data, batch = sharding.mesh.group_size(sharding.data_axes), job.train.batch
    if micro_batch < 0:
        yield Diagnostic(
            f"micro_batch = {micro_batch}",
            "write the samples per micro-batch and rank, or 0 for all of them at once",
            "micro_batch",
        )
    elif 0 < batch < num_data:
        text = f"a global batch of {batch} samples is too small for {num_data} data-parallel ranks"
        yield Diagnostic(text, f"raise train.batch to at least {num_data}, or use fewer ranks", "train.batch")
    elif batch > 0 and batch % num_data:
        text = f"a global batch of {batch} samples does not divide by {num_data} data-parallel ranks"
        lower = batch - batch % num_data
        yield Diagnostic(
            text, f"set train.batch to {lower} or {lower + num_data}, or change the mesh", "train.batch"
        )
    elif batch > 0 and micro_batch and (batch // num_data) % micro_batch:
        local = batch // num_data
        divisors = [n for n in range(1, local + 1) if local % n == 0]
        text = f"the {local} samples of a rank ({batch} over {num_data} ranks) do not divide by micro_batch = {micro_batch}"
        yield Diagnostic(text, f"choose micro_batch from {', '.join(map(str, divisors[:12]))}", "micro_batch")


def global_batch_diagnostics(job: Job, sharding: ShardingPlan, micro_batch: int) -> Iterator[Diagnostic]:
    """A loss of the whole batch, or one rank that takes it for others, needs all outputs at once."""
    local = job.train.batch // sharding.mesh.group_size(sharding.data_axes)
    if 0 < micro_batch < local and (sharding.model_spec.needs_global_batch or sharding.primary_rank_axes):
        who = (
            "the loss is taken"
            if sharding.primary_rank_axes
            else "the loss is no sum over samples: it is taken"
        )
        text = f"{who} on the whole global batch at once, and micro_batch = {micro_batch} cuts a rank's {local} samples"
        yield Diagnostic(
            text, "set micro_batch = 0, and lower train.batch if that does not fit", "micro_batch"
        )
    if job.guard.action != "off" and (sharding.model_spec.needs_global_batch or sharding.primary_rank_axes):
        text = "the guard looks for the rank that spoiled a step, and here no rank has a loss of its own"
        yield Diagnostic(text, 'set guard.action = "off"', "guard.action")
    used = [column for column in sharding.model_spec.outputs if column.used_by_loss]
    if sharding.model_spec.needs_global_batch and not used:
        text = "the loss of the whole batch takes none of the model's outputs"
        yield Diagnostic(text, "compute it from the tensors that the forward returns", "loss")
