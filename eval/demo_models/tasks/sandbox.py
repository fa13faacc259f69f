"""Runs generated Python functions against their references, each in a process of its own that is then thrown away.

Started as ``python -I sandbox.py CASES.json VERDICTS.json`` in a fresh interpreter, so that nothing of the caller
(torch, a CUDA context, open files) is inherited by the processes that execute generated code. The code sees a short
list of built-in names, no import and no attribute that starts with an underscore, for one second and one GiB of memory.
"""
import ast
import builtins
import json
import multiprocessing
import re
import resource
import signal
import sys
from multiprocessing.connection import Connection

_ALLOWED = ('abs', 'all', 'any', 'bin', 'bool', 'dict', 'divmod', 'enumerate', 'filter', 'float', 'hash', 'int',
            'isinstance', 'len', 'list', 'map', 'max', 'min', 'pow', 'range', 'repr', 'reversed', 'round', 'set',
            'sorted', 'str', 'sum', 'tuple', 'zip', 'True', 'False', 'None', 'ValueError', 'IndexError', 'KeyError',
            'Exception')
_SECONDS = 1.0
_MEMORY = 1 << 30
_CODE_BLOCK = re.compile(r'```(?:python)?\n(.*?)(?:```|$)', re.DOTALL)


class _OutOfTimeError(BaseException):
    """Not an Exception, so that the code under test does not catch it by accident."""


def _allowed(code: str) -> bool:
    """Whether the code parses, imports nothing and touches no private attribute."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return not any(isinstance(node, (ast.Import, ast.ImportFrom))
                   or (isinstance(node, ast.Attribute) and node.attr.startswith('_')) for node in ast.walk(tree))


def _namespace() -> dict:
    return {'__builtins__': {name: getattr(builtins, name) for name in _ALLOWED}}


def _agrees(code: str, case: dict) -> bool:
    """Whether the generated function returns what the reference returns on every argument list."""
    written, reference = _namespace(), _namespace()
    exec(case['reference'], reference)
    exec(code, written)
    for arguments in case['tests']:
        # Both get their own copy: a function may change its arguments.
        text = json.dumps(arguments)
        if written[case['name']](*json.loads(text)) != reference[case['name']](*json.loads(text)):
            return False
    return True


def _out_of_time(*_: object) -> None:
    raise _OutOfTimeError


def _try(code: str, case: dict, verdict: Connection) -> None:
    """Body of a throw-away process; `verdict` is the sending end of a pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        agrees = bool(_agrees(code, case))
    except BaseException:       # whatever generated code raises, the time-out too, is a wrong answer
        agrees = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    verdict.send(agrees)


def run_case(text: str, case: dict) -> bool:
    """The verdict on one answer; no code block, forbidden code, an error or a time-out is wrong."""
    found = _CODE_BLOCK.search(text)
    if found is None or not _allowed(found.group(1)):
        return False
    context = multiprocessing.get_context('fork')
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(found.group(1), case, sender))
    process.start()
    sender.close()
    try:
        # A loop that swallows the alarm too is ended from outside.
        return receiver.recv() if receiver.poll(3 * _SECONDS) else False
    except EOFError:
        return False
    finally:
        process.kill()
        process.join()
        receiver.close()


def main(cases_path: str, verdicts_path: str) -> None:
    """Reads [[text, case], ...], writes [bool, ...]."""
    with open(cases_path) as file:
        cases = json.load(file)
    verdicts = [run_case(text, case) for text, case in cases]
    with open(verdicts_path, 'w') as file:
        json.dump(verdicts, file)


if __name__ == '__main__':
    main(*sys.argv[1:])
