"""The token cache: written once, memory-mapped afterwards, and never visible half-written."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from meshwright.plan.job.errors import PlanError
from meshwright.run.data.token_cache import open_token_cache
from meshwright.run.data.token_dataset import EncodedDocument

TEXTS = [
    EncodedDocument(np.array([5, 6, 7])),
    EncodedDocument(np.array([8])),
    EncodedDocument(np.array([300, 9])),
]
CHATS = [
    EncodedDocument(np.array([5, 6, 7]), np.array([0, 1, 1])),
    EncodedDocument(np.array([8, 9]), np.array([0, 1])),
]


def counted(
    documents: Iterable[EncodedDocument],
) -> tuple[Callable[[], Iterable[EncodedDocument]], list[int]]:
    calls: list[int] = []

    def made() -> Iterable[EncodedDocument]:
        calls.append(1)
        return documents

    return made, calls


def never() -> Iterable[EncodedDocument]:
    pytest.fail("the documents were tokenized again")


def only(cache: Path) -> Path:
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    return folder


def test_documents_come_back_as_they_were(tmp_path):
    kept = open_token_cache(tmp_path, "k", 500, lambda: TEXTS)
    assert kept.tokens.tolist() == [5, 6, 7, 8, 300, 9]
    assert kept.document_starts.tolist() == [0, 3, 4, 6]
    assert kept.label_mask is None
    assert kept.document(2).ids.tolist() == [300, 9]
    chats = open_token_cache(tmp_path, "c", 500, lambda: CHATS)
    assert chats.label_mask is not None
    assert chats.label_mask.tolist() == [0, 1, 1, 0, 1]
    assert chats.document(1).label_mask is not None
    assert chats.document(1).label_mask.tolist() == [0, 1]


def test_what_is_kept_is_not_made_again(tmp_path):
    first = open_token_cache(tmp_path / "cache", "k", 500, lambda: TEXTS)
    again = open_token_cache(tmp_path / "cache", "k", 500, never)
    assert again.digest == first.digest
    assert np.array_equal(again.tokens, first.tokens)
    assert isinstance(again.tokens, np.memmap)


def test_another_key_or_vocabulary_is_another_entry(tmp_path):
    for key, size in (("k", 500), ("l", 500), ("k", 600)):
        made, calls = counted(TEXTS)
        open_token_cache(tmp_path, key, size, made)
        assert calls == [1]


def test_ids_of_large_vocabularies_are_kept_whole(tmp_path):
    large = [EncodedDocument(np.array([70_000, 3]))]
    assert open_token_cache(tmp_path, "k", 70_001, lambda: large).tokens.tolist() == [70_000, 3]
    assert open_token_cache(
        tmp_path, "s", 65_536, lambda: [EncodedDocument(np.array([65_535]))]
    ).tokens.tolist() == [65_535]


def test_the_digest_covers_ids_boundaries_and_labels(tmp_path):
    moved = [
        EncodedDocument(np.array([5, 6])),
        EncodedDocument(np.array([7, 8])),
        EncodedDocument(np.array([300, 9])),
    ]
    other = [CHATS[0], EncodedDocument(np.array([8, 9]), np.array([1, 1]))]
    made = {
        "a": TEXTS,
        "b": moved,
        "c": CHATS,
        "d": other,
        "e": [EncodedDocument(each.ids) for each in CHATS],
    }
    assert (
        len(
            {
                open_token_cache(tmp_path, key, 500, lambda documents=documents: documents).digest
                for key, documents in made.items()
            }
        )
        == 5
    )


def test_what_fails_leaves_nothing(tmp_path):
    def failing() -> Iterable[EncodedDocument]:
        yield TEXTS[0]
        raise PlanError("row 2 is broken", fix="repair it")

    with pytest.raises(PlanError, match="row 2 is broken"):
        open_token_cache(tmp_path, "k", 500, failing)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    made, calls = counted(TEXTS)
    open_token_cache(tmp_path, "k", 500, made)
    assert calls == [1]


@pytest.mark.parametrize("damage", ["cut", "gone", "meta"])
def test_damaged_entries_are_made_again(tmp_path, damage: str):
    open_token_cache(tmp_path, "k", 500, lambda: TEXTS)
    place = only(tmp_path)
    if damage == "cut":
        (place / "tokens.bin").write_bytes(b"12")
    elif damage == "gone":
        (place / "document_starts.bin").unlink()
    else:
        (place / "meta.json").write_text("{}")
    made, calls = counted(TEXTS)
    assert open_token_cache(tmp_path, "k", 500, made).tokens.tolist() == [5, 6, 7, 8, 300, 9]
    assert calls == [1]
    assert only(tmp_path) == place


def test_what_a_killed_process_left_is_removed(tmp_path):
    open_token_cache(tmp_path, "k", 500, lambda: TEXTS)
    place = only(tmp_path)
    place.rename(place.with_name(f"{place.name}.partial-12ab"))
    open_token_cache(tmp_path, "k", 500, lambda: TEXTS)
    assert only(tmp_path) == place


def test_of_several_that_begin_at_once_one_tokenizes(tmp_path):
    made, calls = counted(TEXTS)
    begun, digests = threading.Barrier(3), []

    def rank() -> None:
        begun.wait(10)
        digests.append(open_token_cache(tmp_path, "k", 500, made).digest)

    threads = [threading.Thread(target=rank) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert calls == [1]
    assert len(digests) == 3
    assert len(set(digests)) == 1


def test_a_cache_that_cannot_be_written_is_refused_with_its_key(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        PlanError,
        match=r"run.cache: the tokens cannot be kept in .*file(.|\n)*name another folder: run.cache",
    ):
        open_token_cache(tmp_path / "file" / "cache", "k", 500, lambda: TEXTS)
