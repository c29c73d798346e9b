"""What a search found, in words: the scenario, the ranking, and why the others lose."""

from meshwright.planner.hardware import machine
from meshwright.planner.layout import Order
from meshwright.planner.search import Wish, search
from meshwright.planner.shapes import parse_shape
from meshwright.report.choice import PARTS, Budget, choice_dict, reasons, spent_on

WISH = Wish(parse_shape("7b: layers 32 hidden 4096 heads 32"), machine("H100", 32), 64, {"1f1b": (Order(), 1)})
FOUND = search(WISH, 4)


def test_every_loser_is_told_what_costs_it_more():
    first, *others = reasons(WISH, FOUND)
    assert first.startswith(f"{FOUND.seen} layouts were priced.")
    assert len(others) == 3
    for number, (line, each) in enumerate(zip(others, FOUND.best[1:], strict=True), start=2):
        more = {name: spent_on(each, name) - spent_on(FOUND.best[0], name) for name in PARTS}
        assert line.startswith(f"{number}. ")
        assert line.endswith(f"{PARTS[max(more, key=more.__getitem__)]}.")


def test_days_and_cost_are_said_only_where_they_are_asked_for():
    plain, asked = (choice_dict(WISH, FOUND, budget)["layouts"][0] for budget in (Budget(), Budget(1e12, 2.0)))
    assert "days" not in plain
    assert asked["cost"] > asked["cost_of_waiting"] > 0


def test_shares_are_of_the_whole_step():
    for row in choice_dict(WISH, FOUND, Budget())["layouts"]:
        assert 0 <= row["waiting"] + row["exposed"] < 1
        assert 0.05 < row["mfu"] < 0.9
