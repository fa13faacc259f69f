"""How much memory a CPU engine's KV cache takes when `num_gpu_blocks` is 0.

The least of three amounts:

- a quarter of `cache_max_entry_count` of the memory that is available once the weights are loaded, so 1.6 GiB on a
  laptop with 8 GiB to spare and the option's default of 0.8;
- 4 GiB;
- room for 16 sequences of the model's greatest length, because the cache is zeroed and so really taken.
"""
import psutil

KV_SHARE = 0.25
KV_MAX_BYTES = 4 << 30
KV_FULL_SEQUENCES = 16
# The least that LMDeploy accepts.
MIN_KV_BLOCKS = 16


def available_bytes() -> int:
    """Memory that can be taken without swapping, in bytes."""
    return psutil.virtual_memory().available


def num_kv_blocks(block_nbytes: int, block_size: int, cache_max_entry_count: float, available: int,
                  max_length: int | None) -> int:
    """Number of KV blocks.

    Args:
        block_nbytes: Bytes of one block over all layers.
        block_size: Tokens a block.
        cache_max_entry_count: The engine option, in (0, 1).
        available: Available memory in bytes.
        max_length: Greatest length of a sequence in tokens, None if the model names none.

    Raises:
        ValueError: Fewer than 16 blocks fit.
    """
    budget = min(int(available * cache_max_entry_count * KV_SHARE), KV_MAX_BYTES)
    blocks = budget // block_nbytes
    if blocks < MIN_KV_BLOCKS:
        raise ValueError(f'num_gpu_blocks: the KV cache may take {budget >> 20} MiB, which is {blocks} blocks of '
                         f'{block_nbytes >> 10} KiB; at least {MIN_KV_BLOCKS} are needed. Free some memory '
                         f'({available >> 20} MiB are available), or set num_gpu_blocks')
    if max_length is not None:
        # One more block a sequence holds what the engine reserves ahead of a step.
        blocks_a_sequence = -(-max_length // block_size) + 1
        blocks = min(blocks, max(MIN_KV_BLOCKS, KV_FULL_SEQUENCES * blocks_a_sequence))
    return blocks
