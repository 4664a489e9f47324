"""Improve a schedule by small changes along its critical path."""

from __future__ import annotations

import math
import random

from jaxpp_flax.planning.schedule_search.problem import Problem, Words, evaluate


def critical_moves(problem: Problem, words: Words, ends: list[list[float]]) -> list[tuple[int, int]]:
    """Return ``(rank, position)`` of passes on the critical path that delay the next pass of their rank.

    The step can become shorter only if one of these passes changes places with the next one, unless
    the chain of transfers itself takes this time.
    """
    passes = problem.passes
    place: list[list[int]] = [[0] * problem.num_microbatches for _ in passes]
    numbered: list[list[int]] = []
    for word in words:
        count = [0] * len(passes)
        marks: list[int] = []
        for position, n in enumerate(word):
            place[n][count[n]] = position
            marks.append(count[n])
            count[n] += 1
        numbered.append(marks)
    rank = max(range(len(words)), key=lambda r: ends[words[r][-1]][numbered[r][-1]])
    position = len(words[rank]) - 1
    moves: list[tuple[int, int]] = []
    while True:
        n, m = words[rank][position], numbered[rank][position]
        p = passes[n]
        start = ends[n][m] - p.time
        if p.remote >= 0 and ends[p.remote][m] + p.wait >= start - 1e-12:
            rank, position = passes[p.remote].rank, place[p.remote][m]
        elif position:
            before = words[rank][position - 1]
            if before != n:
                moves.append((rank, position - 1))
            position -= 1
        else:
            return moves


def improve(problem: Problem, words: Words, *, evaluations: int, goal: float, seed: int = 0) -> tuple[float, Words]:
    """Improve words by simulated annealing, with moves of passes on the critical path.

    Args:
        problem: the problem to schedule.
        words: the words to start from.
        evaluations: the number of schedules to try.
        goal: stop at this makespan (a lower bound).
        seed: the seed of the random choices: the same seed gives the same schedule.

    Returns:
        The best makespan found, and its words.
    """
    found = evaluate(problem, words)
    if found is None:
        raise ValueError("the starting schedule deadlocks")
    generator = random.Random(seed)
    current, ends = found
    words = [list(word) for word in words]
    best, kept = current, [list(word) for word in words]
    moves = critical_moves(problem, words, ends)
    scale = sum(p.time for p in problem.passes) / max(1, len(problem.passes))
    for step in range(evaluations):
        if best <= goal * (1 + 1e-9):
            break
        temperature = 0.3 * scale * (1 - step / evaluations) ** 2 + 1e-12
        change = _propose(problem, words, moves, generator)
        if change is None:
            continue
        rank, word = change
        old, words[rank] = words[rank], word
        trial = evaluate(problem, words) if problem.fits(rank, word) else None
        if trial is None or (trial[0] > current and generator.random() >= math.exp((current - trial[0]) / temperature)):
            words[rank] = old
            continue
        current, ends = trial
        moves = critical_moves(problem, words, ends)
        if current < best - 1e-12:
            best, kept = current, [list(word) for word in words]
    return best, kept


def _propose(
    problem: Problem, words: Words, moves: list[tuple[int, int]], generator: random.Random
) -> tuple[int, list[int]] | None:
    """Propose a rank and its word, with one pass moved forward or back by a few places."""
    if moves and generator.random() < 0.85:
        rank, position = moves[generator.randrange(len(moves))]
    else:
        rank = generator.randrange(len(words))
        position = generator.randrange(len(words[rank]))
    word = words[rank]
    reach = 1 if generator.random() < 0.6 else generator.randrange(2, 6)
    if generator.random() < 0.5:  # move the pass later, or the next pass earlier
        source, target = position, min(len(word) - 1, position + reach)
    else:
        source, target = min(len(word) - 1, position + 1), max(0, position + 1 - reach)
    low, high = min(source, target), max(source, target)
    if all(word[i] == word[source] for i in range(low, high + 1)):
        return None
    moved = list(word)
    moved.insert(target, moved.pop(source))
    return rank, moved
