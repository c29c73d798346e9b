"""The gradient noise scale: the batch size up to which more samples per step still pay.

Why it works: the gradient of a batch is the true one plus noise, and the noise averages out. For the mean
over B samples

    E |G_B|^2 = |G|^2 + S / B    G: gradient of all data     S: variance of one sample's, summed over elements

Below B_simple = S / |G|^2 the noise is larger than the signal, and twice the batch allows almost twice the
step; far above it, more samples are wasted. Two batch sizes give two equations in two unknowns, and a step of
data-parallel training has both for free: the small one on every rank before gradients are summed, the big one
after. Unbiased:

    |G|^2 = (B_big |G_big|^2 - B_small |G_small|^2) / (B_big - B_small)
    S     = (|G_small|^2 - |G_big|^2) / (1 / B_small - 1 / B_big)            B_simple = S / |G|^2, in samples

Parts of a batch differ in their loss weight (padding, ignored labels, weights), and a rank may have run out
of data. A part's gradient is divided by the part's own weight c, the whole by the weight C of the step; parts
are averaged with weight c / C:

    |G_small|^2 = sum c/C |G_part|^2 / sum c/C        B_small = B_big (sum c/C) / (number of parts with c > 0)

For tokens this is unbiased with tokens as the unit of noise, reported in samples of the step's mean length.
With gradients h already divided by C, as the engine has them, c/C |G_part|^2 = |h|^2 C/c. That, c/C, and 1
are the three numbers of REDUCE_SQNORM.

One step's estimates are noisy themselves, |G|^2 may even be negative. So both are smoothed, each by an
exponential average over about 100 steps, before their ratio is taken. (No bias correction of the averages: it
would cancel in the ratio.)

Cost: the norm of every gradient once more, and 24 bytes. The averages are saved with a checkpoint.
Limits: on one data rank the small batch is the first microbatch alone, which is unbiased too, and less
precise. Ranks with slices of the weights, or with other stages, add up their squares; a weight that several
stages use is refused. Samples of a step must be independent: samples cut from one document are not, and the
noise is then not that of documents. Norms are computed in the gradients' dtype: with bfloat16 parameters they
have 8 bits, too few for a noise scale far below the batch. Steps that the loss guard skipped, in which
nothing counted, or in which only one part had data, do not enter the averages.
Paper: McCandlish et al. 2018, arXiv 1812.06162, equation 2.9 and appendix A.1.
"""

from collections import defaultdict
from math import isfinite

import torch

from meshwright.engine.runtime.mixed_precision import total_norm
from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler

AVERAGE_DECAY = 0.99  # decay of the averages, per step


class GradientNoiseScale:
    """Handlers of GRAD_SQNORM, REDUCE_SQNORM and NOISE_SCALE, and the two running averages."""

    def __init__(self, state: RankState) -> None:
        self.handlers: dict[str, Handler] = {
            "GRAD_SQNORM": self.compute_grad_sqnorm,
            "REDUCE_SQNORM": self.reduce_sqnorm,
            "NOISE_SCALE": self.update_noise_scale,
        }
        self._state, plan = state, state.plan
        # microbatches in a gradient that is measured once
        self._num_parts = plan.num_microbatches if plan.num_data > 1 else 1
        self._microbatch_by_action = {
            action.name: action.microbatch for action in plan.actions if action.kind == "GRAD_SQNORM"
        }
        self._measured_microbatches = sorted(
            {
                action.microbatch
                for role in plan.program.roles  # a rank may have no trained weight
                for action in role.actions
                if action.kind == "GRAD_SQNORM"
            },
            key=str,
        )
        coordinate = plan.mesh.coordinate(state.world.rank)
        self._counted_params = plan.view.params_counted_in_sum
        # other model-parallel ranks have the same
        self._reports_weights = not any(coordinate[axis] for axis in plan.sharding.model_parallel_axes)
        self._message = torch.zeros(3, dtype=torch.float64)
        tensors = state.strategy_tensors.of("noise_scale") if plan.job.train.noise_scale else {}
        self._averages = tensors.get("averages", torch.zeros(2, dtype=torch.float64))

    def compute_grad_sqnorm(self, action: Action) -> None:
        """Computes the squared norm of the gradients of `action.tensors` on this rank alone."""
        parameters = (
            self._state.trained_module.parameters[name]
            for name in action.tensors
            if name in self._counted_params
        )
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = total_norm(grads) if grads else torch.zeros(())
        self._state.step.local_sqnorms[action.name] = norm.double().to(self._state.world.device) ** 2

    def reduce_sqnorm(self, action: Action) -> None:
        """Starts the sum over ranks of c/C |G_part|^2, of c/C, and of the number of parts.

        Where each microbatch is measured by itself, the rank has as many parts.
        """
        squares: dict[int | None, list[torch.Tensor]] = defaultdict(list)
        for name, square in self._state.step.local_sqnorms.items():
            squares[self._microbatch_by_action[name]].append(square)
        count, weights = self._state.token_counter.totals()[0] or 1.0, self._state.step.microbatch_weights
        weights_behind = {
            microbatch: weights[: self._num_parts]
            if microbatch is None
            else weights[microbatch : microbatch + 1]
            for microbatch in self._measured_microbatches
        }
        fractions = {microbatch: sum(counted) / count for microbatch, counted in weights_behind.items()}
        zero = torch.zeros((), dtype=torch.float64, device=self._state.world.device)
        total = torch.stack(
            [sum(squares[microbatch], zero) / (fraction or 1.0) for microbatch, fraction in fractions.items()]
        ).sum()
        reported_fractions = fractions if self._reports_weights else {}
        sums = [
            sum(reported_fractions.values(), 0.0),
            float(sum(fraction > 0 for fraction in reported_fractions.values())),
        ]
        total = total / self._state.update.loss_scale_value**2
        (reported,) = self._state.copies.to_device([torch.tensor(sums, dtype=torch.float64)])
        self._message = torch.cat([total.view(1), reported])
        self._state.start_collective(action, self._message)

    def update_noise_scale(self, action: Action) -> None:
        """Adds this step's estimates of |G|^2 and S to the averages, and stores their ratio."""
        squares, fraction, num_parts = self._message.tolist()
        num_samples = self._state.token_counter.totals()[2]
        if fraction and self._state.step.spike is None and not self._state.step.overflow:
            estimate_pair = estimate_signal_and_noise(
                squares / fraction,
                num_samples * fraction / num_parts,
                self._state.step.grad_norm**2,
                num_samples,
            )
            if estimate_pair is not None:
                estimate = torch.tensor(estimate_pair, dtype=torch.float64)
                self._averages.copy_(AVERAGE_DECAY * self._averages + (1 - AVERAGE_DECAY) * estimate)
        self._state.step.noise_scale = simple_noise_scale(*self._averages.tolist())


def estimate_signal_and_noise(
    small_sqnorm: float, small_batch: float, big_sqnorm: float, big_batch: float
) -> tuple[float, float] | None:
    """Returns |G|^2 and S, from squared norms of mean gradients over `small_batch` and `big_batch` samples.

    None where the two sizes are equal, or a norm is not finite.
    """
    if not small_batch < big_batch or not isfinite(small_sqnorm) or not isfinite(big_sqnorm):
        return None
    return (
        (big_batch * big_sqnorm - small_batch * small_sqnorm) / (big_batch - small_batch),
        (small_sqnorm - big_sqnorm) / (1 / small_batch - 1 / big_batch),
    )


def simple_noise_scale(grad_sqnorm: float, variance: float) -> float | None:
    """Returns B_simple in samples; None where an average is below 0, or the gradient is 0: not known yet."""
    return variance / grad_sqnorm if grad_sqnorm > 0 and variance >= 0 else None
