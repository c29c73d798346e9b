"""The numbers that sum up a run, and the tables that compare several."""

from math import nan

from meshwright.report.html.run_summary import (
    LossAtStep,
    plan_difference_table,
    run_comparison_table,
    summarize_run,
)
from meshwright.report.timeline.run_folder_reader import RunRecord

STEPS = [
    {"step": 1, "loss": 4.0, "tokens": 100, "seconds": 10.0, "save_s": 0.0, "tokens_per_s": 10.0},
    {"step": 2, "loss": 2.0, "tokens": 100, "seconds": 2.0, "save_s": 0.5, "tokens_per_s": 50.0},
    {"step": 3, "loss": nan, "tokens": 90, "seconds": 2.0, "save_s": 0.0, "tokens_per_s": 45.0},
    {"step": 4, "loss": 2.5, "tokens": 100, "seconds": 2.0, "save_s": 0.0, "tokens_per_s": 40.0},
]
EVALUATIONS = [{"step": 2, "loss": 3.0, "seconds": 1.0}, {"step": 4, "loss": 2.75, "seconds": 1.0}]


def test_a_run_is_summed_up_by_its_metrics():
    found = summarize_run(RunRecord("one", STEPS, EVALUATIONS, {}, {"world": 6}))
    assert (found.num_ranks, found.last_step, found.num_tokens) == (6, 4, 390)
    assert found.duration_s == 18.5, "steps, the save, and the evaluations"
    assert found.tokens_per_s == 45.0, "the first step warms up"
    assert found.final_loss == 2.5
    assert found.best_loss == LossAtStep(2.0, 2)
    assert found.best_evaluation == LossAtStep(2.75, 4)


def test_of_a_run_without_steps_only_the_ranks_are_known():
    found = summarize_run(RunRecord("one", [], [], {}, {"world": 2}))
    assert dict(found.facts()) == {"ranks": "2"}


def test_runs_are_compared_in_rows_without_columns_that_no_run_has():
    first, second = RunRecord("one", STEPS, [], {}), RunRecord("two", STEPS[:2], [], {})
    table = run_comparison_table([first, second])
    heads = ["run", "ranks", "steps", "duration", "tokens", "tokens/s", "final loss", "best loss"]
    assert [column.name for column in table.columns] == heads
    assert [row[0] for row in table.rows] == ["one", "two"]
    assert '<td class="number">2.5000</td><td class="number">2.0000 at step 2</td>' in table.html()


def test_the_table_of_differences_has_a_column_per_run():
    runs = [RunRecord(str(lr), [], [], {"optimizer.lr": lr, "train.seed": 1}) for lr in (0.1, 0.2, 0.1)]
    table = plan_difference_table(runs)
    assert table is not None
    assert list(table.columns) == ["key", "0.1", "0.2", "0.1"]
    assert list(table.rows) == [("optimizer.lr", "0.1", "0.2", "0.1")]
    assert plan_difference_table(runs[:1]) is None
