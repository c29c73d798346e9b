"""Sphinx's configuration; `make docs` builds the site."""

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from docs.generator.essay import rst  # noqa: E402
from meshwright import __version__  # noqa: E402

warnings.filterwarnings("ignore", category=DeprecationWarning)

project, author, version, release = "meshwright", "the meshwright developers", __version__, __version__
copyright = f"2026, {author}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx_design"]
exclude_patterns = ["generator", "__pycache__"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # pages from docstrings may begin below the second level

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autosummary_generate = False

smartquotes = False  # options begin with two dashes

html_theme = "furo"
html_title = f"meshwright {version}"
html_static_path: list[str] = []


def setup(app):
    """Docstrings are plain text with `code` and indented pictures; autodoc wants reStructuredText."""

    def convert(app, what, name, obj, options, lines):
        lines[:] = rst(lines)

    app.connect("autodoc-process-docstring", convert)
