"""The `baton` command."""

import os

# gRPC reads it when it is imported, so before anything else. Its fork handlers are for programs
# that go on after a fork; ours only start others. Around a fork they stop gRPC's threads, and under
# load that fails: the child aborts before it becomes another program, or this process stalls.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
