"""Local ranks of a command: the type of their launcher, and the error when they fail."""

from collections.abc import Callable
from pathlib import Path

from meshwright.run.launch.local_launcher import LaunchResult

LocalLauncher = Callable[[list[str], int, Path], LaunchResult]


class RanksFailed(Exception):
    """Local ranks failed; `result` says how."""

    def __init__(self, result: LaunchResult) -> None:
        self.result = result
        super().__init__(f"the ranks ended with code {result.exit_code}")
