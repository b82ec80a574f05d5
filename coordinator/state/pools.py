"""The two pools of workers, and the role that each pool's workers have."""

from __future__ import annotations

from enum import Enum

from baton.v1 import common_pb2


class Pool(Enum):
    """What a worker is given. Prompts that run unsplit are computed by the decode pool."""

    PREFILL = "prefill"
    DECODE = "decode"


ROLE_OF = {Pool.PREFILL: common_pb2.ROLE_PREFILL, Pool.DECODE: common_pb2.ROLE_DECODE}
POOL_OF = {role: pool for pool, role in ROLE_OF.items()}
