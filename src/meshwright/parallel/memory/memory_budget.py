"""Memory budget: blocks keep, recompute, encode or offload activations, as fast as a number of bytes allows.

Why it works: of two blocks with as many bytes the one that runs faster should run again; a block near the end
is needed again at once, one near the begin only when all others have given their memory back; and an input
that is large beside what a block saves inside need not be kept either: block calls in a row, a segment, can
start again from the input of the first. What is best depends on all blocks together. The bytes and operations
of each are known from a trial, and a dynamic program over the chain finds the fastest choice whose peak fits
(plan/step/memory/activation_budget.py has the peak and the program).

    choice          held between F and B          before B                        time added
    keep            input, activations            -                               0
    recompute       input                         RECOMPUTE                       one forward
    selective       input, outputs of matmul,     RECOMPUTE without these         norms, activation functions,
                    of attention, or of both      operations                      the other of the two
    segment a .. b  input of a                    RECOMPUTE_OUTPUT a .. b-1,      one forward of a .. b, of
                                                  RECOMPUTE b, ... RECOMPUTE a    a .. b-1 at most two
    gist            input, encoded activations    decode                          passes over memory
    offload         input; activations on the     FETCH_ACTIVATIONS, beside the   copies that take longer than
                    host                          backward of the next block      what they run beside

    before   F0 F1 F2 F3 LOSS B3 B2 B1 B0                 below, 1 and 2 are a segment
    after    F0 F_CHECKPOINTED1 F_INPUT_DROPPED2 F3 LOSS B3 RECOMPUTE_OUTPUT1 RECOMPUTE2 B2 RECOMPUTE1 B1 B0

    activations at any time <= budget_mb MiB       outputs of blocks, what they save, scratch of backwards,
                                                   gradients between blocks and of the loss, received values

`budget_mb` is for one rank, with all its microbatches in flight; 0 takes as few bytes as possible. Weights,
their gradients and optimizer states are not in it. `choices` are those beside keeping: "recompute",
"segment", "selective" (as `save` of activation_checkpointing; for each block call "matmul", "attention" or
both, whatever is best), "gist" where the model has ReLU or max pooling, and "offload". `blocks` selects by
patterns which block calls may run again.

"offload" is `activation_offload` of saved activations, a bytes each: they leave beside the forward of the
next block call, f seconds, and come back beside its backward, for which 2 f stand. `host_gb_per_s` is the
rate R of the host link one way, in 10^9 bytes per second; the commands fill it in with that of
`run.hardware`, as `forward_ms`. Without both, offload is not offered; on a CPU, whose memory is that of the
host, nobody fills it in.

    time added    max(0, a / R - f) + max(0, a / R - 2 f), and a hundredth of both copies: of choices that
                  hide them all, the one that copies less
    host memory   the sum of a over offloaded block calls and microbatches in flight. With `host_gb` (2^30
                  bytes per rank) the first block calls have the choice, as many as fit together

`forward_ms` are measured milliseconds of the forward of each block call of the model, in order, `matmul_ms`
and `attention_ms` what these operations take of them; the commands fill them in with those predicted for
`run.hardware` (a kind of device, or a file of `bench device`), if the config names it. Else a block takes the
time of its operations, where a byte read or written counts as 20. In a segment, what a rerun saves before the
last one counts as read once more: it has left the cache. With "selective", a call of Python for each torch
function, in both runs, counts as a million operations. If everything fits, the plan is the one without it.

Cost: about a second of planning for 200 block calls. Bytes sent: those of the forwards that run again.
Bytes copied over the host link: a, once out and once in. Two blocks that both are offloaded hold 2 a while
one is computed.
Limits: an output is kept if more than the next block call reads it, or code between blocks does. A block call
runs at most three times. All microbatches choose alike. With halves of backwards (I, W) what runs again stays
until W. Bytes are those measured in a trial; where the data decides (experts, gist) the expected ones; if
ranks have unequal slices, without buffers of collectives inside blocks, and with experts as one device has
them. What selective checkpointing refuses is not chosen: block calls with experts, attention over ranks that
share tokens, all of it where the residual stream is sharded by features. A block call of a segment keeps no
outputs. In a pipeline the outputs of a stage stay until its forward ends.
Paper: Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains: how to train deep neural
networks with limited memory", arXiv 1911.13214; Jain et al. 2020, "Checkmate: Breaking the Memory
Wall with Optimal Tensor Rematerialization", arXiv 1910.02653.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil, inf
from typing import ClassVar

from meshwright.parallel.memory.activation_checkpointing import checkpointing_diagnostics
from meshwright.parallel.memory.budgeted_chain import (
    GIST,
    OFFLOAD,
    SEGMENT,
    SELECTIVE,
    BlockTimes,
    apply_choice,
    budgeted_chain,
)
from meshwright.parallel.memory.early_stop import stop_early
from meshwright.parallel.memory.gist import encode_forwards, is_encoded
from meshwright.parallel.memory.selective_outputs import keep_in_forwards
from meshwright.parallel.memory.tiers.activation_offload import HOST_GB_FIX
from meshwright.parallel.memory.tiers.kept_tensor_copies import KeptTensorCopies
from meshwright.plan.job.errors import Diagnostic, PlanError, format_nbytes
from meshwright.plan.job.field_constraints import above, at_least, one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.block_patterns import matches_any
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.memory.activation_budget import RECOMPUTE, ActivationBudget
from meshwright.plan.step.memory.activation_copies import ACTIVATION_COPIES
from meshwright.plan.step.memory.recomputed_segments import check_nothing_recomputed
from meshwright.plan.step.program import Action, Program
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

LOCATION = "strategies.memory_budget"
MIB = 2**20
LINK_FIX = "write the 10^9 bytes per second of the host link one way: 63 for PCI Express 5; 0: unknown"
MILLISECONDS = "write milliseconds, one number for each block call"


@dataclass(frozen=True)
class MemoryBudget(Strategy):
    """Chooses per block call what keeps or recomputes its activations, so that these take at most `budget_mb`
    MiB at any time; 0: as few as possible.

    `choices` beside keeping; `blocks` may run again (without them: all); `forward_ms` as measured, per block
    call of the model, with its parts `matmul_ms` and `attention_ms`. `host_gb_per_s` is the rate of the host
    link, `host_gb` the host memory that activations of a rank may use, in GB of 2^30 bytes; None: no bound.
    """

    name: ClassVar[str] = "memory_budget"
    phase: ClassVar[StrategyPhase] = "memory"
    budget_mb: float = field(
        default=0.0, metadata=at_least(0, "write MiB of activations per rank; 0 takes as few as possible")
    )
    choices: tuple[str, ...] = field(
        default=(RECOMPUTE, SEGMENT, SELECTIVE, OFFLOAD),
        metadata=one_of(RECOMPUTE, SEGMENT, SELECTIVE, GIST, OFFLOAD),
    )
    blocks: tuple[str, ...] = ()
    forward_ms: tuple[float, ...] = field(default=(), metadata=at_least(0, MILLISECONDS))
    matmul_ms: tuple[float, ...] = field(default=(), metadata=at_least(0, MILLISECONDS))
    attention_ms: tuple[float, ...] = field(default=(), metadata=at_least(0, MILLISECONDS))
    host_gb_per_s: float = field(default=0.0, metadata=at_least(0, LINK_FIX))
    host_gb: float | None = field(default=None, metadata=above(0, fix=HOST_GB_FIX))

    @property
    def needs_stage_boundaries(self) -> bool:  # type: ignore[override]
        """Whether it reads ModelSpec.stage_boundaries: which block calls read what others return."""
        return SEGMENT in self.choices

    @property
    def excludes(self) -> Mapping[str, str]:  # type: ignore[override]
        """What copies activations of its own."""
        text = 'both copy activations to the host; leave "offload" out of its choices'
        return {"activation_offload": text} if self.offers_offload else {}

    @property
    def offers_offload(self) -> bool:
        """Whether block calls may be offloaded: their seconds and those of copies are known."""
        return OFFLOAD in self.choices and bool(self.forward_ms) and self.host_gb_per_s > 0

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        model_spec = sharding.model_spec
        yield from checkpointing_diagnostics(self.blocks, model_spec, LOCATION)
        yield from self._check_times(model_spec.block_calls)
        if SEGMENT in self.choices and RECOMPUTE not in self.choices:
            text = "block calls of a segment are recomputed, and `choices` leaves out recompute"
            yield Diagnostic(text, 'add "recompute", or leave out "segment"', f"{LOCATION}.choices")
        if GIST in self.choices and not model_spec.relu_activations:
            text = f"no block of {model_spec.name} has a ReLU or a max pooling inside: gist saves 0 bytes"
            yield Diagnostic(text, 'leave out "gist"', f"{LOCATION}.choices")
        if self.choices == (OFFLOAD,) and not self.offers_offload:
            text = "offload alone is no choice where the seconds of blocks and of copies are unknown"
            fix = "write forward_ms and host_gb_per_s, or add other choices"
            yield Diagnostic(text, fix, f"{LOCATION}.choices")
        if self.host_gb is not None and OFFLOAD not in self.choices:
            text = f"host_gb = {self.host_gb:g} bounds what is offloaded, and `choices` leaves out offload"
            yield Diagnostic(text, 'add "offload", or leave out host_gb', f"{LOCATION}.host_gb")

    def _check_times(self, calls: tuple[str, ...]) -> Iterator[Diagnostic]:
        given = {
            "forward_ms": self.forward_ms,
            "matmul_ms": self.matmul_ms,
            "attention_ms": self.attention_ms,
        }
        for name, times in given.items():
            if len(times) not in (0, len(calls)):
                text = f"{name} has {len(times)} numbers, and the model {len(calls)} block calls: "
                text += ", ".join(calls if len(calls) < 9 else (*calls[:3], "...", calls[-1]))
                yield Diagnostic(text, "write one number for each, or none", f"{LOCATION}.{name}")
            elif times and not self.forward_ms:
                text = f"{name} is a part of the time of blocks, and forward_ms is missing"
                yield Diagnostic(text, f"write forward_ms, or leave out {name}", f"{LOCATION}.{name}")

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return program.edit(lambda actions: self._fit(actions, view, job))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        forwards = [each for each in runtime.state.plan.actions if each.kind == "F" and is_encoded(each)]
        if GIST in self.choices:
            encode_forwards(runtime, forwards)
        unread = stop_early(runtime)
        if SELECTIVE in self.choices:
            keep_in_forwards(runtime, unread)
        kinds = {action.kind for action in runtime.state.plan.actions}
        if self.offers_offload and kinds & {*ACTIVATION_COPIES}:
            return KeptTensorCopies(runtime.state).handlers
        return {}

    def _fit(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        """Returns `actions` with the fastest choice that fits. Raises PlanError if none does."""
        check_nothing_recomputed(actions)
        chain = budgeted_chain(actions, view, job, self._times, self._may_rerun, self.choices)
        limit, kept_nbytes = self.budget_mb * MIB, chain.peak_nbytes(None)
        if kept_nbytes <= limit:
            return actions
        budget = ActivationBudget(chain.blocks, chain.loss_nbytes, use_segments=SEGMENT in self.choices)
        # the program has the last word: it knows in which order microbatches run
        found = chain.with_peaks(budget.choices())
        least, chosen = min(found, key=lambda each: each[0])
        if limit:
            fitting = [choice for nbytes, choice in found if nbytes <= limit]
            if not fitting:
                raise self._too_small(min(least, kept_nbytes), view)
            chosen = fitting[-1]
        elif least >= kept_nbytes:
            return actions
        return apply_choice(actions, chosen, view, job)

    @property
    def _times(self) -> BlockTimes:
        op_ms = {"matmul": self.matmul_ms, "attention": self.attention_ms}
        known = {op: given for op, given in op_ms.items() if given}
        host_nbytes = inf if self.host_gb is None else self.host_gb * 2**30
        return BlockTimes(self.forward_ms, known, 1e9 * self.host_gb_per_s, host_nbytes)

    def _may_rerun(self, block_call: str) -> bool:
        return not self.blocks or matches_any(block_call, self.blocks)

    def _too_small(self, least: int, view: RankView) -> PlanError:
        calls = view.model_spec.block_calls
        text = (
            f"budget_mb = {self.budget_mb}, and the activations of the block calls '{calls[0]}' to "
            f"'{calls[-1]}' take {format_nbytes(least)} at least"
        )
        enough = ceil(least / MIB * 1e6) / 1e6
        fix = (
            f"write budget_mb = {enough} or more, or let a rank have less: a smaller micro_batch, more ranks"
        )
        if OFFLOAD in self.choices and not self.offers_offload:
            text += "; none is offloaded, because forward_ms or host_gb_per_s is unknown"
        return PlanError(text, fix=fix, location=f"{LOCATION}.budget_mb")
