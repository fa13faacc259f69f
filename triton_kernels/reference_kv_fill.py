"""Twin of `kv_fill` with rows that are written nowhere."""
from torch import Tensor

__all__ = ['kv_fill']


def kv_fill(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Write the keys and values of scattered rows into the paged cache, in place.

    Args:
        key, value: [N, Hkv, D].
        key_cache, value_cache: [B, G, Hkv, D].
        pages: [N] integer, page of each row; -1 for a row that is written nowhere.
        offsets: [N] integer, slot within the page. No two rows share a slot.
    """
    written = pages >= 0
    at = pages[written].long(), offsets[written].long()
    key_cache[at] = key[written].to(key_cache.dtype)
    value_cache[at] = value[written].to(value_cache.dtype)
