"""Checks a checkpoint's tensors while they are loaded, so that an error names the tensor and what was expected."""
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .tensors import tensor_shapes

if TYPE_CHECKING:
    from lmdeploy.pytorch.models.sdar import SDARForCausalLM as _Model
else:
    _Model = object

_COMPUTED = ('rotary_emb.inv_freq', 'rotary_emb.cos_cached', 'rotary_emb.sin_cached')


class CheckedWeights(_Model):
    """Mixin before a model class of LMDeploy's. Quantised checkpoints have other tensors and are not checked."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        quantised = getattr(config, 'quantization_config', None) is not None
        self._shapes = None if quantised else tensor_shapes(config)
        self._missing = set(self._shapes or ())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors of one file.

        Raises:
            ValueError: one is not a tensor of the model, or of another shape.
        """
        super().load_weights(self._checked(weights))

    def update_weights(self) -> None:
        """After the last file.

        Raises:
            ValueError: a tensor has never come.
        """
        if self._missing:
            assert self._shapes is not None
            named = [f'{name} {list(self._shapes[name])}' for name in self._shapes if name in self._missing]
            more = f' and {len(named) - 3} more' if len(named) > 3 else ''
            raise ValueError(f'the checkpoint lacks {", ".join(named[:3])}{more}; by config.json (model_type '
                             f'{self.config.model_type!r}) it must have them')
        super().update_weights()

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            if any(computed in name for computed in _COMPUTED):
                continue
            if self.config.tie_word_embeddings and name == 'lm_head.weight':
                continue
            if self._shapes is not None:
                expected = self._shapes.get(name)
                if expected is None:
                    raise ValueError(f'tensor {name} {list(weight.shape)} of the checkpoint must not be there: by '
                                     f'config.json (model_type {self.config.model_type!r}) there is none of that name')
                if tuple(weight.shape) != expected:
                    raise ValueError(f'tensor {name} of the checkpoint is {list(weight.shape)}; by config.json it must '
                                     f'be {list(expected)}')
            self._missing.discard(name)
            yield name, weight
