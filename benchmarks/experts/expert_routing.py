"""Every routing of `mw.nn.MixtureOfExperts` against the loops of its paper, in float64.

Compared are the output, the losses of the router, and the gradients of the input and of every parameter, for
a sum in which each element has its own weight. The error is the largest difference, relative to the largest
magnitude of its tensor.

    options      those of each routing; experts with and without gate, bias and a shared expert
    sizes        odd numbers of samples, tokens and experts; one expert; k = E; one token
    routers      random; all scores equal (ties); all tokens to one expert; an expert that no token chooses
    modes        training, and evaluation for routings that draw

A case with a capacity says how many choices were dropped.

    python -m benchmarks.experts.expert_routing       a minute
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.experts.routing_loops import looped_output
from benchmarks.harness.result import Result
from meshwright.nn import (
    ExpertChoice,
    ExpertMLP,
    GShard,
    MixtureOfExperts,
    Routing,
    SigmoidGroups,
    Switch,
    TopK,
)

NAME = "expert_routing"
CLAIM = (
    "outputs, router losses and all gradients of every routing equal loops written from its paper to 1e-10 "
    "in float64: ties, one expert for all tokens, experts without a token, dropped tokens, random choices"
)
TOLERANCE, WIDTH, INTERMEDIATE = 1e-10, 5, 3
ROUTERS = ("random", "ties", "one expert", "an idle expert")
GATED, PLAIN = ExpertMLP(), ExpertMLP("gelu", gated=False, bias=True)


@dataclass(frozen=True)
class Case:
    """A routing with its experts: their number, samples and tokens, how the router is filled, the mode; and
    the seed of all numbers.
    """

    routing: Routing
    num_experts: int
    shape: tuple[int, int]
    router: str = "random"
    training: bool = True
    mlp: ExpertMLP = GATED
    shared_intermediate: int = 0
    seed: int = 1

    def __str__(self) -> str:
        mode = f"seed {self.seed}" if self.training else f"seed {self.seed}, evaluation"
        return f"{self.routing}, {self.num_experts} experts, {self.shape}, {self.router}, {mode}"

    def layer_and_input(self) -> tuple[MixtureOfExperts, torch.Tensor]:
        """Returns the layer and its input [samples, tokens, WIDTH], with the same numbers each time."""
        torch.manual_seed(self.seed)
        sizes = WIDTH, INTERMEDIATE, self.num_experts
        layer = MixtureOfExperts(*sizes, self.routing, self.mlp, self.shared_intermediate).double()
        hidden = torch.randn(*self.shape, WIDTH, dtype=torch.float64)
        hidden[..., 0] = hidden[..., 0].abs() + 0.5
        with torch.no_grad():
            layer.router.weight.mul_(4)
            if self.router == "ties":
                layer.router.weight.zero_()
            elif self.router == "one expert":
                layer.router.weight[-1, 0] += 40
            elif self.router == "an idle expert":
                layer.router.weight[-1, 0] -= 40
            if layer.router.choice_bias is not None:
                layer.router.choice_bias.copy_(torch.linspace(0.2, -0.9, self.num_experts))
        return layer.train(self.training), hidden.requires_grad_()


def cases() -> Iterator[Case]:
    """Yields all cases."""
    for routing, num_experts, shape in _sizes():
        for router in ROUTERS:
            yield Case(routing, num_experts, shape, router)
    for routing in (GShard(1.0, 3, "random"), Switch(1.0, noise_size=0.3, priority="random")):
        yield Case(routing, 4, (2, 6), training=False)
    for routing in (TopK(2), GShard(1.0), Switch(1.0), ExpertChoice(), SigmoidGroups(2)):
        yield Case(routing, 3, (3, 5), mlp=PLAIN, shared_intermediate=4)
    for seed in (3001, 4001, 5001):  # scores of several tokens round to 1, in another order than they have
        yield Case(ExpertChoice(1.0), 3, (3, 7), "one expert", seed=seed)


def _sizes() -> Iterator[tuple[Routing, int, tuple[int, int]]]:
    yield from ((TopK(k, normalized=each), 5, (3, 7)) for k in (2, 3, 5) for each in (False, True))
    yield from ((TopK(1, normalized=False), each, (2, 5)) for each in (1, 3))
    yield TopK(2), 2, (1, 1)
    for factor in (0.5, 1.0, 2.0):
        yield from ((GShard(factor), 3, (3, 7)), (GShard(factor, 3, "random"), 4, (2, 6)))
        yield from ((Switch(factor, noise_size=0.0), 3, (3, 7)), (Switch(factor, 2, 0.3), 4, (2, 6)))
        yield Switch(factor, 3, 0.2, "dropout", "random"), 5, (2, 9)
        yield from ((ExpertChoice(factor), 3, (3, 7)), (ExpertChoice(factor, 3), 4, (2, 6)))
    yield from ((Switch(1.0), 1, (2, 3)), (ExpertChoice(3.0), 3, (2, 1)), (GShard(1e-3), 2, (2, 3)))
    for normalized, scale in ((True, 2.5), (False, 1.0)):
        yield SigmoidGroups(3, normalized=normalized, scale=scale), 5, (3, 7)
        yield from ((SigmoidGroups(k, 4, 2, normalized, scale), 8, (2, 5)) for k in (3, 4))
        yield SigmoidGroups(2, 3, 1, normalized, scale), 6, (2, 5)


def compare(case: Case) -> dict[str, object]:
    """Returns the error of one case, and how many choices were dropped."""
    layer, hidden = case.layer_and_input()
    torch.manual_seed(2)
    found = layer(hidden, return_losses=True)
    torch.manual_seed(2)
    output, balancing, z, num_dropped = looped_output(layer, hidden)
    pairs = [(found[0], output), (found[1].load_balancing, balancing), (found[1].z, z)]
    leaves = [hidden, *layer.parameters()]
    grads = [_grads([pair[side] for pair in pairs], leaves) for side in (0, 1)]
    pairs += list(zip(*grads, strict=True))
    error = max(_difference(*pair) for pair in pairs)
    return {"case": str(case), "error": error, "dropped": num_dropped}


def _grads(values: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the gradients of a sum in which each element has a weight of its own."""
    total = sum(
        (value * torch.linspace(0.3, 1.7, value.numel(), dtype=torch.float64).view(value.shape)).sum()
        for value in values
    )
    found = torch.autograd.grad(torch.as_tensor(total), leaves, allow_unused=True)
    pairs = zip(found, leaves, strict=True)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in pairs]


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not found.isfinite().all():
        return float("inf")
    difference, scale = (float(each.detach().abs().max()) for each in (found - expected, expected))
    return difference / max(1e-3, scale)


def result(rows: list[dict[str, object]]) -> Result:
    """Returns the result of all cases: how many are equal."""
    errors = [float(str(row["error"])) for row in rows]
    return Result.of_count(NAME, CLAIM, errors, limit=TOLERANCE, bar=len(rows), detail={"cases": rows})


def main() -> None:
    """Compare all cases, and write the result."""
    torch.set_num_threads(1)
    rows = []
    for case in cases():
        rows.append(compare(case))
        print(rows[-1], file=sys.stderr, flush=True)
    print(result(rows).write(NAME))


if __name__ == "__main__":
    main()
