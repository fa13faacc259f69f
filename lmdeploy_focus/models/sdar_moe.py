"""SDAR-MoE with focus; layers, experts, prefill and head are LMDeploy's."""
from typing import Any

from lmdeploy.pytorch.models.sdar_moe import SDARMoeForCausalLM

from .checked_weights import CheckedWeights
from .configs import SDAR_MOE_ROUTER_FIELDS, check_router_fields
from .decoder import SplitModel


class FocusSDARMoeForCausalLM(CheckedWeights, SplitModel, SDARMoeForCausalLM):
    """LMDeploy's model with a `decoder` for the decode step, and a checked checkpoint.

    Raises:
        ValueError: the config has a router field that the model does not know.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        check_router_fields(config.to_dict(), SDAR_MOE_ROUTER_FIELDS)
        super().__init__(config, *args, **kwargs)
