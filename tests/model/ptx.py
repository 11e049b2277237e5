"""Triton's code for an H100, compiled to PTX and machine code without a GPU: what test_ptx.py imports when it runs.

torch.compile traces on the CPU. The graphs that inductor would get are moved to fake tensors of "cuda"; inductor writes
their Triton code, and triton compiles it for sm_90 with the ptxas of its wheel."""

import re
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config, scheduler
from torch._inductor.codecache import PyCodeCache
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

H100 = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
PROPERTIES = DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)


class Kernel(NamedTuple):
    loops: int
    """over the elements of a row; 0: one program has a few elements"""
    ptx: str
    resources: dict[str, int]
    """of the machine code: registers (REG), bytes of a thread's stack (STACK) and of its local memory (LOCAL)"""


class Graphs(list):
    """The graphs of what is compiled by `backend`, which runs them as they are: [(graph, its fake inputs)]."""

    def __init__(self):
        super().__init__()
        self.backend = aot_autograd(fw_compiler=self.take, decompositions=select_decomp_table())

    def take(self, graph, inputs):
        self.append((graph, inputs))
        return make_boxed_func(graph)

    def kernels(self, folder: Path, options: dict) -> list[list[Kernel]]:
        """Those that inductor makes of each graph."""
        return [kernels_of(*graph, folder, options) for graph in self]


@contextmanager
def as_on_an_h100(folder: Path):
    """What inductor and triton ask of the GPU."""
    capability = SimpleNamespace(major=9, minor=0, multi_processor_count=132, warp_size=32, gcnArchName="")
    driver = SimpleNamespace(get_current_target=lambda: H100, is_active=lambda: True)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for cache in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            patch.setenv(cache, str(folder))
        patch.setattr(DeviceProperties, "create", lambda device: PROPERTIES)
        patch.setattr(torch.cuda, "get_device_properties", lambda *_: capability)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(scheduler, "has_triton", lambda *_: True)
        patch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
        patch.setattr(triton.runtime.driver, "_active", driver)
        stack.enter_context(config.patch(compile_threads=1, force_disable_caches=True))
        yield


def on_cuda(graph, inputs):
    """The graph and its inputs, with fake tensors on "cuda"; numbers, which are scalar tensors, stay on the CPU."""
    mode = next(x.fake_mode for x in inputs if isinstance(x, torch.Tensor))

    def move(x: torch.Tensor) -> torch.Tensor:
        if x.ndim == 0 and x.dtype == torch.float64:
            return x
        with mode:
            return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cuda:0")

    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = node.kwargs | {"device": torch.device("cuda", 0)}
        node.meta["val"] = tree_map_only(torch.Tensor, move, node.meta.get("val"))
    return [tree_map_only(torch.Tensor, move, x) for x in inputs], mode


def kernels_of(graph, inputs, folder: Path, options: dict) -> list[Kernel]:
    """Those that inductor makes of a graph, compiled by the first of their configurations."""
    with as_on_an_h100(folder), config.patch(options):
        inputs, mode = on_cuda(graph, inputs)
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=mode.shape_env, is_inference=True)
        with V.set_fake_mode(mode), V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            code = lowering.codegen()[0].value
        sources = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'", code, re.DOTALL)
        return [compiled(name, source, folder) for name, source in sources]


def compiled(name: str, source: str, folder: Path) -> Kernel:
    kernel = getattr(PyCodeCache.load(source), name)
    first = kernel.configs[0]
    meta = kernel._create_compile_meta(first)
    code = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    return machine_code(code, kernel._create_compile_options(first, meta), folder, source.count("for r0_offset in"))


def compiled_for_an_h100(function, tensors: dict[str, str], constants: dict, folder: Path) -> Kernel:
    """A Triton function of ours, without fused multiplication and addition. tensors: the types of its pointers."""
    signature = dict.fromkeys(function.arg_names, "i32") | tensors | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind != "constexpr"}
    return machine_code(ASTSource(function, signature, constants, aligned), {"enable_fp_fusion": False}, folder)


def machine_code(code: ASTSource, options: dict, folder: Path, loops: int = 0) -> Kernel:
    binary = triton.compile(code, target=H100, options=options)
    (folder / "cubin").write_bytes(binary.asm["cubin"])
    dump = [TOOLS / "cuobjdump", "--dump-resource-usage", folder / "cubin"]
    said = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    resources = {what: int(n) for what, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    return Kernel(loops, binary.asm["ptx"], resources)
