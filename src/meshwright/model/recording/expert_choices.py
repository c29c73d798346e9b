"""Records which experts the tokens of a forward choose, and finds the first token that chooses others.

A router compares scores. Two that nearly tie may be rounded otherwise under a plan, and change places: then
all that follows differs, though nothing is wrong. So choices are compared before numbers. The margin is the
difference of the weights of the experts that changed places. Where experts choose tokens, these change
places: then it is how far the token's score for the expert is from the nearest of these, on one device.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.model.tensors.pytree import tree_tensors
from meshwright.nn.mixture_of_experts import MixtureOfExperts
from meshwright.nn.routing.capacity import SAMPLE, group_size
from meshwright.nn.routing.routes import Routes
from meshwright.plan.model_spec.model_spec import ExpertsCall


@dataclass(frozen=True)
class Choices:
    """The experts `index` [tokens, k] of one forward, and their `weights` [tokens, k], of whole samples.

    Where experts choose tokens, of each group of `group_tokens` of a sample, `scores` [tokens, E] are those
    of every token.
    """

    index: torch.Tensor
    weights: torch.Tensor
    scores: torch.Tensor | None = None
    group_tokens: int | str = SAMPLE

    def of_samples(self, num_samples: int) -> "Choices":
        """Returns them as [samples, tokens of each, k]."""
        return self._map_tensors(lambda tensor: tensor.unflatten(0, (num_samples, -1)))

    def first_tokens(self, number: int) -> "Choices":
        """Returns those of the first tokens of [samples, tokens, k]."""
        return self._map_tensors(lambda tensor: tensor[:, :number])

    def on_cpu(self) -> "Choices":
        """Returns a copy in the memory of the host."""
        return self._map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True))

    def _map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Choices":
        scores = None if self.scores is None else change(self.scores)
        return Choices(change(self.index), change(self.weights), scores, self.group_tokens)


@dataclass
class ChoiceRecorder:
    """Records the first call of each of the experts of `module` in a forward, on the CPU.

    `forward_key` names the forward that runs; None: it is not recorded. `found` is by layer and forward.
    """

    forward_key: Callable[[], object]
    found: dict[tuple[str, object], Choices] = field(default_factory=dict)
    _handles: list[RemovableHandle] = field(default_factory=list)

    def attach(self, module: nn.Module, calls: Iterable[ExpertsCall]) -> None:
        """Begins to record the modules of `calls`; those in the dense form are given no choice."""
        for layer in {call.name for call in calls if call.form == "choice"}:

            def record(called: nn.Module, args: Any, kwargs: Any, layer: str = layer) -> None:
                key = self.forward_key()
                if key is not None and (layer, key) not in self.found:
                    self.found[layer, key] = _given_choices(args, kwargs).on_cpu()

            parent = module.get_submodule(layer.rpartition(".")[0])
            # experts that choose tokens are given a row for each choice, and not for each token
            called = parent.expert_rows if isinstance(parent, MixtureOfExperts) else None
            called = called or module.get_submodule(layer)
            handle = called.register_forward_pre_hook(record, with_kwargs=True)
            self._handles.append(handle)

    def pop_choices(self, num_samples: int) -> dict[str, Choices]:
        """Returns what one forward of `num_samples` samples has chosen, by layer, and forgets it."""
        choices = {layer: each.of_samples(num_samples) for (layer, _), each in self.found.items()}
        self.found.clear()
        return choices

    def detach(self) -> None:
        """Ends recording."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _given_choices(args: Any, kwargs: Any) -> Choices:
    """Returns the choices among the arguments of experts, or of `ExpertRows`."""
    for routes in args:
        if isinstance(routes, Routes):
            of_tokens = routes.index, routes.weights, routes.probabilities
            index, weights, scores = (each.flatten(0, 1) for each in of_tokens)
            experts_choose = routes.num_choices is not None
            return Choices(index, weights, scores if experts_choose else None, routes.group_tokens)
    _, index, weights = tree_tensors((args, kwargs))
    return Choices(index, weights)


def first_other_choice(
    found: Choices, expected: Choices, samples: Sequence[int], positions: Sequence[int]
) -> str:
    """Returns the first token whose experts in `found` are not those in `expected`, with its margin, in
    words; "": none.

    `found` are those of `samples` and `positions` of the samples in `expected`, [samples, tokens, k] both.
    An expert of weight 0 does not count, nor does the order of experts.
    """
    rows = (torch.tensor(samples).unsqueeze(1), torch.tensor(positions, dtype=torch.int64))
    truth = Choices(expected.index[rows], expected.weights[rows])
    same = found.index.sort(-1).values == truth.index.sort(-1).values
    for sample, place in (~same.all(-1)).nonzero().tolist():
        experts, others = (_weights_by_expert(each, sample, place) for each in (truth, found))
        lost, gained = sorted(experts.keys() - others.keys()), sorted(others.keys() - experts.keys())
        if lost or gained:
            at = samples[sample], positions[place]
            if expected.scores is None:
                given = (experts, lost), (others, gained)
                heaviest = [max((weights[each] for each in left), default=0.0) for weights, left in given]
                margin = abs(heaviest[0] - heaviest[1])
            else:
                distances = (
                    _distance_to_change(expected, expected.scores, *at, each) for each in lost + gained
                )
                margin = max(distances)
            token = "sample {}, position {}".format(*at)
            choice = f"experts {sorted(experts)} on one device, {sorted(others)} under the plan"
            return f"{token} ({choice}, margin {margin:.1g})"
    return ""


def _weights_by_expert(choices: Choices, sample: int, place: int) -> dict[int, float]:
    pairs = zip(choices.index[sample, place].tolist(), choices.weights[sample, place].tolist(), strict=True)
    return {expert: weight for expert, weight in pairs if weight}


def _distance_to_change(
    choices: Choices, scores: torch.Tensor, sample: int, position: int, expert: int
) -> float:
    """Returns how far the score of a token for an expert, which chooses tokens, is from the nearest one with
    which it changes places: the highest of those left if it is taken, else the lowest of those taken.
    """
    size = group_size(choices.group_tokens, scores.shape[1])
    group = slice(position // size * size, position // size * size + size)
    is_taken = (choices.index[sample, group] == expert).any(-1)
    own, place = scores[sample, group, expert], position % size
    others = own[is_taken != is_taken[place]]
    return float((others - own[place]).abs().min()) if len(others) else float(own[place])
