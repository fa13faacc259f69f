"""The stages of a denoising step, one file each, in the order of the paper; they import torch and our kernels only."""
