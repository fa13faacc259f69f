"""Anchors, blocks, labels, weights and masks, by hand."""
import math

import pytest
import torch

from scripts.dflash_training.blocks import cut_blocks, decay, draw_anchors, gamma, visible

MASK = 99
IDS = torch.tensor([[10, 11, 12, 13, 14, 15, 0, 0], [20, 21, 22, 23, 24, 25, 26, 27]])
# Two prompt tokens and four of the answer; three and five.
ANSWER = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1]], dtype=torch.bool)


@pytest.mark.parametrize('block_size,expected', [(8, 4), (10, 5), (16, 7), (4, 2)])
def test_gamma(block_size, expected):
    """Red when the published values of gamma change."""
    assert gamma(block_size) == expected


def test_decay():
    """Red when the first drafted token weighs another thing than 1, or the base of the decay changes."""
    expected = [1.0, math.exp(-1 / 4), math.exp(-2 / 4), math.exp(-3 / 4)]
    assert decay(8)[:4].tolist() == pytest.approx(expected)
    assert len(decay(8)) == 7


def test_labels_and_what_counts():
    """Red when labels are shifted, the anchor's token is masked, positions begin at 0 in each block, or a slot behind
    the answer, behind the sequence or of a block that is not real counts."""
    anchors, real = torch.tensor([[2, 4], [5, 0]]), torch.tensor([[True, True], [True, False]])
    blocks = cut_blocks(IDS, ANSWER, anchors, real, 4, MASK)
    assert blocks.ids[0].tolist() == [[12, MASK, MASK, MASK], [14, MASK, MASK, MASK]]
    assert blocks.positions[0].tolist() == [[2, 3, 4, 5], [4, 5, 6, 7]]
    assert blocks.labels[0, 0].tolist() == [13, 14, 15] and blocks.labels[1, 0, :2].tolist() == [26, 27]
    assert blocks.counted.int().tolist() == [[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [0, 0, 0]]]


def test_anchors_lie_in_the_answer():
    """Red when an anchor is a prompt's token, the last of the answer or padding, when one occurs twice, or when a
    possible one is never drawn."""
    generator = torch.Generator().manual_seed(0)
    seen: list[set[int]] = [set(), set()]
    for _ in range(60):
        anchors, real = draw_anchors(ANSWER, 2, generator)
        assert real.all()
        for row, drawn in enumerate(anchors.tolist()):
            assert len(set(drawn)) == 2
            seen[row] |= set(drawn)
    assert seen == [{2, 3, 4}, {3, 4, 5, 6}]
    assert draw_anchors(ANSWER, 6, generator)[1].sum(1).tolist() == [3, 4]


def test_what_a_block_sees():
    """Red when a block sees the anchor's own feature or a later one, another block, or not all of itself."""
    mask = visible(torch.tensor([[2, 5]]), 8, 3)[0, 0]
    assert mask.shape == (6, 8 + 6)
    for row in range(6):
        block = row // 3
        assert mask[row, :8].tolist() == [position < (2, 5)[block] for position in range(8)]
        assert mask[row, 8:].tolist() == [other // 3 == block for other in range(6)]
