"""What a model predicts, gathered from all ranks: each sample once, in the order of the global batch.

    global batch    s0 s1 | s2 s3 | s4            microbatches of 2 on 3 data ranks
    rank 0          forward(s0 s1)  ---.
    rank 1          forward(s2 s3)  ---+---> every rank has what was predicted of s0 s1 s2 s3 s4
    rank 2          forward(s4)     ---'     in the sizes that each rank had: nothing is padded or repeated

Ranks that share samples (tensor, context and pipeline parallelism) run the same forward together, and all
have full outputs. A rank without samples runs a dummy, whose results are dropped. The model is in eval mode
and takes no gradients; its state is restored.

    bytes = (n - 1) * largest prediction of a rank, per tensor and microbatch
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from meshwright.comm.collectives.group import Group
from meshwright.engine.forward_backward.evaluation import (
    EVALUATION_ACTION,
    Evaluation,
    no_samples_error,
    whole_batch_diagnostics,
)
from meshwright.engine.forward_backward.lockstep_pipeline_forward import BROADCAST_DTYPES, MAX_DIMS
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.loss.loss_definition import Batch
from meshwright.plan.job.errors import raise_diagnostics

Predictions = Mapping[str, torch.Tensor]  # by name, one sample per row
Predict = Callable[[Any, Batch], Predictions]  # of the outputs of the model, and the batch
EvalMetric = Callable[[Any, Batch], tuple[torch.Tensor | float, torch.Tensor | float]]  # a sum, and its count


def gathered_predictions(
    executor: StepExecutor, batches: Iterable[Batch | None], predict: Predict
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yields, for each of `batches`, what `predict` returns on each data rank that has samples, in order.

    Each batch holds samples of this rank, prepared for the loss, and goes through the model at once; None:
    the rank has none.
    All ranks pass equally many. `predict` returns the same names and numbers of dims on all ranks.
    """
    state = executor.state
    module, device = state.trained_module.module, state.world.device
    group = state.world.group(executor.state.plan.sharding.data_axes)
    executor.check_sites_agree("evaluate")
    for batch in batches:
        samples = state.trained_module.dummy_batch if batch is None else batch
        samples = {key: value.to(device) for key, value in samples.items()}
        with executor.full_param_forwards.evaluation_forwards(EVALUATION_ACTION):
            found = predict(module(**executor.loss.model_inputs(samples)), samples)
        yield _gather(found, batch is not None, group, device)


def evaluate_with_metrics(
    executor: StepExecutor, batches: Iterable[Batch | None], metrics: Mapping[str, EvalMetric]
) -> Evaluation:
    """Returns the loss over `batches` and the `metrics`: sums over all samples, each divided by its count.

    Batches as for `gathered_predictions`.
    """
    loss = executor.loss
    raise_diagnostics(whole_batch_diagnostics(loss))

    def count(outputs: Any, batch: Batch) -> Predictions:
        sums = [loss.total(outputs, batch), *loss.count_weight_and_tokens(batch)]
        for metric in metrics.values():
            sums += metric(outputs, batch)
        return {"sums": torch.tensor([[float(each) for each in sums]], dtype=torch.float64)}

    device = executor.state.world.device
    sums = torch.zeros(3 + 2 * len(metrics), dtype=torch.float64, device=device)
    for row in gathered_predictions(executor, batches, count):
        for piece in row:
            sums += piece["sums"][0].to(device)
    total, weight, tokens, *counted = sums.tolist()
    if not weight > 0:
        raise no_samples_error()
    pairs = zip(metrics, counted[::2], counted[1::2], strict=True)
    values = {name: value / number if number else float("nan") for name, value, number in pairs}
    return Evaluation(total / weight, int(tokens), loss.is_token_nll, values)


def _gather(
    found: Predictions, has_samples: bool, group: Group, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    gathered: list[dict[str, torch.Tensor]] = [{} for _ in range(group.size)]
    counts = torch.zeros(group.size, dtype=torch.int64, device=device)
    group.all_gather(counts, counts.new_tensor([int(has_samples)]), action=EVALUATION_ACTION).wait()
    for name, tensor in found.items():
        pieces = _gather_tensor(tensor.detach().to(device).contiguous(), group, device)
        for rank, piece in enumerate(pieces):
            gathered[rank][name] = piece
    return [each for each, count in zip(gathered, counts.tolist(), strict=True) if count]


def _gather_tensor(tensor: torch.Tensor, group: Group, device: torch.device) -> list[torch.Tensor]:
    """Returns the tensor of every rank of `group`, in the shape and dtype that it has there."""
    if group.size == 1:
        return [tensor]
    header = torch.zeros(2 + MAX_DIMS, dtype=torch.int64, device=device)
    shape = [BROADCAST_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    header[: len(shape)] = torch.tensor(shape)
    headers = header.new_zeros(group.size * len(header))
    group.all_gather(headers, header, action=EVALUATION_ACTION).wait()
    described = [
        (BROADCAST_DTYPES[code], tuple(dims[:ndim]))
        for code, ndim, *dims in headers.view(group.size, -1).tolist()
    ]
    sizes = [torch.empty(shape, dtype=dtype, device="meta").nbytes for dtype, shape in described]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: tensor.nbytes] = tensor.view(-1).view(torch.uint8)
    received = padded.new_zeros(group.size * len(padded))
    group.all_gather(received, padded, action=EVALUATION_ACTION).wait()
    rows = received.view(group.size, -1)
    return [
        row[:size].clone().view(dtype).view(shape)
        for row, size, (dtype, shape) in zip(rows, sizes, described, strict=True)
    ]
