"""Checks a checkpoint's tensors while they are loaded, so that an error names the tensor and what was expected."""
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .tensors import SCALE, Shapes, scale_shapes, tensor_shapes

if TYPE_CHECKING:
    from lmdeploy.pytorch.models.sdar import SDARForCausalLM as _Model
else:
    _Model = object

_COMPUTED = ('rotary_emb.inv_freq', 'rotary_emb.cos_cached', 'rotary_emb.sin_cached')
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class CheckedWeights(_Model):
    """Mixin before a model class of LMDeploy's. Checkpoints that are quantised other than by blocks of FP8 have other
    tensors and are not checked."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._shapes, self._scales = tensor_shapes(config), scale_shapes(config)
        self._missing = set(self._shapes or ())
        self._scales_wanted: set[str] = set()
        self._scales_given: set[str] = set()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors of one file.

        Raises:
            ValueError: one is not a tensor of the model, of another shape, or in FP8 where the model is not.
        """
        super().load_weights(self._checked(weights))

    def update_weights(self) -> None:
        """After the last file.

        Raises:
            ValueError: a tensor has never come, or a weight in FP8 without its scales or the other way round.
        """
        if self._missing:
            assert self._shapes is not None
            raise ValueError(f'the checkpoint lacks {_named(self._shapes, self._missing)}; by config.json (model_type '
                             f'{self.config.model_type!r}) it must have them')
        if lacking := self._scales_wanted - self._scales_given:
            raise ValueError(f'the checkpoint lacks {_named(self._scales, lacking)}; its weights in FP8 must have them')
        if needless := self._scales_given - self._scales_wanted:
            raise ValueError(f'the checkpoint has {_named(self._scales, needless)}, which must belong to weights in '
                             'FP8, and these are not')
        super().update_weights()

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            if any(computed in name for computed in _COMPUTED):
                continue
            if self.config.tie_word_embeddings and name == 'lm_head.weight':
                continue
            if self._shapes is not None:
                self._check(name, weight, self._shapes)
            self._missing.discard(name)
            yield name, weight

    def _check(self, name: str, weight: Tensor, shapes: Shapes) -> None:
        expected = shapes.get(name) or self._scales.get(name)
        if expected is None:
            raise ValueError(f'tensor {name} {list(weight.shape)} of the checkpoint must not be there: by '
                             f'config.json (model_type {self.config.model_type!r}) there is none of that name')
        if tuple(weight.shape) != expected:
            raise ValueError(f'tensor {name} of the checkpoint is {list(weight.shape)}; by config.json it must '
                             f'be {list(expected)}')
        if name in self._scales:
            self._scales_given.add(name)
        elif weight.dtype in _FP8:
            scale = f'{name.removesuffix("weight")}{SCALE}'
            if scale not in self._scales:
                raise ValueError(f'tensor {name} of the checkpoint is {weight.dtype}; it must not be quantised: the '
                                 'model has no scales for it')
            self._scales_wanted.add(scale)


def _named(shapes: Shapes, names: set[str]) -> str:
    """The first few of `names`, in the order of the model, with their shapes."""
    named = [f'{name} {list(shape)}' for name, shape in shapes.items() if name in names]
    return ', '.join(named[:3]) + (f' and {len(named) - 3} more' if len(named) > 3 else '')
