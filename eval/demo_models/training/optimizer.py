"""Orthogonalised momentum (Muon) for the matrices, AdamW for the embedding and the norms."""
import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(gradient: Tensor, steps: int = 5) -> Tensor:
    """Quintic Newton-Schulz iteration on a stack of matrices [N, rows, columns], in bf16."""
    first, second, third = _COEFFICIENTS
    x = gradient.bfloat16()
    flip = x.shape[-2] > x.shape[-1]
    if flip:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        terms = torch.baddbmm(square, square, square, beta=second, alpha=third)
        x = torch.baddbmm(x, terms, x, beta=first)
    return x.mT if flip else x


class Optimizer:
    """Matrices of one shape are stepped together."""

    def __init__(self, module: nn.Module, matrix_rate: float, other_rate: float, decay: float = 0.05,
                 momentum: float = 0.95):
        self.matrix_rate, self.other_rate, self.decay, self.momentum = matrix_rate, other_rate, decay, momentum
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        embeddings, vectors = [], []
        for name, parameter in module.named_parameters():
            if parameter.ndim == 2 and 'embed' not in name:
                by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
            else:
                (embeddings if parameter.ndim == 2 else vectors).append(parameter)
        self.matrices = [(group, torch.zeros(len(group), *group[0].shape, device=group[0].device))
                         for group in by_shape.values()]
        self.others = embeddings + vectors
        groups = [{'params': group, 'lr': other_rate, 'weight_decay': 0.0} for group in (embeddings, vectors) if group]
        self.adam = torch.optim.AdamW(groups, lr=other_rate, betas=(0.9, 0.95), eps=1e-8,
                                      fused=self.others[0].is_cuda)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update at `factor` times the learning rates; clears the gradients."""
        rate = self.matrix_rate * factor
        for group, momentum in self.matrices:
            gradient = torch.stack([parameter.grad for parameter in group])
            momentum.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(momentum, self.momentum)).float()
            rows, columns = group[0].shape
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind(0)), alpha=-rate * max(1.0, rows / columns) ** 0.5)
            for parameter in group:
                parameter.grad = None
        nn.utils.clip_grad_norm_(self.others, 1.0)
        for group in self.adam.param_groups:
            group['lr'] = self.other_rate * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
