"""A file is replaced whole."""

from meshwright.run.telemetry.atomic_write import replace_file


def test_a_file_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path):
    replace_file(tmp_path / "new" / "file.json", "1")
    replace_file(tmp_path / "new" / "file.json", "2")
    assert [(path.name, path.read_text()) for path in (tmp_path / "new").iterdir()] == [("file.json", "2")]
