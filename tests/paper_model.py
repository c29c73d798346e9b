"""A model that exists on paper only, for tests that run nothing."""

from dataclasses import dataclass

from meshwright.plan.model_spec.model_spec import BatchTensor, ModelSpec, ParamSpec


@dataclass(frozen=True)
class Paper:
    """An anatomy of `layers` blocks of `numel` parameters each, for tests that run nothing."""

    layers: int = 3
    numel: int = 100
    tied: bool = False

    @property
    def anatomy(self) -> ModelSpec:
        visits = tuple(f"layer{i}" for i in range(self.layers))
        weights = [ParamSpec(f"{visit}.weight", (self.numel,), (visit,)) for visit in visits]
        if self.tied:
            weights[0] = ParamSpec(
                "layer0.weight", (self.numel,), (visits[0], visits[-1]), aliases=(f"{visits[-1]}.weight",)
            )
            del weights[-1]
        ones = (1,) * self.layers
        inputs, outputs = (BatchTensor("x", (4,), "float32"),), (BatchTensor("output0", (5,), "float32"),)
        return ModelSpec("paper", visits, tuple(weights), ones, ones, inputs=inputs, outputs=outputs)
