"""Passes over the body of a loop: deferred reductions, cuts, labels, tasks."""
