"""What is waited for, and where a program is: as the messages of a process say it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jaxpp_flax.messages import error_location
from jaxpp_flax.processes import ProcessGroup
from jaxpp_flax.processes import waits as waits_module
from jaxpp_flax.processes.failures import Failure
from jaxpp_flax.processes.waits import WaitReporter, Waits


def test_a_long_wait_is_said_again_each_time_that_it_has_doubled():
    waits = Waits()
    reporter = WaitReporter(waits, "process 1", after_s=60.0)
    with waits.waiting("the next batch of the data"):
        now = time.monotonic()
        said = {seconds: reporter.lines(now + seconds) for seconds in range(0, 400, 5)}
    assert {seconds: lines for seconds, lines in said.items() if lines} == {
        seconds: [f"process 1 has been waiting for {seconds} s for the next batch of the data"]
        for seconds in (60, 120, 240)
    }
    assert reporter.lines(now + 1000) == []


def test_waits_of_several_threads_for_the_same_are_said_once_and_each_new_wait_begins_anew():
    waits, held = Waits(), threading.Event()
    reporter = WaitReporter(waits, "process 1", after_s=10.0)

    def hold() -> None:
        with waits.waiting("x", on=0):
            held.wait(60.0)

    threads = [threading.Thread(target=hold) for _ in range(2)]
    for thread in threads:
        thread.start()
    while len(waits.now()) < 2:
        time.sleep(0.01)
    now = time.monotonic()
    assert reporter.lines(now + 11) == ["process 1 has been waiting for 11 s for x (from process 0)"]
    held.set()
    for thread in threads:
        thread.join()
    with waits.waiting("x", on=0):
        assert reporter.lines(time.monotonic() + 9) == []


def test_a_single_process_says_it_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("JAXPP_FLAX_REPORT_AFTER", "0.2")
    group = ProcessGroup(None, 0, 1)
    said = ""
    with group.waiting("the next batch of the data"):
        deadline = time.monotonic() + 30.0
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
            said = capsys.readouterr().err
    assert group._reporter is not None
    group._reporter.stop()
    assert said.startswith("jaxpp_flax: this process has been waiting for 0 s for the next batch of the data\n")


def test_a_setting_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXPP_FLAX_REPORT_AFTER", "soon")
    with pytest.raises(ValueError, match="JAXPP_FLAX_REPORT_AFTER='soon': it must be a number of seconds above 0"):
        ProcessGroup(None, 0, 1).waiting("x")


def place_in(module: str, file: str, source: str, **names: object) -> str:
    """Where the main thread is at the call `here()` of a source that assigns it to `found`."""
    namespace: dict[str, object] = {"__name__": module, "here": waits_module.main_thread_location, **names}
    exec(compile(source, file, "exec"), namespace)
    return str(namespace["found"])


def test_the_user_s_line_is_the_innermost_one_outside_of_libraries():
    inside = ("jaxpp_flax.trainers.x", str(Path(waits_module.__file__).parents[1] / "trainers" / "x.py"))
    namespace: dict[str, Any] = {"__name__": inside[0]}
    exec(compile("def fit(do):\n    return do()\n", inside[1], "exec"), namespace)
    source = "def main():\n    return fit(here)\n\nfound = main()\n"
    found = place_in("__main__", "/home/me/train.py", source, fit=namespace["fit"])
    assert found == "main (/home/me/train.py:2), inside fit"
    # However deep in the package, the line of the user is named: here this test's.
    assert place_in(*inside, "def wait():\n    return here()\nfound = wait()\n").startswith(f"place_in ({__file__}:")


def test_the_place_of_a_main_thread_that_runs_on_is_found_by_another_thread():
    def look() -> None:
        found.extend(waits_module.main_thread_location() for _ in range(200))

    def calls(depth: int) -> int:
        return sum(calls(depth - 1) for _ in range(2)) if depth else 1

    found: list[str] = []
    thread = threading.Thread(target=look)
    thread.start()
    while thread.is_alive():
        calls(6)
    assert all(__file__ in place for place in found)


def test_a_failure_tells_the_user_s_line_and_no_line_of_the_package():
    group = ProcessGroup(None, 0, 1)
    group.observe(Failure(1, "killed"))
    text = group.describe(Failure(1, "killed"))
    me = "test_a_failure_tells_the_user_s_line_and_no_line_of_the_package"
    assert f"Process 0 was at {me} ({__file__}:" in text
    assert text.endswith("inside describe.")


def test_a_main_thread_with_no_line_of_the_user_is_at_no_place_of_the_package():
    assert error_location(ValueError("raised nowhere")) == "no line of your program: it starts, or it has ended"
