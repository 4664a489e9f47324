"""How the processes of a run find, compare, await and end one another."""
