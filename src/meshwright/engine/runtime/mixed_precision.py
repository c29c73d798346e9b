"""Mixed precision: a dtype per role, and a loss scale where something is float16.

Why it works: products of 16 bits are accurate enough for a direction, and several times as fast; sums of many
small steps are not. A weight in bfloat16 has 8 bits: a step below 1/512 of it is rounded away, every time. So
the optimizer steps a *master* in float32, and the weight is the rounded master; small steps add up there
until they show.

    role               what it is                         read by            bytes per parameter with AdamW
                                                                             bf16+master  bf16 compute  fp32
    parameters         what blocks use, UNSHARD sends     F, B, UNSHARD         2             4            4
    gradients          the sum over all samples           CLIP, STEP            2             4            4
    master             what is stepped                    STEP, checkpoints     4             -            -
    optimizer_states   what the optimizer remembers       STEP, checkpoints     8             8            8
    compute            operands of matrix products        F, B                  -             -            -
    reduce             gradients in messages              REDUCE                -             -            -
                                                                               16            16           16

With float32 parameters and bfloat16 compute (the second column, "autocast") weights are their own masters,
cast at each use. With both in bfloat16 and master = "float32" (the first) they are cast once per step, and
half as much is sent and stored. States are 16 bytes either way: mixed precision saves time, activations and
messages, and no state. Checkpoints hold the master, under the weight's name, so a run may continue in other
dtypes. Gradients are cast to the master's dtype when they are stepped, one parameter group at a time, in the
same memory: one group in float32 comes on top.

float16 has 11 bits, ends at 65504, and has nothing below 6e-8. The loss is multiplied by a power of two
before backward, so that small gradients survive, and the sums are divided by it when they are stepped. A
gradient that overflows makes the norm of all gradients infinite or NaN, on every rank, because they share it:
so all of them skip the step and halve the scale together. After a window of steps without an overflow the
scale doubles.

    scale s    loss * s -> backward -> sum -> norm / s     finite: step with gradients / s; else: s <- s / 2

Cost: one cast per gradient and step.
Limits: float16 wants a device that multiplies it (a CPU without such instructions is right, and up to 70
times slower than in float32); no scale helps a forward that overflows float16. Products in float8
are a strategy, `fp8`.
Papers: Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740 (sections 3.1 masters, 3.2 loss
scaling); Rajbhandari et al. 2020, arXiv 1910.02054 (section 3.1, the 16 bytes).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite

import torch

from meshwright.device.local_device import device_diagnostics, platform_of
from meshwright.plan.job.errors import PlanError, raise_diagnostics
from meshwright.plan.job.precision import HALF_DTYPES, PrecisionConfig
from meshwright.plan.plan import Plan

logger = logging.getLogger(__name__)

HALF_TORCH_DTYPES = (torch.bfloat16, torch.float16)
MIN_LOSS_SCALE, MAX_LOSS_SCALE = 1.0, 2.0**100  # range of the scale


class LossScale:
    """The dynamic loss scale of a float16 run, in the tensors `loss_scale_states`, which checkpoints hold."""

    def __init__(self, precision: PrecisionConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self._value, self._num_good_steps = tensors["value"], tensors["num_good_steps"]
        self._window = precision.loss_scale_window

    @property
    def value(self) -> float:
        """The factor of the loss."""
        return self._value.item()

    def update_on_overflow(self, norm: float, step: int) -> bool:
        """Returns whether a step with this gradient norm must be skipped, and updates the scale.

        Raises PlanError when gradients overflow without any scaling: no smaller scale helps.
        """
        if isfinite(norm):
            self._num_good_steps += 1
            if self._num_good_steps >= self._window:
                self._value.fill_(min(MAX_LOSS_SCALE, 2 * self.value))
                self._num_good_steps.zero_()
            return False
        self._num_good_steps.zero_()
        if self.value <= MIN_LOSS_SCALE:
            text = (
                f"the gradients overflow float16 at a loss scale of {self.value:g}: they are not finite "
                "without scaling either"
            )
            fix = (
                'use compute = "bfloat16", whose range is that of float32; or lower optimizer.lr, and '
                "look at the samples"
            )
            raise PlanError(text, fix=fix, location=f"step {step}")
        self._value.fill_(max(MIN_LOSS_SCALE, self.value / 2))
        return True


def autocast(precision: PrecisionConfig, device: torch.device) -> AbstractContextManager:
    """Returns the context of a forward in `precision.compute`."""
    if precision.compute == precision.parameters:
        return nullcontext()
    # no cache: a cached cast would join the graphs of two blocks that share a weight
    return torch.autocast(device.type, dtype=getattr(torch, precision.compute), cache_enabled=False)


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the norm over all of `tensors`, 0-dim; for half types in float32, where their squares fit."""
    if not any(tensor.dtype in HALF_TORCH_DTYPES for tensor in tensors):
        return torch.nn.utils.get_total_norm(tensors)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors), dtype=torch.float32)))


def check_dtype_support(precision: PrecisionConfig, device: torch.device) -> None:
    """Raises PlanError unless `device` can multiply in the dtypes of `precision`, forward and backward.

    Warns of a dtype that is much slower on this device than another.
    """
    raise_diagnostics(device_diagnostics(platform_of(device), 1, precision.roles.values()))
    for dtype in sorted({precision.parameters, precision.compute} & set(HALF_DTYPES)):
        try:
            x = torch.ones(2, 2, dtype=getattr(torch, dtype), device=device, requires_grad=True)
            (x @ x).sum().backward()
        except RuntimeError as error:
            text = f"the device {device} cannot compute in {dtype}: {str(error).splitlines()[0]}"
            raise PlanError(
                text, fix='set parameters and compute to "float32"', location="precision.compute"
            ) from error
    if device.type == "cpu" and precision.scales_loss:
        logger.warning(
            "float16 on %s is right and slow: up to 70 times slower than float32 or bfloat16 where no "
            "instruction has it",
            device,
        )
    if device.type != "cpu" and precision.leaves_tensor_cores_idle:
        logger.warning(
            "matrices are multiplied in %s on %s, without tensor cores: about a tenth of its speed in "
            'bfloat16; set precision.compute = "bfloat16", or precision.tf32 = true',
            *(precision.compute, device),
        )


def set_float32_products(precision: PrecisionConfig, device: torch.device) -> None:
    """Lets float32 products and convolutions of this process take TF32 if the job says so; else neither.

    torch alone lets convolutions take it and products not. On a CPU nothing is set. Warns if TF32 was on
    before, and the job does not have it.
    """
    if device.type == "cpu":
        return
    if torch.get_float32_matmul_precision() != "highest" and not precision.tf32:
        logger.warning("TF32 was on in this process and is off now; keep it with precision.tf32 = true")
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = precision.tf32


def check_dtypes_match_plan(plan: Plan, tensors: Iterable[tuple[str, str, torch.Tensor]]) -> None:
    """Raises RuntimeError unless each of `tensors` (role, name, tensor) has the dtype of the plan."""
    roles = plan.job.precision.roles
    for role, name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != roles[role]:
            text = f"the {role} of {name} are {dtype} in memory, and the plan says {roles[role]}"
            raise RuntimeError(
                f"{text}; this is a bug: report the plan, and train without precision.{role} meanwhile"
            )
