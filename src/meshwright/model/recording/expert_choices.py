"""Records which experts the tokens of a forward choose, and finds the first token that chooses others.

A router compares scores. Two that nearly tie may be rounded otherwise under a plan, and change places: then
all that follows differs, though nothing is wrong. So choices are compared before numbers. The margin is the
difference of the weights of the experts that changed places.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.model.tensors.pytree import tree_tensors
from meshwright.nn.mixture_of_experts import MixtureOfExperts
from meshwright.nn.routing.routes import Routes
from meshwright.plan.model_spec.model_spec import ExpertsCall


@dataclass(frozen=True)
class Choices:
    """The experts `index` [tokens, k] of one forward, and their `weights` [tokens, k], of whole samples."""

    index: torch.Tensor
    weights: torch.Tensor

    def of_samples(self, num_samples: int) -> "Choices":
        """Returns them as [samples, tokens of each, k]."""
        return Choices(*(each.unflatten(0, (num_samples, -1)) for each in (self.index, self.weights)))

    def first_tokens(self, number: int) -> "Choices":
        """Returns those of the first tokens of [samples, tokens, k]."""
        return Choices(self.index[:, :number], self.weights[:, :number])


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
                    index, weights = _given_choice(args, kwargs)
                    copies = (each.detach().to("cpu", copy=True) for each in (index, weights))
                    self.found[layer, key] = Choices(*copies)

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


def _given_choice(args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the index and the weights [tokens, k] among the arguments of experts, or of `ExpertRows`."""
    for routes in args:
        if isinstance(routes, Routes):
            return routes.index.flatten(0, 1), routes.weights.flatten(0, 1)
    _, index, weights = tree_tensors((args, kwargs))
    return index, weights


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
            of_lost, of_gained = (
                max((given[each] for each in left), default=0.0)
                for given, left in ((experts, lost), (others, gained))
            )
            token, margin = f"sample {samples[sample]}, position {positions[place]}", of_lost - of_gained
            choice = f"experts {sorted(experts)} on one device, {sorted(others)} under the plan"
            return f"{token} ({choice}, margin {abs(margin):.1g})"
    return ""


def _weights_by_expert(choices: Choices, sample: int, place: int) -> dict[int, float]:
    pairs = zip(choices.index[sample, place].tolist(), choices.weights[sample, place].tolist(), strict=True)
    return {expert: weight for expert, weight in pairs if weight}
