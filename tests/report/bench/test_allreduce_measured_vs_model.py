"""The table and the page of measured links."""

from io import StringIO

from rich.console import Console

from meshwright.plan.hardware.measured_cluster import AllReduceSeries, Cluster, FitError
from meshwright.plan.hardware.network_model import LinkCost, NetworkModel, SizeBand
from meshwright.report.bench.allreduce_measured_vs_model import (
    MODEL_LABEL,
    network_figure,
    network_page,
    network_view,
)

LINK = LinkCost((SizeBand(0, 1e-4, 1e9),))
SIZES = (1024, 1 << 20)
MEASURED = (
    AllReduceSeries("backend", 3, SIZES, (1e-3, 2e-3), (0.1, 0.2)),
    AllReduceSeries("ring", 3, SIZES, (5e-4, 4e-3), (0.1, 0.2)),
    AllReduceSeries("ring", 2, SIZES, (5e-4, 4e-3), (0.1, 0.2)),
)
CLUSTER = Cluster(
    "",
    "<machine>",
    "2.13",
    "gloo",
    1,
    FitError(0.123, 0.045),
    NetworkModel(inter_host=LINK),
    MEASURED,
)


def test_the_table_shows_times_how_far_the_model_is_off_and_what_auto_takes():
    console = Console(width=120, record=True, file=StringIO())
    console.print(network_view(CLUSTER))
    lines = console.export_text().splitlines()
    assert any("<machine>, 1 ranks on each host, over gloo" in line for line in lines)
    assert any(
        "12 % of the model alone, 4 % with" in line or "12 % of the model alone, 5 % with" in line
        for line in lines
    )
    ring = 4 * (1e-4 + 1024 / 3 / 1e9)
    (row, *_) = [line.split() for line in lines if line.split()[:2] == ["1", "KiB"] and len(line.split()) > 4]
    assert row == ["1", "KiB", "1", "0.5", f"{100 * (ring / 5e-4 - 1):+.0f}%"]
    assert sum(line.startswith("auto chose '") for line in lines) == 2


def test_the_figure_has_points_and_both_lines_of_every_series():
    figure = network_figure(CLUSTER)
    points = [trace for trace in figure.data if trace.mode == "markers"]
    assert [(trace.name, tuple(trace.y)) for trace in points] == [
        (each.algorithm, each.seconds) for each in MEASURED
    ]
    names = [trace.name for trace in figure.data]
    assert names.count(f"ring: {MODEL_LABEL}") == 2
    assert names.count("backend: corrected") == 1
    assert f"backend: {MODEL_LABEL}" not in names  # it is no list of rounds
    assert [trace.showlegend for trace in points] == [True, True, False]


def test_the_page_escapes_what_it_is_given_and_needs_no_network():
    text = network_page(CLUSTER, "1.0")
    assert "&lt;machine&gt;" in text
    assert "<machine>" not in text
    assert "src=" not in text.split("<script>")[0]
    assert "auto chose &#x27;" in text
