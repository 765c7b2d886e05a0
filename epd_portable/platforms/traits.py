"""Facts about each platform that need neither torch nor a device.

The launcher plans a topology with these on a machine that has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Overlap = Literal["turns", "chunks", "stream", "none"]
"""Way in which an engine encodes next to its steps; with ``none`` steps encode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformTraits:
    """Facts about a platform that are known before anything is installed.

    Attributes:
        name: Name in configurations and on the command line.
        device_type: torch's word for its devices, as in ``torch.device("npu:0")``.
        dist_backend: torch.distributed's word for its collectives.
        visible_devices_env: Variable that limits a process to some devices; ``None`` where a
            process is bound to cores instead.
        ray_resource: Ray's word for its devices.
        implementation: ``module:class`` of its `Platform`; imported when a device is first wanted.
        worker_cls: Import path of the vLLM worker class of this platform's instances: a name of its
            own in ``epd_portable.vllm_plugin.worker``, which makes the class.
        worker_base: ``module:class`` of the engine's own worker, which that class extends.
        single_rank_executor_cls: Import path of vLLM's executor of an instance of one rank;
            ``None`` leaves the choice to vLLM.
        pd_ranks_executor_cls: The same of a prefill+decode instance of several ranks.
        engine_plugins: Plug-ins of vLLM without which it does not know the platform.
        compiler: Where the compiler is looked for that kernels are made with at run time: a name
            on ``PATH`` or a file, with variables of the environment.
        env_without_compiler: Names and values of variables of engines where there is none.
        env_with_slab: The same of engines whose device memory others open: what keeps their
            allocator from mapping it piece by piece. Empty where it does not by default.
        env_on_shared_device: The same of engines with others on one of their devices.
        slot_alignment_bytes: Start of every slot in a receive pool is a multiple of this.
        slab_alignment_bytes: Start and size of device memory that is registered for remote access
            are multiples of this.
        needs_device_copy: Whether devices have memory of their own, into which an item that
            arrived in host memory must be copied; else the engine reads a view of the slot.
        foreign_pages_block: Whether a copy from or to host memory that torch did not allocate
            blocks its caller until it has ended, even when the memory is page-locked.
        encode_together_embeds: Items of so many embeddings together are encoded in one step, unless
            a single one is larger; more is no faster than several steps, and leaves later.
        overlap: Way in which a prefill+decode instance encodes next to its steps: in a thread that
            takes ``turns`` with them, in ``chunks`` at their beginnings, or in chunks on a
            ``stream`` of its own. `EPD_ENCODE_OVERLAP` replaces it.
        encode_chunk_embeds: Size of an item whose encoder takes as long as one chunk.
        min_start_tokens: Lower bound of the tokens of text before a missing item that start a
            waiting request while others compute. Decode steps have graphs, and a step that has text
            as well is slower for all of them.
        one_rank_a_device: Whether the library of collectives refuses groups of which two ranks are
            on one device.
        peers_must_be_visible: Whether a process opens the device memory of another only on a
            device that is visible to it as well.
        kv_connector: Which of vLLM's KV connectors reads its devices, by its name in topology
            files.
    """

    name: str
    device_type: str
    dist_backend: str
    visible_devices_env: str | None
    implementation: str
    worker_cls: str
    worker_base: str
    single_rank_executor_cls: str | None = None
    pd_ranks_executor_cls: str | None = None
    ray_resource: str = "CPU"
    engine_plugins: tuple[str, ...] = ()
    compiler: tuple[str, ...] = ()
    env_without_compiler: tuple[tuple[str, str], ...] = ()
    env_with_slab: tuple[tuple[str, str], ...] = ()
    env_on_shared_device: tuple[tuple[str, str], ...] = ()
    slot_alignment_bytes: int
    slab_alignment_bytes: int
    needs_device_copy: bool
    foreign_pages_block: bool = False
    # 8192 patches of Qwen2.5-VL, whose matrices then fill a device. By arithmetic, not measured.
    encode_together_embeds: int = 2048
    overlap: Overlap = "chunks"
    # 3 ms of an H200. By arithmetic, not measured.
    encode_chunk_embeds: int = 256
    # With more tokens a step without graphs is limited by computation. By arithmetic, not measured.
    min_start_tokens: int = 256
    one_rank_a_device: bool = False
    share_env: tuple[str, str] | None = None
    peers_must_be_visible: bool = False
    kv_connector: str


_CUDA = PlatformTraits(
    name="cuda",
    device_type="cuda",
    dist_backend="nccl",
    visible_devices_env="CUDA_VISIBLE_DEVICES",
    ray_resource="GPU",
    implementation="epd_portable.platforms.cuda:CudaPlatform",
    worker_cls="epd_portable.vllm_plugin.worker.EPDGPUWorker",
    worker_base="vllm.v1.worker.gpu_worker:Worker",
    compiler=("nvcc", "$CUDA_HOME/bin/nvcc", "/usr/local/cuda/bin/nvcc"),
    # FlashInfer compiles its sampler, which is the default (vLLM 0.32); vLLM has another one.
    env_without_compiler=(("VLLM_USE_FLASHINFER_SAMPLER", "0"),),
    slot_alignment_bytes=512,
    slab_alignment_bytes=512,
    needs_device_copy=True,
    # NCCL: "Duplicate GPU detected".
    one_rank_a_device=True,
    share_env=(
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "start NVIDIA's MPS by nvidia-cuda-mps-control -d",
    ),
    # cudaIpcOpenMemHandle takes an ordinal of the opener for the device that owns the memory.
    peers_must_be_visible=True,
    kv_connector="nixl",
)
_NPU = PlatformTraits(
    name="npu",
    device_type="npu",
    dist_backend="hccl",
    visible_devices_env="ASCEND_RT_VISIBLE_DEVICES",
    ray_resource="NPU",
    implementation="epd_portable.platforms.npu:NpuPlatform",
    worker_cls="epd_portable.vllm_plugin.worker.EPDNPUWorker",
    worker_base="vllm_ascend.worker.worker:NPUWorker",
    engine_plugins=("ascend", "ascend_model", "ascend_model_loader"),
    # vllm-ascend (0.23 to 0.30) requests expandable segments where nothing else is set.
    env_with_slab=(("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False"),),
    # Else two processes of one device listen on the same ports of the host and of the device. Not
    # everywhere: kernels that compute while they communicate (MC2) do not allow it, by CANN's
    # documentation.
    env_on_shared_device=(
        ("HCCL_HOST_SOCKET_PORT_RANGE", "auto"),
        ("HCCL_NPU_SOCKET_PORT_RANGE", "auto"),
    ),
    # aclrtMemcpyAsync demands 64 at both ends; 512 keeps slots apart for the copy engine.
    slot_alignment_bytes=512,
    # HCCS reaches registered memory in pages of 2 MiB.
    slab_alignment_bytes=2 * 1024 * 1024,
    needs_device_copy=True,
    # torch_npu (2.13) takes for page-locked only what it allocated itself.
    foreign_pages_block=True,
    share_env=("EPD_COMPUTE_SHARE", "no service is needed"),
    # 5 ms of a 910B. By arithmetic, not measured.
    encode_chunk_embeds=128,
    # Shared memory is opened by its key alone.
    # vllm-ascend's own; NIXL has no backend for these devices.
    kv_connector="mooncake",
)
_CPU = PlatformTraits(
    name="cpu",
    device_type="cpu",
    dist_backend="gloo",
    visible_devices_env=None,
    implementation="epd_portable.platforms.cpu:CpuPlatform",
    worker_cls="epd_portable.vllm_plugin.worker.EPDCPUWorker",
    worker_base="vllm.v1.worker.cpu_worker:CPUWorker",
    # vLLM has one rank in the engine's process everywhere but on the CPU, where OpenMP's variables
    # must be set before that process starts; the launcher does that.
    single_rank_executor_cls="vllm.v1.executor.uniproc_executor.UniProcExecutor",
    # Workers of vLLM's own poll while a request waits, on cores that the encoder needs.
    pd_ranks_executor_cls="epd_portable.vllm_plugin.executor.EPDExecutor",
    slot_alignment_bytes=64,
    slab_alignment_bytes=64,
    needs_device_copy=False,
    # Measured with four images on two cores: one by one they take 1.5 to 1.8 times as long at 16
    # embeddings each, and 0.2 to 1.0 times at 64 to 576.
    encode_together_embeds=64,
    overlap="turns",
    # No graphs: text takes as long in this step as in the step of its item.
    min_start_tokens=0,
    kv_connector="nixl",
)


TRAITS: Mapping[str, PlatformTraits] = MappingProxyType(
    {traits.name: traits for traits in (_CUDA, _NPU, _CPU)}
)
"""Every platform by name, the best first."""
