"""The bandit learns the best arm, and its observer draws with the weights of the last step."""

from examples import bandit
from meshwright.testing.ranks import run_on_threads


def test_all_workers_learn_the_best_arm():
    chances = run_on_threads(bandit.train, bandit.MESH)
    best = bandit.REWARDS.argmax()
    assert chances[0] == chances[1]
    assert chances[0][best] > 0.8
