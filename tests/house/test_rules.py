"""The rules of the house: every one holds in the tree, and every one bites."""

import pytest

from tests.house import glossary, layers, public, shape, words
from tests.house.layers import NAMES_DEVICES, ORDINARY, compared_strings, named_devices
from tests.house.source import PACKAGE, Rule, Source, imported, package_sources, python_sources, report

RULES = (*shape.RULES, *words.RULES, *public.RULES, *layers.RULES, *glossary.RULES)
BAD = [
    pytest.param(rule, text, id=f"{rule.sentence}-{i}") for rule in RULES for i, text in enumerate(rule.bad)
]
GOOD = [
    pytest.param(rule, text, id=f"{rule.sentence}-{i}") for rule in RULES for i, text in enumerate(rule.good)
]


@pytest.fixture(scope="module")
def tree() -> list[Source]:
    return python_sources("src", "tests", "benchmarks", "docs", "examples")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.sentence)
def test_the_tree_keeps_the_rule(rule: Rule, tree: list[Source]):
    found = [(source.path, finding) for source in tree if rule.where(source) for finding in rule.find(source)]
    assert not found, report(rule.sentence, found)


@pytest.mark.parametrize(("rule", "text"), BAD)
def test_the_rule_bites(rule: Rule, text: str):
    source = Source(rule.path, text)
    assert rule.where(source), "the example stands where the rule does not look"
    assert list(rule.find(source)), f"{rule.sentence}: not noticed:\n{text}"


@pytest.mark.parametrize(("rule", "text"), GOOD)
def test_the_rule_spares_what_is_right(rule: Rule, text: str):
    found = list(rule.find(Source(rule.path, text)))
    assert not found, report(rule.sentence, [(rule.path, finding) for finding in found])


def test_strings_that_only_look_like_techniques_are_compared_somewhere():
    compared = {text for source in package_sources() for text, _ in compared_strings(source)}
    idle = sorted(ORDINARY.keys() - compared)
    assert not idle, f"ORDINARY excuses strings that nothing compares with: {', '.join(idle)}"


def test_files_that_may_name_accelerators_do():
    naming = {source.inside for source in package_sources() if list(named_devices(source))}
    idle = sorted(NAMES_DEVICES.keys() - naming)
    assert not idle, f"NAMES_DEVICES excuses files that name none: {', '.join(idle)}"


def test_a_finding_is_reported_with_its_file_and_line():
    rule = next(rule for rule in RULES if rule.sentence == "nothing is global")
    path = f"{PACKAGE}/engine/example.py"
    found = [(path, finding) for finding in rule.find(Source(path, rule.bad[0]))]
    assert f"{path}:2: global x" in report(rule.sentence, found)


def test_pickles_are_read_in_one_file_which_nothing_imports():
    sources = package_sources()
    readers = [source.inside for source in sources if "torch.load(" in source.text]
    stem = words.FOREIGN.removesuffix(".py").replace("/", ".")
    importers = [source.path for source in sources for name, _ in imported(source) if f".{stem}" in name]
    assert readers == [words.FOREIGN]
    assert importers == []


def test_cli_may_print_and_read_the_environment():
    cli = Source(f"{PACKAGE}/cli/faults.py", "import os\nprint(os.environ)\n")
    aimed = {rule.sentence for rule in words.RULES if rule.where(cli)}
    assert not aimed & {"only cli prints", "only cli reads the environment"}
