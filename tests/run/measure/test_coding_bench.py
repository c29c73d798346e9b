"""The time of codecs: which ones are measured, that they do what a rank does, and what the samples mean."""

from typing import get_args

import torch

from meshwright.parallel import STRATEGIES
from meshwright.parallel.compression.activation_compression import CodecName
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.run.measure.coding_bench import NUMEL, coding_operations, coding_points


def test_every_codec_is_measured():
    operations = coding_operations(torch.device("cpu"))
    sums = {name for name in operations if " " not in name}
    assert sums == STRATEGIES["compress"].keys()
    names = get_args(CodecName)
    assert operations.keys() - sums == {f"{way} {name}" for name in names for way in ("encode", "decode")}


def test_an_operation_codes_and_decodes_every_element(monkeypatch):
    counted = {"encoded": 0, "decoded": 0}
    encode, decode = Int8Compression.encode_in_place, Int8Compression.decode_into

    def counting_encode(self, values, codes, draws):
        counted["encoded"] += len(values)
        encode(self, values, codes, draws)

    def counting_decode(self, codes, values, *, add):
        counted["decoded"] += len(values)
        decode(self, codes, values, add=add)

    monkeypatch.setattr(Int8Compression, "encode_in_place", counting_encode)
    monkeypatch.setattr(Int8Compression, "decode_into", counting_decode)
    coding_operations(torch.device("cpu"))["int8"]()
    assert counted == {"encoded": NUMEL + NUMEL // 2, "decoded": 2 * NUMEL}


def test_one_way_codes_all_elements_and_leaves_them_as_they_are():
    operations = coding_operations(torch.device("cpu"))
    codes = operations["encode int8"]()
    assert isinstance(codes, torch.Tensor)
    assert len(codes) == NUMEL + 4 * NUMEL // 256
    assert torch.equal(operations["encode int8"](), codes)
    operations["decode int8"]()


def test_samples_become_seconds_of_one_element():
    (point,) = coding_points({"int8": [2.0 * NUMEL, 1.0 * NUMEL, 3.0 * NUMEL]})
    assert (point.operation, point.seconds) == ("int8", 2.0)
