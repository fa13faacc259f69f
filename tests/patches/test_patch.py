"""The machinery of the register, on a small module that stands for LMDeploy."""
import importlib
import inspect
import sys
from dataclasses import replace

import pytest
from lmdeploy_focus.patches import Patch, PatchError, applied, apply, check_version, source_hash, undo

UPSTREAM = """
class Base:
    def inherited(self):
        return 'inherited'


class Thing(Base):
    def method(self, x):
        return ('method', x)

    @staticmethod
    def static(x):
        return ('static', x)

    @classmethod
    def made(cls, x):
        return (cls.__name__, x)


def function(x):
    return ('function', x)
"""


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    (tmp_path / 'upstream_for_patches.py').write_text(UPSTREAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    sys.modules.pop('upstream_for_patches', None)
    yield importlib.import_module('upstream_for_patches')
    del sys.modules['upstream_for_patches']


def row(path, make=None, **changes):
    target = f'upstream_for_patches:{path}'
    written_for = changes.pop('written_for', None)
    if written_for is None:
        written_for = {target: source_hash(target)}
    return Patch(name=f'row of {path}', target=target, why='w', how='h', remove_when='r', written_for=written_for,
                 make=make or wrap, group='engine', **changes)


def wrap(original):

    def replacement(*args):
        return ('patched', original(*args))

    return replacement


@pytest.fixture
def put_on():
    rows = []

    def put(*new):
        rows.extend(new)
        apply(new)

    yield put
    undo(rows)


def test_every_kind_of_attribute_is_replaced_and_keeps_its_kind(upstream, put_on):
    """Red when a static or class method is wrapped as a plain function, so that it would be bound differently."""
    put_on(row('function'), row('Thing.method'), row('Thing.static'), row('Thing.made'))
    thing = upstream.Thing()
    assert upstream.function(1) == ('patched', ('function', 1))
    assert thing.method(1) == ('patched', ('method', 1))
    assert upstream.Thing.static(1) == thing.static(1) == ('patched', ('static', 1))
    assert upstream.Thing.made(1) == thing.made(1) == ('patched', ('Thing', 1))
    assert isinstance(inspect.getattr_static(upstream.Thing, 'static'), staticmethod)
    assert isinstance(inspect.getattr_static(upstream.Thing, 'made'), classmethod)


def test_applying_again_changes_nothing(upstream, put_on):
    """Red when a second activation wraps the wrapper."""
    function = row('function')
    put_on(function)
    once = upstream.function
    put_on(function, replace(function))
    assert upstream.function is once


def test_rows_that_an_import_puts_on_are_not_put_on_twice(tmp_path, monkeypatch):
    """Red when `lmdeploy-focus`, whose own install runs the start-up hook's on the way, wraps everything twice."""
    (tmp_path / 'hooked_for_patches.py').write_text(UPSTREAM + '\nimport builtins\nbuiltins.hook_for_patches()\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    hooked = Patch('hooked', 'hooked_for_patches:function', 'w', 'h', 'r', {}, wrap, 'cli')
    monkeypatch.setattr('builtins.hook_for_patches', lambda: apply([hooked]), raising=False)
    apply([hooked])
    module = sys.modules['hooked_for_patches']
    assert module.function(1) == ('patched', ('function', 1))
    undo([hooked])
    assert module.function(1) == ('function', 1)
    del sys.modules['hooked_for_patches']


def test_undo_gives_the_very_objects_back(upstream):
    """Red when undo leaves a wrapper, a bound method or a mark behind."""
    before = {name: inspect.getattr_static(upstream.Thing, name) for name in ('method', 'static', 'made')}
    rows = [row('function'), *(row(f'Thing.{name}') for name in before)]
    function = upstream.function
    apply(rows)
    assert all(applied(one) for one in rows)
    undo(rows)
    undo(rows)
    assert upstream.function is function
    assert {name: inspect.getattr_static(upstream.Thing, name) for name in before} == before
    assert not any(applied(one) for one in rows)


def test_a_changed_source_stops_all_rows(upstream):
    """Red when rows are replaced one by one as they are checked, or when a hash is not compared."""
    stale = row('Thing.method', written_for={'upstream_for_patches:Thing': 'sha256:' + 64 * '0'})
    function = upstream.function
    with pytest.raises(PatchError) as caught:
        apply([row('function'), stale])
    message = str(caught.value)
    assert '\n' not in message
    for part in ('row of Thing.method', 'upstream_for_patches:Thing.method', 'upstream_for_patches:Thing has moved',
                 'lmdeploy>=0.18,<0.19'):
        assert part in message
    assert upstream.function is function


@pytest.mark.parametrize('path', ['gone', 'Gone.method', 'Thing.gone', 'Thing.inherited'])
def test_a_moved_target_is_told(upstream, path):
    """Red when a missing target is skipped, or when an inherited attribute is shadowed instead of replaced."""
    with pytest.raises(PatchError, match=f'upstream_for_patches:{path} has moved'):
        apply([row(path, written_for={})])


@pytest.mark.parametrize('source', ['upstream_for_patches:gone', 'no_such_module_at_all:f', 'sys:maxsize'])
def test_a_source_that_is_gone_is_told(upstream, source):
    """Red when only the target's existence is checked."""
    with pytest.raises(PatchError, match=f'{source} has moved'):
        apply([row('function', written_for={source: 'sha256:0'})])


def test_unpinned_makes_a_changed_source_a_warning(upstream, put_on, monkeypatch):
    """Red when LMDEPLOY_FOCUS_UNPINNED is not read, or when it hides the warning."""
    monkeypatch.setenv('LMDEPLOY_FOCUS_UNPINNED', '1')
    with pytest.warns(RuntimeWarning, match='upstream_for_patches:function has moved'):
        put_on(row('function', written_for={'upstream_for_patches:function': 'sha256:0'}))
    assert upstream.function(1) == ('patched', ('function', 1))
    with pytest.raises(PatchError):
        apply([row('gone', written_for={})])


def test_the_hash_is_upstreams_even_when_patched(upstream, put_on):
    """Red when a second group's check reads the source of our own replacement."""
    paths = ['upstream_for_patches:function', 'upstream_for_patches:Thing.method', 'upstream_for_patches:Thing.static']
    before = [source_hash(path) for path in paths]
    put_on(row('function'), row('Thing.method'), row('Thing.static'))
    assert [source_hash(path) for path in paths] == before


@pytest.mark.parametrize('version, inside', [('0.18.0', True), ('0.18.7', True), ('0.18.1.dev3', True),
                                             ('0.18.0+cu128', True), ('0.17.9', False), ('0.19.0', False),
                                             ('0.19.0rc1', False), ('1.0', False)])
def test_the_pin(monkeypatch, version, inside):
    """Red when the pin is not enforced, or when the message does not name both versions."""
    monkeypatch.setattr('lmdeploy.version.__version__', version)
    if inside:
        check_version()
        return
    with pytest.raises(PatchError, match=f'needs lmdeploy>=0.18,<0.19, but lmdeploy {version} is installed'):
        check_version()
    monkeypatch.setenv('LMDEPLOY_FOCUS_UNPINNED', '1')
    with pytest.warns(RuntimeWarning, match=version):
        check_version()
