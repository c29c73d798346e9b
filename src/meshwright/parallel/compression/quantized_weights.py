"""qwZ: the weights of ZeRO stage 3 are gathered as codes of one byte, of masters that stay exact.

Why it works: a rank computes with weights that all others send it, and steps a shard that it alone has. If
only what is sent is rounded, the error of a weight is at most half a step of its block, and it is the same in
every step: the next codes are made of the exact shard, so no error adds up. Gradients are taken at the
rounded weights and applied to the exact ones. Every rank decodes the same codes, its own too, so that all
compute with the same bits; forward, backward and recomputation code the same shard, so they use the same
weights.

    rank i      shard i, exact  -> codes i             int8 (int8.py): a scale per block of 256 of the shard
    all ranks   codes 0 .. n-1                         all_gather of bytes, in place of weights
                full weights = values of the codes     what blocks compute with
    STEP        shard i, or its master, with gradients at those values

    sent per rank and gather of N elements: (n-1) c(N/n), c(m) = m + 4 ceil(m / 256): 1.0156 N (n-1)/n
    |weight - shard| <= max |block| / 254

The loss and the gradients of a step are those at the rounded weights. An evaluation, an export and a
checkpoint read the exact shards (in the dtype of the parameters, or masters), as without it. With `hpz`,
codes travel in the gathers over all ranks; those within hosts send the decoded weights, which are the same.

Cost: 1.0156 bytes per element in place of 2 or 4; coding 1/n and decoding all of the weights for each gather,
and buffers for the codes of as many groups as are gathered at once.
Limits: lossy: `verify` compares a plan with one device that computes with the values of the codes and steps
exact weights. Needs zero of stage 3: what is stored whole is stepped where it is decoded. A block with one
huge element codes its others as 0. Blocks begin where shards do, so other meshes round to other weights.
Paper: Wang et al. 2023, "ZeRO++", arXiv 2306.10209, section 3.1 (qwZ); Dettmers et al. 2022, "8-bit
Optimizers via Block-wise Quantization", arXiv 2110.02861.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from meshwright.comm.collectives.group import Rounds
from meshwright.comm.shared_memory import int8_codes
from meshwright.parallel.compression.codecs.block_codes import (
    BLOCK,
    CHUNK,
    SCALE_NBYTES,
    num_blocks,
    split_bytes,
)
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.compression.codecs.sliced_sums import of_peers
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action, Allocation, Program, Transfer
from meshwright.plan.step.single_device_program import stepped_microbatches
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

CODEC = Int8Compression()


@dataclass(frozen=True)
class QuantizedWeights(Strategy):
    """Gathers sharded weights as codes of one byte."""

    name: ClassVar[str] = "quantized_weights"
    phase: ClassVar[StrategyPhase] = "comm"
    exact: ClassVar[bool] = False

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if not any(each.is_stored_sharded for each in sharding.param_shardings):
            text = "no weights are stored in shards, and what is stored whole must stay exact"
            fix = "use zero with stage = 3, or remove quantized_weights"
            yield Diagnostic(text, fix, f"strategies.{self.name}")

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        for frozen in (False, True):
            sharding = sharding.map_param_shardings(
                lambda each: replace(each, is_gathered_as_codes=each.is_stored_sharded), frozen=frozen
            )
        return sharding

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return program.edit(lambda actions: self._gather_codes(actions, view))

    def coding_passes(self, action: Action, view: RankView) -> Mapping[str, int]:
        transfer = action.transfer
        if transfer is None or not transfer.carried_by or not self._carries(action, view):
            return {}
        shard = transfer.nbytes // FLOAT_NBYTES[transfer.dtype]
        return {
            f"encode {CODEC.mode}": shard,
            f"decode {CODEC.mode}": shard * transfer.num_ranks(view.plan.mesh),
        }

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        runtime.wrap("UNSHARD", _CodedGathers(runtime).wrap_unshard)
        return {}

    def gathered_values(self, shard: torch.Tensor) -> torch.Tensor:
        wide = shard.to(torch.promote_types(shard.dtype, torch.float32))
        return CODEC.decode(CODEC.encode(wide, None), len(wide), wide.dtype).to(shard.dtype)

    def _gather_codes(self, actions: list[Action], view: RankView) -> list[Action]:
        if stepped_microbatches(actions):
            text = "the plan updates after every microbatch, and codes are those of the weights of a step"
            fix = "use a schedule that updates once per step (1f1b), or remove quantized_weights"
            raise PlanError(text, fix=fix, location=f"strategies.{self.name}")
        specs = {spec.params[0][0]: spec for spec in view.flat_param_specs.values()}
        coded = {each.name: specs[each.tensors[0]] for each in actions if self._carries(each, view)}
        buffers, sizes, held = _code_buffers(actions, coded), dict[str, int](), dict[str, str]()
        for name, spec in coded.items():
            nbytes = spec.num_ranks * CODEC.code_nbytes(spec.shard_numel)
            sizes[buffers[name]] = max(nbytes, sizes.get(buffers[name], 0))
        edited = []
        for action in actions:
            freed = tuple(held.pop(wait) for wait in action.waits if wait in held)
            action = replace(action, frees=(*action.frees, *freed)) if freed else action
            if action.name in coded and action.transfer is not None:
                held[action.name] = name = buffers[action.name]
                nbytes = CODEC.code_nbytes(coded[action.name].shard_numel)
                codes = Transfer("all_gather", action.transfer.axes, nbytes, dtype="uint8")
                transfer = replace(action.transfer, carried_by=(codes,))
                allocations = (*action.allocations, Allocation(name, sizes[name]))
                action = replace(action, transfer=transfer, allocations=allocations)
            edited.append(action)
        return edited

    @staticmethod
    def _carries(action: Action, view: RankView) -> bool:
        """Returns whether `action` gathers weights over all ranks that share them, and those are several."""
        transfer = action.transfer
        return (
            action.kind == "UNSHARD"
            and transfer is not None
            and not transfer.num_neighbours
            and transfer.num_ranks(view.plan.mesh) > 1
        )


def _code_buffers(actions: Iterable[Action], coded: Container[str]) -> dict[str, str]:
    """Returns the name of the buffer of codes of each gather in `coded`: one beside each buffer of weights,
    which is taken as long or longer.
    """
    found, fetched = dict[str, str](), dict[str, str]()
    for action in actions:
        if action.kind == "FETCH_PARAM" and action.allocations:  # of a shard that rests on the host
            fetched[replace(action, kind="UNSHARD").name] = action.allocations[0].name
        if action.name in coded:
            weights = action.allocations[0].name if action.allocations else fetched[action.name]
            found[action.name] = f"codes of {weights}"
    return found


class _CodedGathers:
    """The gathers of codes of one rank."""

    def __init__(self, runtime: Runtime) -> None:
        self._state = runtime.state

    def wrap_unshard(self, handler: Handler) -> Handler:
        """Returns a handler of UNSHARD that gathers codes where the plan says so."""

        def unshard(action: Action) -> None:
            state, transfer = self._state, action.transfer
            if transfer is None or not transfer.carried_by:
                handler(action)
                return
            group, operand, buffer = (
                state.world.group(transfer.axes),
                state.operand(action),
                action.allocations[-1],
            )
            codes = state.flat_params.buffer(buffer.name, buffer.nbytes, torch.uint8)
            rows = codes[: group.size * transfer.messages[0].nbytes].view(group.size, -1)
            rounds = _gather_rounds(operand.input, operand.output, rows, group.index)
            state.start_exchange(action, group, rounds)

        return unshard


def _gather_rounds(shard: torch.Tensor, full: torch.Tensor, rows: torch.Tensor, index: int) -> Rounds:
    """Yields the one round of a gather: the codes of `shard` to all others, and theirs into `rows`."""
    # gathers begin within the model's forward, whose modes (of verify: all in float64) are not for codes
    with torch._C.DisableTorchFunction():
        encode_shard(shard, rows[index])
    yield of_peers(rows[index].expand_as(rows), index), of_peers(rows, index)
    with torch._C.DisableTorchFunction():
        decode_shards(rows, full.view(len(rows), -1))


def encode_shard(shard: torch.Tensor, codes: torch.Tensor) -> None:
    """Writes the codes of the flat `shard`, which stays as it is: the scales of all blocks, then bytes."""
    wide = torch.promote_types(shard.dtype, torch.float32)
    if not int8_codes.can_code(shard.new_empty(0, dtype=wide)):
        codes.copy_(CODEC.encode(shard.to(wide), None))
        return
    scales, steps = split_bytes(codes, len(shard))
    for begin in range(0, len(shard), CHUNK):
        chunk = shard[begin : begin + CHUNK].to(wide, copy=True)  # coding leaves in it what it loses
        int8_codes.encode(chunk, *_of_chunk(scales, steps, begin, len(chunk)))


def decode_shards(rows: torch.Tensor, full: torch.Tensor) -> None:
    """Writes the values of the codes in `rows`, uint8 [ranks, bytes], into `full` [ranks, shard_numel]."""
    wide, numel = torch.promote_types(full.dtype, torch.float32), full.shape[1]
    in_place = wide == full.dtype
    for begin in range(0, numel, CHUNK):
        columns = full[:, begin : begin + CHUNK]
        if not int8_codes.can_code(full.new_empty(0, dtype=wide)):
            columns.copy_(_decoded_columns(rows, numel, begin, columns.shape[1], wide))
            continue
        for codes, place in zip(rows, columns, strict=True):
            values = place if in_place else torch.empty_like(place, dtype=wide)
            parts = _of_chunk(*split_bytes(codes, numel), begin, len(values))
            int8_codes.decode(*parts, values, add=False)
            if not in_place:
                place.copy_(values)


def _of_chunk(
    scales: torch.Tensor, steps: torch.Tensor, begin: int, numel: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bytes of the scales, and the codes, of `numel` elements from `begin`, a multiple of a
    block.
    """
    first = SCALE_NBYTES * (begin // BLOCK)
    return scales[first : first + SCALE_NBYTES * num_blocks(numel)], steps[begin : begin + numel]


def _decoded_columns(
    rows: torch.Tensor, numel: int, begin: int, length: int, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the values of elements `begin` to `begin + length` of all ranks, in a few operations."""
    num_scales, blocks = SCALE_NBYTES * num_blocks(numel), num_blocks(length)
    first = SCALE_NBYTES * (begin // BLOCK)
    scales = rows[:, first : first + SCALE_NBYTES * blocks].clone().view(torch.float32).to(dtype)
    steps = rows[:, num_scales + begin : num_scales + begin + length].view(torch.int8).to(dtype)
    padded = torch.nn.functional.pad(steps, (0, blocks * BLOCK - length)).view(len(rows), blocks, BLOCK)
    return (padded * scales.unsqueeze(2)).view(len(rows), -1)[:, :length]
