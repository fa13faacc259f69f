"""Print the hash of every LMDeploy source that the register of patches names, and which of them differ.

Run it after LMDeploy was updated: read the sources that differ, adapt the rows, then take over the new hashes.
The exit status is 1 when a hash differs or a source is gone.
"""
import sys

from lmdeploy_focus.patches import REGISTER, source_hash


def main() -> int:
    """Print one line a source: a mark, the source and its hash; '!' marks one that differs from the register."""
    differing = 0
    for row in REGISTER:
        print(f'{row.name} ({row.group}): {row.target}')
        for source, expected in row.written_for.items():
            try:
                found = source_hash(source)
            except (AttributeError, ImportError, OSError, TypeError) as error:
                found = f'gone: {error}'
            differing += found != expected
            print(f"  {' ' if found == expected else '!'} '{source}': '{found}',")
    print(f'{differing} differ' if differing else 'all as written for')
    return 1 if differing else 0


if __name__ == '__main__':
    sys.exit(main())
