"""A step's report on its way to the host: one tensor, one copy."""
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from lmdeploy.pytorch.engine.model_agent.agent import BatchedOutputs
from lmdeploy.pytorch.strategies.dllm.model_agent import DLLMExtraOutputs
from torch import Tensor

from ..kernels.layout import report_columns
from ..stages.state import unpack_bits
from ..stages.view import MASKED, UNMASKED


@dataclass
class FocusExtraOutputs(DLLMExtraOutputs):
    """What the host is told beside tokens and stops; all None in prefill.

    Attributes:
        prefix_rows, suffix_rows: [S] int64, rows of each sequence before and after eviction; 0 where it did not run.
        decoded: [S] int64, tokens that the step decoded.
        evicting: [S] bool, sequences that lost rows.
        ran: [S] bool; the others have stopped or had to wait.
        dense: [S] bool, whether the policy let every row stay.
    """
    prefix_rows: Tensor | None = None
    suffix_rows: Tensor | None = None
    decoded: Tensor | None = None
    evicting: Tensor | None = None
    ran: Tensor | None = None
    dense: Tensor | None = None


@dataclass
class FocusBatchedOutputs(BatchedOutputs):
    """LMDeploy's outputs of a decode step, unpacked from the report once that is on the host.

    Attributes:
        report: [S, report_width(L)] int64.
        length: L.
        dense: whether the policy let every row stay.
    """
    report: Tensor = field(default_factory=lambda: torch.empty(0))
    length: int = 0
    dense: bool = False

    @classmethod
    def of_report(cls, report: Tensor, length: int, dense: bool) -> 'FocusBatchedOutputs':
        """Outputs that still lie on the device."""
        return cls(next_token_ids=None, stopped=None, report=report, length=length, dense=dense)

    def to_cpu(self) -> BatchedOutputs:
        """LMDeploy's outputs on the host; copies the report."""
        columns: SimpleNamespace = report_columns(self.report.cpu(), self.length)
        masked = unpack_bits(columns.masked, self.length)
        extra = FocusExtraOutputs(dllm_mask=torch.where(masked, MASKED, UNMASKED).to(torch.uint8).flatten(),
                                  prefix_rows=columns.entered, suffix_rows=columns.kept, decoded=columns.newly,
                                  evicting=columns.evicted != 0, ran=columns.ran != 0,
                                  dense=(columns.ran != 0) & self.dense)
        return BatchedOutputs(next_token_ids=columns.ids.flatten(), stopped=columns.stopped != 0,
                              stop_pos=columns.stop_pos, extra_outputs=extra,
                              kv_connector_output=self.kv_connector_output)
