"""What a patch is, and how patches are put on and taken off.

A patch replaces one attribute of stock LMDeploy. Its row names every upstream source that it was written for, by hash:
when one of them has moved, nothing is replaced and the error says which.
"""
import hashlib
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

PIN = '>=0.18,<0.19'
UNPINNED = 'LMDEPLOY_FOCUS_UNPINNED'
GROUPS = ('cli', 'boundary', 'engine', 'cpu')


class PatchError(RuntimeError):
    """The installed LMDeploy is not one that this package was written for; the message is one line."""


@dataclass(frozen=True)
class Patch:
    """One row of the register.

    name: what the row is called in messages
    target: 'package.module:attribute.path' that is replaced
    why: the need that no subclass and no registry of LMDeploy can meet
    how: what the replacement does beyond calling the original
    remove_when: the change upstream that makes the row needless
    written_for: 'package.module:qualname' -> 'sha256:<hex>' for every upstream source that the row relies on
    make: original -> replacement; of a static or class method both are the plain function
    group: 'cli' (parsing), 'boundary' (where the command line calls the engine), 'engine' or 'cpu'
    """
    name: str
    target: str
    why: str
    how: str
    remove_when: str
    written_for: Mapping[str, str]
    make: Callable[[Any], Any]
    group: str


@dataclass(frozen=True)
class _Applied:
    owner: Any
    attribute: str
    original: Any


_APPLIED: dict[str, _Applied] = {}
_LOCK = threading.RLock()


def apply(rows: Iterable[Patch]) -> None:
    """Put the rows on; those that are on already stay as they are.

    All rows are checked before the first attribute is replaced.

    Raises:
        PatchError: a target is gone, or a source differs from the one a row was written for
            (`LMDEPLOY_FOCUS_UNPINNED=1` makes the latter a warning).
    """
    with _LOCK:
        pending = [row for row in rows if row.target not in _APPLIED]
        for row in pending:
            _locate(row, row.target)
            for source, expected in row.written_for.items():
                _check_source(row, source, expected)
        for row in pending:
            if row.target not in _APPLIED:  # the import of a target may have put the rows on: the start-up hook does
                _replace(row)


def undo(rows: Iterable[Patch]) -> None:
    """Take the rows off again, for tests; those that are not on are passed over."""
    with _LOCK:
        for row in rows:
            applied = _APPLIED.pop(row.target, None)
            if applied is not None:
                setattr(applied.owner, applied.attribute, applied.original)


def applied(row: Patch) -> bool:
    """Whether the row is on."""
    return row.target in _APPLIED


def source_hash(source: str) -> str:
    """'sha256:<hex>' of the source text of 'package.module:qualname', of the original where it is patched.

    Raises:
        AttributeError, ImportError, OSError, TypeError: there is no such thing, or it has no source.
    """
    text = inspect.getsource(_upstream(source))
    return f'sha256:{hashlib.sha256(text.encode()).hexdigest()}'


def check_version() -> None:
    """Gate on the version of the installed LMDeploy.

    Raises:
        PatchError: it is outside the pin (`LMDEPLOY_FOCUS_UNPINNED=1` makes this a warning).
    """
    from packaging.specifiers import SpecifierSet
    version = _lmdeploy_version()
    if not SpecifierSet(PIN).contains(version, prereleases=True):
        _complain(f'lmdeploy-focus needs lmdeploy{PIN}, but lmdeploy {version} is installed')


def _check_source(row: Patch, source: str, expected: str) -> None:
    try:
        found = source_hash(source)
    except (AttributeError, ImportError, OSError, TypeError) as error:
        raise _moved(row, source, str(error)) from error
    if found != expected:
        _complain(str(_moved(row, source, f'its source is {found[:15]} and was {expected[:15]}')))


def _complain(message: str) -> None:
    if os.environ.get(UNPINNED) != '1':
        raise PatchError(message)
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _moved(row: Patch, source: str, what: str) -> PatchError:
    return PatchError(f'lmdeploy-focus: patch {row.name!r} of {row.target} does not fit lmdeploy '
                      f'{_lmdeploy_version()}: {source} has moved ({what}); it was written for lmdeploy{PIN}')


def _replace(row: Patch) -> None:
    owner, attribute = _locate(row, row.target)
    original = vars(owner)[attribute]
    if isinstance(original, (staticmethod, classmethod)):
        replacement = type(original)(row.make(original.__func__))
    else:
        replacement = row.make(original)
    setattr(owner, attribute, replacement)
    _APPLIED[row.target] = _Applied(owner, attribute, original)


def _locate(row: Patch, target: str) -> tuple[Any, str]:
    """Owner and name of the attribute that is replaced; it must be the owner's own, not an inherited one."""
    module, _, path = target.partition(':')
    *parents, attribute = path.split('.')
    try:
        owner: Any = import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
    except (AttributeError, ImportError) as error:
        raise _moved(row, target, str(error)) from error
    if attribute not in vars(owner):
        raise _moved(row, target, f'no {attribute!r} there')
    return owner, attribute


def _upstream(source: str) -> Any:
    """The object that LMDeploy itself put at 'package.module:qualname', whatever is patched by now."""
    module, _, path = source.partition(':')
    found: Any = import_module(module)
    walked = []
    for name in path.split('.'):
        walked.append(name)
        patched = _APPLIED.get(f'{module}:{".".join(walked)}')
        found = getattr(found, name) if patched is None else patched.original
        found = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
    return found


def _lmdeploy_version() -> str:
    return import_module('lmdeploy.version').__version__
