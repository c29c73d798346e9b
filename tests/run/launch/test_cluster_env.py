"""Environment variables of launchers: how each describes a rank, and refusals."""

import pytest

from meshwright.plan.job.errors import PlanError
from meshwright.run.launch.cluster_env import LOOPBACK, LauncherEnv, find_launcher_env, is_loopback

TORCHRUN = {
    **{
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "29511",
    },
    **{
        "TORCHELASTIC_RUN_ID": "r7",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    },
}
SLURM = {
    **{
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
    },
    **{
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "node[03-04]",
    },
    "SLURM_JOB_NODELIST": "node[01-04]",
}
BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "node[01-02]",
}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{key}": value
    for key, value in {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}.items()
}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def placed(*tables: dict[str, str], terminal: bool = False) -> LauncherEnv | None:
    return find_launcher_env(
        {key: value for table in tables for key, value in table.items()}, "here", has_terminal=terminal
    )


def where(place: LauncherEnv | None) -> tuple[int, int, int, int, str | None, int]:
    assert place is not None
    return place.rank, place.world, place.local_rank, place.local_world, place.master_addr, place.master_port


def test_no_launcher_makes_no_rank():
    assert placed({"HOME": "/", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}) is None


def test_torchrun_is_read_with_its_restarts_and_its_store():
    place = placed(TORCHRUN)
    assert where(place) == (5, 8, 1, 4, "a", 29511)
    assert (place.has_store, place.job_id, place.num_restarts, place.is_single_host) == (True, "r7", 2, False)
    assert str(place) == "rank 5 of 8 (torchrun on host here, 4 per host), master a:29511, restart 2"


def test_a_rank_by_hand_needs_only_rank_world_and_master():
    place = placed({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})
    assert where(place) == (1, 2, 1, 2, "127.0.0.1", 29500)
    assert place.is_single_host
    assert not place.has_store
    assert where(placed({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"})) == (1, 2, 0, 1, "a", 29500)


def test_a_task_of_srun_meets_on_the_first_host_of_its_step():
    rank, world, local_rank, local_world, master, port = where(placed(SLURM))
    assert (rank, world, local_rank, local_world, master) == (5, 8, 1, 4, "node03")
    assert 10_000 <= port < 30_000
    assert placed(SLURM).master_port == port
    assert placed(SLURM, {"SLURM_STEP_ID": "1"}).master_port != port
    assert where(placed(SLURM, {"MASTER_ADDR": "b", "MASTER_PORT": "7000"}))[4:] == ("b", 7000)


def test_tasks_on_one_host_meet_on_its_loopback():
    place = placed(
        SLURM, {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node03"}
    )
    assert where(place)[:5] == (5, 8, 1, 8, LOOPBACK)
    assert place.is_single_host


def test_hosts_with_unequal_numbers_of_tasks_count_their_own():
    assert placed(SLURM, {"SLURM_STEP_TASKS_PER_NODE": "5,3"}).local_world == 3


@pytest.mark.parametrize(
    "table",
    [
        BATCH,
        {**BATCH, "SLURM_STEP_ID": str(0xFFFF_FFFB)},
        {**BATCH, "SLURM_STEP_ID": str(0xFFFF_FFFA), "SLURM_STEP_NUM_TASKS": "8"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
    ids=["batch script", "batch step", "interactive step", "one task"],
)
def test_an_allocation_is_no_rank(table):
    assert placed(table) is None


def test_the_shell_of_srun_pty_is_no_rank_and_a_task_started_from_it_is():
    shell = {**SLURM, "SLURM_PTY_PORT": "40001"}
    assert placed(shell, terminal=True) is None
    assert placed(shell).rank == 5


def test_mpi_says_the_rank_and_the_user_where_to_meet():
    assert where(placed(OPEN_MPI, {"MASTER_ADDR": "a", "MASTER_PORT": "7000"})) == (5, 8, 1, 4, "a", 7000)
    assert where(placed(PMI, {"MASTER_ADDR": "a", "MASTER_PORT": "7000"})) == (5, 8, 1, 4, "a", 7000)
    with pytest.raises(
        PlanError, match=r"Open MPI says rank 5 of 8 .*MASTER_ADDR is not set.*\n.*mpirun: -x MASTER_ADDR"
    ):
        placed(OPEN_MPI)


def test_mpi_on_one_host_and_in_an_allocation_finds_where_to_meet():
    assert placed(OPEN_MPI, {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}).master_addr == LOOPBACK
    assert placed(OPEN_MPI, BATCH).master_addr == "node01"


def test_an_index_of_kubernetes_is_a_rank_beside_a_world_size_only():
    pod = {"JOB_COMPLETION_INDEX": "2", "MASTER_ADDR": "job-0.job"}
    assert placed(pod) is None
    assert where(placed(pod, {"WORLD_SIZE": "3"})) == (2, 3, 0, 1, "job-0.job", 29500)


def test_a_pod_of_kubeflow_is_one_rank_or_needs_torchrun():
    pod = {"PET_NODE_RANK": "1", "PET_NNODES": "3", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "7000"}
    assert where(placed(pod)) == (1, 3, 0, 1, "m", 7000)
    with pytest.raises(PlanError, match=r"PET_NPROC_PER_NODE=4 ranks.*\n.*torchrun -m meshwright"):
        placed(pod, {"PET_NPROC_PER_NODE": "4"})
    assert placed(pod, TORCHRUN, {"PET_NPROC_PER_NODE": "4"}).launcher == "torchrun"


def test_torchrun_under_srun_is_the_inner_one():
    one_per_host = {
        **SLURM,
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    assert where(placed(TORCHRUN, one_per_host)) == (5, 8, 1, 4, "a", 29511)


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        (
            ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, SLURM),
            (
                r"torchrun says rank 0 of 1 \(RANK=0\), and SLURM says rank 5 of 8 "
                r"\(SLURM_PROCID=5\)\n.*one torchrun per "
                r"host"
            ),
        ),
        (
            ({"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "a"}, OPEN_MPI),
            r"environment says rank 3.*Open MPI says rank 5.*\n.*unset RANK",
        ),
        ((SLURM, {"WORLD_SIZE": "4"}), r"SLURM says rank 5 of 8 .*, and WORLD_SIZE=4\n.*unset WORLD_SIZE"),
        (
            ({"RANK": "1"},),
            r"RANK is set in the environment, and WORLD_SIZE='': needed are numbers\n.*unset RANK",
        ),
        (({"RANK": "x", "WORLD_SIZE": "2"},), r"RANK='x': needed are numbers"),
        (({"RANK": "2", "WORLD_SIZE": "2"},), r"RANK=2 and WORLD_SIZE=2: ranks are counted from 0 to 1"),
        (
            ({"RANK": "1", "WORLD_SIZE": "2"},),
            r"environment says rank 1 of 2 \(RANK=1\), and MASTER_ADDR is not set",
        ),
        (({**TORCHRUN, "MASTER_PORT": "70000"},), r"MASTER_PORT='70000'; needed is a number from 1 to 65535"),
    ],
)
def test_what_cannot_be_is_refused_with_both_sides_and_the_repair(tables, text):
    with pytest.raises(PlanError, match=text):
        placed(*tables)


def test_daemons_of_mpirun_that_srun_starts_are_no_disagreement():
    daemons = {
        **SLURM,
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    wide = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "12"}
    assert placed(wide, daemons).launcher == "Open MPI"
    assert placed(OPEN_MPI, daemons).world == 8


def test_a_rank_alone_meets_nobody():
    place = placed({"RANK": "0", "WORLD_SIZE": "1"})
    assert where(place) == (0, 1, 0, 1, None, 29500)
    assert str(place) == "rank 0 of 1 (environment on host here, 1 per host)"


def test_loopback_is_known_by_name_and_number():
    assert [is_loopback(each) for each in ("localhost", "127.0.1.1", "::1", "10.0.0.1", "node1")] == [
        True
    ] * 3 + [False] * 2
