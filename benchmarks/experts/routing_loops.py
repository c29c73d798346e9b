"""The algorithms of the routing papers as loops over samples, groups, tokens and experts.

They share no code with meshwright.nn.routing but the options, and draw what the layer draws, in the same
order: noise of the router's input, priorities, chances of second experts. Weights and losses are made of
scalars, so their gradients are those of the formulas. Numbers of experts and places are Python integers.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.nn import ExpertChoice, GShard, MixtureOfExperts, Routing, SigmoidGroups, Switch, TopK

Choice = tuple[int, torch.Tensor]  # an expert, and its weight
Scalars = list[list[list[torch.Tensor]]]  # by sample, token, expert
Balance = list[tuple[list[int], Scalars]]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "relu": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
}


def looped_output(
    layer: MixtureOfExperts, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Returns what `layer` should return for `hidden` [samples, tokens, D]: output, losses of load balancing
    and z [samples], and how many choices were dropped.
    """
    routes = _Loops(layer, hidden)
    chosen = routes.choose(layer.routing)
    rows = []
    for sample, tokens in enumerate(chosen):
        for token, choices in enumerate(tokens):
            row = torch.zeros_like(hidden[sample, token])
            for expert, weight in choices:
                row = row + weight * _expert(layer, expert, hidden[sample, token])
            if layer.shared is not None:
                row = row + _shared(layer.shared, hidden[sample, token])
            rows.append(row)
    output = torch.stack(rows).view(hidden.shape)
    z = [sum(row.exp().sum().log() ** 2 for row in rows) / len(rows) for rows in routes.logits]
    return output, routes.load_balancing(), _stack(z), routes.num_dropped


def _expert(layer: MixtureOfExperts, expert: int, x: torch.Tensor) -> torch.Tensor:
    weights = {name: value[expert] for name, value in layer.experts.named_parameters()}
    mlp, first = layer.experts.mlp, "gate_up_proj" if layer.experts.mlp.gated else "up_proj"
    made = weights[first] @ x
    made = made + weights[f"{first}_bias"] if mlp.bias else made
    activation = ACTIVATIONS[mlp.activation]
    half = len(made) // 2
    inner = activation(made[:half]) * made[half:] if mlp.gated else activation(made)
    result = weights["down_proj"] @ inner
    return result + weights["down_proj_bias"] if mlp.bias else result


def _shared(shared: Any, x: torch.Tensor) -> torch.Tensor:
    activation, up = ACTIVATIONS[shared.mlp.activation], shared.up_proj(x)
    return shared.down_proj(activation(shared.gate_proj(x)) * up if shared.mlp.gated else activation(up))


def _stack(values: list[Any]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(each) for each in values])


def _number(value: torch.Tensor | float) -> float:
    return float(torch.as_tensor(value).detach())


class _Loops:
    """The routes of one forward; `first_choices` are what counts for load balancing."""

    def __init__(self, layer: MixtureOfExperts, hidden: torch.Tensor) -> None:
        self._router, self._hidden, self._training = layer.router, hidden, layer.training
        self.num_samples, self.num_tokens = hidden.shape[:2]
        self.num_experts = layer.router.weight.shape[0]
        self.num_dropped = 0
        self.logits = [
            [self._router.weight @ token for token in sample] for sample in self._noisy_input(layer.routing)
        ]
        self.first_choices: list[list[list[int]]] | None = None
        self.group = self.num_tokens

    def _noisy_input(self, routing: Routing) -> torch.Tensor:
        x = self._hidden
        if not isinstance(routing, Switch) or not self._training or routing.noise_size == 0:
            return x
        if routing.noise == "dropout":
            return F.dropout(x, routing.noise_size)
        low, high = 1 - routing.noise_size, 1 + routing.noise_size
        return x * (low + (high - low) * torch.rand(x.shape, dtype=torch.float64))

    def choose(self, routing: Any) -> list[list[list[Choice]]]:
        """Returns, by sample and token, the experts that compute it, with weights."""
        kinds = {
            TopK: self._top_k,
            GShard: self._gshard,
            Switch: self._switch,
            ExpertChoice: self._expert_choice,
            SigmoidGroups: self._sigmoid_groups,
        }
        return kinds[type(routing)](routing)

    def load_balancing(self) -> torch.Tensor:
        """Returns E sum over e of (choices of e / choices) x (mean score of e), the mean over groups."""
        found = []
        for sample in range(self.num_samples):
            values = []
            for begin in range(0, self.num_tokens, self.group):
                tokens = range(begin, begin + self.group)
                value = torch.zeros((), dtype=torch.float64)
                for expert in range(self.num_experts):
                    if self.first_choices is None:
                        break
                    chosen = [each for t in tokens for each in self.first_choices[sample][t]]
                    share = sum(each == expert for each in chosen) / len(chosen)
                    mean = sum(self.scores[sample][t][expert] for t in tokens) / self.group
                    value = value + self.num_experts * share * mean
                values.append(value)
            found.append(sum(values) / len(values))
        return _stack(found)

    def _softmax(self) -> None:
        self.scores = [
            [[row[e].exp() / row.exp().sum() for e in range(self.num_experts)] for row in rows]
            for rows in self.logits
        ]

    def _best(self, scores: Any, k: int) -> list[int]:
        return sorted(range(len(scores)), key=lambda e: (-_number(scores[e]), e))[:k]

    def _top_k(self, routing: TopK) -> list[list[list[Choice]]]:
        self._softmax()
        self.first_choices = [[self._best(p, routing.k) for p in rows] for rows in self.scores]
        found = []
        for rows, chosen in zip(self.scores, self.first_choices, strict=True):
            found.append([])
            for p, experts in zip(rows, chosen, strict=True):
                total = sum(p[e] for e in experts) if routing.normalized else 1
                found[-1].append([(e, p[e] / total) for e in experts])
        return found

    def _sigmoid_groups(self, routing: SigmoidGroups) -> list[list[list[Choice]]]:
        bias = self._router.get_buffer("choice_bias")
        per_group = self.num_experts // routing.num_groups
        found: list[list[list[Choice]]] = []
        self.scores, self.first_choices = [], []
        for rows in self.logits:
            for kept in (found, self.scores, self.first_choices):
                kept.append([])
            for row in rows:
                s = [1 / (1 + (-each).exp()) for each in row]
                biased = [_number(s[e] + bias[e]) for e in range(self.num_experts)]
                groups = [biased[g * per_group : (g + 1) * per_group] for g in range(routing.num_groups)]
                sums = [sum(sorted(group, reverse=True)[:2]) for group in groups]
                reached = self._best(sums, routing.top_groups)
                inside = [e for e in range(self.num_experts) if e // per_group in reached]
                chosen = sorted(inside, key=lambda e: (-biased[e], e))[: routing.k]
                total = sum(s[e] for e in chosen) if routing.normalized else 1
                found[-1].append([(e, routing.scale * s[e] / total) for e in chosen])
                self.scores[-1].append([each / sum(s) for each in s])
                self.first_choices[-1].append(chosen)
        return found

    def _groups(self, routing: Any) -> Iterator[tuple[int, range]]:
        self.group = self.num_tokens if routing.group_tokens == "sample" else routing.group_tokens
        for sample in range(self.num_samples):
            for begin in range(0, self.num_tokens, self.group):
                yield sample, range(begin, begin + self.group)

    def _served(self, routing: Any, sample: int, tokens: range, drawn: torch.Tensor | None) -> list[int]:
        return list(tokens) if drawn is None else sorted(tokens, key=lambda t: float(drawn[sample, t]))

    def _priority(self, routing: Any) -> torch.Tensor | None:
        if routing.priority == "order" or not self._training:
            return None
        return torch.rand(self.num_samples, self.num_tokens)

    def _capacity(self, routing: Any) -> int:
        places = math.ceil(round(routing.capacity_factor * self.group / self.num_experts, 9))
        return min(self.group, max(1, places))

    def _nothing(self) -> list[list[list[Any]]]:
        return [[[] for _ in range(self.num_tokens)] for _ in range(self.num_samples)]

    def _switch(self, routing: Switch) -> list[list[list[Choice]]]:
        self._softmax()
        found, drawn = self._nothing(), self._priority(routing)
        self.first_choices = self._nothing()
        for sample, tokens in self._groups(routing):
            counts = [0] * self.num_experts
            for t in self._served(routing, sample, tokens, drawn):
                p = self.scores[sample][t]
                (expert,) = self._best(p, 1)
                self.first_choices[sample][t] = [expert]
                if counts[expert] < self._capacity(routing):
                    found[sample][t].append((expert, p[expert]))
                else:
                    self.num_dropped += 1
                counts[expert] += 1
        return found

    def _gshard(self, routing: GShard) -> list[list[list[Choice]]]:
        self._softmax()
        found, drawn = self._nothing(), self._priority(routing)
        self.first_choices = self._nothing()
        chance = (
            torch.rand(self.num_samples, self.num_tokens, dtype=torch.float64) if self._training else None
        )
        for sample, tokens in self._groups(routing):
            counts, order = [0] * self.num_experts, self._served(routing, sample, tokens, drawn)
            for t in order:
                p = self.scores[sample][t]
                first, second = self._best(p, 2)
                self.first_choices[sample][t] = [first]
                if counts[first] < self._capacity(routing):
                    found[sample][t].append((first, p[first] / (p[first] + p[second])))
                else:
                    self.num_dropped += 1
                counts[first] += 1
            for t in order:
                p = self.scores[sample][t]
                first, second = self._best(p, 2)
                weight = p[second] / (p[first] + p[second])
                taken = chance is None or 2 * _number(weight) > float(chance[sample, t])
                if counts[second] < self._capacity(routing) and taken:
                    found[sample][t].append((second, weight))
                else:
                    self.num_dropped += 1
                counts[second] += 1
        return found

    def _expert_choice(self, routing: ExpertChoice) -> list[list[list[Choice]]]:
        self._softmax()
        found = self._nothing()
        for sample, tokens in self._groups(routing):
            for expert in range(self.num_experts):
                rest = {t: self._rest_over(self.logits[sample][t], expert) for t in tokens}
                best = sorted(tokens, key=lambda t: (rest[t], t))[: self._capacity(routing)]
                for t in best:
                    found[sample][t].append((expert, self.scores[sample][t][expert]))
        return found

    def _rest_over(self, row: torch.Tensor, expert: int) -> float:
        """Returns (1 - p) / p of an expert, which falls with p: p itself may round to 1."""
        logits = row.tolist()
        return sum(math.exp(z - logits[expert]) for e, z in enumerate(logits) if e != expert)
