"""The bounds of every option, and the combinations that are refused, on the stock command line."""
import re

import pytest

CHAT = ('chat', )
SERVER = ('serve', 'api_server')
COMMANDS = pytest.mark.parametrize('command', [CHAT, SERVER], ids=['chat', 'api_server'])
# api_server asks torch.cuda for the batch size where it is not given
BATCH = ('--max-batch-size', '8')

BAD = [
    ('--focus-alpha', ['0.99', '0', '-1', 'nan', 'inf', '-inf', '1e999', 'lots', '', '1,5']),
    ('--dllm-focus-alpha', ['0.99', 'nan']),
    ('--dllm-confidence-threshold', ['0', '1.1', '-0.1', 'nan', 'inf', 'high']),
    ('--dllm-block-length', ['0', '2', '3', '65', '128', '-32', '31.5', 'long']),
    ('--dllm-denoising-steps', ['0', '-1', '33', '1.5', 'few']),
    ('--dllm-unmasking-strategy', ['best', '']),
    ('--focus-keep', ['0', '-1', '2.5', 'nan', 'all', '']),
    ('--focus-policy', ['Auto', 'sometimes', '']),
    ('--focus-selection', ['best', '']),
    ('--focus-cache', ['on', 'fast-dllm-v2', '']),
    ('--focus-kv-visible', ['all', '']),
    ('--focus-commit', ['none', '']),
    ('--device', ['tpu', 'CPU', '']),
    ('--tp', ['3', '4', '0']),
    ('--quant-policy', ['4', '8']),
]
SERVER_BAD = [
    ('--dp', ['2', '0']),
    ('--cache-block-seq-len', ['16', '24', '48', '0']),
    ('--kernel-block-size', ['16', '48']),
    ('--max-prefill-token-num', ['0', '100']),
    ('--role', ['Prefill', 'Decode']),
    ('--distributed-executor-backend', ['threads']),
]
GOOD = [
    ('--focus-alpha', ['1', '1.0', '1e3', '64']),
    ('--dllm-confidence-threshold', ['1', '1e-9', '0.8']),
    ('--dllm-block-length', ['4', '8', '16', '32', '64']),
    ('--dllm-denoising-steps', ['1', '32']),
    ('--dllm-unmasking-strategy', ['low_confidence_dynamic', 'low_confidence_static', 'sequential']),
    ('--focus-keep', ['1', '64', '1000000000000000000000']),
    ('--focus-policy', ['auto', 'always', 'never']),
    ('--focus-selection', ['top', 'random', 'bottom']),
    ('--focus-cache', ['delayed-neighbour', 'delayed', 'off']),
    ('--focus-kv-visible', ['progress', 'reference']),
    ('--focus-commit', ['uncached', 'full']),
    ('--device', ['cuda', 'cpu']),
    ('--tp', ['1', '2']),
    ('--quant-policy', ['0']),
]


@COMMANDS
@pytest.mark.parametrize('flag, value', [(flag, value) for flag, values in GOOD for value in values])
def test_values_inside_the_bounds(command_line, command, flag, value, demo):
    """Red when a bound is too narrow on the command line."""
    assert command_line.run(*command, demo / 'sdar', '--focus', f'{flag}={value}', *BATCH).config.focus


@pytest.mark.parametrize('command, flag, value',
                         [(command, flag, value) for command in (CHAT, SERVER)
                          for flag, values in BAD + (SERVER_BAD if command == SERVER else []) for value in values])
def test_values_outside_the_bounds(command_line, command, flag, value, demo):
    """Red when one of these is not refused with status 2 and the option's name before the model is started."""
    message = command_line.refused(*command, demo / 'sdar', '--focus', f'{flag}={value}', *BATCH)
    assert re.match(r'lmdeploy( chat| serve api_server)?: error: ', message)
    assert flag in message


@pytest.mark.parametrize('words', [
    ('--enable-prefix-caching', ), ('--adapters', 'a=b'), ('--speculative-algorithm', 'dflash'),
    ('--quant-policy', 'int8'),
])
@COMMANDS
def test_combinations_that_are_refused(command_line, command, words, demo):
    """Red when a stock option that does not go with --focus is accepted, or refused without its name."""
    assert words[0] in command_line.refused(*command, demo / 'sdar', '--focus', *words, *BATCH)


@pytest.mark.parametrize('words', [
    ('--enable-microbatch', ), ('--enable-eplb', ), ('--ep', '2'), ('--logprobs-mode', 'raw_logits'),
    ('--enable-return-routed-experts', ), ('--role', 'Prefill'),
    ('--kv-transfer-config', '{"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}'),
])
def test_combinations_that_the_server_refuses(command_line, words, demo):
    """Red when a stock option of the server that does not go with --focus is accepted, or refused without its name."""
    assert words[0] in command_line.refused(*SERVER, demo / 'sdar', '--focus', *words, *BATCH)


@pytest.mark.parametrize('words', [('--tp', '2'), ('--dp', '2'), ('--quant-policy', '8'),
                                   ('--distributed-executor-backend', 'ray')])
def test_combinations_that_a_cpu_refuses(command_line, words, demo):
    """Red when --device cpu starts what only a GPU can do."""
    assert words[0] in command_line.refused(*SERVER, demo / 'ar', '--device', 'cpu', *words)
