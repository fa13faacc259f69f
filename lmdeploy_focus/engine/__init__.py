"""Subclasses of LMDeploy's engine parts; they carry tensors to the stages and results back."""
