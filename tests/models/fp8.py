"""Block-scaled FP8 checkpoints, and plain-torch stand-ins of LMDeploy's FP8 operators, which it has for GPUs alone.

The stand-ins multiply by the dequantised weights and leave activations as they are: what they compute is right if, and
only if, every weight and every scale was loaded to its place.
"""
import torch
import torch.nn.functional as F
from lmdeploy.pytorch.backends.blockedf8_modules import LinearBlockedF8BuildSpec, LinearBlockedF8Impl
from lmdeploy.pytorch.backends.moe import FusedMoEBlockedF8BuildSpec, FusedMoEBlockedF8Impl

from lmdeploy_focus.cpu.backend import CpuOpsBackend
from lmdeploy_focus.cpu.experts import CpuFusedMoEImpl
from lmdeploy_focus.models.tensors import _NEVER_FP8, FP8_BLOCK

FP8 = torch.float8_e4m3fn
# the smallest sizes at which no block of scales lies across two heads or two experts
SIZES = {'hidden_size': 256, 'head_dim': 128, 'num_attention_heads': 2, 'num_key_value_heads': 2,
         'intermediate_size': 256, 'moe_intermediate_size': 128}
QUANTISATION = {'quant_method': 'fp8', 'fmt': 'e4m3', 'weight_block_size': [FP8_BLOCK, FP8_BLOCK],
                'activation_scheme': 'dynamic'}


def is_quantised(key, tensor):
    return tensor.dim() == 2 and not key.endswith(_NEVER_FP8)


def quantised(tensors):
    """The checkpoint with FP8 weights and their scales, and the same with the weights that those stand for."""
    made, meant = {}, {}
    for key, tensor in tensors.items():
        made[key] = meant[key] = tensor
        if not is_quantised(key, tensor):
            continue
        rows, columns = (-(-size // FP8_BLOCK) for size in tensor.shape)
        padded = torch.zeros(rows * FP8_BLOCK, columns * FP8_BLOCK)
        padded[:tensor.shape[0], :tensor.shape[1]] = tensor.float()
        blocks = padded.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
        # scales of a spread that no other block would do with
        scale = blocks.abs().amax((1, 3)) / 448 * (1 + torch.arange(rows * columns).view(rows, columns) % 5)
        narrow = (blocks / scale[:, None, :, None]).to(FP8)
        made[key] = narrow.view(padded.shape)[:tensor.shape[0], :tensor.shape[1]].contiguous()
        made[f'{key}_scale_inv'] = scale
        meant[key] = dequantised(made[key], scale)
    return made, meant


def dequantised(weight, scale):
    """[..., R, C] in FP8 and its scales -> float32."""
    wide = scale.repeat_interleave(FP8_BLOCK, -2).repeat_interleave(FP8_BLOCK, -1)
    return weight.float() * wide[..., :weight.shape[-2], :weight.shape[-1]]


class Linear(LinearBlockedF8Impl):

    def forward(self, x, weight, scale, bias=None, all_reduce=False, group=None, rank=0, scatter_size=None):
        return F.linear(x, dequantised(weight, scale).to(x.dtype), bias)


class Experts(FusedMoEBlockedF8Impl):

    def __init__(self, spec):
        super().__init__()
        self.plain = CpuFusedMoEImpl(spec)

    def forward(self, hidden_states, topk_weights, topk_ids, gate_up_weights, gate_up_scale, down_weights, down_scale,
                **kwargs):
        return self.plain.forward(hidden_states, topk_weights, topk_ids, dequantised(gate_up_weights, gate_up_scale),
                                  dequantised(down_weights, down_scale), **kwargs)


def install(monkeypatch):
    """Let a CPU engine build FP8 layers, within one test."""
    original = CpuOpsBackend.build_op.__func__

    def build_op(cls, spec, **kwargs):
        if isinstance(spec, LinearBlockedF8BuildSpec):
            return Linear()
        if isinstance(spec, FusedMoEBlockedF8BuildSpec):
            return Experts(spec)
        return original(cls, spec, **kwargs)

    monkeypatch.setattr(CpuOpsBackend, 'build_op', classmethod(build_op))
