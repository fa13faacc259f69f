"""Training of a DFlash drafter (arXiv 2602.06036) for a Hugging Face target; `../train_dflash.py` is the command."""
