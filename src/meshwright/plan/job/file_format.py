"""Names the format and version of every file that one run writes and another one reads.

    {"format": "meshwright checkpoint", "version": 1, ...}      format = "meshwright plan"
                                                                version = 1

Such a file carries both, and its reader passes it through `FileFormat.contents`, which refuses any other file
with what was found, what is needed and the repair. A version is a whole number. It rises with every change
after which an older reader would misread the file; no file of another version is converted.

    run folder     plan.toml, run_info.json, metrics.jsonl (its first line), ranks/*.json, trace/*.json,
                   attempts/*/owner.json, checkpoints/best.json
    checkpoint     manifest.json, which lists the shards with their checksums; no shard is read without it
    elsewhere      meta.json of a token cache, device.toml, cluster.toml, the recording of a forward
"""

from dataclasses import dataclass
from typing import Any

from meshwright.plan.job.errors import PlanError


@dataclass(frozen=True)
class FileFormat:
    """A kind of file: its name, its version, and the repair for a file that is of another one."""

    name: str
    version: int
    fix: str

    @property
    def header(self) -> dict[str, Any]:
        """The keys that a file of this format carries besides its contents."""
        return {"format": self.name, "version": self.version}

    def contents(self, document: object, location: str) -> dict[str, Any]:
        """Returns `document`, read from the file `location`, without its header.

        Raises PlanError for a document of another format or version.
        """
        if not isinstance(document, dict) or not {"format", "version"} <= document.keys():
            text = f"it names no format and version; needed are '{self.name}', version {self.version}"
            raise PlanError(text, fix=self.fix, location=location)
        found, version = document["format"], document["version"]
        if found != self.name:
            text = f"its format is {found!r:.80}; needed is '{self.name}'"
            raise PlanError(text, fix=self.fix, location=location)
        if version != self.version or type(version) is not int:
            text = f"its version is {version!r:.80}; this meshwright reads version {self.version} of it"
            raise PlanError(text, fix=self.fix, location=location)
        return {key: value for key, value in document.items() if key not in self.header}


CHECKPOINT = FileFormat(
    "meshwright checkpoint",
    1,
    "resume from another checkpoint of the run, or with the meshwright that wrote this one",
)
BEST_CHECKPOINT = FileFormat(
    "meshwright best checkpoint", 1, "remove the file: the next evaluation names the best checkpoint again"
)
PLAN = FileFormat(
    "meshwright plan", 1, "make the plan again from its config: meshwright plan CONFIG.toml --out PLAN.toml"
)
METRICS = FileFormat(
    "meshwright metrics", 1, "move the file away, or train into another folder: the steps are written again"
)
RUN_INFO = FileFormat("meshwright run info", 1, "read the run with the meshwright that trained it")
RANK_USAGE = FileFormat("meshwright rank usage", 1, RUN_INFO.fix)
TRACE = FileFormat("meshwright trace", 1, RUN_INFO.fix)
RUN_OWNER = FileFormat("meshwright run owner", 1, RUN_INFO.fix)
TOKEN_CACHE = FileFormat("meshwright token cache", 1, "remove the folder: the tokens are made again")
DEVICE_PROFILE = FileFormat(
    "meshwright device profile", 1, "measure again: meshwright bench device --out device.toml"
)
CLUSTER = FileFormat("meshwright cluster", 1, "measure again: meshwright bench network --out cluster.toml")
RECORDING = FileFormat("meshwright recording", 1, "record it again: meshwright inspect --record FILE")
