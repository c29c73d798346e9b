"""A model that exists on paper only, for tests that run nothing."""

from dataclasses import dataclass

from meshwright.plan.model_spec.model_spec import Anatomy, Column, Weight


@dataclass(frozen=True)
class Paper:
    """An anatomy of `layers` blocks of `numel` parameters each, for tests that run nothing."""

    layers: int = 3
    numel: int = 100
    tied: bool = False

    @property
    def anatomy(self) -> Anatomy:
        visits = tuple(f"layer{i}" for i in range(self.layers))
        weights = [Weight(f"{visit}.weight", (self.numel,), (visit,)) for visit in visits]
        if self.tied:
            weights[0] = Weight("layer0.weight", (self.numel,), (visits[0], visits[-1]), aliases=(f"{visits[-1]}.weight",))
            del weights[-1]
        ones = (1,) * self.layers
        inputs, outputs = (Column("x", (4,), "float32"),), (Column("output0", (5,), "float32"),)
        return Anatomy("paper", visits, tuple(weights), ones, ones, inputs=inputs, outputs=outputs)
