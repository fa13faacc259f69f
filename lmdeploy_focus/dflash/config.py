"""`DFlashConfig`, what a user gives to `lmdeploy.pipeline` as `speculative_config`, and the options of DFlash."""
from typing import Annotated, Any

from lmdeploy.messages import SpeculativeConfig
from pydantic import Field

from ..config import Option

DFLASH_OPTIONS = (
    Option('draft', '--dflash', Annotated[str, Field(min_length=1)], 'the folder or the hub name of a DFlash drafter',
           'none', 'draft blocks with this model and verify them (means the PyTorch engine)'),
    Option('draft_tokens', '--dflash-draft-tokens', Annotated[int, Field(ge=1)],
           "at least 1 and at most the drafter's block minus one", "the drafter's block minus one",
           'tokens drafted in a step', optional=True),
)
DFLASH_OPTION = {option.field: option for option in DFLASH_OPTIONS}
DFLASH_ON = DFLASH_OPTION['draft'].flag


class DFlashConfig(SpeculativeConfig):
    """LMDeploy's speculative config for a DFlash drafter, checked by this package and run by its parts.

    Args:
        draft: folder or hub name of the drafter; its config.json is read at once.
        draft_tokens: tokens drafted in a step, from 1 to the drafter's block minus one, which is the default.

    Raises:
        ValueError: an option is outside its bounds, or config.json is not a DFlash drafter's; the message has the flag
            or the field, the value and the bound.
        PatchError: the installed LMDeploy is not one that this package was written for.
    """

    def __init__(self, draft: str, draft_tokens: int | None = None) -> None:
        from .drafter import read_drafter
        draft = DFLASH_OPTION['draft'].check(str(draft))
        draft_tokens = DFLASH_OPTION['draft_tokens'].check(draft_tokens)
        longest = read_drafter(draft).block_size - 1
        if draft_tokens is not None and draft_tokens > longest:
            option = DFLASH_OPTION['draft_tokens']
            raise ValueError(f'{option.flag} ({option.field}) is {draft_tokens}; it must be at most {longest}, the '
                             f'block_size of {draft} minus one')
        super().__init__(method='dflash', model=draft,
                         num_speculative_tokens=longest if draft_tokens is None else draft_tokens)
        self._activate()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._activate()

    @staticmethod
    def _activate() -> None:
        from .. import activation
        activation.activate()


def dflash_options_table() -> str:
    """The options of DFlash as the README's Markdown table."""
    lines = ['| field | flag | values | default | |', '|---|---|---|---|---|']
    lines += [f'| `{option.field}` | `{option.flag}` | {option.bound} | {option.default} | {option.help} |'
              for option in DFLASH_OPTIONS]
    return '\n'.join(lines)
