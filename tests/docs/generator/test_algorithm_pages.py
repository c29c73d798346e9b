"""The pages of the algorithms, from a small package made for the purpose and from the real one."""

import re
from pathlib import Path

import pytest

from docs.generate import pages, stale, write
from docs.generator.algorithm_pages import SOURCE

ROOT = Path(__file__).parents[3]
SWAP = '''"""Swap all-reduce: two ranks swap.

    rounds = 1      sent per rank = S | S      seconds = a + S/B
    and so on

Cost: little.
Use: two ranks,
  no more.
Paper: none.
"""

class Swap(AllReduceAlgorithm):
    """One round."""
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "src/meshwright/comm/allreduce"
    folder.mkdir(parents=True)
    (folder / "swap.py").write_text(SWAP)
    (folder / "schedule.py").write_text(
        '"""The words."""\n\nclass AllReduceAlgorithm(ABC):\n    """One way."""\n'
    )
    return tmp_path


def test_every_algorithm_has_a_page_and_its_formulas_stand_in_the_index(root: Path):
    assert "docs/allreduce/swap.md" in write(root)
    assert "**Use:** two ranks," in (root / "docs/allreduce/swap.md").read_text()
    index = (root / "docs/allreduce/index.md").read_text()
    assert r"| [swap](swap.md) | 1 | S \| S | a + S/B | two ranks, no more. |" in index
    assert "schedule" not in index


def test_a_page_is_stale_after_a_change_and_gone_with_its_algorithm(root: Path):
    write(root)
    source = root / "src/meshwright/comm/allreduce/swap.py"
    source.write_text(SWAP.replace("a + S/B", "2 a"))
    assert stale(root) == [
        "docs/allreduce/swap.md is not up to date",
        "docs/allreduce/index.md is not up to date",
    ]
    source.unlink()
    assert "docs/allreduce/swap.md describes nothing that is there" in stale(root)
    write(root)
    assert not (root / "docs/allreduce/swap.md").exists()


@pytest.mark.parametrize("word", ["rounds", "sent", "seconds", "Use:"])
def test_an_essay_that_does_not_say_all_is_refused(root: Path, word: str):
    (root / "src/meshwright/comm/allreduce/swap.py").write_text(re.sub(rf"\b{word}", "something", SWAP))
    with pytest.raises(ValueError, match=r"swap\.py: its essay has nothing like .*; write rounds = "):
        pages(root)


def test_the_index_of_the_package_lists_all_algorithms():
    index = pages(ROOT)["docs/allreduce/index.md"]
    names = [
        path.stem
        for path in sorted((ROOT / SOURCE).glob("*.py"))
        if "(AllReduceAlgorithm):" in path.read_text()
    ]
    assert len(names) >= 9
    assert re.findall(r"^\| \[(\w+)\]", index, re.MULTILINE) == names
    assert "| [ring](ring.md) | 2 (n-1) | 2 (n-1)/n S | 2 (n-1) a + 2 (n-1)/n S/B | long messages. |" in index
