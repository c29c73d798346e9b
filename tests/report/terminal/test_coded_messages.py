"""What a plan says of its codes: each codec by its places, with the bytes of the technique's law."""

import pytest
from rich.console import Console

import meshwright as mw
from meshwright.parallel.compression.activation_compression import ActivationCompression
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.compression.quantized_weights import QuantizedWeights
from meshwright.plan.strategy_interface import Strategy
from meshwright.report.terminal.action_table import plan_details
from meshwright.report.terminal.coded_messages import coded_messages, coded_messages_text
from tests.parallel.compression.gated_model import gated_plan
from tests.tiny_model import analyzed_model, tiny_job

SHARD = mw.BatchSplit("dp_shard")


def text_of(mesh: mw.Mesh, *strategies: Strategy) -> str:
    plan = mw.make_plan(analyzed_model(), tiny_job(), mesh, strategies)
    return coded_messages_text(plan).get("sent as codes", "")


@pytest.mark.parametrize(
    ("mesh", "strategies", "text"),
    [
        (mw.Mesh(dp_replicate=2), (mw.BatchSplit(), mw.DDP()), ""),
        (
            mw.Mesh(pp=2),
            (mw.Pipeline(), ActivationCompression(codec="bfloat16", exact_steps=3)),
            "bfloat16: send over pp in SEND layers.2 to 1 .. SEND_GRAD layers.2 of 1 to 0, 1 x, 720 B in "
            "place of 2.81 KiB, behind 3 exact steps",
        ),
        (
            mw.Mesh(dp_shard=2),
            (SHARD, mw.ZeRO(stage=3), QuantizedWeights(), Int8Compression()),
            "int8: all_gather over dp_shard in UNSHARD embed compressed, F .. UNSHARD embed compressed, B, 9",
        ),
    ],
    ids=["exact", "stages", "weights and gradients"],
)
def test_every_codec_is_named_with_its_places_and_bytes(
    mesh: mw.Mesh, strategies: tuple[Strategy, ...], text: str
):
    found = text_of(mesh, *strategies)
    assert found.startswith(text)
    assert bool(found) == bool(text)


def test_sums_inside_blocks_have_the_bytes_of_the_law_and_stand_in_the_rows_of_their_blocks():
    plan = gated_plan(ActivationCompression(axis="tp", codec="int8"), 3)
    found = list(coded_messages(plan))
    numel = found[0].exact_nbytes / (2 * 8 * 2 / 3)  # float64: 2 (n-1)/n of it over 3 ranks
    part = -(-numel // 3)
    assert {each.coded_nbytes for each in found} == {2 * 2 * (part + 4 * -(-part // 256))}
    (text,) = coded_messages_text(plan).values()
    assert text.startswith(f"int8: all_reduce over tp in {found[0].place} .. ")
    assert f"{len(found)} x" in text
    console = Console(width=250, color_system=None)
    with console.capture() as capture:
        console.print(plan_details(plan))
    assert "as all_to_all of uint8, all_gather of uint8) inside the block" in capture.get()
