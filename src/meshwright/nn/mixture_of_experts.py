"""A mixture of experts: each token goes to a few of many MLPs, so parameters grow and the work does not.

    hidden [samples, tokens, D] -> router -> routing -> which experts, with which weights
                |                                              |
                +--> shared expert (every token) --> + <-- experts (rows sorted by expert)

The layer is plain PyTorch. It computes the same whatever plan runs it: how many samples a rank or a
microbatch has changes nothing, because capacity, random choices and losses belong to a sample. For that,
`hidden` must have its samples apart: [samples, tokens, D], not merged rows.

    moe = MixtureOfExperts(width=256, intermediate=512, num_experts=8, routing=TopK(2))
    hidden = hidden + moe(norm(hidden))

With `return_losses` the layer also returns what balances the router, per sample, as an output: a loss reads
outputs, because with a pipeline the layer may be on another rank than the loss. Scores that are not finite
make outputs that are not finite: a routing hides none.

Cost: tokens x k rows through an MLP of `intermediate` features, and the router: tokens x E scores.
Under context parallelism, routings with capacity and `return_losses` gather few numbers per token
(whole_samples.py).
Limits: under `expert_parallel` a token that is dropped by all its experts still travels. With `ExpertChoice`,
a rank with some of the tokens of a sample has memory for the rows of all: experts may take most of them
there.
"""

from collections.abc import Iterator

import torch
from torch import nn

from meshwright.nn.experts import ExpertMLP, Experts, SharedExpert
from meshwright.nn.router import Router
from meshwright.nn.routing.losses import RouterLosses, router_losses
from meshwright.nn.routing.routes import Routes, Routing
from meshwright.nn.routing.top_k import TopK
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics


class MixtureOfExperts(nn.Module):
    """The layer. `width` is D, `intermediate` the features inside of each expert, `routing` which experts a
    token goes to, `mlp` what an expert computes, `shared_intermediate` the features of an expert for all
    tokens (0: none).
    """

    def __init__(
        self,
        width: int,
        intermediate: int,
        num_experts: int,
        routing: Routing = TopK(),
        mlp: ExpertMLP = ExpertMLP(),
        shared_intermediate: int = 0,
    ) -> None:
        super().__init__()
        sizes = {"width": (width, 1), "intermediate": (intermediate, 1), "num_experts": (num_experts, 1)}
        sizes["shared_intermediate"] = shared_intermediate, 0
        raise_diagnostics([*_size_diagnostics(sizes), *routing.diagnostics(num_experts), *mlp.diagnostics()])
        self.routing = routing
        self.router = Router(width, num_experts, has_choice_bias=routing.has_choice_bias)
        self.experts = Experts(width, intermediate, num_experts, mlp)
        self.expert_rows = ExpertRows()
        self.shared = SharedExpert(width, shared_intermediate, mlp) if shared_intermediate else None

    def forward(
        self, hidden: torch.Tensor, *, return_losses: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, RouterLosses]:
        """Returns what the experts make of `hidden` [samples, tokens, D], and with `return_losses` the losses
        of the router, each [samples].

        Raises PlanError for `hidden` of another number of dims, and for groups that do not divide the tokens.
        """
        if hidden.ndim != 3:
            text = f"the input has the shape {tuple(hidden.shape)}; needed is [samples, tokens, width]"
            fix = "keep samples apart from tokens: merged, the layer would see what a microbatch has"
            raise PlanError(text, fix=fix, location="MixtureOfExperts")
        routes = self.routing.route(hidden, self.router)
        output = self.expert_rows(self.experts, hidden.flatten(0, 1), routes).view(hidden.shape)
        output = output if self.shared is None else output + self.shared(hidden)
        if not return_losses:
            return output
        return output, router_losses(routes, self.router.whole_samples)

    def extra_repr(self) -> str:
        """Returns the routing, as `print(model)` shows it."""
        return f"routing={self.routing}"


class ExpertRows(nn.Module):
    """Runs experts on the tokens that chose them; where few indices are experts, each choice is a row."""

    def forward(self, experts: Experts, tokens: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Returns the weighted sums [samples x tokens, D] of what `experts` return for `tokens`."""
        index, weights = routes.index.flatten(0, 1), routes.weights.flatten(0, 1)
        if routes.num_choices is None:
            return experts(tokens, index, weights)
        is_none = (index == experts.num_experts).flatten().to(torch.uint8)
        chosen = is_none.sort(stable=True).indices[: routes.num_choices]
        token = chosen.div(index.shape[1], rounding_mode="floor")
        choice = (each.flatten().index_select(0, chosen).unsqueeze(1) for each in (index, weights))
        rows = experts(tokens.index_select(0, token), *choice)
        return torch.zeros_like(tokens).index_add(0, token, rows)


def _size_diagnostics(sizes: dict[str, tuple[int, int]]) -> Iterator[Diagnostic]:
    for name, (given, least) in sizes.items():
        if not isinstance(given, int) or isinstance(given, bool) or given < least:
            yield Diagnostic(
                f"{name} is {given!r}; needed is a whole number from {least} up", f"set {name} = 8", name
            )
