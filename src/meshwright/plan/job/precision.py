"""Configures a dtype per role: what a step keeps, computes in and sends (`engine/runtime/mixed_precision.py`
uses them).

    parameters        what blocks compute with and UNSHARD sends
    master            what the optimizer updates; "" is the dtype of parameters
    gradients         the sum that the optimizer reads; "" is the dtype of parameters
    optimizer_states  what the optimizer keeps per element; "" is the dtype of the master
    compute           the operands of matrix products
    reduce            the dtype in which gradients are sent

Some combinations break training silently: float16 without a master, a master narrower than its parameters.
They are refused before anything is built.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import frexp
from typing import Literal

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least, field_diagnostics

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

    If something is float16, the loss is multiplied by a scale that begins with `loss_scale`, doubles after
    `loss_scale_window` steps without an overflow, and is halved by an overflow.
    """

    parameters: FloatDtype = "float32"
    compute: FloatDtype = "float32"
    reduce: FloatDtype = "float32"
    master: OptionalFloatDtype = ""
    gradients: OptionalFloatDtype = ""
    optimizer_states: OptionalFloatDtype = ""
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

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields every combination that cannot train."""
        yield from field_diagnostics(self, "precision")
        yield from self._compute_diagnostics()
        yield from self._master_diagnostics()
        yield from self._gradient_diagnostics()
        if self.optimizer_states not in ("", self.effective.master):
            text = f"optimizer_states in {self.optimizer_states}"
            text += f"; the optimizer keeps them in the dtype of what it updates, {self.effective.master}"
            yield Diagnostic(
                text,
                f'remove it, or set precision.master = "{self.optimizer_states}"',
                "precision.optimizer_states",
            )
        yield from self._scale_diagnostics()

    def notes(self) -> Iterator[str]:
        """Yields what trains, and perhaps not as it was meant."""
        if self.effective.master == "bfloat16":
            yield (
                "bfloat16 parameters without a float32 master: steps below 1/512 of a weight are lost; set "
                'precision.master = "float32"'
            )

    def _compute_diagnostics(self) -> Iterator[Diagnostic]:
        if self.parameters in HALF_DTYPES and self.compute != self.parameters:
            text = f"{self.parameters} parameters with {self.compute} compute"
            yield Diagnostic(
                text, f'use compute = "{self.parameters}", or parameters = "float32"', "precision.compute"
            )
        if self.parameters == "float64" and self.compute != "float64":
            yield Diagnostic(
                f"float64 parameters with {self.compute} compute",
                'use compute = "float64"',
                "precision.compute",
            )
        if self.compute == "float64" and self.parameters != "float64":
            text = f"float64 compute with {self.parameters} parameters"
            yield Diagnostic(text, 'use parameters = "float64"', "precision.parameters")

    def _master_diagnostics(self) -> Iterator[Diagnostic]:
        master = self.effective.master
        if master != self.parameters and (self.parameters not in HALF_DTYPES or master != "float32"):
            text = f"a {master} master of {self.parameters} parameters"
            text += "; a master is float32, for bfloat16 or float16 parameters"
            fix = (
                'set master = "float32"'
                if self.parameters in HALF_DTYPES
                else 'remove it, or set parameters = "bfloat16"'
            )
            yield Diagnostic(text, fix, "precision.master")
        elif master == "float16":
            text = "float16 parameters without a master"
            text += ": updates below 6e-8 vanish, and so does the optimizer's eps of 1e-8"
            yield Diagnostic(text, 'set master = "float32"', "precision.master")

    def _gradient_diagnostics(self) -> Iterator[Diagnostic]:
        for role, dtype in (("gradients", self.effective.gradients), ("reduce", self.reduce)):
            if role == "gradients" and (dtype == "float64") != (self.parameters == "float64"):
                text = f"{dtype} gradients of {self.parameters} parameters"
                yield Diagnostic(
                    text,
                    f'remove it: then they are {self.parameters}, or set "float32"',
                    "precision.gradients",
                )
            elif dtype == "float16" and not self.scales_loss:
                text = f"{role} in float16, and the loss is not scaled: small gradients vanish"
                yield Diagnostic(
                    text, f'set {role} = "bfloat16", or compute = "float16"', f"precision.{role}"
                )

    def _scale_diagnostics(self) -> Iterator[Diagnostic]:
        if not 1 <= self.loss_scale <= 2.0**100 or frexp(self.loss_scale)[0] != 0.5:
            text = f"a loss scale of {self.loss_scale:g}"
            text += "; needed is a power of two from 1 up, so that scaling rounds nothing"
            yield Diagnostic(text, "write 65536.0", "precision.loss_scale")
        if not self.scales_loss and (self.loss_scale, self.loss_scale_window) != (
            DEFAULT_LOSS_SCALE,
            DEFAULT_LOSS_SCALE_WINDOW,
        ):
            text = f"a loss scale, and nothing is computed in float16, but in {self.compute}"
            yield Diagnostic(
                text,
                'remove loss_scale and loss_scale_window, or set compute = "float16"',
                "precision.loss_scale",
            )
