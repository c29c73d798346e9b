"""A job restarted by torchrun after a rank was killed ends as an undisturbed one."""

from tests.command_line import command, lay_out, metrics

TORCHRUN = (
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "--max-restarts",
    "3",
    "-m",
    "meshwright",
)
DIES = """

def dies():
    def act():
        if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
            os.kill(os.getpid(), signal.SIGKILL)

    return _at_step(25, act)
"""


def test_a_rank_killed_under_torchrun_is_started_again_and_repeats_its_steps_bit_for_bit(tmp_path):
    config = lay_out(tmp_path, train={"steps": 40}, model={"source": "model.py:dies"})
    with (tmp_path / "model.py").open("a") as file:
        file.write(DIES)
    code, out, err = command("train", config, launcher=TORCHRUN)
    assert code == 0, err
    assert out.count("(torchrun on host ") == 2
    again = out.partition(", restart 1\n")[2]
    assert again.splitlines()[2] == "resumed from step 20", out
    assert " steps were repeated from step 21: all are bit-identical" in out
    assert sorted(metrics(tmp_path / "run")) == list(range(1, 41))
    assert "rank 1: its process is gone, without a report" in err, "the rank that lost its peer says which"
    assert "Traceback" not in err
