"""What a GPU is to confirm, in less than 10 minutes, without network or a checkpoint: started by gpu_check.sh.

    hardware     versions, the driver, the ceilings of the GPU and its host
    numerics     packed_sdpa and varlen against the padded eager model: log-probs, entropies, gradients; LoRA in bf16
    update       tokens/s and MFU of an update (forward, backward, AdamW), host syncs, GAE, hf rollouts
    fused        the same for forward and backward at 1.5B, and the launches of a layer: unfused, --compile, fused
    memory       the peak of a step against planner/memory.py, for models of 0.5, 1.5 and 3 B random parameters
    scripts      grpo.py learns the embedded task and resumes bit for bit; two steps of ppo.py, dapo.py and remax.py
    stages       seconds of each stage of grpo.py, with a model of 0.5 B random parameters
    vllm_engine  where vLLM is installed: two syncs, sleep and wake, log-probs, tokens per second
    attention    the speed of varlen, packed_sdpa, windows, cuDNN's SDPA
    log_probs    LinearLogProbs by its chunk; uncompiled, compiled, and liger-kernel beside it
    ranks        two ranks against one, what a weight sync gathers, time limits
    saves        a save, a load, an export
    vllm_scripts      grpo.py with vLLM: it learns; LoRA, a mixture of experts
    batch_invariance  vLLM's batch-invariant kernels: a row alone and among others
    several      with --ranks N, in 20 minutes: kinds of parallelism against one rank, servers, resume, teardown, speed

Each part is a process of its own and gives its rows one by one: what fails or hangs is reported, and the others go on.
What it prints goes to a log. At the end, or when it is interrupted, the check prints a summary of ten lines, a table,
and what the rows say of the claims in claims.py, and it writes them as JSON. Exit code 1 if a check fails,
130 if it is interrupted. --device cpu --tiny runs all of it small, which proves that the parts run.
"""
