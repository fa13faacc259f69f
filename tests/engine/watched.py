"""What every process of an engine decides, step by step, in files: the config that LMDeploy hands to its workers
carries the watch along, as it does the extension."""
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lmdeploy_focus.config import FocusParams


@dataclass(frozen=True)
class WatchedParams(FocusParams):
    """The engine's options; whoever unpickles them writes its steps to a file of `folder` from then on."""
    folder: str = ''

    @classmethod
    def of(cls, params: FocusParams, folder: Path) -> 'WatchedParams':
        """`params`, watched."""
        return cls(**{f.name: getattr(params, f.name) for f in fields(FocusParams)}, folder=str(folder))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        watch(Path(self.folder))


def watch(folder: Path) -> None:
    """Write each step of this process: the number of sequences that came so far, their states, how much more attention
    each masked token receives, and the rows that are kept. For steps that launch their kernels one by one."""
    import os

    from lmdeploy_focus.stages import select
    from lmdeploy_focus.stages.state import FocusState
    if getattr(select, 'watched', False):
        return
    select.watched = True
    plan, append, came = select.plan, FocusState.append, [0]

    def watched_append(self: FocusState, rows: Any) -> None:
        came[0] += rows.size(0)
        append(self, rows)

    def watched_plan(model: Any, view: Any, options: Any, *rest: Any) -> None:
        plan(model, view, options, *rest)
        first, second = (partial.cpu() for partial in view.partials)
        step = {'came': came[0], 'table': view.table.cpu().clone(), 'delta': second.sum(1) - first.sum(1),
                'entered': view.entered.current.cpu(), 'kept': view.plan.current.cpu(),
                'pending': view.plan.pending.cpu()}
        with open(folder / f'{os.getpid()}.pickle', 'ab') as file:
            pickle.dump(step, file)

    select.plan, FocusState.append = watched_plan, watched_append


def steps_of(folder: Path) -> list[list[dict[str, Any]]]:
    """The steps of each process that wrote to `folder`."""

    def read(path: Path) -> Iterator[dict[str, Any]]:
        with open(path, 'rb') as file:
            while True:
                try:
                    yield pickle.load(file)
                except EOFError:
                    return

    return [list(read(path)) for path in sorted(folder.glob('*.pickle'))]
