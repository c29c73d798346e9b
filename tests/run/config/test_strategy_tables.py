"""Techniques of a user's own in a config: read, written and read back, and refused before a rank starts."""

from pathlib import Path

import pytest

from examples.ternary_gradients import TernaryCompression
from meshwright.parallel import STRATEGIES
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.python_file import source_of
from meshwright.run.config.config_and_plan_files import PlanRequest, read_request
from meshwright.run.config.plan_file import write_request

EXAMPLES = Path(__file__).parents[3] / "examples"
IMPORTS = """
from dataclasses import dataclass
from typing import ClassVar
from meshwright import Strategy
from meshwright.parallel.compression.codecs.block_codes import BlockCodec
from meshwright.parallel.compression.codecs.cast import CastCompression
"""
LIKE_CAST = "@dataclass(frozen=True)\nclass Own(CastCompression):\n    "


def read(folder: Path, table: str, *overrides: str) -> PlanRequest:
    """The request of a config in `folder` with this table of a strategy."""
    path = folder / "run.toml"
    path.write_text(f"[[strategies]]\n{table}")
    return read_request(path, overrides, STRATEGIES)


def test_a_class_in_a_file_beside_the_config_is_read_written_and_read_back(tmp_path):
    for name in ("ternary_gradients.py", "gathered_sum.py"):
        (tmp_path / name).write_bytes((EXAMPLES / name).read_bytes())
    table = """name = "compress"
source = "ternary_gradients.py:TernaryCompression"
min_numel = 9
[[strategies]]
name = "gathered_sum"
source = "gathered_sum.py:GatheredSum"
"""
    request = read(tmp_path, table, "--strategies.compress.axis", "dp_shard")
    codec, gathered = request.strategies or ()
    assert codec.as_dict() == TernaryCompression(min_numel=9, axis="dp_shard").as_dict()
    assert source_of(type(codec)) == f"{tmp_path / 'ternary_gradients.py'}:TernaryCompression"
    assert source_of(TernaryCompression) == ""
    elsewhere = tmp_path / "elsewhere" / "plan.toml"
    write_request(request, elsewhere)
    assert read_request(elsewhere, (), STRATEGIES).strategies == (codec, gathered)


@pytest.mark.parametrize(
    ("text", "source", "problem", "fix"),
    [
        ("", "own.py", "source = '.*own.py'; needed is a Python file and a class", "file.py:Class"),
        ("", "absent.py:Own", "there is no file absent.py", "give the path of a Python file"),
        ("", "own.py:Own", r"own.py has no class 'Own'", "define it: extend meshwright.Strategy"),
        (LIKE_CAST + "mode = 'own'", "own.py:Own2", "own.py has no class 'Own2'", "did you mean 'Own'"),
        ("import not_here", "own.py:Own", r"ModuleNotFoundError: .*not_here' \(line 7\)", "correct the file"),
        ("raise SystemExit(3)", "own.py:Own", r"raised SystemExit: 3 \(line 7\)", "correct the file"),
        ("def Own(): ...", "own.py:Own", "Own in .* is a function, no class", "BlockCodec"),
        ("class Own: ...", "own.py:Own", "Own in .* is a class that is no Strategy", "BlockCodec"),
        ("", "own.py:BlockCodec", "own.py imports BlockCodec from", "name the file that defines it"),
        (
            "@dataclass(frozen=True)\nclass Own(BlockCodec):\n    mode = 'own'",
            "own.py:Own",
            "Own lacks what each BlockCodec defines: code_nbytes, decode, encode",
            "define in Own: code_nbytes, decode, encode",
        ),
        ("class Own(CastCompression):\n    mode = 'own'", "own.py:Own", "Own is no dataclass", "@dataclass"),
        (LIKE_CAST + "mode = 'own'\n    source: str = ''", "own.py:Own", "a field 'source'", "another name"),
        (LIKE_CAST + "pass", "own.py:Own", "mode = 'cast', as one of the library", "none of: int8, int4"),
        (
            LIKE_CAST + "mode = ''",
            "own.py:Own",
            "mode = '', and a technique of this name needs one",
            "none of: int8, int4",
        ),
        (
            "@dataclass(frozen=True)\nclass Own(Strategy):\n    name = 'own'\n    phase = 'comm'",
            "own.py:Own",
            "name = 'compress', and Own has name = 'own'",
            'write name = "own"',
        ),
    ],
)
def test_what_is_no_technique_is_refused_with_its_repair(tmp_path, text, source, problem, fix):
    (tmp_path / "own.py").write_text(f"{IMPORTS}{text}\n")
    with pytest.raises(PlanError, match=rf"strategies.compress[\w.]*: .*{problem}(?s:.*)repair: .*{fix}"):
        read(tmp_path, f'name = "compress"\nsource = "{source}"')


def test_all_that_a_class_lacks_is_told_at_once(tmp_path):
    (tmp_path / "own.py").write_text(f"{IMPORTS}class Own(Strategy): ...\n")
    with pytest.raises(PlanError) as caught:
        read(tmp_path, 'name = "own"\nsource = "own.py:Own"')
    assert [each.problem for each in caught.value.diagnostics] == [
        "Own has no name",
        "Own has no phase",
        "Own is no dataclass: fields of its own would be no keys",
    ]
