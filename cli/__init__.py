"""The `baton` command."""

import os

# gRPC reads this variable at import time. gRPC's fork handlers serve programs that keep running
# Python after a fork; Baton's children execute another program at once. The handlers stop gRPC's
# threads around a fork, which fails under load: the child aborts before exec, or this one hangs.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
