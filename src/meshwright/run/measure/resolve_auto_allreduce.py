"""Replaces `algorithm = "auto"` of a strategy by a rule, once, when the plan is made.

The rule comes from the measured links in the file that the key `cluster` of the config names. The plan
contains the rule and needs the file no more. A resumed run keeps the rule of its own plan, because another
algorithm gives other last bits; for a new choice, start in another folder.
"""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.comm.allreduce.size_rule import AUTO, SizeRule
from meshwright.comm.tuning.choose_size_rule import choose_rule
from meshwright.device.local_device import num_accelerators
from meshwright.device.platforms import ACCELERATOR_BACKENDS
from meshwright.plan.hardware.measured_cluster import Cluster
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.file_format import PLAN
from meshwright.plan.sharding.mesh import Mesh, axes_with
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.checkpoint.resume import CHECKPOINTS_FOLDER
from meshwright.run.config.plan_file import PLAN_FILE
from meshwright.run.measure.cluster_file import describe_machine, read_cluster


def choose_algorithms(
    strategies: Sequence[Strategy], mesh: Mesh, cluster: str, folder: Path
) -> tuple[tuple[Strategy, ...], list[str]]:
    """Returns `strategies` with a rule in place of every "auto", and one line per choice with its reason.

    `cluster` is the path of a cluster.toml ("": none), `folder` the run's folder. Raises PlanError if a rule
    is needed and nothing is measured.
    """
    if not any(_strategy_fields(strategy).get("algorithm") == AUTO for strategy in strategies):
        return tuple(strategies), []
    kept = [_resumed_rule(strategy, mesh, folder) for strategy in strategies]
    notes: list[str] = []
    measured: Cluster | None = None
    found = []
    for strategy, rule in zip(strategies, kept, strict=True):
        if _strategy_fields(strategy).get("algorithm") != AUTO:
            found.append(strategy)
            continue
        if rule is not None:
            notes.append(f"auto keeps '{rule}' for {strategy.name}, with which the run in {folder} began")
        else:
            if measured is None:
                measured = _read_measurement(cluster, strategy)
                notes += _mismatch_warnings(measured, cluster)
            ranks, per_host = _placed(strategy, mesh, measured)
            choice = choose_rule(measured, ranks, per_host)
            rule = str(choice.rule)
            notes.append(str(choice))
        found.append(_with_rule(strategy, rule))
    return tuple(found), notes


def _strategy_fields(strategy: Strategy) -> dict[str, Any]:
    return strategy.as_dict()


def _with_rule(strategy: Strategy, rule: str) -> Strategy:
    fields: dict[str, Any] = {"algorithm": rule}
    return replace(strategy, **fields)


def _read_measurement(cluster: str, strategy: Strategy) -> Cluster:
    if not cluster:
        text = "auto chooses by the measured cost of the links, and no measurement is named"
        fix = (
            'run `meshwright bench network`, then write cluster = "cluster.toml" at the top '
            "of "
            'the file; or algorithm = "ring"'
        )
        raise PlanError(text, fix=fix, location=f"strategies.{strategy.name}.algorithm")
    return read_cluster(Path(cluster))


def _placed(strategy: Strategy, mesh: Mesh, cluster: Cluster) -> tuple[int, int]:
    ranks = mesh.peers(0, _axes(_strategy_fields(strategy)))
    if not cluster.ranks_per_host or len(ranks) == 1:
        return len(ranks), 0
    hosts = len({rank // cluster.ranks_per_host for rank in ranks})
    return len(ranks), 0 if hosts == 1 else -(-len(ranks) // hosts)


def _mismatch_warnings(cluster: Cluster, path: str) -> Iterator[str]:
    here = describe_machine()
    gpu = num_accelerators() > 0
    if (cluster.transport in ACCELERATOR_BACKENDS) != gpu:
        have = "has GPUs" if gpu else "has none"
        yield (
            f"{path} was measured over {cluster.transport}, and this machine {have}: measure "
            f"where the plan will run"
        )
    elif cluster.machine != here:
        yield (
            f"{path} was measured on another machine ({cluster.machine}; here: {here}): measure where the "
            f"plan will run"
        )


def _axes(fields: dict[str, Any]) -> tuple[str, ...]:
    return fields.get("axis", "dp_replicate"), *axes_with("tokens")


def _resumed_rule(strategy: Strategy, mesh: Mesh, folder: Path) -> str | None:
    path = folder / PLAN_FILE
    if not path.is_file() or not any((folder / CHECKPOINTS_FOLDER).glob("step-*")):
        return None
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # resuming says what is wrong with it
    document = PLAN.contents(document, str(path))
    mine = {key: value for key, value in _strategy_fields(strategy).items() if key != "algorithm"}
    sizes = document.get("mesh", {})
    if any(sizes.get(axis, 1) != mesh.size(axis) for axis in _axes(mine)):
        return None
    return _rule(document.get("strategies", []), mine)


def _rule(tables: Iterable[dict[str, Any]], mine: dict[str, Any]) -> str | None:
    for table in tables:
        text = table.get("algorithm")
        if (
            isinstance(text, str)
            and {key: value for key, value in table.items() if key != "algorithm"} == mine
        ):
            try:
                return str(SizeRule.parse(text))
            except PlanError:
                return None
    return None
