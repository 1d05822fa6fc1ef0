"""Pictures are rendered only where they are what is tested: rendering takes most of the time of a short run."""

from collections.abc import Iterator

import pytest

# test_report has a run of every command with its pictures; those of the studies are rendered where their numbers are checked.
RENDERED = (
    "test_blocks", "test_plots", "test_plots_densities", "test_plots_rewards", "test_report", "test_report_page", "test_studies",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        import server

        server.ensure_running()  # one for all workers; it loads while they collect


@pytest.fixture(scope="module", autouse=True)
def _unrendered_pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    from matplotlib.figure import Figure  # not above: pytest's main process does without what only its workers use

    from real import leave_unplotted, write_unrendered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dohyo.lab.plots.densities._TERMS", 100)  # a mean over fewer z is a density, too
        if request.path.stem not in RENDERED:
            patch.setattr(Figure, "savefig", write_unrendered)
            leave_unplotted(patch.setattr)
        yield
