"""A rank that loads its prompts from handoffs computes attention before any matrix product."""

import subprocess
import sys

# Request to arch_prctl(2): which CPU state components this process may use; AMX is bit 18.
PROGRAM = """
import ctypes

import torch

from baton.kvtransfer.connector.handoffs.rank_handoffs import allow_matrix_unit

SYS_arch_prctl, ARCH_GET_XCOMP_PERM, AMX = 158, 0x1022, 1 << 18

def allowed():
    mask = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(SYS_arch_prctl, ARCH_GET_XCOMP_PERM, ctypes.byref(mask)) == 0
    return bool(mask.value & AMX)

before = allowed()
allow_matrix_unit()
print("allowed", before, allowed() == torch.cpu._is_amx_tile_supported())
"""


def test_a_rank_may_use_the_matrix_unit_from_its_first_step():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "allowed False True"
