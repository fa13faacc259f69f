"""Training of the three demo models on one GPU; `../train.py` is the command."""
