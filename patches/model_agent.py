"""The row that chooses the model agent's class."""
from collections.abc import Callable
from typing import Any

from ._patch import Patch

_AGENT = 'lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent'


def _choose(original: type) -> Callable[..., Any]:

    def build(model_path: str, *, backend_config: Any, misc_config: Any, **kwargs: Any) -> Any:
        from lmdeploy_focus.config import FocusDLLMConfig
        agent_class, dllm_config = original, misc_config.dllm_config
        if isinstance(dllm_config, FocusDLLMConfig) and dllm_config.focus is not None:
            from lmdeploy_focus.engine.model_agent import FocusModelAgent
            agent_class = FocusModelAgent
        if backend_config.device_type == 'cpu':
            from lmdeploy_focus.cpu.agent import cpu_agent_class
            agent_class = cpu_agent_class(agent_class)
        return agent_class(model_path, backend_config=backend_config, misc_config=misc_config, **kwargs)

    return build


ROWS: tuple[Patch, ...] = (
    Patch(
        name='model agent',
        target='lmdeploy.pytorch.engine.model_agent:BaseModelAgent',
        why='build_model_agent names the class; every executor calls that function',
        how='FocusModelAgent where the config carries focus, else stock; on a CPU the CPU form of either',
        remove_when='LMDeploy offers a registry of model agents',
        written_for={
            'lmdeploy.pytorch.engine.model_agent:build_model_agent':
                'sha256:6bdc5d16713006d76806b008e3b471567a91d5c8832dfa0f015855105dd882e7',
            f'{_AGENT}.__init__':
                'sha256:ec8f7a9166252c0da14a8d9e5a26d8a0b53d0c8c8b930001dda0abeb1c2bd372',
            f'{_AGENT}.build_graph_runner':
                'sha256:e44c7ec4227554a5c440b8596e939324c22bdf28430b4b8d3359b85725ccf72d',
            f'{_AGENT}._async_model_forward':
                'sha256:c5c0d901d220a23235b45c7f248118ffa19f9796a790b4c79182d3e5e4633ebf',
            f'{_AGENT}.async_sampling_logits':
                'sha256:d785f81091cc70e6c1bf4b5ae0ae4550533c5efe5f49d2e48b87758c4ef21d0e',
            f'{_AGENT}._step_postprocess_with_output':
                'sha256:c6e081e47f42a9f65e1f811b257c6507e32a599bcc78d99aea2b463ba0eb8541',
            f'{_AGENT}._async_step':
                'sha256:03b3ed9babb0425718502ae3b94ee501efba9a92955eea8d6363e009301fb574',
            f'{_AGENT}._get_inputs_from_delta':
                'sha256:f5b316e88a38ab6c418225e71d8b8a52bf902aaef4ddbb622a33e34708642d8f',
            f'{_AGENT}._step_postprocess_without_output':
                'sha256:ae23919b7fdd0a74d5ced5601daa1e868fab72211c6d4ca70ae91a8e089d3fce',
            f'{_AGENT}._init_runtime_state':
                'sha256:22f46299d49789c68738015c6af4970e1fb31838a38ca13da49426e9eacc33cd',
            f'{_AGENT}.reset_runtime_state':
                'sha256:8d0cd15cff737e26c72e7c67633a5b9eca1a00410e47ec52882e6a8bc2dd4daf',
            f'{_AGENT}.build_model':
                'sha256:0a3b7aadb129dafcc6069ec10910f1e956fe7eb761222fdd358ca107d48b30b0',
            'lmdeploy.pytorch.engine.model_agent.agent:BatchedOutputs':
                'sha256:0491f7e0e722ed66abfff7761dc57359d953f69cb07e881aa12e866180dbd2a3',
            'lmdeploy.pytorch.strategies.dllm.sequence:HistoryDLLMMask':
                'sha256:d32877adab742e9318074e3d1d733ce4ecad513d7f8f43d5bc9f207a518dcae4',
            'lmdeploy.pytorch.engine.model_agent.agent:model_forward':
                'sha256:590e0f33e5951eecd11142f365fafb9571ad37a4808a54e7cb5da49ca915d272',
            'lmdeploy.pytorch.engine.logits_process:FusedLogitsProcessor':
                'sha256:475adb66ca99b0d59b3bd19a13c243ea90e385156f31bffed89da7c6c81a5f2f',
            'lmdeploy.pytorch.engine.logits_process:SamplingInputs':
                'sha256:0fa6a9e45039c6102ee92955836776d6d45588f2785509fb3942e69c1df83b70',
            'lmdeploy.pytorch.strategies.ar.sampling:ARSamplingStrategy':
                'sha256:b1922c34742c0882138fd6d542350567cd87ac329d7b707a644e1180114908ab',
            'lmdeploy.pytorch.strategies.dllm.model_agent:DLLMModelAgentStrategy':
                'sha256:806311b2879ba8ff0fcc070f71131a32e5c561e681ef2a9ae01aff807868298a',
            'lmdeploy.pytorch.strategies.dllm.model_agent:DLLMStoppingCriteria':
                'sha256:420790fcfb46d43a9529fa11510eac746c8b8f1245188621d1aecb6ad76a3f05',
            'lmdeploy.pytorch.strategies.dllm.sequence:SchedulerSequenceDLLM':
                'sha256:b9610237241bf39eabd5e00f4a8c96ad0f89c07a7f17df813167012e5e072221',
            'lmdeploy.pytorch.strategies.dllm.sequence:DLLMSequenceStrategy':
                'sha256:85a13961d74a57643c47a300ca91d3c4aa6a06da583675cc41053a0a9dac4dc1',
            'lmdeploy.pytorch.strategies.dllm.step_inputs:DLLMStepInputs':
                'sha256:92143e4337b3026523abd971d30b69746c4bf54db42acbd1af105d0b5100beb5',
            'lmdeploy.pytorch.models.sdar:SDARAttention':
                'sha256:5eb29d09e358ee76b6ebcfa207c5559f02fe6da7c2e123bc36ee9d28c5734e99',
            'lmdeploy.pytorch.models.sdar:SDARDecoderLayer':
                'sha256:97d13f32cd5b1290a5d9f3231e8bf535e65d81f16096f65fa0f6859ac2d1c37e',
            'lmdeploy.pytorch.models.sdar:SDARModel':
                'sha256:cec681d27f058d8c513b83a3495f604f03caf0e77a25a1982fc2c3338ed4d286',
        },
        make=_choose,
        group='engine',
    ),
)
