"""How properties are run: in CI the same questions every time; by `nox -s fuzz` new ones, for as long as it is given.

The hooks of pytest are taken over by conftest.py. With MERGER_FUZZ_MINUTES in the environment, every property is
repeated with a new seed each time until its share of the minutes is over or it fails; at the end it is told how many
examples each had and which events they reached. What fails is kept in .hypothesis and tried first by the next such run.
"""

from __future__ import annotations

import os
import textwrap
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.statistics import collector

KEPT = Path.cwd() / ".hypothesis" / "examples"

# No deadlines: a core that is shared with other ranks says nothing about the code. What is asked of `fuzz` is said in
# full, since Hypothesis has other defaults where the environment has CI in it: no database, and nothing at random.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60)
settings.register_profile(
    "fuzz",
    derandomize=False,
    database=DirectoryBasedExampleDatabase(KEPT),
    deadline=None,
    max_examples=200,
    print_blob=True,
)
settings.load_profile("ci")

_KEPT_TEXT = f"""\
The failing example is kept in {KEPT}
and is the first that the next run tries: nox -s fuzz -- """


class _Tally:
    """What the runs of one property came to."""

    def __init__(self) -> None:
        self.runs = 0
        self.examples = 0
        self.events: Counter[str] = Counter()

    @contextmanager
    def counting(self) -> Generator[None, None, None]:
        """Counts what Hypothesis reports of the runs within; who listened before still hears of it."""
        before: Any = collector.value

        def note(statistics: Any) -> None:
            if before is not None:
                before(statistics)
            self.runs += 1
            for name in ("reuse-phase", "generate-phase"):
                for case in statistics.get(name, {}).get("test-cases", []):
                    if case["status"] in {"valid", "interesting"}:
                        self.examples += 1
                        # Hypothesis has events of its own: where it drew once more to please a filter.
                        self.events.update(event for event in case["events"] if not event.startswith("Retried draw"))

        with collector.with_value(note):  # type: ignore[arg-type] # its type is inferred from the default, None
            yield


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Repeats a property until its share of the minutes is over, or it fails."""
    minutes = float(os.environ.get("MERGER_FUZZ_MINUTES", "0"))
    if not minutes or not _is_property(pyfuncitem):
        return (yield)
    # Every worker has its part of the properties to run, and all of the minutes to run them in.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = 60 * minutes * workers / sum(map(_is_property, pyfuncitem.session.items))
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    tally, begin = _Tally(), time.monotonic()
    try:
        with tally.counting():
            result = yield
            while time.monotonic() - begin < share:
                pyfuncitem.obj(**arguments)
    except Exception:
        pyfuncitem.add_report_section("call", "fuzz", f"{_KEPT_TEXT}{pyfuncitem.nodeid}")
        raise
    finally:
        told = {"seconds": round(time.monotonic() - begin), **vars(tally), "events": dict(tally.events)}
        pyfuncitem.user_properties.append(("fuzz", told))
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tells of each property that was repeated how many examples it had, and how many of them reached which event."""
    found = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            found += [(report.nodeid, outcome, told) for name, told in report.user_properties if name == "fuzz"]
    if not found:
        return
    terminalreporter.section("fuzz")
    for nodeid, outcome, told in sorted(found, key=lambda item: item[0]):
        counts = f"{told['examples']} examples in {told['runs']} runs, {told['seconds']} s"
        terminalreporter.line(f"{nodeid}: {outcome}, {counts}")
        events = sorted(told["events"].items(), key=lambda item: (-item[1], item[0]))
        text = ", ".join(f"{event} {count}" for event, count in events)
        for line in textwrap.wrap(text, 110):
            terminalreporter.line(f"    {line}")


def _is_property(item: pytest.Item) -> bool:
    return item.get_closest_marker("hypothesis") is not None
