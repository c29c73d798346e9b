"""Records the forward graphs of a model on fake tensors: one for each shape of its inputs, independent of the
batch size.

An analyzed model can be made without memory, so a graph is recorded where it is needed, by two forwards on a
few samples each: two batch sizes tell which dims grow with the batch. A model whose forward reads values of
tensors is made once in full, on the CPU.

If matmuls run in another dtype than the parameters (autocast), these forwards run under autocast too, since
it decides the dtype of the tensors that cross stage boundaries. The rules are those of the device that will
train (model/trial/accelerator_autocast.py): a layer norm returns bfloat16 on a CPU and float32 on a GPU.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.device.local_device import local_platform
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.record_model import SECOND_BATCH_SIZE
from meshwright.model.context_parallel.block_input_sharding import SingleRankForward
from meshwright.model.context_parallel.patch_hf_attention import patch_attention
from meshwright.model.pipeline.forward_graph import ForwardGraph, ForwardRecord, build_forward_graph
from meshwright.model.pipeline.forward_recorder import record_forward
from meshwright.model.rng.stateless_dropout import record_draw_sites
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.model.tensors.clear_fake_caches import clear_fake_caches
from meshwright.model.tensors.fake_tensor_limits import depends_on_values
from meshwright.model.trial.accelerator_autocast import trial_autocast
from meshwright.model.trial.fake_tensor_forward import PROBE_BATCH
from meshwright.plan.job.errors import PlanError

# one of 32 layers takes about 0.2 MB; recording it again takes as long as several steps
MAX_FORWARD_GRAPHS = 256
Inputs = Mapping[str, torch.Tensor]
InputSignature = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def trace_forward_graph(
    analyzed: AnalyzedModel,
    inputs: Inputs,
    dtype: torch.dtype = torch.float32,
    *,
    training: bool = True,
    compute_dtype: torch.dtype | None = None,
    sequence_sharded: bool = False,
    device_type: str = "cpu",
) -> ForwardGraph:
    """Returns the graph of a forward on samples like `inputs`, in training or in evaluation mode.

    Parameters are in `dtype`, matmuls run in `compute_dtype` (None: `dtype`) by the rules of `device_type`.
    Only the outputs that the loss reads count as used; the others may be placeholder tensors on a rank that
    runs one stage. If `sequence_sharded`, a third forward finds which values are sharded along the sequence.
    Raises PlanError if the operations depend on the batch size; errors of the forward itself are passed on.
    """
    num_samples = PROBE_BATCH, SECOND_BATCH_SIZE
    mode: FakeTensorMode | None = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        first, second = (
            _record_forward(analyzed, inputs, each, dtype, mode, training, compute_dtype, device_type)
            for each in num_samples
        )
    except Exception as error:
        if not depends_on_values(error):
            raise
        mode = None
        first, second = (
            _record_forward(analyzed, inputs, each, dtype, mode, training, compute_dtype, device_type)
            for each in num_samples
        )
    single_rank = SingleRankForward.for_inputs(analyzed.sequence_info, inputs) if sequence_sharded else None
    sharded_record = (
        None
        if single_rank is None
        else _record_forward(
            analyzed,
            inputs,
            num_samples[0],
            dtype,
            mode,
            training,
            compute_dtype,
            device_type,
            single_rank,
        )
    )
    return build_forward_graph(first, second, num_samples, sharded_record)


def add_stage_boundaries(
    analyzed: AnalyzedModel,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    *,
    sequence_sharded: bool = False,
    device_type: str = "",
) -> AnalyzedModel:
    """Returns `analyzed` with the stage boundaries in its model spec: the values between blocks in training
    on its example, on a device of `device_type` (by default that of this host).

    With `sequence_sharded`, the boundaries also tell which values are sharded along the sequence.
    """
    inputs = {column.name: analyzed.example[column.name] for column in analyzed.model_spec.inputs}
    boundaries = (
        get_forward_graphs(analyzed, dtype, device_type or local_platform().type)
        .get(inputs, compute_dtype, sequence_sharded=sequence_sharded)
        .boundaries
    )
    return replace(analyzed, model_spec=replace(analyzed.model_spec, stage_boundaries=boundaries))


def get_forward_graphs(analyzed: AnalyzedModel, dtype: torch.dtype, device_type: str) -> "ForwardGraphCache":
    """Returns the graph cache of a model with parameters in `dtype` on devices of a type; all callers share
    it, so each graph is recorded once.
    """
    key = dtype, device_type
    return analyzed.forward_graphs.setdefault(key, ForwardGraphCache(analyzed, dtype, device_type))


@dataclass
class ForwardGraphCache:
    """A cache of forward graphs by the shape of the inputs, recorded on first use; threads may share it.

    It keeps `max_graphs` graphs and drops the least recently used one, so sequences of any length do not fill
    the memory.
    """

    analyzed: AnalyzedModel
    dtype: torch.dtype = torch.float32
    device_type: str = "cpu"
    max_graphs: int = MAX_FORWARD_GRAPHS
    _graphs: dict[tuple[InputSignature, bool, torch.dtype | None, bool], ForwardGraph] = field(
        default_factory=dict
    )
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def get(
        self,
        inputs: Inputs,
        compute_dtype: torch.dtype | None = None,
        *,
        training: bool = True,
        sequence_sharded: bool = False,
    ) -> ForwardGraph:
        """Returns the graph of a forward on `inputs`, of any batch size; arguments as in
        `trace_forward_graph`.
        """
        signature = tuple((key, tuple(value.shape[1:]), value.dtype) for key, value in inputs.items())
        compute_dtype = None if compute_dtype == self.dtype else compute_dtype
        key = signature, training, compute_dtype, sequence_sharded
        with self._lock:
            graph = self._graphs.pop(key, None)
            if graph is None:
                graph = trace_forward_graph(
                    self.analyzed,
                    inputs,
                    self.dtype,
                    training=training,
                    compute_dtype=compute_dtype,
                    sequence_sharded=sequence_sharded,
                    device_type=self.device_type,
                )
                while len(self._graphs) >= self.max_graphs:
                    del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = graph  # at the end: the most recently used
            return graph


def _record_forward(
    analyzed: AnalyzedModel,
    inputs: Inputs,
    num_samples: int,
    dtype: torch.dtype,
    mode: FakeTensorMode | None,
    training: bool,
    compute: torch.dtype | None,
    device_type: str = "cpu",
    sharded_forward: SingleRankForward | None = None,
) -> ForwardRecord:
    """Records one forward on `num_samples` samples, on real tensors of the CPU if `mode` is None.

    With `sharded_forward` the forward runs as on a rank with a sequence shard: glue on real
    tensors, as in the sequence
    analysis.
    """
    module, blocks, _ = analyzed.make_module("cpu", dtype, mode)
    batch = {key: _make_samples(value, num_samples, dtype) for key, value in inputs.items()}
    glue_mode: AbstractContextManager = nullcontext()
    if mode is not None and sharded_forward is None:
        batch = {key: mode.from_tensor(value) for key, value in batch.items()}
        glue_mode = mode
    elif mode is not None:
        for block in blocks.values():
            block.forward = partial(_run_in_mode, mode, block.forward)
    if sharded_forward is not None:
        patch_attention(module, lambda queries, keys: None)
    casts = compute is not None and compute != dtype
    autocast = trial_autocast(compute, device_type) if casts else nullcontext()
    rng = StatelessRNG(seed=0)
    used_outputs = {place for place, column in enumerate(analyzed.model_spec.outputs) if column.used_by_loss}
    try:
        with glue_mode, record_draw_sites(rng, num_samples), torch.set_grad_enabled(training), autocast:
            run_forward, count_draws = partial(module, **batch), lambda: rng.num_draws
            versions = {key: value._version for key, value in batch.items()}
            record = record_forward(
                module if training else module.eval(),
                blocks,
                run_forward,
                rng.enter_block,
                count_draws,
                used_outputs,
                sharded_forward,
            )
    finally:
        clear_fake_caches(module)
    for key, value in batch.items():
        if value._version != versions[key]:
            text = (
                f"the forward writes into its input '{key}', and every stage that a rank runs "
                f"would do so again"
            )
            raise PlanError(text, fix=f"begin the forward with {key} = {key}.clone()", location="model")
    return record


def _run_in_mode(mode: FakeTensorMode, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return forward(*args, **kwargs)


def _make_samples(value: torch.Tensor, num_samples: int, dtype: torch.dtype) -> torch.Tensor:
    first = value.detach()[: min(num_samples, len(value))].to(
        "cpu", dtype if value.is_floating_point() else value.dtype
    )
    return first.repeat(-(-num_samples // len(first)), *[1] * (first.ndim - 1))[:num_samples]
