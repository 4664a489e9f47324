"""The passes as data: their order, what the runner does between two of them, and each structure as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.passes import PASSES
from jaxpp_flax.engine.passes.place import StepOnRanks
from jaxpp_flax.engine.passes.runner import observers
from jaxpp_flax.engine.program.program import Free
from jaxpp_flax.engine.tracing.ir import Equation, VerificationError, from_jaxpr
from jaxpp_flax.schedules import GPipe
from tests.engine.toys import built, chain, mesh_of, sgd_step
from tests.helpers import batch_of
from tests.running import ROOT

NAMES = [each.name for each in PASSES.rows]
STEP = sgd_step(GPipe(2))

# What the structure after each pass shows of `STEP`; that of the others is the step with its `treduce`.
SHOWS = {
    "open_loops": r"loop over 2 microbatches: GPipe; marks: layer_0\n",
    "gather_parameters": r"loop over 2 microbatches: GPipe; marks: layer_0\n",
    "defer_reductions": r"loop over 2 microbatches: GPipe; marks: layer_0\n",
    "label": r"(?ms)marks: layer_0 \(cuts\)\n.*^   3  [^\n]* = dot_general",
    "partition": r"task bwd_0 \(stage 0\)",
    "join_shapes": r"task bwd_0 \(stage 0\)",
    "lower_loops": r"its accumulators update .*argument 0.*argument 3",
    "scatter_gradients": r"its accumulators update .*argument 0.*argument 3",
    "place": r"(?m)^ranks \[1\]: sub makes float32",
    "unroll": r"rank 0 -> rank 1: send v\d+ receive v\d+",
    "offload": r"rank 0 -> rank 1: send v\d+ receive v\d+",
    "liveness": r"rank 1: free v\d+",
}


def texts_of(make: Callable[[], Any], folder: Path) -> list[dict[str, str]]:
    """The text after each pass, by its name, of each step that is built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPP_FLAX_DUMP", str(folder))
        make()
    steps = [sorted(step.iterdir()) for step in sorted(folder.iterdir())]
    return [{file.stem.partition("_")[2]: file.read_text() for file in files} for files in steps]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return texts_of(lambda: built(STEP, 2, chain(2), batch_of(2)), tmp_path_factory.mktemp("made"))


def rows_of_the_page(heading: str, row: str) -> list[tuple[str, ...]]:
    page = (ROOT / "docs" / "internals" / "engine.md").read_text(encoding="utf-8")
    return re.findall(row, page.partition(f"## {heading}\n")[2].partition("\n## ")[0])


def test_names_are_those_of_files():
    assert len(set(NAMES)) == len(NAMES)
    folder = ROOT / "jaxpp_flax" / "engine" / "passes"
    assert [name for name in NAMES if not [*folder.rglob(f"{name}.py")]] == ["inline"]


def test_the_glossary_is_short_and_its_files_exist():
    rows = rows_of_the_page("Words", r"(?m)^\| \*\*(.+)\*\* \| (.+) \| `(.+)` \|$")
    assert 10 <= len(rows) <= 20
    for term, meaning, file in rows:
        assert (ROOT / "jaxpp_flax" / file).is_file(), f"{term}: there is no {file}"
        assert ". " not in meaning, f"{term}: one sentence"


@pytest.mark.parametrize("name", NAMES)
def test_text_after_every_pass(texts: list[dict[str, str]], name: str):
    text = texts[0][name]
    assert re.search(SHOWS.get(name, r"= treduce\("), text), text


def test_text_tells_the_chosen_cuts(tmp_path: Path):
    make = lambda: built(STEP, 2, chain(4), batch_of(2), policy=lambda marks, num_stages: [1])  # noqa: E731
    assert "marks: layer_0, layer_1 (cuts), layer_2" in texts_of(make, tmp_path)[0]["label"]


def test_text_on_an_explicit_mesh_in_64_bits(tmp_path: Path):
    mesh = mesh_of(2, AxisType.Explicit, data=2)
    step = mpmd_jit_with_loop(STEP, mesh, in_specs=(PartitionSpec(), PartitionSpec(None, "data")))
    with jax.enable_x64(True):
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "float64"), (chain(2), batch_of(2)))
        (texts,) = texts_of(lambda: step.compile(*arguments), tmp_path)
    assert all(texts.values())
    # The gradient of a weight waits for the end of the loop as one part for each shard.
    assert "float64[2@data,8,8]" in texts["defer_reductions"]
    assert "float64[2@data,8,8]" not in texts["open_loops"]


def test_each_structure_is_verified_before_the_next_pass(monkeypatch: pytest.MonkeyPatch):
    """A placed step without its moves is a defect that `schedule` would trip over first."""
    at = NAMES.index("place")
    place = PASSES.rows[at]

    def without_moves(step: Any, settings: Any) -> StepOnRanks:
        placed = place.run(step, settings)
        return replace(placed, need={**placed.need, **dict.fromkeys(placed.inputs, frozenset[int]())})

    broken = replace(PASSES, rows=(*PASSES.rows[:at], replace(place, run=without_moves), *PASSES.rows[at + 1 :]))
    graph, _ = from_jaxpr(jax.jit(STEP).trace(chain(2), batch_of(2)).jaxpr)
    settings = built(STEP, 2, chain(2), batch_of(2)).settings
    ran: list[str] = []
    monkeypatch.setenv("JAXPP_FLAX_VERIFY", "1")
    with pytest.raises(VerificationError, match="a rank does not have"):
        ran.extend(each.name for each, _ in broken.steps(graph, settings, observers()))
    assert ran == NAMES[:at]
    monkeypatch.setenv("JAXPP_FLAX_VERIFY", "0")
    with pytest.raises(KeyError):
        list(broken.steps(graph, settings, observers()))


def test_dump_writes_every_structure_of_every_function(texts: list[dict[str, str]], tmp_path: Path):
    folder = tmp_path / "dumped" / "here"
    found = texts_of(lambda: [built(STEP, 2, chain(2), batch_of(number)) for number in (2, 3)], folder)
    files = [f"{number:02}_{name}.txt" for number, name in enumerate(NAMES, 1)]
    assert [step.name[:7] for step in sorted(folder.iterdir())] == ["step_0_", "step_1_"]
    assert all(sorted(file.name for file in step.iterdir()) == files for step in folder.iterdir())
    assert found[0] == texts[0], "made again, it is the same"
    assert "over 3 microbatches" in found[1]["place"]


def closed(equation: Equation) -> Equation:
    return Equation(**{each.name: getattr(equation, each.name) for each in fields(Equation)})


def without_free(instruction: Any) -> Any:
    return replace(instruction, values=(), delete=()) if isinstance(instruction, Free) else instruction


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("normalise_results", lambda g: replace(g, outputs=(*g.outputs, g.outputs[0])), "are one array"),
        ("normalise_results", lambda g: replace(g, outputs=g.inputs[:1]), "nothing reads a result of the loop"),
        ("open_loops", lambda g: replace(g, equations=tuple(map(closed, g.equations))), "a loop that is not opened"),
        ("liveness", lambda p: replace(p, instructions=tuple(map(without_free, p.instructions))), "never ends"),
    ],
)
def test_what_a_pass_promises_beyond_its_structure_is_checked(name: str, fault: Callable[[Any], Any], message: str):
    graph, _ = from_jaxpr(jax.jit(STEP).trace(chain(2), batch_of(2)).jaxpr)
    settings = built(STEP, 2, chain(2), batch_of(2)).settings
    each, structure = next(pair for pair in PASSES.steps(graph, settings) if pair[0].name == name)
    each.verify(structure)
    with pytest.raises(VerificationError, match=message):
        each.verify(fault(structure))
