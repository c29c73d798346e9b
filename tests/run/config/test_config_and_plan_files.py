"""Config files: parsing, defaults, relative paths, and round trips."""

import errno
import json
import math
import os
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.data_config import DataConfig, MixturePart
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import (
    Job,
    LRScheduleConfig,
    OptimizerConfig,
    ParamGroupConfig,
    PrecisionConfig,
    TrainConfig,
)
from meshwright.plan.job.model_config import ModelConfig
from meshwright.run.config.config_and_plan_files import (
    PlanRequest,
    read_request,
)
from meshwright.run.config.plan_file import request_as_dict, write_request
from tests.run.config.configs import CONFIG, KNOWN, Copies, Layers, read


def test_a_file_fills_the_dataclasses_and_defaults_fill_the_rest(tmp_path):
    assert read(tmp_path, CONFIG) == PlanRequest(
        job=Job(
            model=ModelConfig("no/such/model"),
            train=TrainConfig(steps=30),
            optimizer=OptimizerConfig(lr=1.0, groups=(ParamGroupConfig("*.bias"),)),
        ),
        mesh={"dp_replicate": -1},
        micro_batch=2,
        strategies=(Copies(4.0), Layers((1, 2))),
    )


def test_no_list_of_strategies_is_not_an_empty_one(tmp_path):
    assert read(tmp_path, "micro_batch = 1").strategies is None
    assert read(tmp_path, "strategies = []").strategies == ()


def test_paths_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "run.toml").write_text("micro_batch = 1")
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")
    with pytest.raises(PlanError, match=r"there is no such file\n  repair: did you mean 'run.toml'"):
        read_request(tmp_path / "runn.toml", (), KNOWN)
    with pytest.raises(PlanError, match=r"there is no such file\n  repair: check the path"):
        read_request(tmp_path / "nowhere" / "run.toml", (), KNOWN)
    with pytest.raises(
        PlanError,
        match=r"this is a folder; needed is a TOML file\n  repair: name a file in it: latin.toml, run.toml",
    ):
        read_request(tmp_path, (), KNOWN)
    with pytest.raises(
        PlanError, match=r"not valid UTF-8\n  repair: save it as UTF-8; the byte at position 2"
    ):
        read_request(tmp_path / "latin.toml", (), KNOWN)
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(PlanError, match=r"this is a named pipe; needed is a regular file\n.*a TOML file"):
        read_request(tmp_path / "pipe.toml", (), KNOWN)


def test_sources_are_relative_to_the_file_and_become_absolute(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "net.py").touch()
        (folder / "text").mkdir()
    (here / "only_here.py").touch()
    monkeypatch.chdir(here)
    text = '[model]\nsource = "net.py:make"\n[data]\nsource = "text"'
    job = read(there, text).job
    assert (job.model.source, job.data.source) == (f"{there / 'net.py'}:make", str(there / "text"))
    assert read(there, text, "--data.source", "text").job.data.source == str(here / "text")
    assert read(there, '[model]\nsource = "only_here.py"').job.model.source == str(here / "only_here.py")
    assert read(there, '[model]\nsource = "gpt2"').job.model.source == "gpt2"
    (there / "example").mkdir()
    assert read(there, '[data]\nsource = "example"').job.data.source == "example"


def test_tokenizers_and_the_parts_of_a_mixture_are_found_beside_the_file_too(tmp_path, monkeypatch):
    for name in ("here/tok", "there/tok", "there/a"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    text = (
        '[data]\ntokenizer = "tok"\n[[data.mixture]]\nsource = "a"\n[[data.mixture]]\nsource '
        "= "
        '"owner/name:part"\nweight = 2'
    )
    data = read(tmp_path / "there", text).job.data
    assert data.tokenizer == str(tmp_path / "there" / "tok")
    assert data.mixture == (MixturePart(str(tmp_path / "there" / "a")), MixturePart("owner/name:part", 2.0))
    typed = read(tmp_path / "there", text, "--data.tokenizer", "tok").job.data
    assert typed.tokenizer == str(tmp_path / "here" / "tok")
    assert read(tmp_path / "there", '[data]\ntokenizer = "gpt2"').job.data.tokenizer == "gpt2"


def test_a_schedule_of_your_own_is_found_beside_the_file_and_a_name_stays_a_name(tmp_path, monkeypatch):
    (tmp_path / "mine.csv").write_text("0F0,0B0\n")
    (tmp_path / "gpipe").mkdir()
    monkeypatch.chdir("/")
    for said, expected in (
        ("mine.csv", str(tmp_path / "mine.csv")),
        ("gpipe", "gpipe"),
        ("absent.csv", "absent.csv"),
    ):
        (tmp_path / "run.toml").write_text(f'[[strategies]]\nname = "pipeline"\nschedule = "{said}"\n')
        strategies = read_request(tmp_path / "run.toml", [], {"pipeline": {"": Pipeline}}).strategies
        assert strategies == (Pipeline(schedule=expected),)


def test_a_plan_file_can_be_moved_to_another_folder(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "net.py").touch()
    request = read(tmp_path, CONFIG.replace("no/such/model", "net.py:make") + '[data]\nsource = "text"')
    write_request(request, tmp_path / "far" / "away" / "plan.toml")
    assert read_request(tmp_path / "far" / "away" / "plan.toml", (), KNOWN) == request


def test_a_plan_file_spells_out_every_key(tmp_path):
    document = request_as_dict(PlanRequest(strategies=(Copies(),)))
    assert [*document["train"]] == [item.name for item in fields(TrainConfig)]
    assert document["strategies"] == [{"name": "copies", "bucket_mb": 25.0, "overlap": True}]
    assert document["optimizer"]["betas"] == [0.9, 0.95]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    def no_space(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "plan.toml"
    write_request(PlanRequest(micro_batch=1), path)
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(PlanError, match="cannot be written: No space left on device"):
        write_request(PlanRequest(micro_batch=2), path)
    assert read_request(path, (), KNOWN).micro_batch == 1
    assert [found.name for found in tmp_path.iterdir()] == ["plan.toml"]


def test_a_file_that_cannot_be_written_is_a_plan_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match=r"cannot be written: .*\n  repair: name a file in a folder"):
        write_request(PlanRequest(), tmp_path / "file" / "plan.toml")


def test_a_request_as_plain_values_has_no_order_of_keys():
    document = request_as_dict(PlanRequest(mesh={"tp": 2, "pp": 3}))
    assert document == request_as_dict(PlanRequest(mesh={"pp": 3, "tp": 2}))
    assert document != request_as_dict(PlanRequest(mesh={"pp": 2, "tp": 3}))


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
FLOATS = st.floats(allow_nan=False)
INTS = st.integers(-(2**63), 2**63 - 1)
SOURCES = st.builds("no/such/{}".format, TEXTS)  # a path that exists would become absolute
GROUPS = st.builds(ParamGroupConfig, TEXTS, FLOATS, st.none() | FLOATS)
OVERRIDES = st.dictionaries(TEXTS, st.none() | st.booleans() | INTS | FLOATS | TEXTS, max_size=3)
DTYPES = st.sampled_from(["float64", "float32", "bfloat16", "float16"])
FORMATS = st.sampled_from(["auto", "text", "jsonl", "datasets"])
PATTERNS = st.lists(TEXTS, max_size=2).map(tuple)
JOBS = st.builds(
    Job,
    st.builds(ModelConfig, SOURCES, OVERRIDES),
    st.builds(
        DataConfig,
        SOURCES | st.just("example"),
        PATTERNS,
        PATTERNS,
        INTS,
        INTS,
        FORMATS,
        SOURCES,
        *(TEXTS, TEXTS, TEXTS, st.booleans()),
        st.lists(
            st.builds(MixturePart, SOURCES, FLOATS, FORMATS, PATTERNS, PATTERNS, TEXTS, TEXTS, TEXTS),
            max_size=2,
        ).map(tuple),
    ),
    st.builds(TrainConfig, INTS, INTS, FLOATS, INTS),
    st.builds(
        OptimizerConfig,
        st.sampled_from(["adamw", "sgd"]),
        betas=st.tuples(FLOATS, FLOATS),
        groups=st.lists(GROUPS, max_size=2).map(tuple),
    ),
    st.builds(LRScheduleConfig, st.sampled_from(["constant", "cosine", "wsd"]), INTS, INTS, FLOATS),
    st.builds(PrecisionConfig, DTYPES, DTYPES, DTYPES),
)
STRATEGIES = st.builds(Copies, st.none() | FLOATS, st.booleans()) | st.builds(
    Layers, st.lists(st.integers(1, 9), max_size=3).map(tuple), TEXTS
)
REQUESTS = st.builds(
    PlanRequest,
    JOBS,
    st.builds(
        RunConfig, TEXTS, INTS, INTS, sample_prompt=TEXTS, sample_tokens=INTS, workers=INTS, cache=TEXTS
    ),
    st.dictionaries(st.sampled_from(["pp", "dp_replicate", "dp_shard", "cp", "tp"]), INTS),
    INTS,
    INTS,
    st.none() | st.lists(STRATEGIES, max_size=3).map(tuple),
    st.dictionaries(st.sampled_from(["plan_hash", "meshwright"]), TEXTS),
)


@settings(max_examples=60, deadline=None)
@given(request_=REQUESTS)
def test_what_is_written_is_read_back_exactly(tmp_path_factory, request_):
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    write_request(request_, path)
    back = read_request(path, (), KNOWN)
    assert back == request_
    # 1, 1.0 and true are equal, their texts are not
    texts = [json.dumps(request_as_dict(each), sort_keys=True) for each in (back, request_)]
    assert texts[0] == texts[1]


def test_not_a_number_is_read_back(tmp_path):
    write_request(PlanRequest(job=Job(optimizer=OptimizerConfig(lr=float("nan")))), tmp_path / "plan.toml")
    assert math.isnan(read_request(tmp_path / "plan.toml", (), KNOWN).job.optimizer.lr)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("version = 1", "version = 2", "its version is 2; this meshwright reads version 1 of it"),
        ("version = 1\n", "", "it names no format and version"),
        ("meshwright plan", "some plan", "its format is 'some plan'; needed is 'meshwright plan'"),
        ('format = "meshwright plan"\nversion = 1\n', "", "it names no format and version"),
    ],
)
def test_a_plan_of_another_version_is_refused_and_a_config_needs_none(tmp_path, old, new, problem):
    path = tmp_path / "plan.toml"
    write_request(PlanRequest(extra={"plan_hash": "1", "meshwright": "0.1"}), path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(PlanError) as raised:
        read_request(path, (), KNOWN)
    (diagnostic,) = raised.value.diagnostics
    assert (diagnostic.location, diagnostic.problem[: len(problem)]) == (str(path), problem)
    assert "meshwright plan CONFIG.toml" in diagnostic.fix
    path.write_text("micro_batch = 2\n")
    assert read_request(path, (), KNOWN).micro_batch == 2
