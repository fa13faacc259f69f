"""Phase `ar`: next-token training of the autoregressive model."""
import torch

from ..checkpoint import save_ar
from ..network import Decoder, Shape, rope_table
from ..tokenizer import END_OF_TEXT
from .loop import Journal, cross_entropy, train, warm_up
from .optimizer import Optimizer
from .rows import Rows, unpack
from .settings import Settings

_PROMPT_WEIGHT = 0.1


def train_ar(settings: Settings, rows: Rows, journal: Journal) -> None:
    """Writes `ar`. Tokens of prompts count a tenth of those of answers; padding does not count."""
    torch.manual_seed(settings.seed)
    model = Decoder(Shape()).to(settings.device)
    cos, sin = (table[None] for table in rope_table(settings.length, model.shape.head_size, model.shape.rope_theta,
                                                    settings.device))
    optimizer = Optimizer(model, settings.matrix_rate, settings.other_rate)
    loss = cross_entropy(settings.compile)
    batch = settings.batch_ar

    def step(raw: torch.Tensor | None = None) -> torch.Tensor:
        ids, assistant = unpack(rows.batch(batch) if raw is None else raw)
        targets = torch.roll(ids, -1, 1)
        weight = torch.where(torch.roll(assistant, -1, 1), 1.0, _PROMPT_WEIGHT) * (targets != END_OF_TEXT)
        weight[:, -1] = 0
        hidden, _ = model.trunk(ids, cos, sin, 'causal', dtype=settings.dtype)
        return (loss(hidden, model.embed_tokens.weight, targets) * weight).sum() / weight.sum()

    # Compiles on made-up tokens while the first rows are still being generated.
    dummy = torch.randint(4, 4000, (batch, settings.length), device=settings.device).to(torch.int16)
    warm_up('ar', lambda: step(dummy), model.layers, model.parameters(), settings.compile, journal)
    rows.wait(min(batch * 4, settings.rows_at_start))
    train('ar', step, optimizer, settings.minutes_ar, batch * settings.length, rows.poll, journal)
    save_ar(model, settings.out / 'ar')
