"""The seconds of a step, from sizes alone: what each rank computes, sends and waits for, summed in closed form.

    a layer, forward     4 or 5 products, attention, what only passes through memory, the meetings of tensor ranks
    backward             each product twice, attention 2.5 times; what is rerun, once more
    a micro-batch        its layers; on the last rank along pp the head and the loss
    in float8, float4    what goes in is cast; attention, norms and the head stay in 16 bits
    small kernels        a layer is not faster than its host asks for them
    heads of odd width   scores of heads no multiple of 8 wide are not computed where matrices are: at float32's speed
    weights one by one   a copy for each rank's piece of each weight, and nothing runs beside the gather: it grows with ranks
    a step               micros x the slowest rank  +  what ranks along pp wait  +  sums over copies that nothing hides
                         + the optimizer

A sketch takes microseconds, a program seconds: a search makes thousands of the one and few of the other. Its closed forms are
those of the papers; what they leave out (unlike parts, transfers that meet) the clock finds when the program is played.

Papers: D. Narayanan et al. 2021, arXiv 2104.04473, section 3; V. Korthikanti et al. 2022, arXiv 2205.05198, section 4.
"""

from dataclasses import dataclass

from meshwright.planner.analytic.model_shape import Shape
from meshwright.planner.analytic.parallel_config import Layout
from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.roofline import HALF, attention, gathered, passed, product, sent

SIXTEEN = "bfloat16"
LAUNCHES = 80  # kernels of a layer's forward
WEIGHTS = 12  # of a layer: matrices, biases and norms
ALIGNED = 8  # 16-bit elements that units for matrices load at once: heads of another width are computed by those for float32
STEPPED = (
    28  # bytes that AdamW reads and writes per weight: gradient, master, two moments, and the weight itself
)


@dataclass(frozen=True)
class Both:
    """Seconds of a forward and of its backward; `weights`: of the latter, its products for gradients of weights, where known."""

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0

    def __add__(self, other: "Both") -> "Both":
        return Both(
            self.forward + other.forward, self.backward + other.backward, self.weights + other.weights
        )

    @property
    def late(self) -> float:
        """W, what can be put off; half of the backward where nothing else is known."""
        return self.weights or self.backward / 2

    @property
    def all(self) -> float:
        """Of both together."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Step:
    """The seconds of a step, and where they go; the parts add up to the whole."""

    compute: float
    tensor: float
    waiting: float
    copies: float
    optimizer: float
    fixed: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute + self.tensor + self.waiting + self.copies + self.optimizer + self.fixed


@dataclass(frozen=True)
class Parts:
    """What a micro-batch takes on one rank: a layer and its `met`ings, the embedding (`first`) and the head (`last`)."""

    layer: Both
    met: Both
    first: Both
    last: Both


def parts(shape: Shape, layout: Layout, machine: Machine) -> Parts:
    """Those of `layout`, without what is rerun: alike wherever tp, cp and micro-batch are."""
    given = shape, layout, machine
    return Parts(layer(*given), meetings(*given), entry(*given), head(*given))


def step(shape: Shape, layout: Layout, machine: Machine, known: Parts | None = None) -> Step:
    """What a step of `shape` under `layout` takes on `machine`; `known` spares a search to count its parts once more."""
    found = known or parts(shape, layout, machine)
    computed, met, first, last = found.layer, found.met, found.first, found.last
    if layout.reruns == "layers":
        computed += Both(0.0, layout.rerun_share * computed.forward)
        met += Both(0.0, layout.rerun_share * met.forward)
    gathers = _gathers(shape, layout, machine, computed + met)
    layers, per_rank = layout.layers(shape), shape.layers / layout.pp
    one = paced(computed + met + gathers, layout, machine)
    if layout.pp == 1:
        slowest, waiting, handed = one.all * shape.layers + first.all + last.all, 0.0, 0.0
    else:
        ends = first.all + last.all if layout.order.folded else max(first.all, last.all)
        ends = (first.all + last.all) / 2 if layout.order.both else ends
        if layers == per_rank:
            slowest = one.all * layers + ends
        else:  # a rank with the head has a layer less, and may be busier for it
            layers, slowest = max(
                (layers, one.all * layers),
                (layers - 1, one.all * (layers - 1) + ends),
                key=lambda each: each[1],
            )
        whole = Both(one.forward * per_rank, one.backward * per_rank, one.weights * per_rank)
        others = layout.pp * whole.all + first.all + last.all - slowest
        handed = handover(shape, layout, machine)
        waiting = waited(layout, whole, others) + 2 * (layout.pp - 1) * handed
    busy = layout.micros * slowest
    turn = (
        handed * machine.rates.handover * (1 - layout.hidden) + machine.rates.turn_s if layout.pp > 1 else 0.0
    )
    between = layout.micros * layout.chunks * turn
    tensor = layout.micros * met.all * layers
    return Step(
        compute=busy - tensor,
        tensor=tensor,
        waiting=waiting + between,
        copies=summed(shape, layout, machine, Both(layers * one.forward, layers * one.backward)),
        optimizer=stepped(shape, layout, machine),
        fixed=machine.rates.fixed_s,
    )


def waited(layout: Layout, whole: Both, others: float) -> float:
    """Seconds that ranks along pp wait, by the paper of their order; `whole` is a rank's part, and `others` all ranks but one."""
    order = layout.order
    share = (order.f * whole.forward + order.b * whole.backward + order.w * whole.late) / whole.all
    share *= (layout.pp / 2 - 1) / (layout.pp - 1) if order.both else 1.0
    # a W longer than what there is to wait fills no more than that
    return max(0.0, share * others / layout.chunks, unfilled(layout, whole, others))


def unfilled(layout: Layout, whole: Both, others: float) -> float:
    """Seconds that ranks along pp wait at least, where too few micro-batches have a W to fill them with: one less than there are.

    Of one micro-batch nothing but F and I is waited for; where they enter at both ends, W of half of the ranks too. `whole` is a
    rank's part, and `others` all ranks but one.
    """
    if not layout.order.fills:
        return 0.0
    half, rest = whole.late, whole.backward - whole.late
    more = (layout.pp / 2 - 2) * half if layout.order.both else 0.0
    return others * (whole.forward + rest) / whole.all - (layout.micros - 1) * half + more


def paced(one: Both, layout: Layout, machine: Machine) -> Both:
    """A layer is not faster than its host asks for its kernels."""
    asked = LAUNCHES * machine.rates.launch_s * (0.5 if layout.compiled else 1.0)
    again = layout.rerun_share if layout.reruns == "layers" else 0.0
    return Both(_longer(one.forward, asked), _longer(one.backward, asked * (1.5 + again)), one.weights)


def _longer(one: float, other: float) -> float:
    """The longer of two that run beside each other; where both take as long they hold each other up a little."""
    return (one**4 + other**4) ** 0.25


def layer(shape: Shape, layout: Layout, machine: Machine) -> Both:
    """What a layer computes for one micro-batch on one rank."""
    tokens, tp, h, f = layout.tokens(shape), layout.tp, shape.hidden, shape.inner / layout.tp
    heads = shape.attended / tp
    groups = max(shape.groups / tp, 1) * shape.width
    made = [(heads + 2 * groups, h), (h, heads), (shape.inward * f, h), (h, f)]
    forward = sum(product(machine, tokens, out, into, layout.dtype) for out, into in made)
    weights = sum(product(machine, out, into, tokens, layout.dtype) for out, into in made)
    backward = weights + sum(product(machine, tokens, into, out, layout.dtype) for out, into in made)
    seen = _attended(shape, layout, machine, heads)
    rates = machine.rates
    across = (
        HALF
        * tokens
        * h
        / (tp if layout.sequence else 1)
        * rates.stream
        * (1.0 if layout.fused else rates.unfused)
    )
    inside = HALF * tokens * (2 * (heads + 2 * groups) + 1.5 * (shape.inward + 1) * f) * rates.inside
    between = passed(machine, across + inside * (0.7 if layout.compiled else 1.0), 8)
    cast = _cast(shape, layout, machine)
    again = seen.forward if layout.reruns == "attention" and layout.kernel in ("eager", "softmax") else 0.0
    again += 0.3 * between if layout.reruns == "attention" else 0.0
    again += between + forward / 2 if layout.reruns == "operators" else 0.0
    return Both(
        forward + seen.forward + between + cast,
        backward + seen.backward + 2 * between + again + cast,
        weights,
    )


def _cast(shape: Shape, layout: Layout, machine: Machine) -> float:
    """What goes into products of few bits is read in 16 and written in 8, as it is and turned round."""
    if layout.dtype in (SIXTEEN, "float16", "float32"):
        return 0.0
    elements = layout.tokens(shape) * (2 * shape.hidden + (shape.attended + shape.inner) / layout.tp)
    times = machine.rates.casts * (machine.rates.casts_rows if layout.dtype == "float8_rowwise" else 1.0)
    return times * 4 * elements / (machine.device.memory_rate * machine.rates.memory)


def _attended(shape: Shape, layout: Layout, machine: Machine, heads: float) -> Both:
    """Attention: a fused kernel computes half of the pairs, those not masked; another one all, and their scores pass memory."""
    tokens = layout.tokens(shape)
    flops = 4 * tokens * shape.sequence * heads
    if layout.kernel not in ("eager", "softmax"):
        return Both(
            *(attention(machine, flops / 2, back=back, kernel=layout.kernel) for back in (False, True))
        )
    rates = machine.rates
    scores = tokens * shape.sequence * shape.heads / layout.tp
    times = rates.scores_eager if layout.kernel == "eager" else rates.scores_fused
    dtype = "float16" if shape.width % ALIGNED == 0 else "float32"
    computed = flops / (machine.peak(dtype) * rates.product * 0.7)
    forward = computed + passed(machine, HALF * scores * times, 4)
    return Both(forward, 2 * computed + passed(machine, 1.5 * HALF * scores * times, 6))


def head(shape: Shape, layout: Layout, machine: Machine) -> Both:
    """The logits of one micro-batch, and their loss: in 16 bits, whatever the layers are computed in."""
    tokens, words, h = layout.tokens(shape), shape.vocab / layout.tp, shape.hidden
    lost = 6 * tokens * words * machine.rates.loss
    forward = product(machine, tokens, words, h, SIXTEEN) + passed(machine, lost, 6)
    backward = product(machine, tokens, h, words, SIXTEEN) + product(machine, words, h, tokens, SIXTEEN)
    return Both(forward, backward + passed(machine, lost, 4))


def entry(shape: Shape, layout: Layout, machine: Machine) -> Both:
    """The embedding of one micro-batch."""
    return Both(passed(machine, 8 * layout.tokens(shape) * shape.hidden, 6), 0.0)


def meetings(shape: Shape, layout: Layout, machine: Machine) -> Both:
    """What tensor ranks send each other in a layer, and ranks along cp: keys and values, unless attention hides them."""
    tokens, h, tp = layout.tokens(shape), shape.hidden, layout.tp
    seen = 1 - layout.hidden * min(1.0, machine.rates.tensor_hidden)
    one = seen * gathered(machine, HALF * tokens * h, tp, layout.apart, layout.ranks)
    forward, backward = 4 * one, (5 if layout.sequence else 4) * one
    if layout.cp > 1:
        beside = _attended(shape, layout, machine, shape.attended / tp)
        groups, swaps = max(shape.groups / tp, 1), layout.swaps
        travels = 2 * HALF * layout.micro_batch * shape.sequence * groups * shape.width / swaps
        seconds = gathered(machine, travels, layout.cp / swaps, layout.beside * swaps, layout.ranks)
        exchanged = (
            2 * HALF * tokens * (shape.attended / tp + max(groups, swaps) * shape.width)
        )  # q and o; k and v
        swapped = gathered(machine, exchanged, swaps, layout.beside, layout.ranks)
        forward += max(0.0, seconds - beside.forward) / 2 + swapped
        backward += max(0.0, 2 * seconds - beside.backward) / 2 + swapped
    return Both(forward, backward)


def handover(shape: Shape, layout: Layout, machine: Machine) -> float:
    """Seconds in which a micro-batch goes from one rank along pp to the next."""
    nbytes = HALF * layout.tokens(shape) * shape.hidden / (layout.tp if layout.sequence else 1)
    return sent(machine, nbytes, layout.tp * layout.sharers)


def _gathers(shape: Shape, layout: Layout, machine: Machine, one: Both) -> Both:
    """Where weights lie in shards: what a layer waits for them longer than it computes, and what both slow each other."""
    if layout.shards < 3 or layout.sharers == 1:
        return Both()
    nbytes = HALF * shape.layer_numel / layout.tp
    whole = gathered(machine, nbytes / HALF * layout.gathers, layout.holders, layout.beside, layout.ranks)
    back = whole + gathered(machine, nbytes / HALF * layout.sums, layout.holders, layout.beside, layout.ranks)
    if layout.piecewise:
        asked = (
            WEIGHTS * layout.holders * machine.rates.launch_s
        )  # a copy for each rank's piece of each weight
        return Both(whole + asked, back + asked)
    beside = machine.rates.beside
    return Both(
        max(0.0, whole - one.forward) + beside * min(one.forward, whole),
        max(0.0, back - one.backward) + beside * min(one.backward, back),
    )


def _own(shape: Shape, layout: Layout) -> float:
    """The weights of one rank along tp and pp: of the last one, with the head."""
    tables = 2 if (layout.pp == 1 and not shape.tied) or layout.order.both else 1
    layers = layout.layers(shape) * (2 if layout.order.both else 1)
    return (layers * shape.layer_numel + tables * shape.table_numel) / layout.tp


def summed(shape: Shape, layout: Layout, machine: Machine, beside: Both) -> float:
    """The sums over copies, and the shares of weights brought together again, as far as nothing hides them.

    Shares of gradients are summed behind every micro-batch, whole ones once; where groups of copies hold the same shares, these
    are summed over the groups. Where micro-batches enter at both ends, two ranks have the same part.
    """
    own, ranks = _own(shape, layout), layout.ranks
    pair = (
        2 * gathered(machine, own * layout.sums, 2, layout.tp * layout.sharers, ranks)
        if layout.order.both
        else 0.0
    )
    if layout.sharers == 1:
        return pair
    hidden = min(1.0, machine.rates.sums_hidden)
    groups = layout.sharers / layout.holders
    shares = own * layout.sums / layout.holders
    across = (
        2 * gathered(machine, shares, groups, layout.beside * layout.holders, ranks) * (1 - hidden) + pair
    )
    whole = own if layout.shards < 3 else 2 * shape.table_numel / layout.tp
    there = gathered(machine, whole * layout.sums, layout.holders, layout.beside, ranks)
    back = gathered(machine, whole * HALF, layout.holders, layout.beside, ranks)
    if layout.shards == 3:
        return there + back + across
    times = layout.micros if layout.shards == 2 else 1
    if not layout.hidden:
        return (times * there + back) * (1 - hidden) + across
    last = min(
        1.0, shape.table_numel / layout.tp / own
    )  # the embedding's come when nothing is left to run beside them
    summed = times * max(last * there, there - hidden * beside.backward)
    return summed + max(last * back, back - hidden * beside.forward) + across


def stepped(shape: Shape, layout: Layout, machine: Machine) -> float:
    """Seconds in which the optimizer reads and writes what it steps."""
    own = _own(shape, layout)
    nbytes = own * STEPPED if layout.shards == 0 else own * (STEPPED / layout.holders + 4)
    return nbytes / (machine.device.memory_rate * machine.rates.memory)
