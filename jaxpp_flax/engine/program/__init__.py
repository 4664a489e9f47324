"""The program of a compiled step: tasks and instructions over values, and facts about them."""
