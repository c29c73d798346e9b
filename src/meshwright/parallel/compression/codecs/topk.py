"""Top-k: of each slice of the gradients, the k elements of largest magnitude travel, each with its index.

Why it works: most of the length of a gradient lies in few elements. The others wait in the residual until
they have grown: error feedback is what makes it converge, and nothing is lost.

    slice j of rank i    k values, k indices    -> rank j          k = density x elements of the slice
    rank j               the sum of n k pairs, exact               at most n k elements differ from 0
                         n k pairs, or the slice   -> all ranks    whichever is smaller

    |x - decoded|^2 <= (1 - k / m) |x|^2                           of m elements, so it contracts

    codes of a slice: [k values, float32][k indices, int32]        c = 8 k
    codes of a sum:   [n k values][n k indices], or [values]       s = min(8 n k, 4 m)

`momentum` moves the momentum of SGD before the codes (*momentum correction*): what waits has grown by as much
as it would have. `local_clip` scales the gradient of a parameter on a rank to that norm / sqrt(n) at most:

    g = clip(gradient)     u = momentum x u + g     v = residual + u     v is coded; u = 0 where v is sent

Where each microbatch is reduced on its own (zero 2 and 3), u decays with the first one of a step, and v takes
the g of each later one. u is in unscaled gradients, P as a residual, and kept to the bit by a step that is
left out. Clipping is of what one sum takes: a slice under tensor parallelism, a shard behind an exact sum.

Selection is exact, and costs little more than one pass: the magnitudes of a random sample of 16384 elements
say which threshold somewhat more than k elements exceed; of these the k largest are taken. Where too few
exceed it, a lower one is taken: the sample decides the time, never the choice. Of equal magnitudes the first
ones are taken; a slice with fewer than k elements that are not 0 sends zeros. So every message has the size
that the plan states. Steps before density is that low (the paper's warm-up) are `exact_steps`: sizes do not
change from step to step, and with `momentum` there are none of them.

Sent per rank, K of N elements: reduce-scatter 8 K (n-1) / n, all-reduce (n-1) / n (8 K + min(8 n K, 4 N)).
Cost: a pass over the gradients beside that for residuals; 4 bytes per element, or 8 with `momentum`.
Limits: with many ranks or large k sums travel as floats, half of an all-reduce: then reduce-scatters (zero)
gain. The largest are chosen within one sum: a bucket of ddp, a parameter group of zero. Over more elements
the choice is better: on 2 ranks, at 0.5 %, ZeRO 2 ended 1.8 % above ddp, and so did ddp with buckets of that
size. What is not finite is above all numbers: it is sent, so that the loss guard sees it. `momentum` is for
SGD, of which `optimizer.momentum` then stays 0, and needs all parameters coded and one update per step. Under
AdamW it learns less per step: a Llama of 3.8 M ended 4 % above the loss of exact sums with a density of 0.01,
after 180 steps as after 540, and under Adafactor too (benchmark `compression_curves`).
Paper: Lin et al. 2018, "Deep Gradient Compression", arXiv 1712.01887 (section 3: sampled threshold, momentum
correction, local clipping, momentum factor masking); Stich et al. 2018, "Sparsified SGD with Memory", arXiv
1809.07599.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import ClassVar

import torch

from meshwright.model.tensors.counter_rng import chunk_numel, uniform
from meshwright.parallel.compression.codecs.sliced_sums import SlicedCodec, slice_numel
from meshwright.parallel.compression.residuals import CodedOperand
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import Constraint, at_least, below_one
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.mesh import ROUND_AXES
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.strategy_state import StateSpec

PAIR_NBYTES, VALUE_NBYTES = 8, 4  # a value and its index; a value
MOMENTUM = "momentum"  # the name of the state that holds the momenta
SAMPLE = 1 << 14  # magnitudes that tell a threshold: 164 of them exceed that of 1 %, give or take 13
DENSITY = Constraint(
    "number above 0 and below 0.5 (a value with its index takes 8 bytes, and 4 alone)",
    lambda value: 0 < value < 0.5,
    "write 0.01; to send all elements, use another mode or remove compress",
)


@dataclass(frozen=True)
class TopKCompression(SlicedCodec):
    """Sums the `density` x elements of largest magnitude of each slice of the gradients.

    With `momentum`, that of SGD is added before; `local_clip` bounds the norm of the gradient of a parameter
    on a rank, times the root of the ranks; 0: neither.
    """

    mode: ClassVar[str] = "topk"
    density: float = field(default=0.01, metadata={"constraint": DENSITY})
    momentum: float = field(default=0.0, metadata=below_one())
    local_clip: float = field(default=0.0, metadata=at_least(0))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from super().check(job, sharding)
        location = f"strategies.{self.name}"
        if not self.error_feedback:
            text = "error_feedback = False with topk: small elements would never be applied"
            yield Diagnostic(text, 'remove it, or use mode = "int8"', f"{location}.error_feedback")
        if self.axis in ROUND_AXES and (self.momentum or self.local_clip):
            text = "momentum and local_clip are of gradients, and what sites send is an outer gradient"
            fix = "set momentum = 0 and local_clip = 0: diloco has outer_momentum, train.clip is of each site"
            yield Diagnostic(text, fix, f"{location}.axis")
        if not self.momentum:
            return
        rules = {job.optimizer.name, *(group.name for group in job.optimizer.groups if group.name)}
        if others := sorted(rules - {"sgd"}):
            text = f"momentum = {self.momentum} before codes, and {', '.join(others)} has its own averages"
            yield Diagnostic(text, 'remove it, or set optimizer.name = "sgd"', f"{location}.momentum")
        own = max((each.momentum for each in (job.optimizer, *job.optimizer.groups)), default=0.0)
        if own:
            text = f"momentum = {self.momentum} before codes, and the optimizer has {own} behind them"
            yield Diagnostic(text, "set optimizer.momentum = 0, or remove it here", f"{location}.momentum")
        if self.exact_steps:
            text = f"momentum before codes, and the first {self.exact_steps} steps have no codes"
            yield Diagnostic(text, "remove exact_steps or momentum", f"{location}.exact_steps")

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from super().check_combined(sharding)
        trained = [each for each in sharding.param_shardings if each.param.trainable]
        exact = [each.param.name for each in trained if not self._selects(each, sharding)]
        if not self.momentum or not exact:
            return
        text = f"momentum before codes, and {len(exact)} parameters are summed exactly ({exact[0]} ...)"
        fix = "remove momentum, and set optimizer.momentum; or choose all parameters"
        if sharding.mesh.size(self._axis(sharding)) == 1:
            text = f"momentum before codes, and one rank along {self._axis(sharding)} codes nothing"
            fix = "remove momentum, and set optimizer.momentum; or use two ranks or more"
        yield Diagnostic(text, fix, f"strategies.{self.name}.momentum")

    def states(self, view: RankView, job: Job) -> Iterable[StateSpec]:
        residuals = tuple(super().states(view, job))
        momenta = (replace(each, name=MOMENTUM) for each in residuals)
        return (*residuals, *momenta) if self.momentum else residuals

    def prepare(self, operand: CodedOperand) -> None:
        operand.decay = self.momentum
        for name, gradient in operand.by_param.items() if operand.after else ():
            if self.local_clip:
                self._clip(operand, name, gradient)
            if self.momentum:
                self._add_momentum(operand, name, gradient)

    def _clip(self, operand: CodedOperand, name: str, gradient: torch.Tensor) -> None:
        """Scales the gradient of this rank to a norm of at most local_clip / sqrt(ranks)."""
        limit = self.local_clip * operand.scale / sqrt(operand.num_ranks)
        factor = (limit / gradient.norm()).clamp_(max=1)  # NaN for NaN, and 0 x infinity is NaN too
        if operand.is_observed:
            operand.clipped[name] = (gradient - gradient * factor) / operand.scale
        gradient.mul_(factor)

    def _add_momentum(self, operand: CodedOperand, name: str, gradient: torch.Tensor) -> None:
        """Adds the gradient to the momentum, and to the gradient, once in a step, the momentum before it."""
        key, begins = f"{MOMENTUM}/{name}", name in operand.begins
        before, momentum = operand.before[key].view(-1), operand.after[key].view(-1)
        torch.mul(before, self.momentum if begins else 1.0, out=momentum)
        momentum.add_(gradient, alpha=1.0 / operand.scale)
        if begins:
            torch.mul(momentum, operand.scale, out=gradient)
        if operand.is_observed:
            operand.momenta[name] = momentum.clone()

    def end_momenta(self, operand: CodedOperand, codes: torch.Tensor) -> None:
        numel = slice_numel(len(operand.values), operand.num_ranks)
        if not self.momentum or not operand.after:
            return
        lengths = (max(0, min(numel, len(operand.values) - rank * numel)) for rank in range(len(codes)))
        sent = torch.cat(
            [
                _pairs(row)[1][: self.num_kept(length)] + rank * numel
                for rank, (row, length) in enumerate(zip(codes, lengths, strict=True))
            ]
        )
        sent = sent.sort().values
        for name, gradient in operand.by_param.items():
            begin = operand.place(name)
            ends = torch.tensor((begin, begin + gradient.numel()), device=sent.device)
            first, last = torch.searchsorted(sent, ends).tolist()
            operand.after[f"{MOMENTUM}/{name}"].view(-1)[sent[first:last] - begin] = 0

    def num_kept(self, numel: int) -> int:
        """Returns k: how many elements of a slice of `numel` travel."""
        return min(numel, max(1, round(self.density * numel)))

    def slice_nbytes(self, numel: int) -> int:
        return PAIR_NBYTES * self.num_kept(numel)

    def sum_nbytes(self, numel: int, num_ranks: int) -> int:
        return min(PAIR_NBYTES * num_ranks * self.num_kept(numel), VALUE_NBYTES * numel)

    def encode_slice(self, values: torch.Tensor, codes: torch.Tensor, key: int) -> None:
        _write_pairs(values, largest(values, self.num_kept(len(values)), key), codes)

    def add_slices(self, arrived: torch.Tensor, total: torch.Tensor) -> None:
        total.zero_()
        for codes in arrived if len(total) else ():
            values, indices = _pairs(codes)
            total.index_add_(0, indices, values.to(total.dtype))

    def encode_sum(self, total: torch.Tensor, codes: torch.Tensor, key: int) -> None:
        if VALUE_NBYTES * len(total) > len(codes):
            # at least as many places as elements that differ from 0; others hold 0 and the index 0
            _write_pairs(total, total.nonzero().view(-1), codes)
            return
        values = codes.view(torch.float32)[: len(total)]
        values.copy_(total)
        _subtract(total, values)

    def decode_sum(self, codes: torch.Tensor, output: torch.Tensor) -> None:
        if VALUE_NBYTES * len(output) <= len(codes):
            output.copy_(codes.view(torch.float32)[: len(output)])
            return
        values, indices = _pairs(codes)
        output.zero_().index_add_(0, indices, values.to(output.dtype))


def largest(values: torch.Tensor, count: int, key: int) -> torch.Tensor:
    """Returns the indices of the `count` elements of largest magnitude of flat `values`, int64.

    Of equal magnitudes the first ones; NaN is above infinity. The sample, which `key` draws, decides how long
    it takes, and not what it returns.
    """
    if len(values) <= SAMPLE:
        return _largest(magnitudes(values), count)
    drawn = uniform(key, 0, SAMPLE, torch.float64, values.device).mul_(len(values)).long()
    sample = magnitudes(values[drawn]).sort(descending=True).values
    expected = SAMPLE * count / len(values)
    rank = int(expected + 3 * sqrt(expected) + 1)  # short in one of 700
    while True:
        threshold = int(sample[rank]) if rank < SAMPLE else -1
        above = _where(values, lambda found, above=threshold: found > above)
        missing = count - len(above)
        if missing <= 0:
            return above[_largest(magnitudes(values[above]), count)]
        ties = _where(values, lambda found, equal=threshold: found == equal, missing)
        if len(ties) == missing:
            return torch.cat((above, ties))
        rank *= 4


def magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Returns integers in the order of the magnitudes of float32 or float64 `values`, the largest for NaN."""
    if values.dtype == torch.float64:
        return values.view(torch.int64) & torch.iinfo(torch.int64).max
    return values.view(torch.int32) & torch.iinfo(torch.int32).max


def _largest(found: torch.Tensor, count: int) -> torch.Tensor:
    if count == len(found):
        return torch.arange(count, device=found.device)
    threshold = found.topk(count, sorted=False).values.min()
    above, ties = (found > threshold).nonzero().view(-1), (found == threshold).nonzero().view(-1)
    return torch.cat((above, ties[: count - len(above)]))


def _where(
    values: torch.Tensor, holds: Callable[[torch.Tensor], torch.Tensor], limit: int | None = None
) -> torch.Tensor:
    """Returns the indices at which `holds(magnitudes)`, at most the first `limit`."""
    indices, begin, count = [torch.empty(0, dtype=torch.int64, device=values.device)], 0, 0
    for chunk in values.split(chunk_numel(values.device)):
        indices.append(holds(magnitudes(chunk)).nonzero().view(-1).add_(begin))
        begin, count = begin + len(chunk), count + len(indices[-1])
        if limit is not None and count >= limit:
            break
    return torch.cat(indices)[:limit]


def _write_pairs(values: torch.Tensor, indices: torch.Tensor, codes: torch.Tensor) -> None:
    """Writes the elements at `indices` into `codes`, zeros, and leaves in `values` what they lose."""
    sent, places = codes.view(2, -1)
    sent, places = sent.view(torch.float32)[: len(indices)], places.view(torch.int32)[: len(indices)]
    kept = values[indices]
    sent.copy_(kept)
    places.copy_(indices)
    _subtract(kept, sent)
    values[indices] = kept


def _subtract(values: torch.Tensor, sent: torch.Tensor) -> None:
    """Leaves in `values` what `sent`, float32, lacks of it: nothing of float32, so that no NaN is owed."""
    if values.dtype == torch.float32:
        values.zero_()
    else:
        values.sub_(sent)


def _pairs(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sent, places = codes.view(2, -1)
    return sent.view(torch.float32), places.view(torch.int32).long()
