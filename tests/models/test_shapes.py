"""Random checkpoints of published shapes, which the throughput study writes: the published layout, and that both arms
of the study load them."""
import json

import pytest
import torch
from transformers import AutoConfig

from eval.study import shapes
from eval.study.drawing import Draw
from lmdeploy_focus import activation
from lmdeploy_focus.models.tensors import tensor_shapes

from .conftest import model_of

PARAMETERS = {'sdar-8b': 8.2e9, 'sdar-1.7b': 1.72e9, 'sdar-30b-a3b': 30.5e9, 'llada2-mini': 16.3e9}


class Sizes(Draw):
    """Draws shapes alone."""

    def __init__(self):
        pass

    def normal(self, *sizes):
        return torch.empty(sizes, dtype=torch.bfloat16, device='meta')

    def ones(self, count):
        return self.normal(count)

    def zeros(self, count):
        return self.normal(count)


@pytest.mark.parametrize('name', shapes.SHAPES)
def test_the_published_layout(name):
    """Red when a tensor of a shape has another name or size than the model's checkpoint, or is missing, or when a
    published shape has other sizes."""
    activation.register()
    values = shapes.SHAPES[name].config(32)
    written = [(key, tuple(value.shape)) for key, value in shapes.SHAPES[name].tensors(Sizes())]
    assert len(written) == len(dict(written))
    assert dict(written) == tensor_shapes(AutoConfig.for_model(**values))
    if name in PARAMETERS:
        assert sum(torch.Size(size).numel() for _, size in written) == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.parametrize('name', ['tiny-sdar-moe', 'tiny-llada2'])
@pytest.mark.parametrize('length', [4, 32])
def test_both_arms_load_what_is_written(name, length, engine, decode, tmp_path, monkeypatch):
    """Red when the files do not fit together, a weight does not come back as drawn, or an arm refuses the checkpoint.

    Several files are written, and what is cut out of one large tensor lies in them as its own.
    """
    monkeypatch.setattr(shapes, 'FILE_BYTES', 1 << 17)
    shapes.write(name, tmp_path, length, 'cpu')
    folder = shapes.place(name, tmp_path, length)
    assert len(list(folder.glob('*.safetensors'))) > 3
    drawn = dict(shapes.SHAPES[name].tensors(Draw('cpu')))
    size = json.loads((folder / 'config.json').read_text())['moe_intermediate_size']
    for options in ({'focus': False}, {'focus_policy': 'always'}):
        pipe = engine(folder, **options)
        assert pipe.async_engine.engine.executor.model_config.dllm_block_length == length
        assert pipe.async_engine.engine.executor.model_config.dllm_mask_token == 32700
        experts = model_of(pipe).model.layers[1].mlp.experts
        for part, rows in (('gate', slice(0, size)), ('up', slice(size, None))):
            wanted = drawn[f'model.layers.1.mlp.experts.3.{part}_proj.weight'].float()
            torch.testing.assert_close(experts.gate_up.weight[3, rows], wanted, rtol=0, atol=0)
        tokens, = decode(pipe, ['The'], max_new_tokens=6, ignore_eos=True)
        assert len(tokens) == 6
