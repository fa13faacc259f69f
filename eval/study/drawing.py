"""Random weights in bf16, drawn where it is fast."""
import torch
from torch import Tensor

SPREAD = 0.02


class Draw:
    """Draws the weights of one checkpoint; what it gives lies on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(0)

    def normal(self, *sizes: int) -> Tensor:
        """Normal with the standard deviation SPREAD."""
        made = torch.randn(*sizes, device=self.device, generator=self.generator, dtype=torch.bfloat16)
        return made.mul_(SPREAD).cpu()

    def ones(self, count: int) -> Tensor:
        """The weight of a norm."""
        return torch.ones(count, dtype=torch.bfloat16)

    def zeros(self, count: int) -> Tensor:
        """A bias, in fp32."""
        return torch.zeros(count)

    def mlp(self, prefix: str, hidden: int, inner: int) -> dict[str, Tensor]:
        """The three matrices of an MLP by name."""
        return {f'{prefix}.gate_proj.weight': self.normal(inner, hidden),
                f'{prefix}.up_proj.weight': self.normal(inner, hidden),
                f'{prefix}.down_proj.weight': self.normal(hidden, inner)}

    def experts(self, prefix: str, count: int, hidden: int, inner: int) -> dict[str, Tensor]:
        """The matrices of a layer's experts by name: parts of three large tensors, as drawing and copying thousands of
        small ones takes minutes."""
        made = {}
        for name, sizes in (('gate_proj', (inner, hidden)), ('up_proj', (inner, hidden)),
                            ('down_proj', (hidden, inner))):
            for expert, matrix in enumerate(self.normal(count, *sizes).unbind()):
                made[f'{prefix}.experts.{expert}.{name}.weight'] = matrix
        return made
