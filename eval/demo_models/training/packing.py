"""Documents as rows of token ids.

A token is an uint16: bits 0 to 11 are its id, bit 15 marks an assistant's token (it has a loss and may be masked).
Documents start on multiples of 32 tokens, so that they start a block at every block length, and are padded with
<|endoftext|>.
"""
import random

import numpy as np
from tokenizers import Tokenizer

from ..tasks import training_pairs
from ..tokenizer import END_OF_TEXT, chat_prompt

ALIGNMENT = 32
ASSISTANT = 1 << 15
_DRAWN_AT_ONCE = 512
_OPEN_ROWS = 48


def document(prompt: list[int], answer: list[int]) -> np.ndarray:
    """Token ids of a prompt and its answer, flagged and padded."""
    tokens = np.array(prompt + answer, dtype=np.uint16)
    tokens[len(prompt):] |= ASSISTANT
    padding = -len(tokens) % ALIGNMENT
    return np.concatenate([tokens, np.full(padding, END_OF_TEXT | ASSISTANT, np.uint16)])


def encode_documents(tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> list[np.ndarray]:
    """Documents of (prompt, answer) texts."""
    prompts = tokenizer.encode_batch_fast([chat_prompt(prompt) for prompt, _ in pairs], add_special_tokens=False)
    answers = tokenizer.encode_batch_fast([answer + '<|im_end|>' for _, answer in pairs], add_special_tokens=False)
    return [document(prompt.ids, answer.ids) for prompt, answer in zip(prompts, answers, strict=True)]


def make_shard(tokenizer: Tokenizer, seed: int, rows: int, length: int) -> np.ndarray:
    """uint16 [rows, length] of whole documents, each put into the open row that it fills best."""
    rng = random.Random(f'train-{seed}')
    shard = np.full((rows, length), END_OF_TEXT, np.uint16)
    written = 0
    open_rows: list[list[np.ndarray]] = []
    used: list[int] = []
    while True:
        for tokens in encode_documents(tokenizer, training_pairs(rng, _DRAWN_AT_ONCE)):
            tokens = tokens[:length]
            rooms = [length - taken - len(tokens) for taken in used]
            fitting = [index for index, room in enumerate(rooms) if room >= 0]
            if fitting:
                best = min(fitting, key=rooms.__getitem__)
            else:
                open_rows.append([])
                used.append(0)
                best = len(used) - 1
            open_rows[best].append(tokens)
            used[best] += len(tokens)
            if len(used) > _OPEN_ROWS or length - used[best] < 2 * ALIGNMENT:
                fullest = int(np.argmax(used))
                row = np.concatenate(open_rows.pop(fullest))
                shard[written, :used.pop(fullest)] = row
                written += 1
                if written == rows:
                    return shard
