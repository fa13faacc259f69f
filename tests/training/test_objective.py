"""The training forward: it is the serving one, and a block never sees what serving would not know."""
from dataclasses import replace

import pytest
import torch

from scripts.dflash_training.blocks import Blocks, cut_blocks, decay
from scripts.dflash_training.layout import new_draft
from scripts.dflash_training.objective import Objective, token_losses
from scripts.dflash_training.target import Target, pad


@pytest.fixture(scope='module')
def draft(target):
    torch.manual_seed(0)
    drafter = new_draft(target.plan).eval()
    for parameter in drafter.parameters():
        # Larger than at the start of a training, and norms that are not all ones.
        parameter.data += torch.randn_like(parameter) * 0.05
    return drafter


@pytest.fixture(scope='module')
def objective(target, draft):
    return Objective(target, draft, anchors=4, positions=600)


def cut(objective, ids, answer, anchors):
    plan = objective.target.plan
    real = torch.ones_like(anchors, dtype=torch.bool)
    return cut_blocks(ids, answer, anchors, real, plan.block_size, plan.mask_token)


@torch.no_grad()
def test_many_blocks_at_once_are_one_block_each(objective, target, draft, samples, demo):
    """Red when training sees another thing than serving: features of other layers, a rope that begins anew, a context
    with or beyond the anchor, company in the batch. Serving is the reference decoder's cache and block here, on its own
    target."""
    from eval.demo_models.checkpoint import load_decoder
    from eval.demo_models.reference_dflash import _Run
    ids, real, answer = objective.batch(samples[:2])
    anchors = torch.tensor([[len(sample.prompt), len(sample.prompt) + 5] for sample in samples[:2]])
    blocks = cut(objective, ids, answer, anchors)
    logits = target.logits(objective.hidden(target.features(ids, real), blocks, anchors))
    decoder = load_decoder(demo / 'ar')
    for row in range(2):
        for index, anchor in enumerate(anchors[row].tolist()):
            run = _Run(decoder, draft, [ids[row, :anchor].tolist()], 8)
            found: list[torch.Tensor] = []
            run.model.logits = lambda x, seen=found: seen.append(x) or target.logits(x)
            run.propose(blocks.ids[row, index][None], blocks.positions[row, index][None], anchor + 8)
            torch.testing.assert_close(logits[row, index], target.logits(found[0])[0], rtol=1e-3, atol=2e-3)


def test_a_block_never_sees_its_anchors_feature_or_later_ones(objective, target, samples):
    """Red when the context of a block includes the anchor: accuracy in training would be nearly 1, acceptance nearly
    0; or when it leaves out the token before the anchor."""
    ids, real, answer = objective.batch(samples[:1])
    anchor = len(samples[0].prompt) + 3
    blocks = cut(objective, ids, answer, torch.tensor([[anchor]]))
    features = [feature.clone().requires_grad_() for feature in target.features(ids, real)]
    objective.hidden(features, blocks, torch.tensor([[anchor]])).square().sum().backward()
    for feature in features:
        moved = feature.grad[0].abs().sum(-1) > 0
        assert moved[:anchor].all() and not moved[anchor:].any()


@torch.no_grad()
def test_a_block_never_sees_another(objective, target, samples):
    """Red when blocks of one sequence see each other's tokens."""
    ids, real, answer = objective.batch(samples[:1])
    first = len(samples[0].prompt)
    anchors = torch.tensor([[first, first + 4]])
    blocks = cut(objective, ids, answer, anchors)
    features = target.features(ids, real)
    before = objective.hidden(features, blocks, anchors)
    changed = blocks.ids.clone()
    changed[0, 1, 0] = 77
    after = objective.hidden(features, replace(blocks, ids=changed), anchors)
    assert torch.equal(before[0, 0], after[0, 0]) and not torch.equal(before[0, 1], after[0, 1])


def test_features_are_the_chosen_layers_outputs(target, samples):
    """Red when hidden states are off by one: entry 0 is the embedding."""
    ids, real = pad([samples[0].prompt], 0, 'cpu')
    outputs = {}
    hooks = [layer.register_forward_hook(lambda module, inputs, output, index=index: outputs.update({index: output}))
             for index, layer in enumerate(target.model.model.layers)]
    features = target.features(ids, real)
    for hook in hooks:
        hook.remove()
    for layer, feature in zip(target.plan.target_layers, features, strict=True):
        output = outputs[layer][0] if isinstance(outputs[layer], tuple) else outputs[layer]
        assert torch.equal(feature, output)


def test_padding_changes_nothing(target, samples):
    """Red when a shorter sequence's features depend on its company."""
    two = target.features(*pad([samples[0].prompt, samples[2].prompt], 0, 'cpu'))
    for row, sample in enumerate((samples[0], samples[2])):
        alone = target.features(*pad([sample.prompt], 0, 'cpu'))
        for batched, single in zip(two, alone, strict=True):
            torch.testing.assert_close(batched[row, :len(sample.prompt)], single[0], rtol=1e-4, atol=1e-3)


def test_the_loss_is_the_weighted_mean(objective, target, samples, monkeypatch):
    """Red when another weight than exp(-(k - 1) / gamma) is used, or the mean is over another thing than the weights.
    Every slot has the loss of its label under logits that are the token ids."""
    from scripts.dflash_training import objective as module
    monkeypatch.setattr(module, 'token_losses', lambda target, hidden, labels: (labels.float(), labels < 0))
    kept: list[Blocks] = []
    monkeypatch.setattr(module, 'cut_blocks', lambda *args: kept.append(cut_blocks(*args)) or kept[0])
    outcome = objective(samples[:2], torch.Generator().manual_seed(1))
    weights = kept[0].counted * decay(8)
    assert outcome.loss.item() == pytest.approx(((kept[0].labels * weights).sum() / weights.sum()).item(), rel=1e-5)
    assert outcome.counted.tolist() == kept[0].counted.sum((0, 1)).tolist()


def test_pieces_of_the_head_are_the_whole(target):
    """Red when a large batch's loss or gradient depends on how it is cut."""
    hidden, labels = torch.randn(10, 256), torch.randint(4096, (10, ))
    results = []
    for most in (1 << 28, 3 * 4096):
        rows = hidden.clone().requires_grad_()
        losses, right = token_losses(target, rows, labels, most)
        losses.sum().backward()
        results.append((losses, right, rows.grad))
    for whole, pieces in zip(*results, strict=True):
        torch.testing.assert_close(whole, pieces)


def test_the_target_is_frozen(objective, target, samples):
    """Red when the target's embedding or head learns, or a parameter of the drafter does not."""
    objective(samples[:2]).loss.backward()
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in target.model.parameters())
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0
               for parameter in objective.draft.parameters())
    assert isinstance(target, Target)
