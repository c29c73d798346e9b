"""expert_bytes: the law by hand, and the ledger of two ranks."""

from benchmarks.experts.expert_bytes import counted, law, notes_of


def test_the_law_counts_rows_and_counts():
    notes = [{"rows": 3, "layers": 2}, {"rows": 4, "layers": 2}]
    there, back = 7 * (16 * 4 + 2 * 8), 7 * 16 * 4
    gradients = 7 * 16 * 4 + 7 * (16 * 4 + 2 * 4)
    assert law(notes, 16, 2) == 2 * 2 * 16 + there + back + gradients


def test_the_ledger_of_two_ranks_equals_the_law():
    for notes in notes_of("ours", counted, 2):
        assert sum(note["sent"] for note in notes) == law(notes, 256, 8)
