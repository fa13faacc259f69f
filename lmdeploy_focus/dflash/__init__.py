"""DFlash (arXiv 2602.06036): a small block-diffusion drafter proposes a block of tokens, the target verifies it whole.

LMDeploy 0.18 has the mode; here are the parts of it that are wrong or missing there, as subclasses.

==============  ========================================================================================================
`config`        `DFlashConfig` and the options
`drafter`       what a drafter's config.json says, of either generation
`checkpoint`    the tensors that a drafter must have
`admission`     whether drafter, target and engine options go together
`specdecode`    the engine's speculative config, built from the three
`targets`       target models that hand out the hidden states of some layers
`network`       the drafter's network: LMDeploy's, with a projection of the context for all layers at once
`proposer`      drafts a block
`history`       what each verified position knows of the tokens before it
`verify`        samples every position of the target and accepts drafted tokens that were sampled too
`agent`         the order of these in a step
`strategy`      the state of the batch between steps
`rows`          what rows see and where their keys go, as our kernels take it
`attention`     the operator of target and drafter on a GPU
`graph_runner`  their CUDA graphs
`acceptance`    how many drafted tokens were accepted
`engine_loop`   tells it with each output of a request
`responses`     carries it to the responses of pipeline and server
`usage`         writes it into the server's usage
`metrics`       feeds LMDeploy's metrics
`chat`          the line that `lmdeploy chat` prints
==============  ========================================================================================================
"""
