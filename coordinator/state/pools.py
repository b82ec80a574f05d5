"""The two pools of workers, and the role that each pool's workers have."""

from __future__ import annotations

from enum import Enum

from baton.v1 import common_pb2


class Pool(Enum):
    """The pool of a worker. The decode pool also computes prompts that are not handed over."""

    PREFILL = "prefill"
    DECODE = "decode"


POOLS = (Pool.PREFILL, Pool.DECODE)
OTHER_POOL = {Pool.PREFILL: Pool.DECODE, Pool.DECODE: Pool.PREFILL}
ROLE_OF = {Pool.PREFILL: common_pb2.ROLE_PREFILL, Pool.DECODE: common_pb2.ROLE_DECODE}
POOL_OF = {role: pool for pool, role in ROLE_OF.items()}
