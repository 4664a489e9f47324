"""The program of a compiled step: instructions over slots, and facts about them."""
