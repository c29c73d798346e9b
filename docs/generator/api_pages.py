"""Makes the pages of the API reference: the public names by subject; Sphinx fills in the docstrings."""

import meshwright
import meshwright.nn
from docs.generator.essay import NOTE

FOLDER = "docs/reference/api"
ORIGIN = "the names in src/meshwright/__init__.py"
WORKFLOW = ("analyze", "make_plan", "verify", "trace", "parallelize", "train", "Trainer")  # the order of use
PAGES = {
    "functions": ("Functions", "From a model to a trainer: analyze, plan, verify, parallelize, train."),
    "trainer": (
        "Trainer and what it returns",
        "The objects that the functions return, and what a training loop meets.",
    ),
    "config": (
        "Config classes",
        "What is trained. The same classes are the tables of a [config file](../config.md).",
    ),
    "strategies": (
        "Strategies",
        "The techniques. Each is a value with options; see [their pages](../../techniques/index.md).",
    ),
    "layers": (
        "Layers",
        "Layers for models of your own, in `mw.nn`: plain PyTorch modules, under every plan the same. "
        "See [the mixture of experts](../../howto/mixture_of_experts.md).",
    ),
}


def api_pages() -> dict[str, str]:
    """Returns the text of every page by its path."""
    public = [*meshwright._MODULE_OF, *(f"nn.{name}" for name in meshwright.nn.__all__)]
    names = sorted(
        public, key=lambda name: (WORKFLOW.index(name) if name in WORKFLOW else len(WORKFLOW), name.lower())
    )
    grouped = {page: [name for name in names if _page_of(name) == page] for page in PAGES}
    made = {f"{FOLDER}/{page}.md": _page(page, members) for page, members in grouped.items() if members}
    return made | {f"{FOLDER}/index.md": _index(grouped)}


def _page_of(name: str) -> str:
    if name.startswith("nn."):
        return "layers"
    home = meshwright._MODULE_OF[name]
    if name[0].islower():
        return "functions"
    if home.startswith("meshwright.parallel") or home == "meshwright.plan.strategy_interface":
        return "strategies"
    return (
        "config"
        if home.startswith(("meshwright.plan.job", "meshwright.plan.sharding.mesh")) and "Error" not in name
        else "trainer"
    )


def _page(page: str, names: list[str]) -> str:
    title, about = PAGES[page]
    module = "meshwright.nn" if page == "layers" else "meshwright"
    shown = {name: name.removeprefix("nn.") for name in names}
    lines = [
        f"# {title}",
        "",
        NOTE.format(origin=ORIGIN),
        "",
        about,
        "",
        "```{eval-rst}",
        f".. currentmodule:: {module}",
        "",
    ]
    lines += [".. autosummary::", "   :nosignatures:", "", *(f"   {short}" for short in shown.values()), ""]
    for name, short in shown.items():
        lines += (
            [f".. autofunction:: {short}"]
            if _page_of(name) == "functions"
            else [f".. autoclass:: {short}", "   :members:"]
        )
        lines.append("")
    return "\n".join([*lines[:-1], "```", ""])


def _index(grouped: dict[str, list[str]]) -> str:
    lines = [
        "# API reference",
        "",
        NOTE.format(origin=ORIGIN),
        "",
        "`import meshwright as mw`. Names are imported on first use, so the",
    ]
    lines += ["import costs nothing and needs no torch.", ""]
    for page, names in grouped.items():
        if names:
            listed = ", ".join(f"`{name}`" for name in names)
            lines += [f"- [{PAGES[page][0]}]({page}.md): {listed}"]
    return "\n".join(
        [
            *lines,
            "",
            "```{toctree}",
            ":hidden:",
            "",
            *(page for page, names in grouped.items() if names),
            "```",
            "",
        ]
    )
