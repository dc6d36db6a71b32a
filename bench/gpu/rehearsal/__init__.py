"""The GPU path without a GPU: the real runner steps on tensors that have a shape, a dtype and a device, but no values.

    python -m bench.gpu.rehearsal [--model NAME …] [--arch 90]

What a first run on a device would stumble over and what a CPU cannot show: an operation whose tensors are on two
devices, a step that makes the host wait, a launch whose arguments do not fit its kernel, a build that does not compile,
spills, or takes more shared memory than there is. Every launch is compiled as the launch itself specialises it, and
compared with what `make kernels-check` compiles. It says nothing about values and nothing about time.
"""
