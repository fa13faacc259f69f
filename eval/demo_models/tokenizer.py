"""The shared byte-level BPE tokenizer: special tokens, chat template, training."""
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .tasks import training_pairs
from .tasks.free_library import is_held_out, library_text

SPECIAL_TOKENS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|MASK|>')
END_OF_TEXT, IM_START, IM_END, MASK = range(4)
STOP_IDS = (IM_END, END_OF_TEXT)
VOCABULARY = 4096
CHAT_TEMPLATE = ("{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + "
                 "'<|im_end|>' + '\n' }}{%- endfor %}{%- if add_generation_prompt %}"
                 "{{- '<|im_start|>assistant\n' }}{%- endif %}")
TOKENIZER_FILES = ('tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'chat_template.jinja')
_WORD = r'\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\n+ *|\s+(?!\S)|\s+'


def chat_prompt(user: str) -> str:
    """What the chat template makes of one user message and the assistant's turn."""
    return f'<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n'


def load_tokenizer(model: str | Path) -> Tokenizer:
    """The tokenizer of a model folder."""
    return Tokenizer.from_file(str(Path(model, 'tokenizer.json')))


def encode_prompts(tokenizer: Tokenizer, prompts: list[str]) -> list[list[int]]:
    """Token ids of user messages in the chat template, ready to be answered."""
    texts = [chat_prompt(prompt) for prompt in prompts]
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def _training_texts(documents: int, source_megabytes: float, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(documents):
        yield from training_pairs(rng, 1)[0]
    total = 0
    for module, source in library_text()[0]:
        if not is_held_out(module):
            yield source
            total += len(source)
            if total > source_megabytes * 1e6:
                return


def train_tokenizer(documents: int = 30000, source_megabytes: float = 3.0, seed: int = 1) -> Tokenizer:
    """A BPE of 4096 entries from training documents and library source; digits are tokens of their own."""
    tokenizer = Tokenizer(models.BPE(unk_token=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_WORD), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
                                  min_frequency=2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(_training_texts(documents, source_megabytes, seed), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Writes the four files that `transformers.AutoTokenizer` reads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / 'tokenizer.json'))
    added = {str(index): {'content': token, 'lstrip': False, 'normalized': False, 'rstrip': False,
                          'single_word': False, 'special': True} for index, token in enumerate(SPECIAL_TOKENS)}
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': 4096,
              'clean_up_tokenization_spaces': False, 'bos_token': None, 'eos_token': '<|im_end|>',
              'pad_token': '<|endoftext|>', 'unk_token': None, 'mask_token': '<|MASK|>', 'add_bos_token': False,
              'additional_special_tokens': ['<|im_start|>', '<|im_end|>'], 'chat_template': CHAT_TEMPLATE,
              'added_tokens_decoder': added}
    (folder / 'tokenizer_config.json').write_text(json.dumps(config, indent=1))
    special = {'eos_token': '<|im_end|>', 'pad_token': '<|endoftext|>', 'mask_token': '<|MASK|>'}
    (folder / 'special_tokens_map.json').write_text(json.dumps(special))
    (folder / 'chat_template.jinja').write_text(CHAT_TEMPLATE)
