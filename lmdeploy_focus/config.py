"""Every option: its flag, its bounds, its default and its message; and the config objects that carry them.

`FocusEngineConfig` is what a user gives to `lmdeploy.pipeline`. `FocusParams` and `FocusDLLMConfig` are what the engine
and its workers get. All three activate the extension in whatever process they are unpickled.
"""
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from lmdeploy.messages import PytorchEngineConfig
from lmdeploy.pytorch.config import DLLMConfig
from pydantic import Field, TypeAdapter, ValidationError

BLOCK_LENGTHS = (4, 8, 16, 32, 64)
FOCUS_THRESHOLD = 0.8
CPU_MAX_BATCH_SIZE = 64

_Threshold = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
_Alpha = Annotated[float, Field(ge=1, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]
_Strategy = Literal['low_confidence_dynamic', 'low_confidence_static', 'sequential']


@dataclass(frozen=True)
class Option:
    """One line of the options table.

    field: attribute of `FocusEngineConfig`
    flag: of `lmdeploy chat` and `lmdeploy serve api_server`
    kind: the type and bounds that pydantic holds a value to
    bound: the same in words, for the messages
    default: the default in words, for `--help` and the README
    help: what it does
    stock: LMDeploy has this option itself
    optional: None is a value too, for 'not given'
    """
    field: str
    flag: str
    kind: Any
    bound: str
    default: str
    help: str
    stock: bool = False
    optional: bool = False

    @cached_property
    def _adapter(self) -> TypeAdapter:
        return TypeAdapter(self.kind)

    def check(self, value: Any) -> Any:
        """The value in its own type.

        Raises:
            ValueError: it is outside the bounds or of another type.
        """
        if value is None and self.optional:
            return None
        try:
            return self._adapter.validate_python(value, strict=True)
        except ValidationError:
            raise ValueError(self._refusal(value)) from None

    def parse(self, text: str) -> Any:
        """The value that a word on the command line means.

        Raises:
            ValueError: it means none, or one outside the bounds.
        """
        try:
            return self._adapter.validate_strings(text)
        except ValidationError:
            raise ValueError(self._refusal(text)) from None

    def _refusal(self, value: Any) -> str:
        later = ', which is not available yet' if (self.field, value) == ('focus_cache', 'fast-dllm-v2') else ''
        return f'{self.flag} ({self.field}) is {value!r}{later}; it must be {self.bound}'


OPTIONS = (
    Option('focus', '--focus', bool, 'on or off', 'off; on in FocusEngineConfig',
           'decode with FOCUS (means the PyTorch engine)'),
    Option('focus_policy', '--focus-policy', Literal['auto', 'always', 'never'], 'auto, always or never', 'auto',
           'when to evict: where it pays, always, or never (delayed cache only)'),
    Option('focus_alpha', '--focus-alpha', _Alpha, 'a finite number >= 1', '1.5',
           'masked positions kept in a step, as a multiple of the mean number decoded'),
    Option('dllm_confidence_threshold', '--dllm-confidence-threshold', _Threshold, 'above 0 and at most 1',
           '0.8 with focus, else 0.85', 'confidence at which a position is unmasked', stock=True, optional=True),
    Option('dllm_unmasking_strategy', '--dllm-unmasking-strategy', _Strategy,
           'low_confidence_dynamic, low_confidence_static or sequential', 'low_confidence_dynamic',
           'which positions a step unmasks', stock=True),
    Option('dllm_denoising_steps', '--dllm-denoising-steps', _Count, 'at least 1 and at most the block length',
           'the block length', 'steps a block, for the strategies with a fixed number', stock=True, optional=True),
    Option('dllm_block_length', '--dllm-block-length', Literal[4, 8, 16, 32, 64], '4, 8, 16, 32 or 64',
           "the checkpoint's, else its name's (-b32)", 'positions in a block', stock=True, optional=True),
    Option('focus_selection', '--focus-selection', Literal['top', 'random', 'bottom'], 'top, random or bottom', 'top',
           'which masked positions are kept, by importance'),
    Option('focus_keep', '--focus-keep', _Count, 'a whole number >= 1', 'none',
           "a fixed number of kept positions instead of alpha's", optional=True),
    Option('focus_cache', '--focus-cache', Literal['delayed-neighbour', 'delayed', 'off'],
           'delayed-neighbour, delayed or off', 'delayed-neighbour',
           "when a decoded position's KV freezes: once its right neighbour was decoded too, once it was, or never"),
    Option('focus_kv_visible', '--focus-kv-visible', Literal['progress', 'reference'], 'progress or reference',
           'progress', 'the keys of the block that a row attends to: up to the rightmost ever run, or in this step'),
    Option('focus_commit', '--focus-commit', Literal['uncached', 'full'], 'uncached or full', 'uncached',
           'rows of a finished block that are run again for its final KV'),
    Option('focus_deterministic', '--focus-deterministic', bool, 'on or off', 'off',
           'row-invariant arithmetic: company in the batch never changes what is kept'),
    Option('device_type', '--device', Literal['cuda', 'ascend', 'maca', 'camb', 'cpu'],
           'cuda, ascend, maca, camb or cpu', 'cuda', 'where to run; cpu means the PyTorch engine', stock=True),
)
OPTION = {option.field: option for option in OPTIONS}


@dataclass(frozen=True)
class FocusParams:
    """What the engine needs of the options, all of it validated; plain and picklable.

    alpha and keep are cut to the longest block: a larger budget keeps every masked position just the same.
    """
    policy: str
    alpha: float
    selection: str
    keep: int | None
    cache: str
    kv_visible: str
    commit: str
    deterministic: bool


@dataclass
class FocusEngineConfig(PytorchEngineConfig):
    """LMDeploy's PyTorch engine config with the options of FOCUS.

    `focus=False` is stock LMDeploy. `device_type` may be 'cpu', and then `dtype` may be 'float32'.
    A `dllm_confidence_threshold` of None becomes 0.8 with focus and LMDeploy's own default without.

    Raises:
        ValueError: an option is outside its bounds, or does not go with another; the message has its flag, its field,
            the value and the bound.
        PatchError: the installed LMDeploy is not one that this package was written for.
    """
    focus: bool = True
    focus_policy: str = 'auto'
    focus_alpha: float = 1.5
    focus_selection: str = 'top'
    focus_keep: int | None = None
    focus_cache: str = 'delayed-neighbour'
    focus_kv_visible: str = 'progress'
    focus_commit: str = 'uncached'
    focus_deterministic: bool = False
    dllm_confidence_threshold: float | None = None

    def __post_init__(self) -> None:
        self.validate()
        _stock_checks(self)
        if self.dllm_confidence_threshold is None:
            self.dllm_confidence_threshold = default_threshold(self.focus)
        self._activate()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._activate()

    def validate(self) -> None:
        """Hold every option to its bounds, and the options to each other, as they are now.

        Raises:
            ValueError: see the class.
        """
        for name, value in check_values(vars(self)).items():
            setattr(self, name, value)

    def focus_params(self) -> FocusParams | None:
        """The engine's part of the options; None when focus is off."""
        if not self.focus:
            return None
        longest = max(BLOCK_LENGTHS)
        return FocusParams(policy=self.focus_policy, alpha=min(self.focus_alpha, float(longest)),
                           selection=self.focus_selection,
                           keep=None if self.focus_keep is None else min(self.focus_keep, longest),
                           cache=self.focus_cache, kv_visible=self.focus_kv_visible, commit=self.focus_commit,
                           deterministic=self.focus_deterministic)

    @classmethod
    def from_stock(cls, config: PytorchEngineConfig, **focus_fields: Any) -> 'FocusEngineConfig':
        """The same config as one of ours, with the fields given.

        With focus off and one of LMDeploy's own devices, nothing is validated: what stock accepts stays accepted.

        Raises:
            ValueError: see the class.
        """
        values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} | focus_fields
        if values.get('focus', cls.focus) or values['device_type'] == 'cpu':
            return cls(**values)
        ours = cls.__new__(cls)
        for field in dataclasses.fields(cls):
            setattr(ours, field.name, values.get(field.name, field.default))
        ours._activate()
        return ours

    def _activate(self) -> None:
        from . import activation
        if self.device_type == 'cpu':
            activation.activate_cpu()
        elif self.focus:
            activation.activate()
        else:
            activation.register()


def _stock_checks(config: Any) -> None:
    """LMDeploy's own checks and completions; they know neither the CPU nor float32, which are set aside."""
    device, dtype = config.device_type, config.dtype
    if device == 'cpu':
        config.device_type = 'cuda'
    if dtype == 'float32':  # where ours allow it
        config.dtype = 'auto'
    PytorchEngineConfig.__post_init__(config)
    config.device_type, config.dtype = device, dtype
    if device == 'cpu' and config.max_batch_size is None:
        config.max_batch_size = CPU_MAX_BATCH_SIZE


@dataclass
class FocusDLLMConfig(DLLMConfig):
    """LMDeploy's block-diffusion config with ours; travels in `MiscConfig.dllm_config` to every worker."""
    focus: FocusParams | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        from . import activation
        activation.activate()


def default_threshold(focus: bool) -> float:
    """The confidence threshold when none is given."""
    return FOCUS_THRESHOLD if focus else PytorchEngineConfig.dllm_confidence_threshold


def check_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check options that are given by field name, each for itself and together; the checked values by field name.

    Raises:
        ValueError: the message has the flag, the field, the value and the bound.
    """
    from .admission import check_combination
    checked = {option.field: option.check(values[option.field]) for option in OPTIONS}
    check_combination({**values, **checked})
    return checked


def options_table() -> str:
    """The options as the README's Markdown table."""
    lines = ['| field | flag | values | default | |', '|---|---|---|---|---|']
    lines += [f'| `{option.field}` | `{option.flag}` | {option.bound} | {option.default} | {option.help} |'
              for option in OPTIONS]
    return '\n'.join(lines)
