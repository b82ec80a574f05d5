"""Baton's additions to vLLM's workers, each of which is a rank."""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group


class WorkerExtension:
    """Mixed into vLLM's workers (`worker_extension_cls`); Baton calls it by collective_rpc."""

    # vLLM's own profiler and model runner.
    profiler: Any
    profile: Any
    model_runner: Any

    def baton_record(self, is_start: bool) -> None:
        """Starts recording, or ends it and writes the trace.

        It uses vLLM's own profiler, without the table that vLLM would write.
        """
        self.profile(is_start)
        if is_start:
            # Skip the table: CPU ranks write it whatever the configuration says, it takes ten times
            # as long as the trace, and requests wait meanwhile.
            self.profiler.dump_cpu_time_total = False

    def baton_make_stage_buffers(self) -> None:
        """Makes the memory into which a pipeline stage receives the output of the stage before it.

        vLLM 0.32 makes it when it tries the model out. On a CPU, vLLM leaves that out unless it
        compiles the model, and dies in the first step (GPUModelRunner._dummy_run).
        """
        runner = self.model_runner
        is_missing = getattr(runner, "intermediate_tensors", self) is None
        if is_missing and not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
