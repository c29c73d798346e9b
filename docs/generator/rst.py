"""Turns this project's docstrings into reStructuredText, for Sphinx's autodoc.

Docstrings are written to be read in the source: `name` is code, indented blocks are pictures, `Args:` lists
parameters.
"""

import re
from collections.abc import Iterator

SECTION = re.compile(r"(Args|Returns|Raises):$")
ARGUMENT = re.compile(r"( +)(\*{0,2}\w+): (.*)")


def rst(lines: list[str]) -> list[str]:
    """Returns the lines of a docstring as reStructuredText."""
    return list(_converted(lines))


def _converted(lines: list[str]) -> Iterator[str]:
    section, literal = "", False
    for line in lines:
        if found := SECTION.match(line):
            section, literal = found.group(1), False
            yield ""
        elif section and (not line.strip() or line.startswith(" ")):
            yield _argument(section, line)
        elif line.startswith("    "):
            if not literal:
                yield from ("", ".. code-block:: text", "")
            literal = True
            yield f"    {line}"
        elif literal and not line.strip():
            yield ""
        else:
            if literal or section:
                yield ""
            section, literal = "", False
            yield _escaped(line)
    yield ""


def _argument(section: str, line: str) -> str:
    found = ARGUMENT.match(line)
    if section == "Args" and found and len(found.group(1)) == 4:
        return f":param {found.group(2)}: {_escaped(found.group(3))}"
    if section == "Raises" and found and len(found.group(1)) == 4:
        return f":raises {found.group(2)}: {_escaped(found.group(3))}"
    if section == "Returns" and line.strip():
        return f":returns: {_escaped(line.strip())}"
    return f"    {_escaped(line.strip())}" if line.strip() else ""


def _escaped(line: str) -> str:
    """A line of prose: `code` becomes ``code``, and characters that mean something in it are escaped."""
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(f"`{part}`" if part.startswith("`") and len(part) > 2 else _plain(part) for part in parts)


def _plain(text: str) -> str:
    return re.sub(r"([*|`\\]|_(?=\W|$))", r"\\\1", text)
