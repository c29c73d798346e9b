"""Makes the pages of the techniques: one per module of `parallel/` and `nn/routing/`, from its essay, and
their index.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from docs.generator.essay import NOTE, PACKAGE, Essay, cell, markdown

SOURCE, ROUTINGS = f"{PACKAGE}/parallel", f"{PACKAGE}/nn/routing"
FOLDER = "docs/techniques"
# FOLDER/NAME of the modules there that several techniques share: no technique themselves
SHARED = (
    "expert/dense_experts",
    "expert/dispatch",
    "expert/chunked_experts",
    "expert/expert_memory",
    "expert/expert_pairs",
    "expert/summed_experts",
    "context/attention_args_to_4d",
    "context/ring_geometry",
    "context/attention_kernel",
    "output_merge/decode_attention",
    "output_merge/merge_outputs",
    "output_merge/triton_merge",
    "context/ulysses_all_to_all",
    "context/block_mask",
    "context/memory_model",
    "context/ring_attention",
    "context/context_parallel_strategy",
    "codecs/block_codes",
    "compression/coded_sum",
    "compression/residuals",
    "codecs/sliced_sums",
    "outer/rounds",
    "outer/round_averages",
    "server/arrival_record",
    "server/stale_updates",
    "memory/block_compiler",
    "embedding/row_actions",
    "embedding/row_exchange",
    "observer/observations",
    "memory/budgeted_chain",
    "memory/early_stop",
    "memory/gist_encodings",
    "memory/selective_outputs",
    "tiers/offload_actions",
    "tiers/kept_tensor_copies",
    "tiers/kept_tensor_file",
    "pipeline/receive_prefetch",
    "pipeline/send_recv_insertion",
    "schedules/list_scheduler",
    "schedules/registry",
    "schedules/schedule",
    "tensor/collective_insertion",
    "tensor/comm_overlap",
    "tensor/joint_sum",
    "tensor/sharded_layer",
    "tensor/layer_split_checks",
    "routing/routes",
    "routing/capacity",
    "routing/losses",
)
TITLES = {
    "data": "Data parallelism",
    "compression": "Compressed communication",
    "compression/codecs": "Codecs",
    "outer": "Rounds between sites",
    "server": "Parameter servers",
    "embedding": "Embedding tables on hosts",
    "observer": "Ranks that observe",
    "memory": "Memory",
    "memory/tiers": "Memory of the host and of disks",
    "precision": "Precision of products",
    "tensor": "Tensor parallelism",
    "context": "Context parallelism",
    "pipeline": "Pipeline parallelism",
    "pipeline/schedules": "Pipeline schedules",
    "expert": "Expert parallelism",
    "routing": "Routings of experts",
}


def techniques(modules: Iterable[Essay]) -> list[Essay]:
    """Returns the modules `parallel/FAMILY/NAME.py` and `nn/routing/NAME.py`, without those that several
    techniques share.

    Raises ValueError when two families have a technique of one name, because a plan file names a technique
    alone.
    """
    sources = f"{SOURCE}/", f"{ROUTINGS}/"
    found = [essay for essay in modules if essay.path.startswith(sources) and "/" in place(essay)]
    found = [
        essay for essay in found if f"{essay.family}/{essay.name}" not in SHARED and essay.name != "__init__"
    ]
    names = [essay.name for essay in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        text = f"techniques of the same name in two families: {', '.join(twice)}"
        raise ValueError(f"{text}; a plan names them alone: rename one")
    return found


def place(essay: Essay) -> str:
    """Returns the family and the name of a technique: `data/zero`, `routing/switch`."""
    path = PurePosixPath(essay.path).with_suffix("")
    return str(path.relative_to(SOURCE if path.is_relative_to(SOURCE) else PurePosixPath(ROUTINGS).parent))


def technique_pages(modules: Iterable[Essay]) -> dict[str, str]:
    """Returns the text of every page by its path."""
    found = techniques(modules)
    pages = {f"{FOLDER}/{place(essay)}.md": _page(essay) for essay in found}
    return pages | ({f"{FOLDER}/index.md": _index(found)} if found else {})


def _page(essay: Essay) -> str:
    family = PurePosixPath(place(essay)).parent
    facts = [f"Family: {family}.", *_in_config(essay), f"Source: `{essay.path}`."]
    head = [f"# {essay.name}", "", NOTE.format(origin=essay.path), "", " ".join(facts), ""]
    return "\n".join([*head, markdown(essay.text), ""])


def _in_config(essay: Essay) -> list[str]:
    """The lines of a config that ask for the technique, if the module has a strategy."""
    reference = "../" * (place(essay).count("/") + 1) + "reference/config.md"
    stated = []
    for node in essay.tree.body:
        given = dict(_constants(node)) if isinstance(node, ast.ClassDef) else {}
        if "name" in given:
            stated.append(
                ", ".join(f'`{key} = "{given[key]}"`' for key in ("name", "mode") if given.get(key))
            )
    return [f"In a config: {' or '.join(stated)} ([options]({reference}#strategies))."] if stated else []


def _constants(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The class attributes of a class that are strings."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            annotated = ast.unparse(each.annotation).startswith("ClassVar")
            if annotated and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str):
                yield each.target.id, each.value.value


def _index(found: list[Essay]) -> str:
    lines = ["# Techniques", "", NOTE.format(origin=f"{SOURCE} and {ROUTINGS}"), ""]
    families = list(dict.fromkeys(str(PurePosixPath(place(essay)).parent) for essay in found))
    for family in sorted(
        families, key=lambda name: (list(TITLES).index(name) if name in TITLES else len(TITLES), name)
    ):
        members = [essay for essay in found if str(PurePosixPath(place(essay)).parent) == family]
        lines += [f"## {TITLES.get(family, family)}", "", "| technique | idea |", "| --- | --- |"]
        lines += [f"| [{essay.name}]({place(essay)}.md) | {cell(essay.idea)} |" for essay in members]
        lines += ["", "```{toctree}", ":hidden:", "", *(place(essay) for essay in members), "```", ""]
    return "\n".join(lines)
