"""What a model's call writes into the model, and what a function of the user's writes after the update."""
