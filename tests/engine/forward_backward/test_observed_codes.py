"""What a rank notes about the codes that it sends: their part of the global batch, and their error."""

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.engine.forward_backward.observed_codes import lost_and_error
from meshwright.parallel.compression.activation_compression import ActivationCompression, FlatCodec
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.plan.strategy_interface import ObservedCodes
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import TOKENS, WIDTH, analyzed_model, executor_of, tiny_job, token_samples

CODEC = FlatCodec(Int8Compression(), "int8")


def test_an_error_is_at_most_what_the_codec_allows():
    values = torch.linspace(-3, 5, 700, dtype=torch.float64).view(7, 100)
    lost, error = lost_and_error(CODEC, values, CODEC.encode(values))
    assert 0.5 < error <= 1
    assert lost.shape == (700,)
    assert lost.abs().max() <= 5 / 254 * (1 + 1e-6)
    _, error = lost_and_error(CODEC, values, CODEC.encode(values.flip(0)))
    assert error > 10


@pytest.mark.parametrize("num_samples", [12, 7])
def test_all_ranks_together_note_every_sample_once(num_samples: int):
    analyzed = analyzed_model()
    strategies = mw.Pipeline(), mw.BatchSplit(), mw.DDP(), ActivationCompression(codec="int8")
    plan = mw.make_plan(analyzed, tiny_job(), mw.Mesh(pp=2, dp_replicate=2), strategies, 2)

    def run(world: World) -> list[ObservedCodes]:
        executor = executor_of(analyzed, plan, world)
        executor.state.observed_codes = []
        rows = [each for each in plan.samples_read(world.rank) if each < num_samples]
        samples = {key: value[rows] for key, value in token_samples(12).items()}
        executor.step(samples)
        executor.close()
        return executor.state.observed_codes

    noted = [each for rank in run_on_threads(run, plan.mesh) for each in rank]
    for kind in ("SEND", "SEND_GRAD"):
        found = [each for each in noted if each.key[0] == kind]
        assert {each.shape for each in found} == {(12, TOKENS, WIDTH)}
        index = torch.cat([each.index for each in found])
        assert sorted(index.tolist()) == list(range(num_samples * TOKENS * WIDTH))
        assert all(0 < each.error <= 1 for each in found)
