"""The recipe of examples/finetune on a tiny random model: its data, its run in every form, and what it writes."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpp_flax import Callback, PipelineTrainer
from jaxpp_flax.layers import merge_lora
from jaxpp_flax.pretrained import load_pretrained
from tests.examples.running import run_example
from tests.helpers import tree_allclose
from tests.running import ROOT, run_python
from tests.trainers.generation.models import greedy

pytestmark = pytest.mark.extras

FOLDER = ROOT / "examples" / "finetune"
MODULES = ("settings", "data", "model", "finetune", "make_tiny_model")


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    """The modules of the recipe, as a script in their folder imports them."""
    for package in ("grain", "tokenizers", "tyro"):
        pytest.importorskip(package)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
        for name in (*MODULES, "llama"):
            patch.delitem(sys.modules, name, raising=False)
    sys.path[:] = [path for path in sys.path if path != str(ROOT / "examples" / "pretrained")]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """136 short documents in four files, drawn by a seed: one word in ten is rare."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    common, rare = (["".join(draw.choices("abdeilmnorstu", k=draw.randint(2, 7))) for _ in range(n)] for n in (40, 400))

    def sentence() -> str:
        words = [draw.choice(rare if draw.random() < 0.1 else common) for _ in range(draw.randint(6, 12))]
        return " ".join(words).capitalize() + "."

    for name in ("first", "second", "third"):
        documents = [" ".join(sentence() for _ in range(draw.randint(1, 9))) for _ in range(45)]
        lines = [json.dumps({"text": document}) for document in documents]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    (folder / "last.txt").write_text("One file, one document.\n\nIt has two paragraphs.", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tiny(recipe: SimpleNamespace, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recipe.make_tiny_model.make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", text)


@pytest.fixture(scope="module")
def settings(recipe: SimpleNamespace, text: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return recipe.settings.Settings(
        model=tiny, text=text, output=tmp_path_factory.mktemp("run"), steps=12, batch_size=8, length=32,
        learning_rate=1e-2, data_parallel=2, microbatches=2, eval_every=6, eval_batches=2, save_every=5,
        prompts=("A batch", "The trainer saves"), max_new_tokens=5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def documents(recipe: SimpleNamespace, text: Path) -> list[str]:
    return recipe.data.read_documents(text)


def test_a_copy_as_the_page_makes_it_needs_nothing_else(tmp_path: Path):
    page = (ROOT / "docs" / "guides" / "finetuning.md").read_text()
    (command,) = re.findall(r"`(cp [^`]*)`", page)
    subprocess.run(command.replace(" mine", f" {tmp_path / 'mine'}"), shell=True, check=True, cwd=ROOT)
    program = "import sys; sys.path.insert(0, sys.argv[1]); import model; print(sys.modules['llama'].__file__)"
    found = run_python("-c", program, str(tmp_path / "mine")).stdout
    assert found.strip() == str(tmp_path / "mine" / "llama.py")


# ---------------------------------------------------------------- the data
def test_documents_are_read_and_split(recipe: SimpleNamespace, documents: list[str], tmp_path: Path):
    assert len(documents) > 100
    assert "One file, one document.\n\nIt has two paragraphs." in documents
    train, held_out = recipe.data.split_documents(documents)
    assert sorted(train + held_out) == sorted(documents)
    assert len(held_out) == len(documents) // 10
    assert recipe.data.split_documents(["a", "b", "c"]) == (["a", "b"], ["c"])
    (tmp_path / "only.txt").write_text("one")
    with pytest.raises(SystemExit, match=r"holds 1 documents in \.txt and \.jsonl files: at least 2 are needed"):
        recipe.data.read_documents(tmp_path)


def test_rows_hold_the_pairs_of_the_documents_in_order(recipe: SimpleNamespace, documents: list[str], settings: Any):
    tokenizer = recipe.finetune.read_tokenizer(settings)
    batches = recipe.data.held_out_batches(documents[:40], tokenizer, 1, replace(settings, eval_batches=1000))
    rows = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    assert {value.shape[1] for value in rows.values()} == {32}
    used = rows["segments"] != 0
    assert used[:-1].all(), "only the last row is padded"
    whole = [[*tokenizer.encode(text).ids, 1] for text in documents[:40]]
    np.testing.assert_array_equal(rows["inputs"][used], np.concatenate([tokens[:-1] for tokens in whole]))
    np.testing.assert_array_equal(rows["targets"][used], np.concatenate([tokens[1:] for tokens in whole]))
    # A segment begins where a row or a document does.
    begins = np.diff(rows["segments"], axis=1, prepend=0)[used]
    document = np.concatenate([[1] + [0] * (len(tokens) - 2) for tokens in whole])
    row = np.tile(np.arange(32) == 0, len(used))[: len(document)]
    np.testing.assert_array_equal(begins, document | row)


def test_an_iterator_goes_on_from_its_state(recipe: SimpleNamespace, documents: list[str], settings: Any):
    tokenizer = recipe.finetune.read_tokenizer(settings)
    data = recipe.data.training_batches(documents[:20], tokenizer, 1, settings)
    assert sum(len(tokenizer.encode(text).ids) for text in documents[:20]) < 15 * 8 * 32
    run = iter(data)
    first = [next(run) for _ in range(3)]
    state = run.get_state()
    after = [next(run) for _ in range(20)]  # into the second pass, which is shuffled otherwise
    again = iter(data)
    again.set_state(state)
    tree_allclose([next(again) for _ in range(20)], after, rtol=0, atol=0)
    seen = [batch["inputs"].tobytes() for batch in (*first, *after)]
    assert len(set(seen)) == len(seen)


def test_the_loss_of_a_packed_row_is_that_of_its_documents_alone(recipe: SimpleNamespace, settings: Any):
    tokenizer, config = recipe.finetune.read_tokenizer(settings), recipe.model.read_config(settings.model)
    texts = ["A short one.", "Another document, which is longer.", "The third", "and a fourth, which is cut off " * 3]
    (packed,) = recipe.data.held_out_batches(texts, tokenizer, 1, replace(settings, batch_size=2, length=64))
    assert packed["segments"].max() > 2
    alone: dict[str, list[np.ndarray]] = {name: [] for name in packed}
    for row, segment in {(i, n) for (i, _), n in np.ndenumerate(packed["segments"]) if n}:
        own = packed["segments"][row] == segment
        for name, values in packed.items():
            found = own[own] if name == "segments" else values[row][own]
            alone[name].append(np.pad(found, (0, 64 - own.sum())).astype(np.int32))
    model = recipe.model.model_factory(config, settings)(nnx.Rngs(0))
    loss = nnx.jit(recipe.model.loss_fn)
    total, count = loss(model, packed)
    expected, number = loss(model, {name: np.stack(rows) for name, rows in alone.items()})
    assert int(count) == int(number) > 64
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    merged, _ = loss(model, {**packed, "segments": np.minimum(packed["segments"], 1)})
    assert abs(float(merged) - float(total)) > 1e-3 * float(total), "documents that see one another have another loss"


# ---------------------------------------------------------------- a run in this process
class Losses(Callback):
    """Remembers the loss of each step; raises after step `fail`."""

    def __init__(self, fail: int | None = None) -> None:
        super().__init__(every=1)
        self.values: dict[int, float] = {}
        self.fail = fail

    def on_metrics(self, trainer: Any, step: int, metrics: Any) -> None:
        self.values[step] = metrics["loss"]
        if step == self.fail:
            raise RuntimeError("the power has failed")


@pytest.fixture(scope="module")
def adapted(recipe: SimpleNamespace, settings: Any) -> tuple[PipelineTrainer, Losses]:
    losses = Losses()
    return recipe.finetune.finetune(settings, [losses]), losses


def logits_of(recipe: SimpleNamespace, directory: Path, tokens: np.ndarray) -> np.ndarray:
    """Of the model in a directory, under plain JAX."""
    llama = recipe.model.LlamaConfig.from_huggingface(recipe.model.read_config(directory))
    model = recipe.model.Llama(llama, rngs=nnx.Rngs(9))
    nnx.update(model, load_pretrained(directory, nnx.state(model, nnx.Param), map=recipe.model.NAMES))
    return np.asarray(model(tokens))


TOKENS = np.arange(48, dtype=np.int32).reshape(2, 24) * 7 % 512


@pytest.mark.slow
def test_an_interrupted_run_goes_on_bit_by_bit(recipe: SimpleNamespace, settings: Any, adapted: Any, tmp_path: Path):
    whole, losses = adapted
    assert losses.values[12] < losses.values[1] - 0.2
    again = replace(settings, output=tmp_path)
    before, after = Losses(fail=7), Losses()
    with pytest.raises(RuntimeError, match="the power has failed"):
        recipe.finetune.finetune(again, [before])
    trainer = recipe.finetune.finetune(again, [after])
    assert min(after.values) == 6, "step 5 was the last one that was saved"
    assert before.values | after.values == losses.values
    tree_allclose(jax.device_get(trainer.state), jax.device_get(whole.state), rtol=0, atol=0)


@pytest.mark.slow
def test_the_export_is_the_model_with_its_adapters(recipe: SimpleNamespace, settings: Any, adapted: Any):
    trainer, _ = adapted
    recipe.finetune.export(trainer, settings)
    target = settings.output / "model"
    assert {path.name for path in target.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    found = logits_of(recipe, target, TOKENS)
    np.testing.assert_array_equal(found, merge_lora(trainer.gather_model())(TOKENS))
    with_adapters = np.asarray(trainer.gather_model()(TOKENS))
    # A product of sums against a sum of products, in float32.
    np.testing.assert_allclose(found, with_adapters, rtol=0, atol=1e-5 * np.abs(with_adapters).max())
    assert np.abs(found - logits_of(recipe, settings.model, TOKENS)).max() > 0.1, "the adapters have learnt"


@pytest.mark.slow
def test_the_prompts_are_continued_as_without_a_pipeline(recipe: SimpleNamespace, settings: Any, adapted: Any):
    trainer, _ = adapted
    tokenizer = recipe.finetune.read_tokenizer(settings)
    prompts = [tokenizer.encode(prompt).ids for prompt in settings.prompts]
    assert len({len(prompt) for prompt in prompts}) > 1
    expected = greedy(trainer.gather_model(), prompts, settings.max_new_tokens)
    texts = recipe.finetune.generate(trainer, settings)
    assert texts == [tokenizer.decode([*a, *b.tolist()]) for a, b in zip(prompts, expected, strict=True)]
    assert all(text.startswith(prompt) for text, prompt in zip(texts, settings.prompts, strict=True))


@pytest.mark.slow
def test_all_weights_are_trained_and_written(recipe: SimpleNamespace, settings: Any, tmp_path: Path):
    full, losses = replace(settings, lora_rank=0, steps=4, output=tmp_path), Losses()
    trainer = recipe.finetune.finetune(full, [losses])
    assert losses.values[4] < losses.values[1] - 0.2
    recipe.finetune.export(trainer, full)
    np.testing.assert_array_equal(logits_of(recipe, tmp_path / "model", TOKENS), trainer.gather_model()(TOKENS))


# ---------------------------------------------------------------- the commands
def held_out_losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"held-out loss(?: before)?: (\d+\.\d{4})", output)]


def continued(output: str) -> list[str]:
    return re.findall(r"^(?:\[0\] )?> (.*)", output, flags=re.MULTILINE)


def arguments(settings: Any, output: Path, **more: object) -> list[str]:
    """The command line of a short run."""
    given = {
        "model": settings.model, "text": settings.text, "output": output, "steps": 3, "batch-size": 8, "length": 32,
        "learning-rate": 1e-2, "microbatches": 2, "eval-batches": 2, "max-new-tokens": 3, **more,
    }  # fmt: skip
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def one(settings: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory and the output of a run as one process, on 2 stages of 2 devices."""
    output = tmp_path_factory.mktemp("one")
    return output, run_example("finetune/finetune.py", *arguments(settings, output, **{"data-parallel": 2}))


@pytest.mark.slow
def test_four_processes_write_the_same_model_as_one(settings: Any, one: tuple[Path, str], tmp_path: Path):
    launch = ("-m", "jaxpp_flax.launch", "-n", "4", str(FOLDER / "finetune.py"))
    four = run_python(*launch, *arguments(settings, tmp_path, **{"data-parallel": 2}), XLA_FLAGS=None).stdout
    assert len(held_out_losses(one[1])) == len(continued(one[1])) == 2
    assert held_out_losses(four) == held_out_losses(one[1])
    assert continued(four) == continued(one[1])
    first, second = ({of.name: of.read_bytes() for of in (at / "model").iterdir()} for at in (one[0], tmp_path))
    assert first == second


def test_a_complete_run_is_refused(recipe: SimpleNamespace, settings: Any, tmp_path: Path, monkeypatch: Any):
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(sys, "argv", ["finetune.py", *arguments(settings, tmp_path)])
    with pytest.raises(SystemExit, match=r"this run is complete\. Choose another --output"):
        recipe.finetune.main()


SRUN = """#!/usr/bin/env bash
# A stand-in for SLURM's: two tasks on this host.
while [[ $1 == --* ]]; do shift; done
export SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_JOB_NUM_NODES=1 SLURM_STEP_NODELIST=localhost
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
status=0
wait $first || status=$?
wait $second || status=$?
exit $status
"""


@pytest.mark.slow
def test_the_job_file_runs_the_recipe(settings: Any, one: tuple[Path, str], tmp_path: Path):
    (tmp_path / "srun").write_text(SRUN, encoding="utf-8")
    (tmp_path / "srun").chmod(0o755)
    changed = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": str(random.randrange(10**6)),  # JAX derives the port from it
    }  # fmt: skip
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    job = ["bash", str(FOLDER / "job.slurm"), *arguments(settings, tmp_path / "run")]
    done = subprocess.run(
        job, cwd=ROOT, env={**own, **changed}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # One device in each stage instead of two: another order of sums, and four digits are printed.
    np.testing.assert_allclose(held_out_losses(done.stdout), held_out_losses(one[1]), atol=2e-4)
    assert continued(done.stdout) == continued(one[1])
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "name", ["docs/guides/finetuning.md", "examples/finetune/finetune.py", "examples/finetune/job.slurm"]
)
def test_the_commands_that_are_shown_are_valid(recipe: SimpleNamespace, name: str):
    import tyro

    shown = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"(?:finetune\.py|job\.slurm) +(--model.*)", shown)
    assert commands
    for command in commands:
        found = tyro.cli(recipe.settings.Settings, args=shlex.split(command, comments=True))
        assert found.batch_size % (found.microbatches * found.data_parallel) == 0


def test_the_default_text_is_on_every_machine(recipe: SimpleNamespace):
    found = list(itertools.islice(recipe.data.library_docstrings(), 50))
    assert len(found) == 50
    assert all(text.strip() for text in found)
