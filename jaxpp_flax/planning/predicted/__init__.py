"""What a step will cost and hold, found without compiling it: for each block, and for each rank of a program."""
