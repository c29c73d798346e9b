"""Configures a dtype per role: what a step keeps, computes in and sends (`engine/runtime/mixed_precision.py`
uses them).

    parameters        what blocks compute with and UNSHARD sends
    master            what the optimizer updates; "" is the dtype of parameters
    gradients         the sum that the optimizer reads; "" is the dtype of parameters
    optimizer_states  what the optimizer keeps per element; "" is the dtype of the master
    compute           the operands of matrix products
    reduce            the dtype in which gradients are sent

Some combinations break training silently: float16 without a master, a master narrower than its parameters.
`Job.diagnostics` refuses them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from meshwright.plan.job.field_constraints import at_least

FloatDtype = Literal["float64", "float32", "bfloat16", "float16"]
OptionalFloatDtype = Literal["", "float64", "float32", "bfloat16", "float16"]

HALF_DTYPES = ("bfloat16", "float16")
ROLES = ("parameters", "master", "compute", "gradients", "reduce", "optimizer_states")
DEFAULT_LOSS_SCALE, DEFAULT_LOSS_SCALE_WINDOW = 65536.0, 2000


@dataclass(frozen=True)
class PrecisionConfig:
    """A dtype per role.

    `parameters` is that of the weights in the blocks, `compute` that of matrix products (bfloat16 with
    float32 parameters is autocast). `reduce` is that in which gradients are sent. `master` and `gradients`
    default to the dtype of `parameters`, `optimizer_states` to that of `master`.

    With `tf32`, GPUs round float32 operands of matrix products and convolutions to TF32 (10 bits behind the
    point, where float32 has 23), which tensor cores multiply; without it, of neither. CPUs do not change.

    If something is float16, the loss is multiplied by a scale that begins with `loss_scale`, doubles after
    `loss_scale_window` steps without an overflow, and is halved by an overflow.
    """

    parameters: FloatDtype = "float32"
    compute: FloatDtype = "float32"
    reduce: FloatDtype = "float32"
    master: OptionalFloatDtype = ""
    gradients: OptionalFloatDtype = ""
    optimizer_states: OptionalFloatDtype = ""
    tf32: bool = False
    loss_scale: float = DEFAULT_LOSS_SCALE
    loss_scale_window: int = field(default=DEFAULT_LOSS_SCALE_WINDOW, metadata=at_least(1))

    @property
    def effective(self) -> "PrecisionConfig":
        """The same with every "" replaced by its default."""
        master = self.master or self.parameters
        return replace(
            self,
            master=master,
            gradients=self.gradients or self.parameters,
            optimizer_states=self.optimizer_states or master,
        )

    @property
    def roles(self) -> dict[str, str]:
        """The dtype of each role, none empty, in the order of ROLES."""
        effective = self.effective
        return {role: vars(effective)[role] for role in ROLES}

    @property
    def scales_loss(self) -> bool:
        """Whether gradients may leave the range of float16, so that the loss is scaled."""
        return "float16" in (self.parameters, self.compute)

    @property
    def compute_text(self) -> str:
        """The dtype of matrix products, as a run shows it beside its speed."""
        return f"{self.compute} (TF32 on GPUs)" if self.compute == "float32" and self.tf32 else self.compute

    @property
    def leaves_tensor_cores_idle(self) -> bool:
        """Whether matrix products on a GPU take none of its tensor cores: about a tenth of its speed."""
        return self.compute in ("float32", "float64") and not (self.compute == "float32" and self.tf32)

    def notes(self) -> Iterator[str]:
        """Yields what trains, and perhaps not as it was meant."""
        if self.effective.master == "bfloat16":
            yield (
                "bfloat16 parameters without a float32 master: steps below 1/512 of a weight are lost; set "
                'precision.master = "float32"'
            )
