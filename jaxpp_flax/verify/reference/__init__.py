"""One training step as a user writes it with Flax and Optax alone: it shares nothing with the step that is verified.

It takes the user's model, functions and options, and the state before the step. What the trainer finds out about them,
such as which variables a loss writes, is found out here a second time, in another way.
"""
