"""The user's loss: the rule of what it returns, what a trace of it tells, and losses of the whole batch."""
