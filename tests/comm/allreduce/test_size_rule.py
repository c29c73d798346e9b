"""Algorithm rules by message size: which algorithm they select, their text form, and errors of invalid
ones.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.comm.allreduce import ALGORITHM_NAMES, ALGORITHMS, get_algorithm
from meshwright.comm.allreduce.hierarchical import HierarchicalAllReduce
from meshwright.comm.allreduce.size_rule import SizeRule, rule_diagnostics
from meshwright.plan.job.errors import PlanError

WHERE = "strategies.ddp.algorithm"
TEXT = "recursive_doubling <= 64 KiB, tree <= 1 MiB, else hierarchical/2"


def problems_of(text: str, size: int = 4) -> list[str]:
    """Returns what is wrong with `text`, without the place, which each fault must name."""
    found = list(rule_diagnostics(text, size, WHERE))
    assert all(fault.location == WHERE for fault in found)
    return [str(fault).removeprefix(f"{WHERE}: ").replace("\n  repair", "; repair") for fault in found]


def test_a_rule_picks_the_first_algorithm_whose_size_is_not_exceeded():
    rule = SizeRule.parse(TEXT)
    sizes = (0, 1, 65_536, 65_537, 2**20, 2**20 + 1, 2**40)
    assert [rule.algorithm_for(nbytes) for nbytes in sizes] == ["recursive_doubling"] * 3 + ["tree"] * 2 + [
        "hierarchical/2"
    ] * 2
    assert rule.algorithm_names == ("recursive_doubling", "tree", "hierarchical/2")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_name_alone_is_a_rule_for_all_sizes(name: str):
    rule = SizeRule.parse(name)
    assert (rule.algorithm_for(1), rule.algorithm_for(2**40), str(rule)) == (name, name, name)
    assert problems_of(name) == []


@pytest.mark.parametrize(
    ("text", "again"),
    [
        (TEXT, TEXT),
        ("recursive_doubling<=65536 B,tree<=1024KiB,else hierarchical/2", TEXT),
        ("  tree <= 1.5 MiB ,  else ring ", "tree <= 1536 KiB, else ring"),
        ("tree <= 1 B, else ring", "tree <= 1 B, else ring"),
        ("reduce_broadcast <= 2 GiB, else ring", "reduce_broadcast <= 2 GiB, else ring"),
        ("else ring", "ring"),
    ],
)
def test_a_rule_is_written_in_one_way(text: str, again: str):
    assert str(SizeRule.parse(text)) == again
    assert SizeRule.parse(again) == SizeRule.parse(text)


@given(st.lists(st.integers(1, 2**40), unique=True, max_size=5), st.data())
def test_every_rule_comes_back_from_its_text(sizes: list[int], data: st.DataObject):
    names = st.sampled_from([*ALGORITHMS, "hierarchical/2", "hierarchical/16"])
    rule = SizeRule(data.draw(names), tuple((nbytes, data.draw(names)) for nbytes in sorted(sizes)))
    assert SizeRule.parse(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rng", "no all_reduce algorithm 'rng'; repair: did you mean 'ring'?"),
        (
            "xyz",
            (
                "no all_reduce algorithm 'xyz'; repair: choose one of: backend, naive, reduce_broadcast, "
                "ring, one_shot, recursive_halving"
            ),
        ),
        ("", "'' is neither an algorithm nor a rule by message size; repair: write an algorithm, or"),
        ("ring halving", "'ring halving' is neither an algorithm nor a rule"),
        ("else", "'else' is neither an algorithm nor a rule"),
        (
            "recursive_doubling <= 64 KiB",
            "the rule 'recursive_doubling <= 64 KiB' does not say what larger messages take; "
            "repair: let it end with",
        ),
        ("recursive_doubling <= 64 KiB, ring", "does not say what larger messages take"),
        (
            "recursive_doubling <= 64 KB, else ring",
            "'KB' in 'recursive_doubling <= 64 KB' is not a unit of size; "
            "repair: choose one of: GiB, MiB, KiB, B",
        ),
        (
            "recursive_doubling <= 64, else ring",
            "'recursive_doubling <= 64' in the rule 'recursive_doubling <= 64, else ring' is not an "
            "algorithm with a size",
        ),
        (
            "doubling < 64 KiB, else ring",
            "is not an algorithm with a size; repair: write it so: tree <= 1 MiB",
        ),
        (
            "tree <= 1 MiB, reduce_broadcast <= 1024 KiB, else ring",
            "'reduce_broadcast <= 1024 KiB' is never reached: messages of up to 1 MiB are taken",
        ),
        ("tree <= 0 KiB, else ring", "'tree <= 0 KiB' is never reached"),
        ("tree <= 1 MiB, else auto", "auto cannot be a part of a rule"),
        (
            "hierarchical",
            (
                "no all_reduce algorithm 'hierarchical'; repair: write hierarchical/G, where G is the "
                "number of ranks"
            ),
        ),
        ("hierarchical/0", "repair: write hierarchical/G, where G"),
        ("hierarchicl/4", "repair: did you mean 'hierarchical/4'?"),
        ("ring/4", "repair: write ring alone: only hierarchical takes a number"),
        (
            "auto",
            (
                "auto needs the measured cost of the links; repair: run `meshwright bench network`, "
                "then name its file: cluster ="
            ),
        ),
    ],
)
def test_a_wrong_rule_is_refused_with_its_repair(text: str, message: str):
    (fault,) = problems_of(text)
    assert message in fault
    with pytest.raises(PlanError) as caught:
        SizeRule.parse(text, WHERE)
    assert [str(each) for each in caught.value.diagnostics] == [
        str(each) for each in rule_diagnostics(text, 4, WHERE)
    ]


def test_all_errors_are_reported_at_once():
    found = problems_of("doublng <= 4 KB, rng <= 1 MiB, trea <= 1 KiB")
    assert len(found) == 6
    for word in ("larger messages", "'recursive_doubling'", "'KB'", "'ring'", "'tree'", "never reached"):
        assert sum(word in fault for fault in found) >= 1, word


@pytest.mark.parametrize(
    ("per_host", "size", "message"),
    [
        (
            4,
            6,
            (
                r"6 ranks are not a whole number of hosts with 4 ranks each; repair: write "
                r"hierarchical/2 "
                r"or hierarchical/3, or ring"
            ),
        ),
        (
            8,
            4,
            (
                r"4 ranks are not a whole number of hosts with 8 ranks each; repair: write hierarchical/2, "
                r"or ring"
            ),
        ),
        (
            2,
            7,
            (
                r"7 ranks are not a whole number of hosts with 2 ranks each; repair: write ring: 7 "
                r"ranks "
                r"have no hosts of equal size"
            ),
        ),
        (
            1,
            4,
            (
                r"with 1 of 4 ranks on a host there is nothing to sum inside a host; repair: write "
                r"hierarchical/2, or ring"
            ),
        ),
        (
            4,
            4,
            (
                r"with 4 of 4 ranks on a host there is nothing to sum between hosts; repair: write "
                r"hierarchical/2, or ring"
            ),
        ),
    ],
)
def test_hosts_that_do_not_fit_the_ranks_are_refused(per_host: int, size: int, message: str):
    assert problems_of(f"hierarchical/{per_host}", size) == [f"hierarchical/{per_host}: {message}"]
    assert problems_of(f"recursive_doubling <= 1 KiB, else hierarchical/{per_host}", size) == [
        f"hierarchical/{per_host}: {message}"
    ]


def test_hosts_that_fit_are_no_error_nor_is_a_single_rank():
    assert (
        problems_of("hierarchical/2", 4)
        == problems_of("hierarchical/2", 1)
        == problems_of("hierarchical/3", 9)
        == []
    )


def test_a_name_with_a_number_is_that_algorithm():
    assert get_algorithm("hierarchical/4") == HierarchicalAllReduce(4)
    assert str(get_algorithm("hierarchical/4")) == "hierarchical/4"
    assert [str(get_algorithm(name)) for name in ALGORITHMS] == list(ALGORITHMS)
    assert ALGORITHM_NAMES[-1] == "hierarchical/G"
