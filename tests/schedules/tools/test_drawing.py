"""Pictures hold every pass; the command line runs and refuses as it should."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from jaxpp_flax.schedules import (
    ZBV,
    Event,
    Interleaved1F1B,
    ScheduleError,
    Std1F1B,
    ZeroBubble,
    draw,
    replay,
    simulate,
    write_csv,
)
from jaxpp_flax.schedules.task import forward
from jaxpp_flax.schedules.tools.cli import _parser, main


def test_a_grid_names_every_pass_and_folds():
    step = simulate(Std1F1B(8), num_microbatches=32)
    text = draw(step, width=100)
    assert max(map(len, text.splitlines())) <= 100
    for letter in "FB":
        for m in range(32):
            assert len(re.findall(rf"\b{letter}{m}(?!\d)|(?<=[=\-.]){letter}{m}(?!\d)", text)) == 8


def test_a_grid_tells_a_ranks_stages_apart():
    assert "f0-" in draw(simulate(ZBV(4), num_microbatches=2))
    text = draw(simulate(Interleaved1F1B(6, 2), num_microbatches=2))
    assert "5F0" in text
    assert "4B1" in text


def test_svg_has_a_bar_for_each_pass(tmp_path):
    panels = [("1F1B", simulate(Std1F1B(4), num_microbatches=5)), ("<ZB>", simulate(ZeroBubble(4), num_microbatches=5))]
    draw(panels, tmp_path / "step.svg")
    root = ElementTree.parse(tmp_path / "step.svg").getroot()
    titles = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 2 * 4 * 5 + (2 * 5 + 3 * 3 * 5)
    assert "W of stage 3, microbatch 4: 17 to 18" in titles or any(t.startswith("W of stage 3") for t in titles)


def test_a_chrome_trace_has_times_and_memory(tmp_path):
    step = simulate(Std1F1B(2), num_microbatches=3)
    draw([("a", step), ("b", step)], tmp_path / "step.json", microseconds=10.0)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    tasks = [event for event in events if event["ph"] == "X"]
    assert len(tasks) == 2 * step.num_tasks
    assert {event["pid"] for event in tasks} == {0, 1}
    assert max(event["ts"] + event["dur"] for event in tasks) == 10.0 * step.makespan
    held = [event["args"]["held"] for event in events if event["ph"] == "C"]
    assert max(held) == 2.0


def test_a_measured_step_is_drawn_beside_the_simulated_one():
    simulated = simulate(Std1F1B(3), num_microbatches=4)
    late = [[Event(e.task, e.rank, 100 + 1.5 * e.start, 100 + 1.5 * e.end) for e in r] for r in simulated.events]
    measured = replay(late)
    assert measured.makespan == pytest.approx(1.5 * simulated.makespan)
    assert measured.bubble == pytest.approx(simulated.bubble)
    assert measured.peak_memory == simulated.peak_memory
    assert "measured: makespan" in draw([("simulated", simulated), ("measured", measured)])


def test_bad_requests_are_refused(tmp_path):
    step = simulate([[forward(0, 0)]])
    with pytest.raises(ScheduleError, match=r"cannot draw a '.png' file. Use .svg, .json"):
        draw(step, tmp_path / "step.png")
    with pytest.raises(ScheduleError, match="at least one timeline"):
        draw([])


def test_command_line(tmp_path, capsys):
    file = tmp_path / "mine.csv"
    picture = tmp_path / "mine.svg"
    assert main(["show", "zbv", "--ranks", "2", "--microbatches", "4", "-o", str(picture)]) == 0
    assert picture.exists()
    assert main(["compare", "--ranks", "3", "--microbatches", "6"]) == 0
    table = capsys.readouterr().out
    assert "zero_bubble_h2" in table
    assert "interleaved_1f1b" in table
    write_csv(ZeroBubble(2), file, 4)
    assert main(["show", str(file)]) == 0
    assert "W3:" in capsys.readouterr().out
    costs = tmp_path / "costs.json"
    costs.write_text('{"forward": [1, 2], "sent": 3}')
    assert main(["show", "gpipe", "--ranks", "2", "--costs", str(costs)]) == 0


def test_a_short_picture_has_both_ends_and_the_beginning():
    step = simulate(Std1F1B(40), num_microbatches=80)
    whole, short = (draw(step, width=80, max_lines=most).splitlines() for most in (None, 60))
    assert len(short) <= 60 + 2 < len(whole)  # and the legend
    assert next(line for line in short if line.startswith("...")) == "... ranks 8 to 31"
    assert {line for line in short if line.startswith("rank")} <= set(whole)
    assert draw(step, width=80, max_lines=len(whole)).splitlines() == whole


def test_command_line_errors_take_one_line_or_a_grid(tmp_path, capsys):
    file = tmp_path / "mine.csv"
    write_csv(Std1F1B(2), file, 2)
    file.write_text(file.read_text().replace("1F0,1B0", "1B0,1F0"))
    assert main(["show", str(file)]) == 2
    assert ">1B0<" in capsys.readouterr().err
    for wrong, text in [
        (["show", str(tmp_path / "none.csv")], f"error: there is no file '{tmp_path / 'none.csv'}'."),
        (["compare", "--costs", "nofile"], "error: there is no file 'nofile'."),
        (["show", "1f1"], "Did you mean"),
        (["show", "nothing"], "A CSV file can be given too; its name ends in .csv."),
        (["show", "zero_bubble", "--ranks", "0"], "--ranks=0: it must be a whole number of at least 1"),
        (["compare", "--microbatches", "0"], "--microbatches=0: it must be"),
        (["show", "gpipe", "--stages-per-rank", "0"], "--stages-per-rank=0: it must be"),
        (["compare", "--stages-per-rank", "1,0"], "--stages-per-rank=0: it must be"),
        (["compare", "--stages-per-rank", "a"], "whole numbers with commas between them, such as 1,2, got 'a'"),
        (["show", "gpipe", "--output", str(tmp_path / "no" / "x.svg")], f"there is no directory {tmp_path / 'no'}"),
        (["show", "1f1b", "--forward", "fast"], "--forward 'fast': give one number"),
        (["show", "1f1b", "--ranks", "4", "--forward", "1,2"], "2 numbers for 4 stages"),
    ]:
        assert main(wrong) == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "compare"])
def test_every_flag_is_explained(command, capsys):
    (commands,) = (action for action in _parser()._actions if action.choices)
    for action in commands.choices[command]._actions:
        assert action.help, action.option_strings or action.dest
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "--latency" in capsys.readouterr().out
