"""The stages of a trainer: the blocks of each, their schedule and ranks, and the plan that gives both."""
