"""Passes over the body of a loop: what may be deferred, which mark cuts, labels, tasks."""
