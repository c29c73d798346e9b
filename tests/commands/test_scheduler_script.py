"""`meshwright launch`: the files it writes for a plan, and refusals."""

from pathlib import Path

import pytest

from tests.command_line import forget_ranks, invoke, lay_out, refuse_to_start


@pytest.fixture
def config(tmp_path: Path, monkeypatch) -> Path:
    forget_ranks(monkeypatch)
    refuse_to_start(monkeypatch)
    return lay_out(tmp_path / "job")


def test_the_world_of_the_plan_is_spread_over_hosts(config, capsys):
    code, out, err = invoke(
        capsys, "launch", config, "--print", "slurm", "--mesh.dp_replicate", 6, "--hosts", 3
    )
    assert (code, err) == (0, "")
    assert "#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=2\n" in out
    assert f"meshwright train {config} --mesh.dp_replicate 6\n" in out
    assert "#SBATCH --job-name=meshwright-config\n" in out


def test_an_open_mesh_takes_what_the_hosts_have(config, capsys):
    words = ("launch", config, "--print", "torchrun", "--mesh.dp_replicate", -1)
    assert invoke(capsys, *words, "--hosts", 2, "--per-host", 3)[1].count("torchrun --nnodes=2") == 2
    code, _, err = invoke(capsys, *words, "--hosts", 2)
    assert code == 2
    assert "repair: say how many: --hosts N --per-host M" in err


def test_hosts_that_do_not_fit_are_refused(config, capsys):
    code, out, err = invoke(capsys, "launch", config, "--print", "slurm", "--hosts", 2, "--per-host", 4)
    assert (code, out) == (2, "")
    assert "2 hosts x 4 ranks are 8, and the mesh of the plan has 2" in err


def test_a_plan_that_cannot_work_is_refused_before_it_waits_in_a_queue(config, capsys):
    code, _, err = invoke(capsys, "launch", config, "--print", "slurm", "--train.batch", 7)
    assert code == 2
    assert "does not divide by 2 data-parallel ranks" in err


def test_options_reach_the_file_and_the_file_its_place(config, capsys, tmp_path):
    out = tmp_path / "job.yaml"
    options = (
        "--cpu",
        "--name",
        "mine",
        "--image",
        "registry/mesh:1",
        "--volume",
        "claim:/work",
        "--out",
        out,
    )
    assert invoke(capsys, "launch", config, "--print", "k8s", *options)[0] == 0
    text = out.read_text()
    assert all(
        word in text
        for word in ("name: mine\n", "'registry/mesh:1'", "claimName: claim", "mountPath: '/work'")
    )
    assert "nvidia" not in text
    assert "--time=1:00:00" in invoke(capsys, "launch", config, "--print", "slurm", "--time", "1:00:00")[1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--print", "slrum"), "there is no job file for 'slrum'"),
        (("--print", "slurm", "--name", "My Job"), "repair: --name my-job"),
        (("--print", "slurm", "--time", "a day"), "'a day' is not a time limit"),
        (("--print", "slurm", "--out", "/no/such/folder/job.sh"), "the file cannot be written"),
    ],
)
def test_an_option_that_cannot_be_fulfilled_is_named(options, text, config, capsys):
    code, _, err = invoke(capsys, "launch", config, *options)
    assert code == 2
    assert text in err
