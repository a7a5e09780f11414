"""The Triton kernels on a machine without a GPU: in Triton's interpreter, bit for bit the reference; and they compile.

The interpreter must be chosen before Triton is loaded, and tests change what modules have. So each is a copy of one of
two processes that have loaded torch and Triton.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.loaded import Loaded
from support.processes import run_python
from support.slow import some_slow

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")
TESTS = Path(__file__).parent.parent
IN_TESTS = {"PYTHONPATH": str(TESTS), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}

LOADED = "import torch, triton, thinwire.kernels.cuda.launch"


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Loaded]:
    with Loaded(LOADED, TRITON_INTERPRET="1", **IN_TESTS) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def compiled() -> Iterator[Loaded]:
    with Loaded(LOADED) as loaded:
        yield loaded


SPECS = {
    "topk": ["topk:ratio=1/64,bits=2"],
    "topk-bits": [f"topk:ratio=1/16,bits={bits},chunk=256" for bits in (1, 4, 8, 16, 32)],
    "topk-small": ["topk:ratio=1/4,bits=2,chunk=16", "topk:ratio=1/3,bits=1,chunk=64"],
    "quantize": ["quantize:bits=8", *(f"quantize:bits={bits},block=32" for bits in (1, 2, 4))],
    "none": ["none"],
}
"""Of each kind of kernel the smallest: the interpreter is slow. tests/gpu has the whole table."""


@pytest.mark.parametrize("name", some_slow(SPECS, "topk-bits", "topk-small"))
def test_interpreted_kernels_are_the_reference(interpreted: Loaded, name: str) -> None:
    code = f"from support import triton_rows; assert triton_rows.main('cpu', {SPECS[name]}) == 0"
    interpreted.run(code, time_limit=250)


COMPILED = [
    (SPECS["topk"][0], "bfloat16"),
    (SPECS["topk"][0], "float32"),
    ("quantize:bits=8", "float32"),
    ("none", "bfloat16"),
]


@pytest.mark.parametrize(("spec", "dtype"), COMPILED)
def test_kernels_compile_for_hopper(compiled: Loaded, spec: str, dtype: str) -> None:
    """Without a GPU: what the interpreter allows, the compiler may not. No product is fused into a sum."""
    code = f"""
        import torch, triton, thinwire
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from thinwire.kernels.cuda import adam, dense, launch, marks, quantize, topk
        from thinwire.kernels.updates import AdamUpdate

        NAMES = {{torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int32: "*i32",
                 torch.int64: "*i64"}}
        done = []

        def compile_only(kernel, grid, *args, num_warps, maxnreg=80, **constants):
            signature = dict.fromkeys(kernel.arg_names, "constexpr")
            for name, arg in zip(kernel.arg_names, args, strict=False):
                tensor = isinstance(arg, torch.Tensor)
                signature[name] = NAMES[arg.dtype] if tensor else "fp32" if isinstance(arg, float) else "i32"
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            options = {{"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False, "maxnreg": maxnreg}}
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            assert "fma.rn.f32" not in made.asm["ptx"] and ".ftz" not in made.asm["ptx"], kernel
            done.append(kernel)

        for module in (adam, dense, marks, quantize, topk):
            module.launch = compile_only
        topk._sums_up = lambda *given: True  # which is written in part as PTX
        layout = thinwire.compressor("{spec}").layout(40_000, torch.{dtype})
        kernel = dict(topk=topk, quantize=quantize, none=dense)["{spec}".split(":")[0]]
        tensor, residual = torch.zeros(40_000, dtype=torch.{dtype}), torch.zeros(40_000)
        payload = torch.zeros(layout.nbytes, dtype=torch.uint8)
        kernel.encode(tensor, residual, layout, payload)
        kernel.commit(tensor, residual, layout, payload)
        kernel.decode(payload.repeat(8, 1), layout, residual, 0.5, False)
        if kernel is topk:
            m, v = torch.zeros(40_000), torch.zeros(40_000)
            for kept, beta2 in ((residual, 0.9), (residual, 1.0), (None, 0.9), (None, 1.0)):
                update = AdamUpdate(m, v, 0.5, 1.0, 1.0, 1e-8, 8.0, 1.0, beta2)
                adam.write(update, tensor, m)
                adam.advance(update, tensor, kept)
        assert len(done) > 1, done
        assert kernel is not topk or any("sum_chunks" in str(one) for one in done)
        """
    compiled.run(code)


def test_without_triton_the_reference_runs_and_forcing_says_what_to_install() -> None:
    code = """
        import sys
        sys.modules["triton"] = None
        import importlib.util
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
        import torch
        torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda device: (9, 0)
        from thinwire import compressor, kernels
        layout = compressor("quantize").layout(8192, torch.float32)
        assert kernels.select(layout, torch.device("cuda"))[0] == "reference"
        assert kernels.adam(torch.device("cuda")).__name__ == "thinwire.kernels.reference.adam"
        try:
            with kernels.force("cuda"):
                kernels.select(layout, torch.device("cuda"))
        except RuntimeError as error:
            assert "pip install triton" in str(error), error
        else:
            raise AssertionError("fell back")
        """
    run_python(code)


@pytest.mark.parametrize(("capability", "backend"), [((9, 0), "cuda"), ((7, 5), "reference")], ids=str)
def test_cuda_tensors_use_triton_where_it_knows_the_gpu(compiled: Loaded, capability: object, backend: str) -> None:
    """And float64, which nobody sends gradients in, goes to the reference."""
    code = f"""
        import torch
        torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda device: {capability}
        from thinwire import compressor, kernels
        device = torch.device("cuda")
        def chosen(spec, dtype=torch.float32):
            return kernels.select(compressor(spec).layout(99_999, dtype), device)[0]
        for spec in ("topk:ratio=1/64", "quantize", "none"):
            assert [chosen(spec), chosen(spec, torch.float64)] == ["{backend}", "reference"], spec
            with kernels.force("cuda"):
                assert chosen(spec) == "cuda", spec
        assert chosen("quantize:block=16384") == "reference"
        assert kernels.adam(device).__name__ == "thinwire.kernels.{backend}.adam"
        """
    compiled.run(code)


PROGRAMS = {
    "adam": "from support import adam_formula; adam_formula.check('cpu')",
    "steps": (TESTS / "support" / "triton_steps.py").read_text(),
    "shared": (TESTS / "support" / "triton_shared.py").read_text(),
}
"""Adam; compressors, collectives and optimizers; and the kernel that is written in part as PTX, played by NumPy."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_interpreted(interpreted: Loaded, name: str) -> None:
    interpreted.run(PROGRAMS[name], time_limit=250)
