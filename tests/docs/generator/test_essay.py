"""Docstrings as reStructuredText."""

from docs.generator.essay import rst


def test_code_is_marked_and_special_characters_are_escaped():
    assert rst(["Sums `a * b` over *all* ranks_."]) == ["Sums ``a * b`` over \\*all\\* ranks\\_.", ""]


def test_an_indented_picture_becomes_a_code_block():
    found = rst(["Text.", "", "    a -> b", "    c", "", "More."])
    assert found == [
        "Text.",
        "",
        "",
        ".. code-block:: text",
        "",
        "        a -> b",
        "        c",
        "",
        "",
        "More.",
        "",
    ]


def test_arguments_become_fields():
    found = rst(
        ["Makes it.", "", "Args:", "    loss: a sum;", "        and a count.", "    world: the ranks."]
    )
    assert found == [
        "Makes it.",
        "",
        "",
        ":param loss: a sum;",
        "    and a count.",
        ":param world: the ranks.",
        "",
    ]
