"""SDAR (dense) with focus; layers, prefill and head are LMDeploy's."""
from lmdeploy.pytorch.models.sdar import SDARForCausalLM

from .checked_weights import CheckedWeights
from .decoder import SplitModel


class FocusSDARForCausalLM(CheckedWeights, SplitModel, SDARForCausalLM):
    """LMDeploy's model with a `decoder` for the decode step, and a checked checkpoint."""
