"""The command line: adds our options to `lmdeploy chat` and `lmdeploy serve api_server`, and acts on them.

The steps of a command, each a function here that a row of `patches/cli.py` calls: `add_arguments` when LMDeploy builds
its parser, `finish_arguments` when it has parsed, `run_command` when the command runs, and `convert_config` when it
hands its engine config to the engine. A command without our options stays LMDeploy's own.
"""
import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from .patches import PatchError, apply, check_version, rows

DISABLE = 'LMDEPLOY_FOCUS_DISABLE'
REQUEST = 'focus_request'
GROUP = 'FOCUS arguments'
DFLASH_GROUP = 'DFlash arguments'
# Fields of `dflash.config.DFLASH_OPTIONS` -> where the parser leaves them.
DFLASH_DEST = {'draft': 'dflash', 'draft_tokens': 'dflash_draft_tokens'}
# The options of the reference implementation, kept as hidden aliases.
FOCUS_ALIAS, CACHE_ALIAS, ALPHA_ALIAS = '--dllm-enable-focus', '--dllm-enable-delayed-cache', '--dllm-focus-alpha'
# LMDeploy's options of its own drafters, and their defaults.
STOCK_DRAFT = {'speculative_draft_model': None, 'speculative_num_draft_tokens': 1,
               'speculative_dflash_block_size': None}
# What `chat` lacks of the options that `serve api_server` has: LMDeploy's own helpers that add them.
CHAT_LACKS = ('dllm_unmasking_strategy', 'dllm_denoising_steps', 'dllm_confidence_threshold', 'max_batch_size')
# model_type of the checkpoints that our config builder reads better than LMDeploy's, which has no LLaDA2 at all.
REGISTERED = ('sdar', 'sdar_moe', 'llada2_moe')
# Options whose name on the command line is not the field's.
NAME_OF_FIELD = {'device_type': 'device', 'block_size': 'cache_block_seq_len'}


@dataclass(frozen=True)
class Request:
    """What the user asked of us.

    fields: fields of `FocusEngineConfig` by name
    dflash: arguments of `DFlashConfig`; empty without --dflash
    fail: prints 'lmdeploy: error: <message>' and exits with status 2
    """
    fields: dict[str, Any]
    dflash: dict[str, Any]
    fail: Callable[[str], NoReturn]

    @property
    def cpu(self) -> bool:
        """Whether the command runs on the CPU."""
        return self.fields['device_type'] == 'cpu'


# The conversion that the running command wants at its boundary; None for a command that is stock's own.
_CONVERT: ContextVar[Callable[..., Any] | None] = ContextVar('focus_convert', default=None)


def install() -> None:
    """Teach LMDeploy's command line our options; `LMDEPLOY_FOCUS_DISABLE=1` in the environment prevents it.

    On an LMDeploy that this package was not written for, the stock command line stays as it is, and only a command that
    has our options fails, with exit status 2 and the reason.
    """
    if os.environ.get(DISABLE) == '1':
        return
    try:
        check_version()
        apply(rows('cli'))
    except PatchError as error:
        _guard(str(error))


def main() -> None:
    """`lmdeploy-focus`: the `lmdeploy` command, for environments in which the start-up hook does not run."""
    install()
    import_module('lmdeploy.cli.entrypoint').run()


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add our options to the parser of 'chat' or 'api_server', in groups that show the whole tables."""
    from .config import OPTIONS
    from .dflash.config import DFLASH_OPTIONS
    if command == 'chat':
        helper = import_module('lmdeploy.cli.utils').ArgumentHelper
        engine = next(group for group in parser._action_groups if group.title == 'PyTorch engine arguments')
        for name in CHAT_LACKS:
            getattr(helper, name)(engine)
    group = parser.add_argument_group(GROUP)
    for option in OPTIONS:
        if option.stock:
            group._group_actions.append(_adapt_stock(parser._option_string_actions[option.flag], option))
        elif option.kind is bool:
            group.add_argument(option.flag, dest=option.field, action='store_true', default=argparse.SUPPRESS,
                               help=_help(option))
        else:
            group.add_argument(option.flag, dest=option.field, type=_parser_of(option), default=argparse.SUPPRESS,
                               metavar=_metavar(option), help=_help(option))
    group = parser.add_argument_group(DFLASH_GROUP)
    for option in DFLASH_OPTIONS:
        group.add_argument(option.flag, dest=DFLASH_DEST[option.field], type=_parser_of(option),
                           default=argparse.SUPPRESS, metavar='DRAFT' if option.field == 'draft' else 'N',
                           help=_help(option))
    _adapt_dtype(parser._option_string_actions['--dtype'])
    _add_aliases(parser)
    parser.set_defaults(**{REQUEST: None})


def finish_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check what was parsed and turn it into what the stock command expects plus a `Request`.

    Wrong values and combinations end the process with status 2, before a model is looked for.
    """
    given = vars(args)
    if REQUEST not in given:
        return
    from .config import CPU_MAX_BATCH_SIZE, OPTIONS, default_threshold
    fields = {option.field: given.pop(option.field) for option in OPTIONS if not option.stock and option.field in given}
    if given.pop('dllm_enable_delayed_cache', False) and 'focus' not in fields:
        fields = {'focus_policy': 'never', **fields, 'focus': True}
    focus, cpu = fields.get('focus', False), args.device == 'cpu'
    dflash = {field: given.pop(dest) for field, dest in DFLASH_DEST.items() if dest in given}
    if dflash and 'draft' not in dflash:
        parser.error('--dflash-draft-tokens must be given with --dflash')
    if dflash and focus:
        parser.error('--dflash must not be given with --focus: its target is autoregressive')
    if fields and not focus:
        flags = ', '.join(option.flag for option in OPTIONS if option.field in fields)
        parser.error(f'{flags} must be given with --focus')
    if args.dtype == 'float32' and not cpu:
        parser.error('--dtype is float32; it must be auto, float16 or bfloat16 without --device cpu')
    if args.dllm_confidence_threshold is None:
        args.dllm_confidence_threshold = default_threshold(focus)
    if not focus and not cpu and not dflash:
        if args.command == 'chat':
            _forget_defaults(given)
        return
    args.backend = 'pytorch'
    if cpu and args.max_batch_size is None:
        args.max_batch_size = CPU_MAX_BATCH_SIZE
    fields = {**fields, 'focus': focus, 'device_type': args.device}
    if args.dtype == 'float32':
        fields['dtype'], args.dtype = args.dtype, 'auto'  # LMDeploy's own config refuses it
    if args.speculative_algorithm is not None:
        parser.error(f'--speculative-algorithm is {args.speculative_algorithm!r}; it must not be given with '
                     f'{"--focus" if focus else "--dflash" if dflash else "--device cpu"}')
    for dest, default in STOCK_DRAFT.items() if dflash else ():
        if given[dest] != default:
            parser.error(f'--{dest.replace("_", "-")} is {given[dest]!r}; it must not be given with --dflash: '
                         '--dflash-draft-tokens says how many tokens are drafted')
    try:
        values = _check(args, fields)
        if dflash:
            from .dflash.admission import check_options
            from .dflash.config import DFlashConfig
            check_options(values)
            DFlashConfig(**dflash)
    except (ValueError, AssertionError, PatchError) as error:  # LMDeploy's own checks assert
        parser.error(str(error))
    given[REQUEST] = Request(fields, dflash, parser.error)


def run_command(command: Callable[[argparse.Namespace], Any], args: argparse.Namespace) -> Any:
    """Run `lmdeploy chat` or `lmdeploy serve api_server`; without our options it gets what it would get without us."""
    request = vars(args).pop(REQUEST, None)
    if request is None and not _registers_for(args.model_path):
        return command(args)
    try:
        apply(rows('boundary'))
    except PatchError as error:
        if request is None:
            return command(args)
        request.fail(str(error))
    with _converting(request):
        return command(args)


def convert_config(model_path: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call that starts the engine, with the config made ours if the command wants it."""
    convert = _CONVERT.get()
    return keywords if convert is None else convert(model_path, keywords)


@contextmanager
def _converting(request: Request | None) -> Iterator[None]:

    def convert(model_path: str, keywords: dict[str, Any]) -> dict[str, Any]:
        if request is not None and request.dflash:
            keywords = {**keywords, 'speculative_config': _drafter(request)}
        return {**keywords, 'backend_config': _ours(request, model_path, keywords)}

    token = _CONVERT.set(convert)
    try:
        yield
    finally:
        _CONVERT.reset(token)


def _drafter(request: Request) -> Any:
    from .dflash.config import DFlashConfig
    try:
        return DFlashConfig(**request.dflash)
    except (ValueError, PatchError) as error:
        request.fail(str(error))


def _ours(request: Request | None, model_path: str, keywords: dict[str, Any]) -> Any:
    from lmdeploy.messages import PytorchEngineConfig

    from .admission import admit, check_without_focus, resolve_block_length
    from .config import FocusEngineConfig
    config = keywords['backend_config']
    if request is None:
        # A block-diffusion checkpoint without our options: only its own block length and mask id are brought in.
        if not isinstance(config, PytorchEngineConfig):
            return config
        try:
            check_without_focus(model_path, config)
        except ValueError as error:
            print(f'lmdeploy: error: {error}', file=sys.stderr)
            sys.exit(2)
        return FocusEngineConfig.from_stock(config, focus=False)
    try:
        config = FocusEngineConfig.from_stock(config, **request.fields)
        admit(model_path, config, trust_remote_code=keywords.get('trust_remote_code', False),
              speculative_config=keywords.get('speculative_config'))
        if config.focus:
            # LMDeploy bounds the batch by the block length only where the engine config has it.
            config.dllm_block_length = resolve_block_length(model_path, config)
    except (ValueError, PatchError) as error:
        request.fail(str(error))
    return config


def _check(args: argparse.Namespace, fields: dict[str, Any]) -> dict[str, Any]:
    """Check the options as parsed: each for itself, together, and as LMDeploy does; all of them by field name."""
    import dataclasses

    from lmdeploy.messages import PytorchEngineConfig

    from .config import FocusEngineConfig, check_values
    values = {field.name: getattr(args, NAME_OF_FIELD.get(field.name, field.name), field.default)
              for field in dataclasses.fields(FocusEngineConfig)}
    check_values(values | fields)
    stock = {field.name for field in dataclasses.fields(PytorchEngineConfig)} - {'role', 'migration_backend'}
    device = 'cuda' if fields['device_type'] == 'cpu' else fields['device_type']
    PytorchEngineConfig(**{name: values[name] for name in stock} | {'device_type': device})
    return values | fields


def _forget_defaults(given: dict[str, Any]) -> None:
    """Take out of `chat`'s arguments those that only we added and nobody gave: it hands all of them on."""
    from lmdeploy.messages import PytorchEngineConfig
    for name in CHAT_LACKS:
        if given[name] == getattr(PytorchEngineConfig, name):
            del given[name]


def _registers_for(model_path: str) -> bool:
    """Whether the checkpoint is one whose config our builder reads better than LMDeploy's."""
    path = Path(model_path, 'config.json')
    if 'llada2' in model_path.lower() and not Path(model_path).exists():
        # A repository: only LLaDA2, which stock LMDeploy cannot run, is worth a look before stock's own download.
        from transformers.utils.hub import cached_file
        path = Path(cached_file(model_path, 'config.json', _raise_exceptions_for_gated_repo=False,
                                _raise_exceptions_for_missing_entries=False,
                                _raise_exceptions_for_connection_errors=False) or path)
    if not path.is_file():
        return False
    try:
        model_type = json.loads(path.read_text(encoding='utf-8')).get('model_type')
    except (ValueError, AttributeError):  # not ours to complain about
        return False
    return model_type in REGISTERED


def _adapt_stock(action: argparse.Action, option: Any) -> argparse.Action:
    if option.field == 'device_type':
        action.choices = [*(action.choices or ()), 'cpu']
        action.help = f'{action.help}; cpu means the PyTorch engine'
    elif option.optional:
        action.default = None  # tells 'not given' apart
        action.help = f'{str(action.help).rstrip(".")}. Default: {option.default}'
    return action


def _adapt_dtype(action: argparse.Action) -> None:
    action.choices = [*(action.choices or ()), 'float32']
    action.help = f'{str(action.help).rstrip(".")}; float32 with --device cpu only'


def _add_aliases(parser: argparse.ArgumentParser) -> None:
    from .config import OPTION
    hidden: dict[str, Any] = {'default': argparse.SUPPRESS, 'help': argparse.SUPPRESS}
    parser.add_argument(FOCUS_ALIAS, dest='focus', action='store_true', **hidden)
    parser.add_argument(CACHE_ALIAS, dest='dllm_enable_delayed_cache', action='store_true', **hidden)
    parser.add_argument(ALPHA_ALIAS, dest='focus_alpha', type=_parser_of(OPTION['focus_alpha']), **hidden)


def _parser_of(option: Any) -> Callable[[str], Any]:

    def parse(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _help(option: Any) -> str:
    return f'{option.help[0].upper()}{option.help[1:]}. Default: {option.default.partition(";")[0]}'


def _metavar(option: Any) -> str:
    choices = getattr(option.kind, '__args__', None)
    return '{' + ','.join(choices) + '}' if choices and isinstance(choices[0], str) else 'N'


def _guard(message: str) -> None:
    """Make LMDeploy's command fail with this message when it has our options, and else run as it is."""
    entrypoint = import_module('lmdeploy.cli.entrypoint')
    run = entrypoint.run

    def guarded() -> None:
        if _has_our_options(sys.argv[1:]):
            print(f'lmdeploy: error: {message}', file=sys.stderr)
            sys.exit(2)
        run()

    entrypoint.run = guarded  # type: ignore[attr-defined]


def _has_our_options(words: list[str]) -> bool:
    flags = [word.partition('=')[0].replace('_', '-') for word in words]
    devices = [word.partition('=')[2] or following for word, following, flag in
               zip(words, [*words, ''][1:], flags, strict=True) if flag == '--device']
    return 'cpu' in devices or any(flag.startswith(('--focus', '--dflash')) or
                                   flag in (FOCUS_ALIAS, CACHE_ALIAS, ALPHA_ALIAS) for flag in flags)
