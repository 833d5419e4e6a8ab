"""PyTorch's allocators: CUDA and ROCm, and XPU."""
