"""Finds why a plan differs from one device, by experiments on one device.

    init         the initial values differ
    data         the samples of a rank are not those of the plan
    choice of    a token has other experts: of scores that nearly tie, rounding decides
      experts
    plan         the numbers agree, and the messages sent are not those planned
    randomness   two runs on one device differ
    loss         on one device, the batch in two parts has another gradient than the whole batch
    loss scale   all gradients differ by one factor
    technique    none of these: the parallel technique computes something else

The first five look alike on a loss curve. Only the last two are faults of this library; the others have a
repair in the user's code or config, which the verdict names (`CAUSE_NOTES`).
"""

import torch

from meshwright.verifier.one_device.parity_case import ParityCase, TensorsByName
from meshwright.verifier.reference import batch_gradients
from meshwright.verifier.verdict_and_cause import Difference

TOLERANCE = 1e-9  # relative to the largest gradient, in float64


def find_cause(differences: list[Difference], parity_case: ParityCase) -> str:
    """Returns the cause of `differences`; "" without any.

    Where they do not tell it themselves, runs the first batch on one device again, whole and in parts.
    """
    cause = apparent_cause(differences)
    return (_on_one_device(parity_case) or cause) if cause in ("loss scale", "technique") else cause


def apparent_cause(differences: list[Difference]) -> str:
    """Returns the cause that the earliest differences show by themselves; "" without any."""
    if not differences:
        return ""
    start = min(difference.step for difference in differences)
    earliest = [difference for difference in differences if difference.step == start]
    quantities = {difference.quantity for difference in earliest}
    if "initial value" in quantities:
        return "init"
    if "samples" in quantities:
        return "data"
    if "choice of experts" in quantities:
        return "choice of experts"
    if quantities == {"ledger"}:
        return "plan"
    factors = [difference.factor for difference in earliest if difference.quantity == "gradient"]
    known = [factor for factor in factors if factor is not None]
    is_uniform = (
        bool(known)
        and len(known) == len(factors)
        and max(known) - min(known) <= 1e-6 * abs(max(known, key=abs))
    )
    return "loss scale" if is_uniform else "technique"


def _on_one_device(parity_case: ParityCase) -> str | None:
    """Returns "randomness" or "loss" where one device differs from itself."""
    batch = parity_case.batch_reader(parity_case.single_device_plan, 0)(0)
    if batch is None or parity_case.loss.whole_batch:
        return None
    num_samples = len(next(iter(batch.values())))
    whole = batch_gradients(parity_case, batch, [num_samples])
    if _differ(whole, batch_gradients(parity_case, batch, [num_samples])):
        return "randomness"
    half = num_samples // 2
    if half and _differ(whole, batch_gradients(parity_case, batch, [half, num_samples - half])):
        return "loss"
    return None


def _differ(first: TensorsByName, second: TensorsByName) -> bool:
    known = [tensor.nan_to_num().abs().max().item() for tensor in first.values() if tensor.numel()]
    return any(
        not torch.allclose(
            tensor, second[name], rtol=0, atol=TOLERANCE * max(known, default=0.0), equal_nan=True
        )
        for name, tensor in first.items()
    )
