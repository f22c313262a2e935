"""The Triton kernels in Triton's interpreter, where there is no GPU; and what importing the package does not do.

The interpreter is chosen when Triton is imported, for a whole process: the tests of `tests/triton_kernels` run in one
of their own. Where there is a GPU, pytest collects them itself and they run compiled; elsewhere a
program compiles the kernels and runs nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
LEAST_SHARED_MEMORY = 99 * 1024
"""Bytes that a program may have on every GPU with bfloat16; an H100 has 227 KiB."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels' tests run compiled, one by one")
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "--tb=short", "-p", "no:cacheprovider", str(HERE / "triton_kernels")]
    child = subprocess.run(
        command,
        cwd=HERE.parent,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert child.returncode == 0, f"{' '.join(command)} with TRITON_INTERPRET=1:\n{child.stdout}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels' tests run compiled, one by one")
@pytest.mark.skipif(sys.platform != "linux", reason="Triton brings its assembler for Linux only")
def test_kernels_compile_for_a_gpu_that_is_not_there():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, str(HERE / "compile_for_a_gpu.py")],
        cwd=HERE.parent,
        env=environment | {"PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    compiled = {tuple(line.split()[:2]) for line in child.stdout.splitlines()}
    kernels = {
        (path.stem, name)
        for path in (HERE.parent / "tp" / "kernels" / "triton").glob("*.py")
        for name in re.findall(r"def (_\w*kernel)\(", path.read_text())
    }
    assert compiled == kernels
    for code, shared in (map(int, line.split()[2:]) for line in child.stdout.splitlines()):
        assert code > 0
        assert shared <= LEAST_SHARED_MEMORY


def test_importing_and_using_the_package_on_a_cpu_does_not_import_triton():
    program = """if True:
        import sys, torch, tp
        from tp.kernels.fused_add_rms_norm import fused_add_rms_norm
        from tp.kernels.gated_activation import silu_and_mul
        from tp.kernels.int8_weight import Int8Weight
        from tp.kernels.linear import linear
        from tp.kernels.rotary import rotate_queries_and_keys
        import tp.kernels.cache_attention, tp.kernels.cross_entropy
        x = torch.ones(2, 4)
        fused_add_rms_norm(x, torch.ones(2, 4), torch.ones(4), 1e-5)
        silu_and_mul(x)
        linear(x.half(), Int8Weight(torch.ones(3, 4), torch.ones(3)))
        rotate_queries_and_keys(x.view(2, 1, 4), x.view(2, 1, 4), x.view(2, 1, 4), x.view(2, 1, 4))
        assert "triton" not in sys.modules
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", program], cwd=HERE.parent, env=environment, check=True)
