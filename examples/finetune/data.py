"""Documents to batches of fixed shape, through grain: read, tokenized, shuffled, packed.

A document is its tokens and the end token. It gives pairs of an input and its target, the next token. The pairs of one
document after another fill rows of `length`. `segments` counts the documents of a row from 1; 0 is padding. So no
target is a token of another document, and with `segments` in the attention, a row's losses are those of its documents
one by one. A document that does not fit goes on in the next row, as one that begins there.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import grain
import numpy as np
from settings import Settings
from tokenizers import Tokenizer

Batch = dict[str, np.ndarray]  # inputs, targets, segments: (batch, length), int32


def read_documents(folder: Path | None) -> list[str]:
    """The documents of a folder, in the same order every time; without a folder, text that every machine has."""
    if folder is None:
        return list(library_docstrings())
    documents = []
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".txt":
            documents.append(path.read_text(encoding="utf-8"))
        elif path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").splitlines()
            documents += [json.loads(line)["text"] for line in lines if line.strip()]
    documents = [text for text in documents if text.strip()]
    if len(documents) < 2:
        raise SystemExit(f"{folder} holds {len(documents)} documents in .txt and .jsonl files: at least 2 are needed.")
    return documents


def library_docstrings() -> Iterator[str]:
    """The docstrings of the modules, classes and functions of Python's standard library."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_bytes()))
        texts = (ast.get_docstring(node) for node in nodes if isinstance(node, kinds))
        yield from (text for text in texts if text and text.strip())


def split_documents(documents: list[str]) -> tuple[list[str], list[str]]:
    """Those to train on, and the held-out ones: every tenth, or the last one of fewer than ten."""
    every = min(10, len(documents))
    return [text for i, text in enumerate(documents, 1) if i % every], documents[every - 1 :: every]


def training_batches(documents: list[str], tokenizer: Tokenizer, end: int, settings: Settings) -> grain.IterDataset:
    """Batches without end, shuffled anew in each pass. Iterators know their place, which checkpoints keep."""
    shuffled = grain.MapDataset.source(documents).seed(settings.seed).shuffle().repeat()
    return packed(shuffled, tokenizer, end, settings.length).batch(settings.batch_size, drop_remainder=True)


def held_out_batches(documents: list[str], tokenizer: Tokenizer, end: int, settings: Settings) -> list[Batch]:
    """The first batches of one pass, the same ones in every run."""
    rows = packed(grain.MapDataset.source(documents), tokenizer, end, settings.length)
    return list(islice(rows.batch(settings.batch_size), settings.eval_batches))


def packed(documents: grain.MapDataset, tokenizer: Tokenizer, end: int, length: int) -> grain.IterDataset:
    pairs = documents.map(partial(inputs_and_targets, tokenizer=tokenizer, end=end)).to_iter_dataset()
    lengths = {"inputs": length, "targets": length}
    return grain.experimental.ConcatThenSplitIterDataset(pairs, length_struct=lengths).map(with_segments)


def inputs_and_targets(text: str, tokenizer: Tokenizer, end: int) -> dict[str, np.ndarray]:
    tokens = np.array([*tokenizer.encode(text).ids, end], np.int32)
    return {"inputs": tokens[:-1], "targets": tokens[1:]}


def with_segments(row: dict[str, Any]) -> Batch:
    return {"inputs": row["inputs"], "targets": row["targets"], "segments": row["inputs_segment_ids"]}
