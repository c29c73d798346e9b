"""Capacity of experts: groups of tokens, and the place of each token in the expert that it chose.

    group of 6 tokens, choices   a b a a b a         places   0 0 1 2 1 3
    capacity 2                                       tokens 3 and 5 are dropped

A group is one sample, or a fixed number of its tokens. It is never what a rank or a microbatch has: then the
number of devices would decide which tokens are dropped, and so which model is trained. Where ranks have some
of the tokens of a sample, places are found for all of them (`WholeSamples`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isfinite
from typing import Literal

import torch

from meshwright.nn.routing.routes import Routing
from meshwright.plan.job.errors import Diagnostic, PlanError, suggest_name

SAMPLE: Literal["sample"] = "sample"
BATCH_PARTS = ("rank", "device", "microbatch", "micro_batch", "batch", "global_batch")
Priority = Literal["order", "random"]
PRIORITIES = ("order", "random")


def expert_capacity(num_tokens: int, num_experts: int, factor: float) -> int:
    """Returns how many of `num_tokens` an expert takes: factor x tokens / experts, rounded up."""
    exact = Fraction(str(factor)) * num_tokens / num_experts  # 1.1 x 10 is 11 places, and in floats 12
    return min(num_tokens, max(1, ceil(exact)))


@dataclass(frozen=True)
class GroupRouting(Routing):
    """A routing in which the tokens of a group share the capacity of experts: `group_tokens` tokens of a
    sample, or all of it ("sample").
    """

    capacity_factor: float = 1.0
    group_tokens: int | str = SAMPLE

    def size_and_capacity(self, num_tokens: int, num_experts: int) -> tuple[int, int]:
        """Returns the tokens of a group, in samples of `num_tokens`, and the places of an expert in it.

        Raises PlanError if groups do not divide samples.
        """
        size = group_size(self.group_tokens, num_tokens)
        if num_tokens % max(size, 1):
            text = f"groups of {size} tokens do not divide a sample of {num_tokens} tokens"
            divisors = [str(each) for each in range(1, num_tokens + 1) if num_tokens % each == 0]
            fix = f"set group_tokens to one of {', '.join(divisors)}, or to 'sample'; or pad the samples"
            raise PlanError(text, fix=fix, location="routing.group_tokens")
        return size, expert_capacity(size, num_experts, self.capacity_factor)


def group_size(group_tokens: int | str, num_tokens: int) -> int:
    """Returns the tokens of a group in samples of `num_tokens`."""
    return num_tokens if isinstance(group_tokens, str) else group_tokens


def split_groups(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Returns [groups, size, ..] of `tensor` [samples, tokens, ..]."""
    return tensor.unflatten(1, (tensor.shape[1] // max(size, 1), size)).flatten(0, 1)


def join_groups(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns [samples, tokens, ..] of `tensor` [groups, size, ..], with the samples and tokens of `like`."""
    return tensor.reshape(*like.shape[:2], *tensor.shape[2:])


def draw_priority(priority: Priority, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Returns random numbers [samples, tokens] for the tokens of `hidden` if they are served at random; else
    none.
    """
    return [] if priority == "order" else [torch.rand_like(hidden[..., 0], dtype=torch.float32)]


def places_in_experts(
    choices: torch.Tensor,
    num_experts: int,
    taken: torch.Tensor | None = None,
    priority: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the places [groups, size] of tokens in the experts of `choices` [groups, size], and how many
    chose each expert, [groups, E].

    `taken` [groups, E] places are taken before. Tokens are served in order, or with the lowest `priority`
    [groups, size] first.
    """
    order = None if priority is None else priority.sort(dim=1, stable=True).indices
    served = choices if order is None else choices.gather(1, order)
    experts = torch.arange(num_experts, device=choices.device)
    chosen = (served.unsqueeze(-1) == experts).to(torch.int64)
    places = (chosen.cumsum(1) * chosen).sum(-1) - 1
    if taken is not None:
        places = places + taken.gather(1, served)
    if order is not None:
        places = torch.zeros_like(places).scatter(1, order, places)
    return places, chosen.sum(1)


def check_capacity(factor: float, group_tokens: int | str, priority: str = "order") -> Iterator[Diagnostic]:
    """Yields what is wrong with the options of a routing that has a capacity."""
    if not isinstance(factor, (int, float)) or not isfinite(factor) or factor <= 0:
        text = f"the capacity factor is {factor!r}; needed is a number above 0"
        yield Diagnostic(text, "set capacity_factor = 1.25", "routing.capacity_factor")
    if group_tokens in BATCH_PARTS:
        text = f"capacity is for each {group_tokens}, so the number of devices would decide what is dropped"
        fix = "set group_tokens to 'sample', or to a number of tokens that divides each sample"
        yield Diagnostic(text, fix, "routing.group_tokens")
    elif group_tokens != SAMPLE and (type(group_tokens) is not int or group_tokens < 1):
        text = f"group_tokens is {group_tokens!r}; needed is 'sample', or a whole number from 1 up"
        yield Diagnostic(text, "set group_tokens = 'sample'", "routing.group_tokens")
    if priority not in PRIORITIES:
        text = f"the priority of tokens is {priority!r}"
        yield Diagnostic(text, suggest_name(str(priority), PRIORITIES), "routing.priority")
