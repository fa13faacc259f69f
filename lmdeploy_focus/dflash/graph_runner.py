"""CUDA graphs of target and drafter: LMDeploy's, without its demand for FlashAttention-3."""
from dataclasses import replace
from typing import Any

import torch
from lmdeploy.pytorch.backends.cuda.graph_runner import CUDAGraphRunner
from lmdeploy.pytorch.backends.cuda.warmup_manager import WarmupMeta, get_warmup_manager
from lmdeploy.pytorch.config import BackendConfig, CacheConfig, ModelConfig
from torch import nn


class DFlashGraphRunner(CUDAGraphRunner):
    """LMDeploy's runner for a model whose attention is `DecodeRowsAttentionImpl`.

    The steps' shapes are those of speculative decoding, R rows a sequence; a graph holds one number of sequences.
    """

    def __init__(self, model: nn.Module, model_config: ModelConfig, *args: Any, **kwargs: Any) -> None:
        # LMDeploy refuses a speculative model here unless FlashAttention-3 is installed
        super().__init__(model, replace(model_config, model_paradigm='ar'), *args, **kwargs)
        self.model_config = model_config


def build_graph_runner(model: nn.Module, model_config: ModelConfig, cache_config: CacheConfig,
                       backend_config: BackendConfig, device: torch.device) -> DFlashGraphRunner:
    """What LMDeploy's CUDA backend builds, with our runner; its operators are warmed up first, as there."""
    get_warmup_manager().warmup(WarmupMeta(max_num_tokens=cache_config.max_prefill_token_num,
                                           max_batch_size=cache_config.max_batches,
                                           dtype=model_config.dtype,
                                           model_config=model_config))
    return DFlashGraphRunner(model, model_config, cache_config, backend_config, device)
