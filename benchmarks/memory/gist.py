"""What `gist` saves of what autograd keeps between forward and backward, and what it costs.

VGG-16, ResNet-18, OPT, a decoder with squared ReLU (Nemotron) and Llama, one device, in float32, each beside
itself without `gist`:

    saved      live bytes when the loss begins, without and with: measured by every storage that operations
               make (benchmarks/harness/peak_bytes.py), against what the counted values say (bar: 1 %)
    bits       weights after two steps (bar: equal)
    time       CPU seconds of a step, interleaved (bar: 1.10)

Decoders have the widths of the smallest OPT (125 M), and two layers: narrower ones do fewer operations for
each value that is encoded. Llama has SiLU, so nothing is saved: it must be refused. Of what autograd keeps,
VGG-16 must save 45 %.

    python -m benchmarks.memory.gist             about ten minutes
    python -m benchmarks.memory.gist --quick     a few rounds of each; writes nothing
"""

import gc
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.harness.interleaved_timing import Comparison, Cost, Verdict, Window, compare, measure, overall
from benchmarks.harness.peak_bytes import PeakLive
from benchmarks.harness.result import Result
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.backends.threads import single_rank_world
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.memory.gist import Gist
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

NAME = "gist"
CLAIM = (
    "gist saves what the count of zeros says (within 1 %), at least 45 % of VGG-16's activations, with the "
    "same bits and at most 1.10 x the CPU seconds of a step"
)
BYTES_BAR, TIME_BAR, VGG_BAR = 0.01, 1.10, 0.45
WINDOW, QUICK = Window(40, 80, 240, warmup=1), Window(3, 4, 120, window_s=0.0, threshold=64.0, warmup=1)
VGG_LAYERS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0: pooling
TOKENS, VOCABULARY = 128, 1_000
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "use_cache": False,
}


class VGG16(nn.Module):
    """VGG-16 (configuration D), for ten classes."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in VGG_LAYERS:
            if width:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            else:
                layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        hidden = (nn.Linear(512, 512), nn.ReLU(inplace=True), nn.Linear(512, 512), nn.ReLU(inplace=True))
        self.classifier = nn.Sequential(*hidden, nn.Linear(512, 10))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Returns the scores of classes."""
        return self.classifier(self.features(pixel_values).flatten(1))


def _vgg() -> Model:
    return Model(VGG16(), blocks=["features", "classifier"])


def _resnet() -> nn.Module:
    sizes = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "num_labels": 10}
    config = transformers.ResNetConfig.from_dict({**sizes, "layer_type": "basic"})
    return transformers.ResNetForImageClassification(config)


def _opt() -> nn.Module:
    sizes = {**SIZES, "ffn_dim": 3_072, "word_embed_proj_dim": 768, "dropout": 0.0}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes))


def _nemotron() -> nn.Module:
    sizes = {**SIZES, "num_key_value_heads": 12, "intermediate_size": 3_072}
    return transformers.NemotronForCausalLM(transformers.NemotronConfig(**sizes))


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=3_072))


def _images(size: int, num_samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(num_samples, 3, size, size, generator=generator)
    return {"pixel_values": pixels, "labels": torch.arange(num_samples) % 10}


def _tokens() -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (4, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


MODELS: Mapping[str, tuple[Callable[[], Any], dict[str, torch.Tensor]]] = {
    "VGG-16": (_vgg, _images(32, 8)),
    "ResNet-18": (_resnet, _images(64, 8)),
    "OPT": (_opt, _tokens()),
    "Nemotron": (_nemotron, _tokens()),
    "Llama": (_llama, _tokens()),
}


class Step:
    """One configuration: a step of a model, with or without `gist`; its loss notes the live bytes."""

    def __init__(
        self, name: str, analyzed: AnalyzedModel, plan: Plan, batch: dict[str, torch.Tensor]
    ) -> None:
        self.name, self._batch, self.at_loss = name, batch, 0
        self.live: PeakLive | None = None  # while live bytes are counted
        world = single_rank_world(torch.device("cpu"))
        self._ledger = world.ledger
        self._engine = parallelize(analyzed, plan, world=world, loss=self._noting_loss())

    def step(self) -> Cost:
        """Runs a step."""
        cpu, wall = time.process_time(), time.perf_counter()
        self._engine.step(self._batch)
        return Cost(time.process_time() - cpu, time.perf_counter() - wall)

    def saved_nbytes(self) -> int:
        """Returns the bytes that live between forward and loss, beyond those before the forward."""
        gc.collect()
        with PeakLive() as live:
            self._engine.step(self._batch)  # makes everything known that stays
            before, self.live = live.now, live
            self._engine.step(self._batch)
            self.live = None
        return self.at_loss - before

    def num_values(self) -> int:
        """Returns the values that the last step kept."""
        return sum(rows for name, rows in self._ledger.counts.items() if name.startswith("values not zero"))

    def weights(self) -> list[torch.Tensor]:
        """Returns all weights."""
        with self._engine.full_params() as module:
            return [parameter.detach().clone() for parameter in module.parameters()]

    def _noting_loss(self) -> Loss:
        loss = token_cross_entropy()

        def total(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
            if self.live is not None:
                self.at_loss = self.live.now
            return loss.total(outputs, batch)

        return Loss(total, loss.count, loss.targets)


@dataclass(frozen=True)
class Row:
    """What one model shows."""

    model: str
    activations: int
    saved: int
    expected: int
    same_bits: bool
    comparison: Comparison

    @property
    def error(self) -> float:
        """The relative difference of the saved bytes from the expected ones."""
        return abs(self.saved - self.expected) / self.expected

    @property
    def share(self) -> float:
        """The saved share of the activations."""
        return self.saved / self.activations

    @property
    def holds(self) -> Verdict:
        """Whether all bars hold."""
        exact = self.same_bits and self.error <= BYTES_BAR
        return overall([exact and (self.model != "VGG-16" or self.share >= VGG_BAR), self.comparison.holds])

    def as_dict(self) -> dict[str, object]:
        """Returns the row of the result."""
        return {
            "model": self.model,
            "activations": self.activations,
            "saved": self.saved,
            "expected": self.expected,
            "share": self.share,
            "error": self.error,
            "same_bits": self.same_bits,
            "holds": self.holds,
            "time": self.comparison.as_dict(),
        }


def planned(analyzed: AnalyzedModel, num_samples: int, *strategies: Strategy) -> Plan:
    """Returns a plan on one device, with SGD."""
    job = Job(
        ModelConfig("model"),
        DataConfig("example", sequence=TOKENS),
        TrainConfig(batch=num_samples),
        OptimizerConfig("sgd", lr=0.01),
    )
    return make_plan(analyzed, job, Mesh(), strategies)


def measure_model(name: str, window: Window) -> Row:
    """Returns what the model `name` shows."""
    make, batch = MODELS[name]
    torch.manual_seed(0)
    analyzed = analyze(make(), batch, loss=token_cross_entropy())
    num_samples = len(batch["labels"])
    plain = planned(analyzed, num_samples)
    sides = [
        Step(side, analyzed, plan, batch)
        for side, plan in (
            ("plain", plain),
            ("gist", planned(analyzed, num_samples, Gist())),
            ("twin", plain),
        )
    ]
    activations, encoded = (side.saved_nbytes() for side in sides[:2])
    sides[2].step()
    sides[2].step()
    same_bits = all(map(torch.equal, sides[0].weights(), sides[1].weights()))
    found = analyzed.model_spec.relu_activations
    dense = sum(4 * each.saved_numel + 8 * each.index_numel for each in found) * num_samples
    bits = sum(-(-each.mask_numel // 8) + each.index_numel for each in found) * num_samples
    expected = dense - bits - 4 * sides[1].num_values()
    rounds = measure(sides, window)
    comparison = compare(rounds, "gist", base="plain", twin="twin", bar=TIME_BAR)
    return Row(name, activations, activations - encoded, expected, same_bits, comparison)


def refusal(name: str) -> str:
    """Returns why `gist` is refused for the model `name`; empty if it is not."""
    make, batch = MODELS[name]
    analyzed = analyze(make(), batch, loss=token_cross_entropy())
    try:
        planned(analyzed, len(batch["labels"]), Gist())
    except PlanError as error:
        return str(error)
    return ""


def main() -> None:
    """Measure, and write the result."""
    torch.set_num_threads(1)
    quick = "--quick" in sys.argv[1:]
    rows = []
    for name in ("VGG-16", "ResNet-18", "OPT", "Nemotron"):
        rows.append(measure_model(name, QUICK if quick else WINDOW))
        print(rows[-1].as_dict(), file=sys.stderr)
    refused = refusal("Llama")
    print(refused, file=sys.stderr)
    if quick:
        return
    values = [row.share for row in rows]
    result = Result.of(
        NAME,
        CLAIM,
        values=values,
        median=values[0],
        spread=(min(values), max(values)),
        bar=VGG_BAR,
        holds=overall([*(row.holds for row in rows), "it saves 0 bytes" in refused]),
        repeats=len(rows),
        detail={"rows": [row.as_dict() for row in rows], "Llama": refused},
    )
    print(result.write(NAME))


if __name__ == "__main__":
    main()
