"""Our Triton kernel as PTX and machine code for an H100, without a GPU, by the ptxas of triton's wheel."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

TOOLS = Path(find_spec("triton").origin).parent / "backends/nvidia/bin"
pytestmark = pytest.mark.skipif(not (TOOLS / "ptxas").exists(), reason="needs triton's ptxas")


def compiled_for_an_h100(function, tensors: dict[str, str], constants: dict):
    """Without fused multiplication and addition. tensors: the types of its pointers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict.fromkeys(function.arg_names, "i32") | tensors | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind != "constexpr"}
    code, options = ASTSource(function, signature, constants, aligned), {"enable_fp_fusion": False}
    return triton.compile(code, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(("dtype", "backward"), [("bf16", False), ("fp32", True)])
def test_the_rotary_kernel_rounds_each_product_and_spills_nothing(tmp_path, dtype, backward):
    """To the tensors' dtype, as separate operations do: none is fused with the sum."""
    import lib.model.rotary

    constants = {"Q_HEADS": 64, "K_HEADS": 8, "HALF": 64, "BACKWARD": backward}  # the heads of a model of 70B
    tensors = dict.fromkeys(("q", "k", "q_out", "k_out", "cos", "sin"), f"*{dtype}")
    binary = compiled_for_an_h100(lib.model.rotary._kernel, tensors, constants)
    ptx = binary.asm["ptx"]
    assert re.search(r"^\.target sm_90a?$", ptx, re.MULTILINE)
    arithmetic = set(re.findall(r"\b(?:fma|mul|add|sub)\.[\w.]*f\d+", ptx))
    assert arithmetic == {f"{name}.rn.{dtype.replace('fp', 'f')}" for name in ("mul", "add", "sub")}
    (tmp_path / "cubin").write_bytes(binary.asm["cubin"])
    dump = [TOOLS / "cuobjdump", "--dump-resource-usage", tmp_path / "cubin"]
    said = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    used = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said))
    assert used["STACK"] == used["LOCAL"] == "0" and 0 < int(used["REG"]) <= 255  # a spill would be in these two
