"""A model spec without a model, and programs of given lists, for tests that run nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwright.plan.model_spec.model_spec import BatchTensor, ModelSpec, ParamSpec
from meshwright.plan.step.program import Action, Program, Role
from meshwright.plan.step.single_device_program import stage_role_name

FIRST_ROLE = stage_role_name(0)


def program_of(actions_by_role: Mapping[str, Iterable[Action]]) -> Program:
    """Returns the program with these lists, each of one rank."""
    return Program(
        tuple(
            Role(name, range(rank, rank + 1), tuple(actions))
            for rank, (name, actions) in enumerate(actions_by_role.items())
        )
    )


@dataclass(frozen=True)
class SyntheticModel:
    """A model spec of `layers` blocks of `numel` parameters each, for tests that run nothing."""

    layers: int = 3
    numel: int = 100
    tied: bool = False

    @property
    def model_spec(self) -> ModelSpec:
        block_calls = tuple(f"layer{i}" for i in range(self.layers))
        weights = [
            ParamSpec(f"{block_call}.weight", (self.numel,), (block_call,)) for block_call in block_calls
        ]
        if self.tied:
            weights[0] = ParamSpec(
                "layer0.weight",
                (self.numel,),
                (block_calls[0], block_calls[-1]),
                aliases=(f"{block_calls[-1]}.weight",),
            )
            del weights[-1]
        ones = (1,) * self.layers
        inputs, outputs = (BatchTensor("x", (4,), "float32"),), (BatchTensor("output0", (5,), "float32"),)
        return ModelSpec("paper", block_calls, tuple(weights), ones, ones, inputs=inputs, outputs=outputs)
