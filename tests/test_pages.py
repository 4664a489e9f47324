"""The code on the pages of docs/ runs, block after block, as a reader would try it.

Long pages are slow tests; `.ci/run` runs them on one version.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer, pipeline_stage
from jaxpp_flax.pretrained import export_pretrained
from jaxpp_flax.trainers import ModelError
from tests.examples.running import load_example
from tests.helpers import python_blocks, slow
from tests.running import ROOT

pytestmark = pytest.mark.usefixtures("all_devices")


def run_page(
    name: str, blocks: int, *, files: str | None = None, only: str | None = None, **given: Any
) -> dict[str, Any]:
    """Run the page's blocks of Python, of which there are at least so many, in one namespace with what is given.

    A block that begins with a comment such as "# model.py" is a file: the others import it, as the page says. `files`
    is another page with such files. With `only`, run the blocks whose beginning matches this pattern.
    """
    found = [block for block in python_blocks(ROOT / "docs" / name) if only is None or re.match(only, block)]
    if files is not None:
        found += [block for block in python_blocks(ROOT / "docs" / files) if block.startswith("# ")]
    assert len(found) >= blocks
    namespace: dict[str, Any] = {"__name__": "page", **given}
    with pytest.MonkeyPatch.context() as patch:
        programs = []
        for number, block in enumerate(found):
            code = compile(block, f"{name}, block {number}", "exec")
            if file := re.match(r"# (\w+)\.py\n", block):
                module = ModuleType(file[1])
                patch.setitem(sys.modules, file[1], module)
                exec(code, vars(module))
            else:
                programs.append(code)
        for code in programs:
            exec(code, namespace)
    return namespace


TRAINER_PAGES = {
    "trainer": (3, ""),
    "loss": (2, "'accuracy'"),
    "lengths": (1, "shape(s) of microbatches"),
    "optimizers": (1, ""),
    "precision": (1, ""),
    "metrics": (2, "'update_ratio'"),
    "evaluation": (1, ""),
    "devices": (2, ""),
    "lora": (2, ""),
    "other_loops": (2, ""),
    "weights": (2, "bfloat16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("page", TRAINER_PAGES)
def test_the_pages_about_the_trainer_run(page: str, capsys: pytest.CaptureFixture[str]):
    blocks, text = TRAINER_PAGES[page]
    run_page(f"guides/{page}.md", blocks, files="guides/trainer.md")
    assert text in capsys.readouterr().out


@pytest.mark.slow
def test_the_page_about_the_output_shows_what_is_printed(capsys: pytest.CaptureFixture[str]):
    """The words and the stages: operations and bytes differ between versions of JAX."""
    run_page("guides/output.md", 1, files="guides/trainer.md")
    printed = " ".join(capsys.readouterr().out.split())
    page = (ROOT / "docs/guides/output.md").read_text(encoding="utf-8")
    shown = re.findall(r"^ +\d  block_\d, block_\d +\d+ |^ stage  blocks.*$", page, flags=re.MULTILINE)
    assert len(shown) == 3
    for row in [*shown, "If time follows FLOPs, ranks are idle for", "after compiling:", "best loss"]:
        assert " ".join(row.split()) in printed
        assert row in page


@pytest.mark.slow
def test_the_page_about_long_sequences_runs():
    names = run_page("guides/long_sequences.md", blocks=2)
    whole, divided = names["losses"]
    assert abs(whole - divided) <= 1e-6 * whole  # the same sums over positions, in another order
    assert all(2 * part < 1.6 * rank for rank, part in zip(*names["peaks"], strict=True)), "a device keeps its part"


@pytest.mark.slow
def test_the_page_about_linen_runs(capsys: pytest.CaptureFixture[str]):
    run_page("guides/linen.md", blocks=2)
    assert "['Dense_0', 'Dense_1', 'Dense_2']" in capsys.readouterr().out


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of qwix
def test_the_page_about_number_formats_runs():
    pytest.importorskip("qwix")
    names = run_page("guides/formats.md", 2, files="guides/trainer.md")
    types = {leaf.dtype.name for leaf in jax.tree.leaves(names["trainer"].state.model_state)}
    assert "uint4" in types


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore:::(?!jaxpp_flax)")  # of the loaders' packages
def test_the_page_about_data_runs(capsys: pytest.CaptureFixture[str]):
    for package in ("datasets", "grain", "webdataset"):
        pytest.importorskip(package)
    first = run_page("guides/trainer.md", blocks=1, only=r"# model\.py|import optax\n")
    # These two are as large as all else: their blocks run where they are installed.
    blocks = {"torch": (r"import jax\nfrom torch", 6), "tensorflow": (r"import tensorflow", 4)}
    left_out = [name for name in blocks if importlib.util.find_spec(name) is None]
    others = "".join(f"(?!{blocks[name][0]})" for name in left_out) or None
    given = {name: first[name] for name in ("trainer", "batches")}
    names = run_page("guides/data.md", blocks=6, only=others, jax=jax, **given)
    steps = 54 - sum(blocks[name][1] for name in left_out)
    assert names["trainer"].state.step == steps, "every loader gave its batches"
    assert "another shape of batches" in capsys.readouterr().out


class Block(nnx.Module):
    """A layer of an installed package, for the page about one's own model."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_the_ten_lines_for_a_model_of_another_package_run():
    [block, *_] = python_blocks(ROOT / "docs" / "start" / "own_model.md")
    batches = [np.ones((16, 4), np.float32)] * 5
    given = {"Block": Block, "Model": Model, "batches": batches, "loss_fn": lambda model, x: jnp.mean(model(x) ** 2)}
    exec(compile(block, "own_model.md", "exec"), given)
    assert given["trainer"].step == 5
    assert "block_0" in str(given["trainer"].plan).lower()


class Normalized(Block):
    """A layer that was trained under `pmap`, with statistics over the axis "batch"."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(4, axis_name="batch", rngs=rngs)

    def __call__(self, x):
        return self.norm(super().__call__(x))


@pytest.mark.slow
def test_a_batch_norm_of_pmap_is_converted_as_the_page_says():
    """With `axis_name` deleted, the statistics are over all data-parallel devices."""

    def trained(axis_name: str | None, mesh: dict[str, int] | None) -> np.ndarray:
        model = nnx.Sequential(*[pipeline_stage(Normalized)(nnx.Rngs(seed)) for seed in range(2)])
        for layer in model.layers:
            layer.norm.axis_name = axis_name
        loss = lambda model, x: jnp.mean((model(x) - 1) ** 2)  # noqa: E731
        trainer = PipelineTrainer(
            model, optax.sgd(0.1), loss, num_stages=2, num_microbatches=2, mesh=mesh, logging=False
        )
        trainer.train_step(np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32))
        return np.concatenate(
            [np.ravel(leaf) for leaf in jax.tree.leaves(nnx.state(trainer.gather_model(), nnx.BatchStat))]
        )

    with pytest.warns(UserWarning, match="JPF901"):
        alone = trained(None, None)
    with pytest.warns(UserWarning, match="JPF901"):
        together = trained(None, {"data": 2})
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)  # one mean, summed in another order
    with pytest.raises(ModelError, match=r"uses the axis name 'batch', as a layer with BatchNorm\(axis_name='batch'\)"):
        trained("batch", {"data": 2})


@pytest.mark.slow
def test_the_page_about_memory_runs(capsys: pytest.CaptureFixture[str]):
    run_page("guides/memory.md", blocks=2, files="guides/trainer.md")
    kinds, kept, moved = capsys.readouterr().out.splitlines()
    assert kinds == "{'pinned_host'}"
    assert "[0, 0]" in kept
    assert "[0, 0]" not in moved


@pytest.mark.slow
def test_the_page_about_assignments_runs(capsys: pytest.CaptureFixture[str]):
    run_page("guides/stages.md", blocks=4, **unmarked())
    out = capsys.readouterr().out
    assert "assignment of 9 blocks to 4 stages, operations and bytes estimated" in out
    assert "no mixture of keep, recompute and offload keeps within memory_limit" in out
    assert '{"name": "after_block_7", "stage": 3' in out


def test_the_page_for_programs_of_jaxpp_runs(capsys: pytest.CaptureFixture[str]):
    run_page("coming_from/jaxpp.md", blocks=2)
    assert capsys.readouterr().out == "(1,) (4,)\n"


def test_the_page_for_programs_of_shardy_runs():
    run_page("coming_from/shardy_mpmd.md", blocks=2)


def test_the_page_about_tasks_runs(capsys: pytest.CaptureFixture[str]):
    run_page("guides/tasks.md", blocks=2)
    out = capsys.readouterr().out
    assert "first(" in out
    assert out.endswith("[4, 5, 6, 7]\n")


@pytest.mark.slow
def test_the_page_about_generation_runs(capsys: pytest.CaptureFixture[str]):
    run_page("guides/generation.md", blocks=3)
    assert len(capsys.readouterr().out.splitlines()) == 3  # two prompts, one sample


def next_token_loss(model, batch):
    logits = model(batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


@pytest.mark.slow
def test_the_page_about_pretrained_weights_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    example = load_example("pretrained/llama.py")
    config = {
        "model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    model = example.Llama(example.LlamaConfig.from_huggingface(config), rngs=nnx.Rngs(1))
    export_pretrained(nnx.state(model, nnx.Param), tmp_path / "llama", map=example.NAMES, config=config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "pretrained"))
    tokens = np.arange(8 * 6, dtype=np.int32).reshape(8, 6) % 16
    batches = [{"inputs": tokens, "targets": tokens}] * 2
    run_page("guides/pretrained.md", blocks=3, batches=batches, loss_fn=next_token_loss)
    assert "blocks/*/up/kernel <- model.layers.*.mlp.up_proj.weight, transpose (1, 0)" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"llama", "finetuned", "copy"}
    assert json.loads((tmp_path / "finetuned" / "config.json").read_text())["dtype"] == "float32"


def unmarked() -> dict[str, Any]:
    """What the short pages leave to the reader: a model without marks, its loss, data and an optimizer."""

    class Block(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + jnp.tanh(self.linear(x))

    class Model(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.blocks = nnx.List([Block(rngs=rngs) for _ in range(4)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for block in self.blocks:
                x = block(x)
            return x

    def loss_fn(model: Model, batch: dict[str, np.ndarray]) -> jax.Array:
        return jnp.mean((model(batch["x"]) - 1) ** 2)

    batches = [{"x": np.random.default_rng(seed).normal(size=(64, 8)).astype(np.float32)} for seed in range(8)]
    return {
        "nnx": nnx, "optax": optax, "Block": Block, "DecoderLayer": Block, "Model": Model, "loss_fn": loss_fn,
        "batches": batches, "tx": optax.adam(1e-3), "model": Model(rngs=nnx.Rngs(0)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("page", "blocks"),
    [
        ("index.md", 1),
        slow("guides/quote.md", 2),
        slow("guides/experts.md", 1),
        ("coming_from/plain_flax.md", 2),
        ("coming_from/torch.md", 1),
        ("coming_from/maxtext.md", 1),
    ],
)
def test_a_short_page_runs(page: str, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "docs" / "guides")  # where files lie that pages offer
    run_page(page, blocks, **unmarked())


@pytest.mark.parametrize("page", ["choosing", "when_not_to_pipeline"])
def test_a_short_page_with_the_trainers_model_runs(page: str):
    run_page(f"guides/{page}.md", blocks=1, files="guides/trainer.md")


@pytest.mark.slow
def test_the_page_about_profiling_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    given = unmarked()
    pipeline_stage(given["Block"])
    model, loss_fn = given["Model"](rngs=nnx.Rngs(0)), given["loss_fn"]  # type: ignore[operator]
    trainer = PipelineTrainer(model, optax.sgd(0.1), loss_fn, num_stages=2, num_microbatches=4, logging=False)  # type: ignore[arg-type]
    run_page("guides/profiling.md", blocks=2, trainer=trainer, batches=given["batches"])
    assert (tmp_path / "step.svg").is_file()
    assert list(tmp_path.glob("trace/**/*.trace.json.gz"))
    assert "% simulated" in capsys.readouterr().out


@pytest.mark.slow
def test_the_first_notebook_runs(capsys: pytest.CaptureFixture[str]):
    run_page("start/first_training.md", blocks=6)
    out = capsys.readouterr().out
    assert "1f1b: makespan 24" in out
    assert "step 61 loss 0.0" in out


@pytest.mark.slow
def test_the_notebook_about_meshes_runs(capsys: pytest.CaptureFixture[str]):
    run_page("guides/mpmd.md", blocks=4)
    out = capsys.readouterr().out
    assert "(16, 16) on ranks (3,)" in out
    assert "gradient on [4, 5]" in out


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "guides").glob("*.md")), ids=lambda page: page.stem)
def test_a_guide_begins_with_about_ten_lines(page: Path):
    first = re.search(r"^```.*?\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert first
    assert len([line for line in first[1].splitlines() if line.strip()]) <= 14


@pytest.mark.parametrize("page", ["docs/internals/engine.md", "docs/internals/trainer.md", "CONTRIBUTING.md"])
def test_every_file_that_a_page_names_exists(page: str):
    named = set(re.findall(r"`([\w/]+/\w+\.py)", (ROOT / page).read_text(encoding="utf-8")))
    assert named
    tops = (ROOT, ROOT / "jaxpp_flax")
    assert [name for name in named if not any((top / name).exists() for top in tops)] == []
