"""The register of patches: every seam of stock LMDeploy that subclassing and registration cannot reach.

Installed as `lmdeploy_focus.patches`. One module for each part of LMDeploy, one row for each replaced attribute.
"""
from . import cli, cpu, dflash, dflash_acceptance, dflash_cuda, engine, misc_config, model_agent, models, strategies
from ._patch import PIN, Patch, PatchError, applied, apply, check_version, source_hash, undo

REGISTER: tuple[Patch, ...] = (*cli.ROWS, *misc_config.ROWS, *strategies.ROWS, *model_agent.ROWS, *engine.ROWS,
                               *models.ROWS, *dflash.ROWS, *dflash_acceptance.ROWS, *dflash_cuda.ROWS, *cpu.ROWS)

__all__ = ['PIN', 'REGISTER', 'Patch', 'PatchError', 'applied', 'apply', 'check_version', 'rows', 'source_hash', 'undo']


def rows(group: str) -> tuple[Patch, ...]:
    """The rows of one group: 'cli', 'boundary', 'engine' or 'cpu'."""
    return tuple(row for row in REGISTER if row.group == group)
