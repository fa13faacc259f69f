"""Brings our options into the stock `lmdeploy` command.

The rows of group 'cli' go on when the command line is imported; those of 'boundary', which need the server's modules,
only when a command runs that wants them.
"""
import functools
from collections.abc import Callable
from typing import Any

from ._patch import Patch


def _add_parser(parsers_of: str, command: str) -> Callable[[Any], Any]:

    def make(original: Any) -> Any:

        @functools.wraps(original)
        def add_parser() -> None:
            from importlib import import_module

            from ..cli import add_arguments
            original()
            module, _, owner = parsers_of.partition(':')
            subparsers = getattr(import_module(module), owner).subparsers
            add_arguments(subparsers.choices[command], command)

        return add_parser

    return make


def _parse_args(original: Any) -> Any:

    @functools.wraps(original)
    def parse_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        from ..cli import finish_arguments
        parsed = original(self, args, namespace)
        finish_arguments(self, parsed)
        return parsed

    return parse_args


def _chat(original: Any) -> Any:

    @functools.wraps(original)
    def chat(args: Any) -> Any:
        from ..cli import run_command
        return run_command(original, args)

    return chat


def _api_server(original: Any) -> Any:

    @functools.wraps(original)
    def api_server(args: Any) -> Any:
        from ..cli import REQUEST, run_command
        request = getattr(args, REQUEST, None)
        if request is not None and request.cpu:
            args.device = 'cuda'  # the stock command builds a config that refuses 'cpu'; ours has the device
        return run_command(original, args)

    return api_server


def _server(original: Any) -> Any:

    @functools.wraps(original)
    def serve(model_path: str, *args: Any, **keywords: Any) -> Any:
        from ..cli import convert_config
        return original(model_path, *args, **convert_config(model_path, keywords))

    return serve


def _launch_server(original: Any) -> Any:

    @functools.wraps(original)
    def launch_server(num_nodes: int, node_rank: int, model_path: str, *args: Any, **keywords: Any) -> Any:
        from ..cli import convert_config
        return original(num_nodes, node_rank, model_path, *args, **convert_config(model_path, keywords))

    return launch_server


ROWS = (
    Patch(
        name='chat-options',
        target='lmdeploy.cli.cli:CLI.add_parser_chat',
        why='LMDeploy has no way to add an option from outside',
        how='adds our argument group to the parser that was just made',
        remove_when='LMDeploy finds command-line extensions by entry points',
        written_for={
            'lmdeploy.cli.cli:CLI.add_parser_chat':
                'sha256:29edbe11c334a6755cca167f2798727120df9c0ab2bb7ab5e69be7349a735721',
        },
        make=_add_parser('lmdeploy.cli.cli:CLI', 'chat'),
        group='cli',
    ),
    Patch(
        name='api-server-options',
        target='lmdeploy.cli.serve:SubCliServe.add_parser_api_server',
        why='LMDeploy has no way to add an option from outside',
        how='adds our argument group to the parser that was just made',
        remove_when='LMDeploy finds command-line extensions by entry points',
        written_for={
            'lmdeploy.cli.serve:SubCliServe.add_parser_api_server':
                'sha256:6a2231a7ec444e1dc6d20ec0494ed1c620c80eef30c33f37f31ab20db29666c1',
        },
        make=_add_parser('lmdeploy.cli.serve:SubCliServe', 'api_server'),
        group='cli',
    ),
    Patch(
        name='parsed-options',
        target='lmdeploy.cli.utils:FlexibleArgumentParser.parse_args',
        why='wrong options must be told before LMDeploy downloads the model',
        how='checks our options once all are parsed, for the commands that have them',
        remove_when='LMDeploy validates its engine config before it looks for the model',
        written_for={
            'lmdeploy.cli.utils:FlexibleArgumentParser.parse_args':
                'sha256:50ddd7dc270af8293ae759d42fc97f69aa2a9aa7c358fcd70750e4d08aad6155',
            'lmdeploy.cli.entrypoint:run':
                'sha256:5779bbfd1ca74233115632fab6fd112f3b2c6758e69bd804da29e4ed4ce0b387',
        },
        make=_parse_args,
        group='cli',
    ),
    Patch(
        name='chat-command',
        target='lmdeploy.cli.cli:CLI.chat',
        why='the command builds a stock engine config whatever was asked',
        how='takes our request out of the arguments and has the config converted where it leaves the command',
        remove_when='LMDeploy lets an extension name the engine config class',
        written_for={
            'lmdeploy.cli.cli:CLI.chat':
                'sha256:27305158e066d65c5dfbb672ee21c384da3ea00740bebb8621fa0fbd06e1b6a2',
        },
        make=_chat,
        group='cli',
    ),
    Patch(
        name='api-server-command',
        target='lmdeploy.cli.serve:SubCliServe.api_server',
        why='the command builds a stock engine config whatever was asked',
        how='takes our request out of the arguments and has the config converted where it leaves the command',
        remove_when='LMDeploy lets an extension name the engine config class',
        written_for={
            'lmdeploy.cli.serve:SubCliServe.api_server':
                'sha256:5e5a1a30562a820292783a812cc70e01ca63f4360f9b8202be2974148e0ce2bf',
        },
        make=_api_server,
        group='cli',
    ),
    Patch(
        name='chat-boundary',
        target='lmdeploy.cli.chat:pipeline',
        why='the command builds a stock engine config whatever was asked',
        how='converts the engine config when the running command wants it',
        remove_when='LMDeploy lets an extension name the engine config class',
        written_for={
            'lmdeploy.cli.chat:build_pipe':
                'sha256:aeebbbb539c6a5af11fe421a12713469725319e7a5a65dccec89758a5006cb5e',
            'lmdeploy.cli.chat:main':
                'sha256:17b786cbfb40cc938037e5bed841de1d271e3946d84bff8ec3c7030744229de3',
            'lmdeploy.api:pipeline':
                'sha256:36cd6d648402313201c34b35ac4469b74adf6e8229a336dc7c480779aedfe040',
        },
        make=_server,
        group='boundary',
    ),
    Patch(
        name='api-server-boundary',
        target='lmdeploy.serve.openai.api_server:serve',
        why='the command builds a stock engine config whatever was asked',
        how='converts the engine config when the running command wants it',
        remove_when='LMDeploy lets an extension name the engine config class',
        written_for={
            'lmdeploy.serve.openai.api_server:serve':
                'sha256:0974b493e2ea5c544a4e6245c5264c624c5937573d02fdc2fbc3acdeeb907511',
        },
        make=_server,
        group='boundary',
    ),
    Patch(
        name='data-parallel-boundary',
        target='lmdeploy.serve.openai.launch_server:launch_server',
        why='the command builds a stock engine config whatever was asked',
        how='converts the engine config when the running command wants it',
        remove_when='LMDeploy lets an extension name the engine config class',
        written_for={
            'lmdeploy.serve.openai.launch_server:launch_server':
                'sha256:7c7e19bd037d2bf268fe72f521795c8ffa96764892c2347ffef5d89e5937f96e',
        },
        make=_launch_server,
        group='boundary',
    ),
)
