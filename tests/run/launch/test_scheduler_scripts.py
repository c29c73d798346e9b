"""Job files, read by their consumers: bash, a YAML parser, and our own reader of the environment."""

import re
import shlex
import subprocess
from dataclasses import replace

import pytest
import yaml

from meshwright.plan.job.errors import PlanError
from meshwright.run.launch.cluster_env import find_launcher_env
from meshwright.run.launch.scheduler_scripts import (
    JobFile,
    distribute_ranks,
    kubernetes_manifest,
    slurm_script,
    torchrun_command,
)

WORDS = ["jobs/it's mine.toml", "--run.folder", "runs/a b", "--train.steps", "5"]
JOB = JobFile(WORDS, "mine", num_hosts=3, ranks_per_host=2, image="registry/mesh:1", volume="claim:/work")


@pytest.mark.parametrize("write", [slurm_script, torchrun_command])
def test_bash_reads_the_script_and_the_arguments_arrive_unchanged(write):
    text = write(JOB)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    line = next(line for line in text.splitlines() if "train" in line and not line.startswith("#"))
    assert shlex.split(line)[-len(WORDS) :] == WORDS


def test_the_batch_script_starts_one_task_per_rank_and_queues_again_what_was_stopped():
    text = slurm_script(JOB)
    for line in (
        "--nodes=3",
        "--ntasks-per-node=2",
        "--gpus-per-node=2",
        "--signal=USR1@180",
        "--requeue",
        "--time=24:00:00",
    ):
        assert f"#SBATCH {line}\n" in text
    assert text.startswith("#!/bin/bash\n#SBATCH")
    assert "gpus" not in slurm_script(replace(JOB, gpus=False))
    stub = 'srun() { return "$CODE"; }; scontrol() { echo "$@"; }; SLURM_JOB_ID=7\n'
    ended = {
        code: subprocess.run(
            ["bash", "-c", stub + text], env={"CODE": str(code)}, capture_output=True, text=True, check=False
        )
        for code in (0, 1, 2, 143)
    }
    assert {code: done.returncode for code, done in ended.items()} == {0: 0, 1: 1, 2: 2, 143: 143}
    assert {code: done.stdout for code, done in ended.items()} == {0: "", 1: "", 2: "", 143: "requeue 7\n"}


def test_torchrun_gets_a_line_per_host_and_no_rendezvous_on_a_single_one():
    lines = [line for line in torchrun_command(JOB).splitlines() if line.startswith("torchrun")]
    assert [re.search(r"--nnodes=3 --node-rank=(\d)", line)[1] for line in lines] == ["0", "1", "2"]
    assert all("--nproc-per-node=2 --max-restarts=3 -m meshwright train" in line for line in lines)
    alone = torchrun_command(replace(JOB, num_hosts=1))
    assert alone.startswith("torchrun --standalone --nproc-per-node=2 ")
    assert "MASTER" not in alone


def test_the_manifest_is_a_headless_service_and_an_indexed_job():
    service, job = yaml.safe_load_all(kubernetes_manifest(JOB))
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    spec = job["spec"]
    assert (job["apiVersion"], spec["completionMode"], spec["completions"], spec["parallelism"]) == (
        "batch/v1",
        "Indexed",
        3,
        3,
    )
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert container["command"][:1] == ["torchrun"]
    assert "--node-rank=$(POD_INDEX)" in container["command"]
    assert container["command"][-len(WORDS) :] == WORDS
    assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]} == {
        "shm": "/dev/shm",
        "run": "/work",
    }
    assert {volume["name"] for volume in pod["volumes"]} == {"shm", "run"}


def test_a_pod_with_one_rank_finds_its_place_by_itself():
    _, job = yaml.safe_load_all(kubernetes_manifest(replace(JOB, ranks_per_host=1, gpus=False)))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["meshwright", "train", *WORDS]
    env = {
        entry["name"]: entry["value"].replace("$(POD_INDEX)", "2")
        for entry in container["env"]
        if "value" in entry
    }
    place = find_launcher_env({**env, "JOB_COMPLETION_INDEX": "2"}, "pod")
    assert (place.rank, place.world, place.local_rank, place.master_addr, place.master_port) == (
        2,
        3,
        0,
        "mine-0.mine",
        29500,
    )


def test_a_manifest_without_image_and_shared_volume_is_refused_at_once():
    with pytest.raises(PlanError) as refused:
        kubernetes_manifest(replace(JOB, image="", volume=""))
    assert [fault.location for fault in refused.value.diagnostics] == ["--image", "--volume"]
    with pytest.raises(PlanError, match=r"'claim' is not a volume\n.*CLAIM:PATH"):
        kubernetes_manifest(replace(JOB, volume="claim"))
    kubernetes_manifest(replace(JOB, num_hosts=1, volume=""))


@pytest.mark.parametrize(
    ("hosts", "per_host", "found"),
    [(None, None, (1, 6)), (3, None, (3, 2)), (None, 3, (2, 3)), (2, 3, (2, 3))],
)
def test_hosts_and_ranks_per_host_follow_from_each_other(hosts, per_host, found):
    assert distribute_ranks(6, hosts, per_host) == found


@pytest.mark.parametrize(("hosts", "per_host"), [(4, None), (None, 4), (2, 2), (7, None)])
def test_hosts_that_do_not_fit_the_mesh_are_refused(hosts, per_host):
    with pytest.raises(
        PlanError, match=r"the mesh of the plan has 6\n.*--hosts 1 --per-host 6, --hosts 2 --per-host 3"
    ):
        distribute_ranks(6, hosts, per_host)
