"""The list of config keys: complete, from the schema, with a meaning for each."""

import dataclasses
from io import StringIO

import pytest
from rich.console import Console

from meshwright.commands.config_help.key_reference import config_tables, key_meaning, key_table
from meshwright.parallel import STRATEGIES
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import TrainConfig


def shown(word: str) -> str:
    console = Console(width=200, file=StringIO())
    console.print(key_table(word))
    return console.file.getvalue()


def test_every_key_is_named_by_the_docstring_of_its_table():
    lacking = [
        key.name
        for table in config_tables()
        for key in table.keys
        if f"`{key.name.rpartition('.')[2]}`" not in table.text
    ]
    assert lacking == []


def test_every_field_of_a_table_and_of_every_strategy_is_listed():
    tables = {table.path: table for table in config_tables()}
    assert [key.name for key in tables["train"].keys] == [
        f"train.{field.name}" for field in dataclasses.fields(TrainConfig)
    ]
    assert {f"strategies.{name}" for name in STRATEGIES} == {
        path.partition(" ")[0] for path in tables if path.startswith("strategies.")
    }


def test_a_key_has_its_type_default_and_the_sentence_that_names_it():
    text = shown("train.batch")
    assert "integer of at least 1; 8" in text
    assert "the number of samples of one step" in text
    assert text.count("\n") == 2


def test_a_part_of_a_name_lists_the_keys_that_contain_it():
    assert "lr_schedule.warmup" in shown("warmup")
    assert "optimizer.lr" in shown("optimizer")
    assert "train.steps" in shown("")


def test_a_word_of_no_key_is_refused_with_the_nearest():
    with pytest.raises(PlanError, match=r"no key contains 'warmpu'\n  repair: did you mean 'warmup'\?"):
        key_table("warmpu")


def test_the_meaning_is_the_sentence_that_begins_with_the_key_or_else_names_it():
    text = "A table.\n\nOf it `a` is one,\nand `b` another. `b` is the last."
    assert key_meaning(text, "a") == "Of it `a` is one, and `b` another."
    assert key_meaning(text, "b") == "`b` is the last."
    assert key_meaning(text, "c") == "A table."
