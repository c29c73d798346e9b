"""The local ranks behind a verb: how they are started, and what is raised when they did not end well."""

from collections.abc import Callable
from pathlib import Path

from meshwright.run.launch.local_launcher import LaunchResult

LocalLauncher = Callable[[list[str], int, Path], LaunchResult]


class RanksFailed(Exception):
    """Local ranks did not end as they should; `outcome` says how."""

    def __init__(self, result: LaunchResult) -> None:
        self.result = result
        super().__init__(f"the ranks ended with code {result.exit_code}")
