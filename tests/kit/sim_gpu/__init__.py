"""A simulated CUDA device inside the CPU build of torch, with NCCL's rules over Gloo, and what is run on it.

`native/` is the device: operators of the CUDA dispatch key run the CPU's kernels on memory that the host cannot reach.
`build.py` compiles it once, `torch_cuda.py` puts it under `torch.cuda`, `nccl.py` under `torch.distributed`,
`observing.py` counts what the host does, and `workers.py` starts workers on such devices.
"""
