"""The program that a step compiles to: instructions over slots, and what is known of them."""
