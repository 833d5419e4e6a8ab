"""NVIDIA devices, through the driver's library NVML."""
