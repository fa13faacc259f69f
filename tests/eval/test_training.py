"""The parts of training that can be wrong without anybody noticing."""
import numpy as np
import pytest
import torch

from eval.demo_models.network import Decoder, Shape, rope_table
from eval.demo_models.tokenizer import END_OF_TEXT, IM_START, MASK
from eval.demo_models.training.loop import learning_rate_factor
from eval.demo_models.training.optimizer import orthogonalise
from eval.demo_models.training.packing import ALIGNMENT, ASSISTANT, make_shard
from eval.demo_models.training.rows import Rows, unpack
from eval.demo_models.training.sdar import add_noise, dense_mask


@pytest.fixture(scope='module')
def shard(tokenizer):
    return make_shard(tokenizer, 3, 6, 512)


def test_documents_start_on_a_block(shard, tokenizer):
    """Red when a document starts within a block, so that training and decoding see different blocks."""
    ids, assistant = unpack(torch.from_numpy(shard.view('int16')))
    starts = 0
    for row in ids.tolist():
        text = tokenizer.decode(row, skip_special_tokens=False)
        assert text.startswith('<|im_start|>user\n')
        users = [index for index in range(len(row) - 1) if row[index] == IM_START and row[index + 1] == row[1]]
        assert all(index % ALIGNMENT == 0 for index in users)
        starts += len(users)
    assert starts > len(ids)
    assert (ids < 4096).all() and not (ids == MASK).any()
    assert assistant[ids == END_OF_TEXT].float().mean() > 0.3        # padding of documents, not of rows


def test_a_shard_is_a_function_of_its_seed(tokenizer, shard):
    """Red when packing depends on anything else; another seed gives other text."""
    assert np.array_equal(make_shard(tokenizer, 3, 6, 512), shard)
    assert not np.array_equal(make_shard(tokenizer, 4, 6, 512), shard)
    assert (shard & ASSISTANT).any(1).all()


def test_rows_are_used_once_and_then_in_passes():
    """Red when a fresh row is skipped, or a pass repeats one."""
    rows = Rows(4, 6, 'cpu')
    rows.add(np.arange(24, dtype=np.uint16).reshape(6, 4))
    rows.add(np.zeros((2, 4), np.uint16))
    assert rows.count == 6
    assert [int(rows.batch(1)[0, 0]) for _ in range(6)] == [0, 4, 8, 12, 16, 20]
    assert sorted(rows.batch(6)[:, 0].tolist()) == [0, 4, 8, 12, 16, 20]
    assert sorted(torch.cat([rows.batch(3), rows.batch(3)])[:, 0].tolist()) == [0, 4, 8, 12, 16, 20]
    with pytest.raises(RuntimeError, match='6 rows'):
        rows.wait(7)


def test_only_answers_are_masked(shard):
    """Red when prompts are masked, or a block's rate is not its own."""
    torch.manual_seed(0)
    ids, assistant = unpack(torch.from_numpy(shard.view('int16')))
    lengths = torch.tensor([32, 32, 16, 8, 4, 4])
    noisy, masked, weight = add_noise(ids, assistant, lengths)
    assert not (masked & ~assistant).any()
    assert (noisy[masked] == MASK).all() and torch.equal(noisy[~masked], ids[~masked])
    assert (weight >= 1).all() and (weight <= 1 / 0.15 + 1e-4).all()
    assert 0.2 < masked[assistant].float().mean() < 0.8
    for row, length in enumerate(lengths.tolist()):
        per_block = weight[row].view(-1, length)
        assert (per_block == per_block[:, :1]).all() and per_block[:, 0].unique().numel() > 3


def test_a_masked_block_sees_itself_and_the_clean_past():
    """Red when a block sees its own clean text, the future, or another masked block."""
    tokens, length = 8, 4
    mask = dense_mask(torch.tensor([length]), tokens)[0, 0]
    noisy, clean = mask[:tokens], mask[tokens:]
    for query in range(tokens):
        block = query // length
        assert noisy[query, :tokens].tolist() == [key // length == block for key in range(tokens)]
        assert noisy[query, tokens:].tolist() == [key // length < block for key in range(tokens)]
        assert not clean[query, :tokens].any()
        assert clean[query, tokens:].tolist() == [key // length <= block for key in range(tokens)]


def test_training_sees_what_decoding_sees():
    """Red when the two-copy mask and block diffusion decoding disagree: a masked block in training gives the logits of
    the same block after its clean past."""
    torch.manual_seed(1)
    model = Decoder(Shape(layers=2)).eval()
    clean = torch.randint(4, 4096, (1, 16))
    noisy = torch.where(torch.rand(1, 16) < 0.5, MASK, clean)
    tables = rope_table(16, model.shape.head_size, model.shape.rope_theta, 'cpu')
    cos, sin = (torch.cat([table, table])[None] for table in tables)
    with torch.no_grad():
        both, _ = model.trunk(torch.cat([noisy, clean], 1), cos, sin, 'dense', dense_mask(torch.tensor([8]), 16),
                              torch.float32)
        mixed = torch.cat([clean[:, :8], noisy[:, 8:]], 1)
        block = torch.arange(16) // 8
        alone, _ = model.trunk(mixed, tables[0][None], tables[1][None], 'dense', (block[:, None] >= block)[None, None],
                               torch.float32)
    torch.testing.assert_close(both[0, 8:16], alone[0, 8:])


@pytest.mark.parametrize('shape', [(3, 16, 48), (2, 48, 16), (1, 32, 32)])
def test_updates_are_nearly_orthogonal(shape):
    """Red when a coefficient or the transposition is wrong: all singular values come near 1."""
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)).float())
    assert (values > 0.4).all() and (values < 1.4).all()


def test_the_learning_rate_is_a_trapezoid():
    """Red when it does not start small, stay, and end at zero."""
    factors = [learning_rate_factor(step / 200) for step in range(201)]
    assert factors[0] == 0.02 and max(factors) == 1.0 and factors[-1] == 0.0
    assert factors.index(1.0) / 200 == 0.02 and factors[70] == 1.0 and factors[71] < 1.0
