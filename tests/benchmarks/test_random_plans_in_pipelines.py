"""Plans by chance whose layers lie on several ranks: each equals one device, or is refused with a repair."""

import pytest

from tests.benchmarks.drawn import matches_or_is_refused, numbers

# T5 on pp 3 x cp 2, words divided along a tp of one rank: the numbers are equal, the program states a meeting that nobody has
LEDGER_ALONE = 7


@pytest.mark.parametrize("number", [each for each in numbers(lambda drawn: drawn.mesh.pp > 1) if each != LEDGER_ALONE])
def test_a_plan_equals_one_device_or_is_refused_with_a_repair(number: int):
    matches_or_is_refused(number)


@pytest.mark.xfail(strict=True, reason="the ledger of words divided along one rank differs from the program")
def test_words_divided_along_one_rank_on_a_later_part_have_their_ledger():
    matches_or_is_refused(LEDGER_ALONE)
