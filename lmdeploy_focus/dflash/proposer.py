"""Drafts a block of tokens for each sequence."""
from typing import Any

from lmdeploy.pytorch.model_inputs import ModelInputs
from lmdeploy.pytorch.spec_decode.proposers.base import ProposalContext
from lmdeploy.pytorch.spec_decode.proposers.dflash import DFlash

from .strategy import DFlashExtraInputs


class DFlashProposer(DFlash):
    """LMDeploy's proposer: one pass of the drafter over [last token, mask, ...], the best token at each mask.

    Grammars do not stop it: a drafted token that a grammar forbids is never sampled, so it is rejected.
    """

    async def propose(self, model_inputs: ModelInputs, extra_inputs: DFlashExtraInputs, sampling_inputs: Any,
                      proposal_ctx: ProposalContext | None = None) -> DFlashExtraInputs:
        """Take the step's target features over into the drafter's cache and draft the next block.

        Args:
            model_inputs: the target's inputs of the step, S sequences.
            extra_inputs: features, and what was accepted.
            sampling_inputs: not needed; the draft is greedy.
            proposal_ctx: has the drafter's cache.

        Returns:
            `extra_inputs` with the drafted tokens, int64 [S, k], and without what the step is done with; zeros where a
            prompt goes on in a further chunk.
        """
        del sampling_inputs
        assert proposal_ctx is not None
        cache_engine = proposal_ctx.cache_engine
        if model_inputs.is_chunk and not model_inputs.is_last_chunk:
            self.materialize_context(model_inputs, extra_inputs, cache_engine)
            drafted = model_inputs.input_ids.new_zeros(model_inputs.seq_length.size(0), self.num_speculative_tokens)
        else:
            drafted = await self.propose_block(model_inputs, extra_inputs, cache_engine)
        return extra_inputs.clone(output_draft_token_ids=drafted, target_hidden_states=None, target_position_ids=None,
                                  target_inputs_embeds=None, target_logits=None, last_token_indices=None)
