"""All figures of one accelerator in minutes, by itself: the kit for the day a device is at hand.

python benchmarks/accelerator.py --minutes 8 --json figures.json
python benchmarks/accelerator.py --only step memory             # two of its sections
python benchmarks/accelerator.py --wheels wheels                # with packages that the machine lacks
python benchmarks/accelerator.py --tests 5                      # then the default tests, with the device visible
python benchmarks/accelerator.py --platform cpu                 # every part, on sizes too small to mean anything

Each part is a process of its own with a deadline: its share of the time that is left, doubled. What it does not use,
the others have. A line is printed for each result as soon as it is known, and the file is written anew; beside it,
`figures.log` has all that the parts print. It ends with 0 if all parts did, 1 if one failed or was cut off, 2 if it
cannot run here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from device.plan import NAMES, Part, parts
from device.preparation import ROOT, RefusedError, environment_of, examined, install_wheels


def result_in(line: str) -> dict[str, Any] | None:
    """The result that a printed line holds: a JSON object is one, whatever it says.

    >>> result_in('{"title": "a", "rows": [{"x": 1}]}')
    {'title': 'a', 'rows': [{'x': 1}]}
    >>> result_in("┃ a table ┃")
    """
    if not line.startswith("{"):
        return None
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def shown(row: Mapping[str, Any]) -> str:
    """A row in one line, without its empty columns.

    >>> shown({"contestant": "1F1B", "ms per step": 12.3456, "over plain": 0.98765, "of the peak": ""})
    '1F1B: ms per step 12.35, over plain 0.9877'
    """
    (_, first), *others = row.items()
    told = [f"{name.strip()} {f'{of:.4g}' if isinstance(of, float) else of}" for name, of in others if of != ""]
    return f"{first}: {', '.join(told)}"


def share(left: float, weight: float, others: float) -> float:
    """Seconds that a part may take of those that are left, beside the weights of the parts after it.

    >>> share(60, 1, 5), share(60, 1, 0)
    (20.0, 60)
    """
    return min(left, 2 * left * weight / (weight + others))


def end_session(leader: int) -> None:
    """Kill a process that leads a session, and all others of the session."""
    for name in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            if os.getsid(int(name)) == leader:
                os.kill(int(name), signal.SIGKILL)


class Figures:
    """What was found, as lines on the screen and as a file that is always whole."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path, self.start = path, time.monotonic()
        self.found: dict[str, Any] = {**facts, "parts": []}

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"[{time.monotonic() - self.start:4.0f} s] {text}", flush=True)

    def write(self) -> None:
        """Write the file, and only then replace the one before."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        new.replace(self.path)

    def begin(self, part: Part) -> dict[str, Any]:
        """The record of a part, to which its results are added."""
        record = {"section": part.section, "part": part.name, "command": " ".join(part.command), "state": "runs"}
        self.found["parts"].append(record | {"results": []})
        self.write()
        return self.found["parts"][-1]

    def add(self, part: Part, record: dict[str, Any], result: Mapping[str, Any]) -> None:
        """Tell a result."""
        record["results"].append(result)
        for row in result.get("rows", []):
            self.say(f"{part.section} · {shown(row)}")
        self.write()


def run_part(
    part: Part, seconds: float, environment: Mapping[str, str], log: TextIO, tell: Callable[[dict[str, Any]], None]
) -> str:
    """Run a part to its end or its deadline, and tell each result when it is printed; return how it ended."""
    log.write(f"\n--- {part.section}, {part.name}: python {' '.join(part.command)}\n")
    process = subprocess.Popen(
        [sys.executable, *part.command], env={**environment, **part.environment}, cwd=ROOT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    late = threading.Event()

    def end() -> None:
        late.set()
        end_session(process.pid)

    deadline = threading.Timer(seconds, end)
    deadline.start()
    last = ""
    with process:
        try:
            for line in process.stdout or ():
                log.write(line)
                log.flush()
                last = line.strip() or last
                if (result := result_in(line)) is not None:
                    tell(result)
            status = process.wait()
        finally:
            deadline.cancel()
            end_session(process.pid)
    if late.is_set():
        return f"cut off after {seconds:.0f} s"
    return "done" if status == 0 else f"failed with status {status}: {last[:200]}"


def run_all(chosen: Sequence[Part], minutes: float, environment: Mapping[str, str], figures: Figures) -> bool:
    """Run the parts one after another within the time; return whether all ended well."""
    until = time.monotonic() + 60 * minutes
    with figures.path.with_suffix(".log").open("a", encoding="utf-8") as log:
        for number, part in enumerate(chosen):
            own = dict(environment) if part.shares_cache else _without_cache(environment)
            others = sum(other.weight for other in chosen[number + 1 :])
            seconds = share(until - time.monotonic(), part.weight, others)
            record, start = figures.begin(part), time.monotonic()
            if seconds < 1:
                record["state"] = "no time was left"
            else:
                record["state"] = run_part(
                    part, seconds, own, log, lambda result, p=part, r=record: figures.add(p, r, result)
                )
            record["seconds"] = time.monotonic() - start
            figures.say(f"{part.section} · {part.name}: {record['state']} ({record['seconds']:.0f} s)")
            figures.write()
    return all(record["state"] == "done" for record in figures.found["parts"])


def _without_cache(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != "JAX_COMPILATION_CACHE_DIR"}


def tests_of(platform: str) -> Part:
    """The default tests, which compute on virtual CPU devices, with the accelerator beside them."""
    platforms = {"gpu": "cpu,cuda", "tpu": "cpu,tpu"}.get(platform, "cpu")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    return Part(section="1 runs", name="tests", command=command, weight=1, environment={"JAX_PLATFORMS": platforms})


def parsed() -> argparse.Namespace:
    """The flags; an error of theirs ends the program with 2."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--minutes", type=float, default=8.0, help="for all parts but the tests (default: 8)")
    flags.add_argument("--json", type=Path, default=Path("figures.json"), help="the file (default: figures.json)")
    flags.add_argument("--platform", default="gpu", choices=["gpu", "tpu", "cpu"])
    flags.add_argument(
        "--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="SECTION", help=", ".join(NAMES)
    )
    flags.add_argument("--wheels", type=Path, help="a folder of wheels; those that the machine lacks are used")
    flags.add_argument("--tests", type=float, default=0.0, metavar="MINUTES", help="then run the default tests")
    arguments = flags.parse_args()
    if not arguments.minutes > 0:
        flags.error(f"--minutes {arguments.minutes:g}: it must be above 0")
    if arguments.json.suffix in (".log", ".new") or not arguments.json.resolve().parent.is_dir():
        flags.error(f"--json {arguments.json}: give a file such as figures.json, in a folder that exists")
    return arguments


def main() -> int:
    arguments = parsed()
    with tempfile.TemporaryDirectory(prefix="accelerator_") as scratch:
        site = Path(scratch, "site")
        try:
            carried = install_wheels(arguments.wheels, site) if arguments.wheels else []
            environment = environment_of(arguments.platform, site)
            facts = examined(arguments.platform, environment)
            if arguments.tests and "pytest" not in facts["versions"]:
                raise RefusedError("--tests: pytest is missing, with pytest-xdist and hypothesis")
        except RefusedError as refused:
            print(f"accelerator: {refused}", file=sys.stderr)
            return 2
        environment["JAX_COMPILATION_CACHE_DIR"] = str(Path(scratch, "cache"))
        figures = Figures(arguments.json, {**facts, "carried": carried, "command": " ".join(sys.argv)})
        figures.say(f"{', '.join(facts['devices'])}; {facts['versions']}")
        chosen = [part for part in parts(arguments.platform, scratch) if part.section.split()[1] in arguments.only]
        well = run_all(chosen, arguments.minutes, environment, figures)
        if arguments.tests:
            well = run_all([tests_of(arguments.platform)], arguments.tests, environment, figures) and well
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
