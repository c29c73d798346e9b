"""Validates a job, its sharding and its strategies together: everything that no strategy can check by
itself.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from meshwright.plan.job.errors import Diagnostic, suggest_name
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.sharding.mesh import AXES, ROUND_AXES, axes_with
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.strategy_interface import Strategy

EXAMPLE_STRATEGIES: Mapping[str, str] = MappingProxyType(
    {
        "outer": 'for sites that meet in rounds: "local_sgd" or "diloco"',
        "site": 'for sites of a data centre that meet more often: "local_sgd" with axis = "site"',
        "pp": 'for runs of layers: "pipeline"',
        "ep": 'for a mixture of experts: "expert_parallel" and "batch_split" with axis = "ep"',
        "cp": 'for tokens of a sample: "ring"',
        "tp": 'for tensor parallelism: "tensor_parallel"',
    }
)

OTHER_NAMES: Mapping[str, str] = MappingProxyType(  # of strategies, in other libraries and in short
    {
        **dict.fromkeys(("fsdp", "fsdp2", "fully_shard", "hsdp", "deepspeed"), "zero"),
        **dict.fromkeys(("dp", "data_parallel"), "ddp"),
        **dict.fromkeys(("tp", "megatron"), "tensor_parallel"),
        **dict.fromkeys(("pp", "pipeline_parallel", "gpipe", "1f1b"), "pipeline"),
        **dict.fromkeys(("cp", "context_parallel", "ring_attention"), "ring"),
        "sp": "sequence_parallel",
        **dict.fromkeys(("ps", "param_server", "byteps", "ps_lite"), "parameter_server"),
        **dict.fromkeys(("localsgd", "post_local_sgd", "fedavg"), "local_sgd"),
        **dict.fromkeys(("gradient_checkpointing", "checkpointing", "recompute"), "activation_checkpointing"),
    }
)


def suggest_strategy(name: str, known: Iterable[str]) -> str:
    """Returns the repair for the unknown strategy `name`: the one that other libraries call so, else the most
    similar of `known`.
    """
    known, other = tuple(known), OTHER_NAMES.get(name.lower().replace("-", "_"))
    return f"here it is called '{other}'" if other in known else suggest_name(name, known)


def model_diagnostics(model_spec: ModelSpec) -> Iterator[Diagnostic]:
    """Yields what is wrong with the model for any plan."""
    if not model_spec.trainable:
        text = f"none of the {len(model_spec.params)} parameters of {model_spec.name} is trained"
        fix = "leave those to be trained out of model.frozen, or set their requires_grad in the model"
        yield Diagnostic(text, fix, "model")


def strategy_choice_diagnostics(strategies: tuple[Strategy, ...]) -> Iterator[Diagnostic]:
    """Yields strategies that exclude each other."""
    order = [strategy.name for strategy in strategies if strategy.phase == "schedule"]
    if len(order) > 1:
        yield Diagnostic(
            f"{' and '.join(order)} both decide the order of the step", "keep one of them", "strategies"
        )
    for strategy in dict.fromkeys(strategies):
        for name in dict.fromkeys(each.name for each in strategies if each.name in strategy.excludes):
            text = f"{strategy.name} does not work with {name}: {strategy.excludes[name]}"
            yield Diagnostic(text, "keep one of them", "strategies")
    storage_by_axis: dict[str, list[str]] = {}
    for strategy in dict.fromkeys(strategies):
        if strategy.phase == "storage":
            storage_by_axis.setdefault(strategy.as_dict().get("axis", ""), []).append(strategy.name)
    for axis, names in storage_by_axis.items():
        if len(names) > 1:
            yield Diagnostic(
                f"{' and '.join(names)} both decide how parameters are stored along {axis}",
                "keep one of them",
                "strategies",
            )
    for name in sorted({str(strategy) for strategy in strategies if strategies.count(strategy) > 1}):
        yield Diagnostic(f"{name} is listed twice", "remove one", "strategies")
    by_name: dict[tuple[str, str], list[str]] = {}
    for strategy in dict.fromkeys(each for each in strategies if each.phase == "comm"):
        axis = strategy.as_dict().get("axis", "")
        axis = axis if axis in ROUND_AXES or strategy.is_per_axis else ""
        by_name.setdefault((strategy.name, axis), []).append(str(strategy))
    for (name, _), options in by_name.items():
        if len(options) > 1:
            text = f"{name} is listed twice, with other options: {'; '.join(options)}"
            yield Diagnostic(text, "keep one of them", "strategies")
    shards: dict[tuple[str, str], set[str]] = {}
    for strategy in (each for each in strategies if each.phase == "shard"):
        shards.setdefault((strategy.name, strategy.as_dict().get("axis", "")), set()).add(str(strategy))
    for (name, axis), options in shards.items():
        if len(options) > 1:
            text = f"{name} is listed twice for {axis}, with other options: {'; '.join(sorted(options))}"
            yield Diagnostic(text, "keep one of them", "strategies")


def sharding_diagnostics(sharding: ShardingPlan, strategies: tuple[Strategy, ...]) -> Iterator[Diagnostic]:
    """Yields gradients without a reduction, and axes without a strategy."""
    unreduced = list(sharding.unreduced_params())
    if unreduced:
        axes = ", ".join(
            sorted(
                {axis for param_sharding in unreduced for axis in param_sharding.grad_layout.axes_with("P")}
            )
        )
        text = f"the gradients of {len(unreduced)} parameters ({unreduced[0].param.name}...)"
        text += f" stay partial sums over {axes}"
        strategy = "zero" if axes == "dp_shard" else "ddp"
        fix = f'add a strategy that reduces them along {axes}: [[strategies]] name = "{strategy}"'
        fix += "" if "," in axes or axes in axes_with("samples") else f', axis = "{axes}"'
        if any(
            param_sharding.flat_shard_axes for param_sharding in unreduced
        ):  # the strategy that shards them must also replicate the shards
            fix = f'replicate the shards along {axes}: replicate_axis = "{axes}" in their strategy'
        yield Diagnostic(text, fix, "strategies")
    # A strategy that cannot use its axis reports that itself.
    options = [strategy.as_dict() for strategy in strategies]
    used_axes = {axis for each in options for axis in (each.get("axis", ""), *each.get("over", ()))}
    idle = [
        axis
        for axis in AXES
        if sharding.mesh.size(axis) > 1 and axis not in used_axes and not _uses_axis(sharding, axis)
    ]
    if idle:
        ranks = " x ".join(str(sharding.mesh.size(axis)) for axis in idle)
        text = f"no strategy uses the axis {' and '.join(idle)}: {ranks} ranks would do the same work"
        examples = "; ".join(
            dict.fromkeys(
                EXAMPLE_STRATEGIES.get(axis, 'for data parallelism: "batch_split" and "ddp"') for axis in idle
            )
        )
        yield Diagnostic(text, f"give the axis a strategy ({examples}), or set its size to 1", "strategies")


def precision_diagnostics(job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
    """Yields precision options that this sharding cannot satisfy.

    Sums have a dtype of their own only if they are sharded; elsewhere they stay where backward leaves them.
    """
    dtypes = job.precision.effective
    unsharded = [
        param_sharding
        for param_sharding in sharding.param_shardings
        if param_sharding.param.trainable and not param_sharding.flat_shard_axes
    ]
    if unsharded and dtypes.gradients != dtypes.parameters:
        names = f"those of {len(unsharded)} parameters ({unsharded[0].param.name}...)"
        text = (
            f"gradients in {dtypes.gradients}, and {names} are not sharded: they stay in {dtypes.parameters}"
        )
        yield Diagnostic(
            text,
            "remove precision.gradients, or shard the parameters over several ranks",
            "precision.gradients",
        )
    if sharding.primary_rank_axes and dtypes.scales_loss:
        text = (
            "the loss is scaled for float16, and only the rank that updates for all others sees an overflow"
        )
        yield Diagnostic(text, 'use compute = "bfloat16"', "precision.compute")


def _uses_axis(sharding: ShardingPlan, axis: str) -> bool:
    layouts = [sharding.batch_layout, *(param_sharding.layout for param_sharding in sharding.param_shardings)]
    return any(axis in dict(layout.placements) for layout in layouts)


def batch_diagnostics(job: Job, sharding: ShardingPlan, micro_batch: int) -> Iterator[Diagnostic]:
    """Yields a batch that cannot be split over the ranks, or into microbatches."""
    num_data, batch = sharding.num_data, job.train.batch
    readers = f"{num_data} {'workers' if sharding.num_servers else 'data-parallel ranks'}"
    if micro_batch < 0:
        yield Diagnostic(
            f"micro_batch = {micro_batch}",
            "write the samples per microbatch and rank, or 0 for all of them at once",
            "micro_batch",
        )
    elif 0 < batch < num_data:
        text = f"a global batch of {batch} samples is too small for {readers}"
        yield Diagnostic(text, f"raise train.batch to at least {num_data}, or use fewer ranks", "train.batch")
    elif batch > 0 and batch % num_data:
        text = f"a global batch of {batch} samples does not divide by {readers}"
        lower = batch - batch % num_data
        yield Diagnostic(
            text, f"set train.batch to {lower} or {lower + num_data}, or change the mesh", "train.batch"
        )
    elif batch > 0 and micro_batch and (batch // num_data) % micro_batch:
        local = batch // num_data
        divisors = [n for n in range(1, local + 1) if local % n == 0]
        text = f"the {local} samples of a rank ({batch} over {num_data} ranks) do not divide"
        text += f" by micro_batch = {micro_batch}"
        yield Diagnostic(text, f"choose micro_batch from {', '.join(map(str, divisors[:12]))}", "micro_batch")


def batch_statistic_diagnostics(job: Job, sharding: ShardingPlan, micro_batch: int) -> Iterator[Diagnostic]:
    """Yields outputs that the loss reads and that are computed over all samples of a forward, where a forward
    has a part of the batch.
    """
    num_data = sharding.num_data
    local = job.train.batch // num_data
    num_microbatches = local // micro_batch if 0 < micro_batch < local else 1
    num_parts = num_data * num_microbatches
    read = [each.statistic for each in sharding.model_spec.outputs if each.used_by_loss and each.statistic]
    if num_parts == 1:
        return
    axes = [axis for axis in sharding.data_axes if sharding.mesh.size(axis) > 1]
    settings = [
        *(["micro_batch = 0"] if num_microbatches > 1 else []),
        *(f"mesh.{axis} = 1" for axis in axes),
    ]
    for statistic in read:
        channels = statistic.side_channels
        source = f" from the {', '.join(channels)} of its blocks" if channels else ""
        text = (
            f"the loss takes {statistic.path}, which the model computes{source} over all samples of a forward"
            f"; this plan runs the batch in {num_parts} parts (data ranks: {num_data}, microbatches: "
            f"{num_microbatches}), and their values do not add up to that of the batch"
        )
        fix = f"run the batch in one part: {', '.join(settings)} (pp, tp and cp may stay); or "
        fix += (
            f"train without it: {', '.join(f'model.overrides.output_{each} = false' for each in channels)}, "
            "and leave it out of a loss of your own; the model's own loss (pass none) is exact in any parts, "
            "and so is meshwright.Loss(auxiliary=...)"
            if channels
            else "return what it is computed from per sample, and add it up in Loss.total"
        )
        yield Diagnostic(text, fix, "loss")


def batch_sum_diagnostics(sharding: ShardingPlan) -> Iterator[Diagnostic]:
    """Yields what contradicts a loss that reads sums over the global batch: one rank for others, and a
    pipeline whose last stage is on several ranks.
    """
    model_spec, where = sharding.model_spec, "the loss reads sums over the tokens of the global batch"
    if not model_spec.num_batch_sums:
        return
    if sharding.primary_rank_axes or model_spec.needs_global_batch:
        text = f"{where}, and one rank, or every rank, computes it on the gathered outputs of all samples"
        fix = "leave data_parallel_master (use ddp or zero) and whole_batch out, or the auxiliary loss"
        yield Diagnostic(text, fix, "loss")
    last = model_spec.block_calls[-1]
    if sum(last in block_calls for block_calls in sharding.block_calls_by_pp_rank) > 1:
        text = f"{where}, and the schedule computes the loss on several ranks of the pipeline"
        fix = 'take a schedule with one last stage, as "dualpipev", "zb_v" or "1f1b"'
        yield Diagnostic(text, fix, "strategies.pipeline.schedule")


def sample_diagnostics(sharding: ShardingPlan, num_tokens: int) -> Iterator[Diagnostic]:
    """Yields that `num_tokens` are to be sampled where some ranks only serve: all ranks would run the
    model.
    """
    if num_tokens and sharding.num_servers:
        text = f"{num_tokens} tokens are sampled after training, and ranks that only serve run no forward"
        fix = "set run.sample_tokens = 0, or dedicated = false in parameter_server"
        yield Diagnostic(text, fix, "run.sample_tokens")


def alignment_diagnostics(align_bytes: int) -> Iterator[Diagnostic]:
    """Yields what is wrong with the multiple at which buffers begin parameters and shards."""
    if align_bytes < 1 or align_bytes & (align_bytes - 1):
        text = f"{align_bytes} bytes, which is not a power of two"
        yield Diagnostic(text, "write 128, 1 for no padding, or 0 for what the device needs", "align_bytes")


def global_batch_diagnostics(job: Job, sharding: ShardingPlan, micro_batch: int) -> Iterator[Diagnostic]:
    """Yields what contradicts a loss of the whole batch, or a primary rank that computes it: both need all
    outputs at once.
    """
    local = job.train.batch // sharding.num_data
    if 0 < micro_batch < local and (sharding.model_spec.needs_global_batch or sharding.primary_rank_axes):
        who = (
            "the loss is computed"
            if sharding.primary_rank_axes
            else "the loss is not a sum over samples: it is computed"
        )
        text = f"{who} on the whole global batch at once"
        text += f", and micro_batch = {micro_batch} splits a rank's {local} samples"
        yield Diagnostic(
            text, "set micro_batch = 0, and lower train.batch if that does not fit", "micro_batch"
        )
    if job.guard.action != "off" and (sharding.model_spec.needs_global_batch or sharding.primary_rank_axes):
        text = "the guard looks for the rank that caused a loss spike, and here no rank has a loss of its own"
        yield Diagnostic(text, 'set guard.action = "off"', "guard.action")
    loss_outputs = [output for output in sharding.model_spec.outputs if output.used_by_loss]
    if sharding.model_spec.needs_global_batch and not loss_outputs:
        text = "the loss of the whole batch uses none of the model's outputs"
        yield Diagnostic(
            text,
            "compute it from the tensors that the forward returns, alone or in a tuple, dict or dataclass",
            "loss",
        )


def joint_decision_diagnostics(job: Job, apart: str) -> Iterator[Diagnostic]:
    """Yields what of `job` all ranks decide together in a step; `apart` says why they cannot."""
    if job.guard.action != "off":
        text = f"the loss guard leaves a step out, or stops, on all ranks together, {apart}"
        yield Diagnostic(text, 'set guard.action = "off"', "guard.action")
    if job.train.noise_scale:
        text = f"the noise scale compares the gradients of all ranks in each step, {apart}"
        yield Diagnostic(text, "set train.noise_scale = false", "train.noise_scale")
    if job.precision.effective.scales_loss:
        text = f"the loss scale of float16 follows overflows on any rank, {apart}"
        yield Diagnostic(text, 'use compute = "bfloat16"', "precision.compute")
