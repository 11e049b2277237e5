"""What is expected of GPUs: G1 to G17 by reading, before one was at hand, P1 to P10 of runs by default, M1 to M10
of several GPUs (--ranks N). Rows of the check confirm or refute it.

G1 to G17 are about what the software does or would have done; most have been fixed since. `elsewhere`: why the check
does not see it, and what does.
"""

from typing import NamedTuple


class Claim(NamedTuple):
    said: str
    elsewhere: str = ""


OF_RANKS = "needs --ranks N"
CLAIMS = {
    "G1": Claim(
        "a vLLM server completes requests from the model's generation config",
        "no server starts here; tests/servers/test_server_engine.py",
    ),
    "G2": Claim("7B with the default flags does not fit 8 x 80 GB"),
    "G3": Claim("bf16 weights merged with LoRA lose small updates"),
    "G4": Claim(
        "a server that fails while a group is made hangs rank 0",
        "no server starts here; tests/servers/test_server_engine.py",
    ),
    "G5": Claim("groups of a mesh do not take --stage-timeout by themselves (they are given it)"),
    "G6": Claim("windows with grouped heads are slow in packed_sdpa"),
    "G7": Claim("CUDA 13 needs a driver of 580 or newer"),
    "G8": Claim("cuDNN's SDPA plans each new shape"),
    "G9": Claim("packed_sdpa is slower than varlen"),
    "G10": Claim("log-probs: chunks of 256 tokens read the head too often, and PyTorch's own operators the logits"),
    "G11": Claim("about 45 host syncs a micro-batch"),
    "G12": Claim("a weight sync gathers fp32, twice the bytes"),
    "G13": Claim("GAE launches 8 kernels a column of tokens"),
    "G14": Claim("AdamW on the CPU runs with one thread"),
    "G15": Claim("a save waits for copies into pageable memory"),
    "G16": Claim("vLLM makes an object of each log-prob"),
    "G17": Claim("the hf engine takes 25 to 35 ms a token at 1.5B"),
    "P1": Claim("a layer launches at most 40 kernels, forward and backward"),
    "P2": Claim("the MFU of forward and backward at 1.5B and 8,192 tokens is at least 0.45"),
    "P3": Claim("the host takes at most 130 ms for the launches of 1.5B, less than the kernels of 8,192 tokens"),
    "P4": Claim("a step of vLLM with 256 rows of 0.5B takes at most 5 ms"),
    "P5": Claim("--gradient-checkpointing auto and --micro-batch-tokens auto choose what fits"),
    "P6": Claim("a weight sync takes at most 0.2 s a GB, with its check"),
    "P7": Claim("--routing-replay R3 passes the second sync of vLLM's weights"),
    "P8": Claim("gpt-oss has the log-probs of vLLM before and after a sync"),
    "P9": Claim("a resume is equal bit for bit"),
    "P10": Claim("masters, gradients and Adam's moments leave the GPU while the engine samples"),
    "M1": Claim("FSDP2 trains as one rank does", OF_RANKS),
    "M2": Claim("ZeRO-1 trains as one rank does", OF_RANKS),
    "M3": Claim("HSDP trains as one rank does", OF_RANKS),
    "M4": Claim("sequence parallelism trains as one rank does", OF_RANKS),
    "M5": Claim("tensor parallelism trains as one rank does", OF_RANKS),
    "M6": Claim("vLLM servers of --rollout-gpus get the weights by NCCL", OF_RANKS),
    "M7": Claim("and so do asynchronous rollouts", OF_RANKS),
    "M8": Claim("a run resumes on half of its ranks", OF_RANKS),
    "M9": Claim("a job whose rank is killed ends within a minute and leaves no process", OF_RANKS),
    "M10": Claim("an update by ZeRO-1 is faster than by FSDP2", OF_RANKS),
}


def verdicts(results: dict[str, list[dict]], on_gpu: bool) -> dict[str, list[str]]:
    """For each claim what the rows say of it, or why none does."""
    found: dict[str, list[str]] = {name: [] for name in CLAIMS}
    for rows in results.values():
        for row in rows:
            for text in row["claims"]:
                name, _, verdict = text.partition(" ")
                found[name].append(verdict)
    why = "its part did not run or failed" if on_gpu else "this was a CPU"
    return {name: said or [f"not seen here: {CLAIMS[name].elsewhere or why}"] for name, said in found.items()}
