"""`device_type='cpu'`: LMDeploy's PyTorch engine without a GPU.

Only what a CPU truly lacks is replaced; everything else is LMDeploy's own code, its plain torch operators included.

==================  ==================================================================================
`scope`             which thread or task works for a CPU engine; every chooser of `patches/cpu.py` asks it
`backend`           the operators that LMDeploy has on accelerators only: paged attention, experts, seeded sampling
`attention`         gather, write and attend over the pages of the KV cache
`experts`           the mixture-of-experts operator
`sampling`          sampling that honours a request's seed
`agent`             a mixin over the model agent: device, KV budget, no warm-up, sleep and wake-up
`budget`            how much memory the KV cache takes
`checks`            what a CPU engine refuses, and the environment check without an accelerator
`stand_ins`         streams and events for a process in which torch.cuda cannot make any
==================  ==================================================================================
"""
