"""Token editing of LLaDA2.1: changing a token after it was decoded. It is refused; a block's tokens stay as decoded.

LLaDA2.1 has the weights and the config of LLaDA2.0, and decodes the same way. Its authors' `generate` edits as well,
with thresholds that are the caller's; only a checkpoint that brings such a threshold along asks for it by itself.
"""
import re
from collections.abc import Mapping
from typing import Any

_ABOUT_EDITING = re.compile(r'edit|post_steps')


def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json or generation_config.json that are about token editing."""
    return {field: value for field, value in config.items() if _ABOUT_EDITING.search(field)}


def check(config: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that asks for token editing.

    Args:
        config: of config.json with `hf_overrides`, whose word counts where both have a field.
        generation: of generation_config.json.

    Raises:
        ValueError: the message has the field, its file and value, and what it must be.
    """
    of_config = fields(config)
    for field, value in {**fields(generation), **of_config}.items():
        # a threshold of 0 edits most of all; no steps are none
        if value is None or value is False or ('steps' in field and value == 0):
            continue
        file = 'config.json' if field in of_config else 'generation_config.json'
        raise ValueError(f'{field} of {file} is {value!r}; it must be absent or null (hf_overrides can make it so): '
                         'tokens are not edited once they are decoded')
