"""The frozen target: its features, embedding and head, and its own answers."""
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .plan import Plan


def pad(rows: Sequence[Sequence[int]], value: int, device: torch.device | str, left: bool = False) -> tuple[Tensor,
                                                                                                        Tensor]:
    """Token ids int64 [S, T], filled up on the right or the left, and bool [S, T], which of them are real."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), value, dtype=torch.long)
    real = torch.zeros(ids.shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[index, place], real[index, place] = torch.tensor(row, dtype=torch.long), True
    return ids.to(device), real.to(device)


class Target:
    """A Hugging Face causal language model without gradients.

    Args:
        model: transformers'.
        plan: which layers are collected, and what ends an answer.
    """

    def __init__(self, model: Any, plan: Plan) -> None:
        self.model, self.plan = model.eval().requires_grad_(False), plan
        self.trunk: nn.Module = model.base_model
        self.embedding: nn.Module = model.get_input_embeddings()
        self.head: nn.Module = model.get_output_embeddings()
        self.filler = plan.stop_ids[0]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.model.dtype

    @torch.no_grad()
    def features(self, ids: Tensor, real: Tensor, layers: Sequence[int] | None = None) -> list[Tensor]:
        """Output of each chosen layer, [S, T, C]; `hidden_states[id + 1]` of transformers, as entry 0 is the embedding.

        Args:
            ids: int64 [S, T], filled up on the right; real: bool [S, T].
            layers: None is the plan's.
        """
        states = self.trunk(input_ids=ids, attention_mask=real.long(), output_hidden_states=True,
                            use_cache=False).hidden_states
        return [states[layer + 1] for layer in (self.plan.target_layers if layers is None else layers)]

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of token ids: [...] -> [..., C]."""
        return self.embedding(ids).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: [..., C] -> [..., vocabulary]; gradients flow through it to `hidden`."""
        return self.head(hidden)

    @torch.no_grad()
    def answer(self, prompts: Sequence[Sequence[int]], max_new: int, temperature: float | None,
               seed: int) -> list[tuple[int, ...]]:
        """Answers to prompts, each up to and with its stop token or `max_new` tokens long.

        Args:
            temperature: None is greedy.
            seed: of the draw; what is drawn depends on the company in the batch too.
        """
        from transformers import GenerationConfig
        torch.manual_seed(seed)
        ids, real = pad(prompts, self.filler, self.device, left=True)
        # Every field that a checkpoint's own generation_config.json may set is set here.
        drawing = {'do_sample': False} if temperature is None else {'do_sample': True, 'temperature': temperature,
                                                                    'top_k': 0, 'top_p': 1.0}
        config = GenerationConfig(max_new_tokens=max_new, eos_token_id=list(self.plan.stop_ids),
                                  pad_token_id=self.filler, repetition_penalty=1.0, num_beams=1, **drawing)
        out = self.model.generate(input_ids=ids, attention_mask=real.long(), generation_config=config)
        return [_until_stop(row, self.plan.stop_ids) for row in out[:, ids.shape[1]:].tolist()]


def _until_stop(row: Sequence[int], stop_ids: Sequence[int]) -> tuple[int, ...]:
    for index, token in enumerate(row):
        if token in stop_ids:
            return tuple(row[:index + 1])
    return tuple(row)


def load_target(name: str, plan: Plan, device: str, dtype: torch.dtype) -> Target:
    """Load a target's weights.

    Raises:
        ValueError: transformers cannot; the message names the target.
    """
    from transformers import AutoModelForCausalLM
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f'TARGET is {name!r}; it must be a causal language model that transformers loads: '
                         f'{str(error).splitlines()[0]}') from error
    # Nothing of the checkpoint's own habits (sampling, penalties) may get into its answers.
    model.generation_config = type(model.generation_config)()
    return Target(model.to(device), plan)
