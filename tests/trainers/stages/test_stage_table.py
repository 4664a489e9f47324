"""The table that is printed before the first step, from summaries of stages; nothing is compiled."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from jaxpp_flax.engine.summary import StageSummary
from jaxpp_flax.schedules import Costs, ResidualPlan, Schedule, StageResiduals, by_name, simulate
from jaxpp_flax.trainers.stages.stage_table import stage_table


def printed(
    flops: list[float], schedule: Schedule, width: int = 80, each: int = 2, name: str = "block", plan: Any = None
) -> str:
    stages = [
        StageSummary(
            stage=i, rank=schedule.rank_of(i), blocks=tuple(f"{name}_{4 * i + k}" for k in range(4)), flops=work,
            parameter_count=1_234_567_890, parameter_bytes=0, sent_bytes=8192, activation_bytes=0, weight_bytes=0,
            devices=tuple(range(each * i, each * i + each)),
        )
        for i, work in enumerate(flops)
    ]  # fmt: skip
    memory = dict.fromkeys(range(schedule.num_ranks), 33_300_000_000)
    console = Console(file=io.StringIO(), width=width)
    console.print(stage_table(stages, memory, "a title", schedule, num_microbatches=8, plan=plan))
    out: Any = console.file
    return out.getvalue()


def test_every_column_is_readable_at_80_columns():
    text = printed([1e12, 1e12, 1e12, 3e12], by_name("1f1b", 4))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line.split() for line in lines if line.strip().startswith("3 "))
    assert row == ["3", "block_12", "…", "1.23", "G", "3", "T", "2.00", "8.19", "kB", "33.3", "GB", "6,", "7"]
    assert "block_15 (4)" in " ".join(text.split())
    assert not [line for line in lines[:6] if "…" in line], "no header is cut off"


def test_the_widest_table_fits_into_80_columns():
    """Long names, many devices, several stages on a rank, a plan: nothing is cut off."""
    moved, kept = StageResiduals(recompute=True, offload=0.5), StageResiduals(offload=1.0)
    plan: Any = SimpleNamespace(
        residuals=ResidualPlan([moved, kept, kept, kept]), peak_bytes=(31.4e9, 32.5e9), notes=("a note " * 30,)
    )
    schedule = by_name("interleaved_1f1b", 4, 2)
    text = printed([1e12] * 4, schedule, each=128, name="TransformerEncoderBlock", plan=plan)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    first = next(line.split() for line in lines if line.strip().startswith("0 on 0"))
    assert first[-5:] == ["33.3", "GB", "31.4", "GB", "0-127"]
    words = " ".join(text.split())
    assert "residuals: recompute, offload inputs 50% (stage 0); offload 100% (stages 1-3)" in words
    assert words.count("a note") == 30
    assert "TransformerEncoderBlock_0 …" in "".join(line[9:24].strip() for line in lines), "a long name is folded"


def test_the_idle_share_is_that_of_the_simulated_schedule():
    flops = [1e9, 1e9, 1e9, 3e9]
    thirds = [work / 3 for work in flops]
    costs = Costs(forward=thirds, backward_input=thirds, backward_weight=thirds)
    for name in ("1f1b", "zero_bubble"):
        schedule = by_name(name, 4)
        bubble = simulate(schedule, costs, num_microbatches=8).bubble
        assert f"idle for {bubble:.0%} of a step" in " ".join(printed(flops, schedule).split())
    assert "idle" not in printed([0.0] * 4, by_name("1f1b", 4)), "without work there is nothing to simulate"


def test_several_stages_on_a_rank_name_it():
    text = printed([1e9] * 4, by_name("interleaved_1f1b", 4, 2))
    ranks = [line.split()[:3] for line in text.splitlines() if re.match(r" +\d on \d ", line)]
    assert ranks == [[str(stage), "on", str(stage % 2)] for stage in range(4)]
