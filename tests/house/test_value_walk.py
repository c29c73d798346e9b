"""How often a reader returns to a file that he has left, when he follows a config or a plan to the engine.

Both limits are a ratchet: a change may lower them. At commit 55850cc3 the walks had 24 and 9 returns.
`value_walk` defines what is counted.
"""

import ast

import pytest

from tests.house.package_code import FunctionCode, ModuleCode, read_modules
from tests.house.source import package_sources
from tests.house.value_walk import follow

PLANS = ("Plan", "RankPlan", "Trainer")
REQUESTS = ("PlanRequest", "OpenedRequest", "ResolvedRun", "Job", "RunConfig")
SHARDINGS = ("ShardingPlan", "RankView", "Program", "Role")
STATES = ("RankState", "Runtime")
MAX_RETURNS = {"config": 8, "plan": 6}


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleCode]:
    return read_modules(package_sources())


def is_engine(function: FunctionCode) -> bool:
    """Whether this is the constructor of what executes the actions."""
    return function.module.name == "meshwright.engine.step.executor" and function.node.name == "__init__"


def test_a_config_comes_to_the_engine_with_few_returns(modules):
    start = "meshwright.commands.train:train_rank:config"
    walk = follow(modules, start, [*REQUESTS, *PLANS], is_engine)
    assert is_engine(walk.steps[-1]), "the walk does not reach the engine"
    assert len(set(walk.stays)) > 20
    assert len(walk.returns) <= MAX_RETURNS["config"], walk.returns


def test_a_plan_is_spread_over_the_engine_with_few_returns(modules):
    walk = follow(modules, "meshwright.api:parallelize:plan", [*PLANS, *SHARDINGS, *STATES])
    assert any(map(is_engine, walk.steps)), "the walk does not reach the engine"
    assert len(set(walk.stays)) > 25
    assert len(walk.returns) <= MAX_RETURNS["plan"], walk.returns


FIRST = """
from second import Box, use, wrap

def start(value: Box, other: int) -> None:
    use(other)
    wrapped = wrap(value)
    value.size
    value.double()
    helper(wrapped.box)
    use(value)

def helper(box: Box) -> None: ...
"""
SECOND = """
class Box:
    @property
    def size(self) -> int: ...
    def double(self) -> "Box": ...

class Wrapped:
    box: Box

def wrap(box: Box) -> Wrapped: ...
def use(box: Box) -> None: ...
"""


def test_a_walk_enters_what_gets_the_value_once_and_in_the_order_of_the_source():
    modules: dict[str, ModuleCode] = {}
    for name, text in (("first", FIRST), ("second", SECOND)):
        modules[name] = ModuleCode(name, ast.parse(text), modules)
    walk = follow(modules, "first:start:value", ["Box", "Wrapped"])
    names = [each.node.name for each in walk.steps]
    assert names == ["start", "wrap", "double", "helper", "use"], "size is a question, and use(other) no step"
    assert walk.stays == ["first", "second", "first", "second"]
    assert walk.returns == ["first", "second"]
